"""Batches of images and labels.

Batch b of epoch e on a rank is a pure function of (seed, e, b, rank, world size), augmentation included. So a
run that stops anywhere continues bit by bit, and the number of workers changes nothing but the speed.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from didicm.data.corruptions import Corruptions
from didicm.data.images import DataError, FeatureSet, ImageSet, MemorySet, UnreadableImageError, is_small
from didicm.data.picture import Picture
from didicm.data.randomness import epoch_order, keys, occurrences, preserved
from didicm.data.transforms import EvalTransform, TrainTransform, to_tensor
from didicm.processes import obey_parent_alone, shielded

REPLACEMENT_TRIES = 20
T = TypeVar("T")


class Batch(NamedTuple):
    """What a worker hands over; it never raises for bad images, as that would lose the message."""

    image: Tensor  # (B, C, H, W), uint8 unless finished; or stored features (B, D)
    label: Tensor  # (B,), int64; in training, if raters disagree, (B, K): their distributions
    shown: np.ndarray  # (B,), which images these are; a tensor would take a file of shared memory to hand over
    key: np.ndarray  # (B,), one per image, for what is random in finishing
    skipped: dict[int, str]  # images that could not be read, each with a sentence that names it


@dataclass
class Batches(Dataset[Batch]):
    """Whole batches, by (epoch, batch): what a worker process does. The fields are as in `make_loader`."""

    images: ImageSet
    transform: TrainTransform | EvalTransform
    batch_size: int
    train: bool
    seed: int
    repeats: int
    balanced: bool
    corruptions: tuple[Corruptions | None, ...]  # each image comes under all of them, one after the other
    rank: int
    world_size: int
    finish: bool  # else that is left to the GPU
    settled: bool  # whether the images come as `transform.settle` leaves them

    def __post_init__(self) -> None:
        self.labels = self.images.labels
        targets = self.images.targets if self.train else None
        self.targets = torch.from_numpy(self.labels if targets is None else targets)
        whole, rest = divmod(len(self.images), self.batch_size * self.world_size)
        # Training drops what does not fill a batch, but has at least one.
        self.count = max(1, whole) if self.train else whole + (rest > self.rank)
        self.stacked: Tensor | None = None
        if isinstance(self.images, MemorySet) and self.settled and self.transform.vectorised:
            stacked = self.images.stacked()
            if stacked is not None:
                self.stacked = torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()
        self._plan: tuple[int, np.ndarray, np.ndarray] = (-1, self.labels, self.labels)

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        epoch, batch = place
        order, draws = self._order(epoch)
        # A global batch is dealt out like cards, so repeats of an image go to different ranks, as in timm.
        whole = self.batch_size * self.world_size
        mine = slice(batch * whole + self.rank, min((batch + 1) * whole, len(order)), self.world_size)
        index, draw = order[mine], draws[mine]
        # The corruption of an image at evaluation must not change from one epoch to the next.
        key = keys(self.seed, epoch, index, draw) if self.train else keys(self.seed, index)
        skipped: dict[int, str] = {}
        if isinstance(self.images, FeatureSet):
            features = torch.from_numpy(self.images.features(index, epoch + draw if self.train else 0))
            return Batch(features, self.targets[torch.from_numpy(index)], index, key, skipped)
        if self.stacked is not None:
            image = self.stacked[torch.from_numpy(index)]
        else:
            image, index, key = self._decode(index, key, skipped)
        if self.finish and len(index):
            image = self.transform.finish(image, key)
        return Batch(image, self.targets[torch.from_numpy(index)], index, key, skipped)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Which image is shown at each place of an epoch, and how often it was before; kept for the next batch."""
        if self._plan[0] != epoch:
            order = np.arange(len(self.images))
            if self.train:
                order = epoch_order(self.labels, self.seed, epoch, repeats=self.repeats, balanced=self.balanced)
                # A set smaller than one batch fills it by starting again.
                order = np.resize(order, self.count * self.batch_size * self.world_size)
            self._plan = (epoch, order, occurrences(order))
        return self._plan[1:]

    def _decode(
        self, index: np.ndarray, key: np.ndarray, skipped: dict[int, str]
    ) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Images, which they are, and the keys of those that could be read."""
        shown, prepared, kept = [], [], []
        prepare = self.transform.vary if self.settled else self.transform.prepare
        with preserved():
            for row, (i, k) in enumerate(zip(index.tolist(), key.tolist(), strict=True)):
                found = self._load(i, k, skipped)
                if found is None:
                    continue
                used, image = found
                for corruption in self.corruptions:
                    taken = image
                    if corruption is not None:  # as a bad camera with the network's resolution would have taken it
                        taken = corruption(self.transform.scale_down(image), np.random.default_rng(k))
                    shown.append(used)
                    prepared.append(prepare(taken, k))
                    kept.append(row)
        images = to_tensor(prepared) if prepared else torch.zeros(0, dtype=torch.uint8)
        return images, np.array(shown, dtype=np.int64), key[kept]

    def _load(self, i: int, key: int, skipped: dict[int, str]) -> tuple[int, Picture] | None:
        """Load image i, or in training another of its class; notes what could not be read."""
        # A corruption acts on the whole image, and not on what training crops.
        shrink = partial(self.transform.shrink, key=key) if self.corruptions == (None,) else None
        for attempt in range(REPLACEMENT_TRIES if self.train else 1):
            try:
                return i, self.images.load(i, shrink)
            except UnreadableImageError as error:
                skipped[i] = str(error)
            members = np.flatnonzero(self.labels == self.labels[i])
            i = int(members[int(keys(key % 2**63, attempt)) % len(members)])
        return None


class Loader:
    """An epoch of batches (image, label): (B, C, H, W) float32, normalised, and (B,) int64 or a target (B, K).

    Stored features (B, D) come in place of images. `set_epoch` serves later epochs with the same worker processes.
    """

    def __init__(self, batches: Batches, epoch: int, start_batch: int, workers: int, device: torch.device) -> None:
        self._batches = batches
        self._device = device
        stored = isinstance(batches.images, FeatureSet)
        unreadable = batches.images.unreadable if isinstance(batches.images, FeatureSet) else []
        # Unreadable images met so far, by their place in the set; those left out of stored features have none.
        self.skipped = {-i: f"{name} cannot be read as an image" for i, name in enumerate(unreadable, 1)}
        self.index = torch.zeros(0, dtype=torch.int64)  # which images the latest batch shows
        self.batches_per_epoch = batches.count  # on this rank
        self.fast = stored or batches.stacked is not None  # whole batches at once, straight from memory
        self._schedule: list[tuple[int, int]] = []  # (epoch, batch) still to come: all that a worker needs to know
        self.set_epoch(epoch, start_batch)
        workers = 0 if self.fast else workers
        self._loader = batch_loader(batches, self._schedule, workers, device, persistent=workers > 0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose what the next pass yields: an epoch, if need be from a batch in its middle."""
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise DataError(f"start_batch must lie in 0..{self.batches_per_epoch}, got {start_batch}")
        self._schedule[:] = [(epoch, batch) for batch in range(start_batch, self.batches_per_epoch)]

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in started(self._loader):
            self.skipped |= batch.skipped
            self._check(batch)
            self.index = torch.from_numpy(batch.shown)
            if len(batch.label):
                image = batch.image.to(self._device, non_blocking=True)
                if not self._batches.finish:
                    image = self._batches.transform.finish(image, batch.key)
                yield image, batch.label.to(self._device, non_blocking=True)

    def _check(self, batch: Batch) -> None:
        kind = "training" if self._batches.train else "evaluation"
        check_readable(self.skipped.values(), len(self._batches.images), kind)
        if self._batches.train and len(batch.label) < self._batches.batch_size:
            first, *_ = batch.skipped.values()
            raise DataError(
                f"no other image of the same class could be read in place of: {first}; check the data with didicm "
                "doctor"
            )


def check_readable(unreadable: Collection[str], images: int, kind: str) -> None:
    """More than 1 % of a set, or more than a few of a small one, is an error; a sentence names each of them."""
    if len(unreadable) > (limit := most_unreadable(images)):
        raise DataError(
            f"{len(unreadable)} of {images} {kind} images cannot be read, more than the {limit} allowed (the "
            f"first: {next(iter(unreadable))}); find them with didicm doctor, and repair or remove them"
        )


def most_unreadable(images: int) -> int:
    """How many images of a set may be unreadable."""
    return max(images // 100, min(10, images // 5), 1)


def make_loader(
    images: ImageSet,
    transform: TrainTransform | EvalTransform,
    batch_size: int,  # on each rank
    *,
    train: bool,
    seed: int,  # at evaluation it decides each image's corruption, the same in every epoch
    epoch: int = 0,
    start_batch: int = 0,  # leave out so many batches, to continue in the middle
    workers: int = 0,  # processes that decode
    repeats: int = 1,  # views of an image in an epoch of unchanged length (repeated augmentation)
    balanced: bool = False,  # draw classes evenly; it shifts calibration, for the classes are not so in the world
    corruption: Corruptions | Sequence[Corruptions | None] | None = None,  # of several, each image comes under all
    rank: int = 0,  # of `world_size`; together they see what one process would with the whole batch
    world_size: int = 1,
    in_memory: bool | None = None,  # decode everything once, in full; None does so if it is small
    device: torch.device | str = "cpu",  # batches travel to a GPU as bytes and are normalised there
) -> Loader:
    """Make the batches of an epoch.

    With several corruptions, an image is decoded once, and a batch has that many times `batch_size` rows: all of
    the first image, all of the second, and so on.

    Training shuffles, drops the last incomplete batch, and puts another image of the same class in place of
    one that cannot be read. Evaluation shows every image once in order and leaves unreadable ones out. More
    than 1 % of unreadable images is an error; of a small set, more than a fifth, or more than 10.
    """
    if batch_size < 1:
        raise DataError(f"the batch size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise DataError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    if repeats < 1:
        raise DataError(f"repeats must be at least 1, got {repeats}")
    if not len(images):
        raise DataError("there are no images to load; check the data and its subset")
    stored = isinstance(images, FeatureSet)
    corruptions = (corruption,) if corruption is None or isinstance(corruption, Corruptions) else tuple(corruption)
    settled = False
    if not stored and (is_small(images) if in_memory is None else in_memory):
        settled = corruptions == (None,)  # a corruption comes before what is settled
        images = MemorySet(images, transform.settle) if settled else MemorySet(images)
    device = torch.device(device)
    finish = device.type == "cpu" or stored
    share = (rank, world_size)
    batches = Batches(
        images, transform, batch_size, train, seed, repeats, balanced, corruptions, *share, finish, settled
    )
    return Loader(batches, epoch, start_batch, workers, device)


def batch_loader(
    batches: Dataset[T], places: Iterable[Any], workers: int, device: torch.device, *, persistent: bool = False
) -> DataLoader[T]:
    """PyTorch's loader of whole batches, each made by one of `workers` processes or by this one."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=places,
        num_workers=workers,
        persistent_workers=persistent,
        collate_fn=_as_it_is,
        worker_init_fn=obey_parent_alone,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own: else every pass would draw a number from the global one
    )


def started(loader: DataLoader[T]) -> Iterator[T]:
    """A pass through a loader, whose workers leave our signals to us."""
    with shielded():
        return iter(loader)


def _as_it_is(batch: Any) -> Any:
    return batch

"""Batches of images and labels.

Batch b of epoch e on a rank is a pure function of (seed, e, b, rank, world size), augmentation included. So a
run that stops anywhere continues bit by bit, and the number of workers changes nothing but the speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from didicm.data.batches import Batch, Batches, Skipped
from didicm.data.corruptions import Corruptions
from didicm.data.images import DataError, ImageSet, MemorySet, is_small
from didicm.data.transforms import EvalTransform, TrainTransform


class Loader:
    """An epoch of batches (image, label): (B, C, H, W) float32, normalised, and (B,) int64.

    The same object serves later epochs by `set_epoch`, which keeps the worker processes.
    """

    def __init__(self, batches: Batches, epoch: int, start_batch: int, workers: int, device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._limit = max(10, len(batches.images) // 100)
        self.skipped: list[Skipped] = []  # unreadable images met so far, each once
        self.index = torch.zeros(0, dtype=torch.int64)  # which images the latest batch shows
        self.fast = batches.stacked is not None  # whole batches at once, straight from memory
        self._schedule = _Schedule(batches.count)
        self.set_epoch(epoch, start_batch)
        self._loader: DataLoader[Batch] = DataLoader(
            batches,
            batch_size=None,
            sampler=self._schedule,
            num_workers=0 if self.fast else workers,
            persistent_workers=not self.fast and workers > 0,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            # Its own generator: else every pass would draw a number from the global one.
            generator=torch.Generator(),
        )

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose what the next pass yields: an epoch, if need be from a batch in its middle."""
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise DataError(f"start_batch must lie in 0..{self.batches_per_epoch}, got {start_batch}")
        self._schedule.epoch, self._schedule.start = epoch, start_batch

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self._batches.count

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        known = {skip.index for skip in self.skipped}
        for batch in self._loader:
            for skip in batch.skipped:
                if skip.index not in known:
                    known.add(skip.index)
                    self.skipped.append(skip)
            self._check(batch)
            self.index = batch.shown
            if len(batch.label):
                image = batch.image.to(self._device, non_blocking=True)
                if not self._batches.finish:
                    image = self._batches.transform.finish(image, batch.key)
                yield image, batch.label.to(self._device)

    def _check(self, batch: Batch) -> None:
        if len(self.skipped) > self._limit:
            kind = "training" if self._batches.train else "evaluation"
            raise DataError(
                f"{len(self.skipped)} of {len(self._batches.images)} {kind} images cannot be read, more than the "
                f"{self._limit} allowed (the first: {self.skipped[0].reason}); find them with didicm doctor, "
                "and repair or remove them"
            )
        if self._batches.train and len(batch.label) < self._batches.batch_size:
            raise DataError(
                f"no other image of the same class could be read in place of: {batch.skipped[0].reason}; "
                "check the data with didicm doctor"
            )


def make_loader(
    images: ImageSet,
    transform: TrainTransform | EvalTransform,
    batch_size: int,
    *,
    train: bool,
    seed: int,
    epoch: int = 0,
    start_batch: int = 0,
    workers: int = 0,
    repeats: int = 1,
    balanced: bool = False,
    corruption: Corruptions | None = None,
    rank: int = 0,
    world_size: int = 1,
    in_memory: bool | None = None,
    device: torch.device | str = "cpu",
) -> Loader:
    """Make the batches of an epoch.

    Training shuffles, drops the last incomplete batch, and puts another image of the same class in place of
    one that cannot be read. Evaluation shows every image once in order and leaves unreadable ones out. More
    than 1 % of unreadable images (or 10, whichever is more) is an error.

    Args:
        images: what to show.
        transform: what the network sees of it.
        batch_size: on each rank.
        train: an epoch for training, or for evaluation.
        seed: of the run. At evaluation it decides each image's corruption, the same in every epoch.
        epoch: counted from 0.
        start_batch: leave out so many batches, to continue in the middle.
        workers: processes that decode.
        repeats: views of an image in an epoch of unchanged length (repeated augmentation).
        balanced: draw classes evenly. It shifts calibration, for the classes are not so in the world.
        corruption: applied to every image before the transform.
        rank: this process, of `world_size`. Together they see what one process would with the whole batch.
        world_size: number of processes.
        in_memory: decode everything once, in full; None does so if it is small.
        device: where the batches go. They travel to a GPU as bytes and are normalised there.
    """
    if batch_size < 1:
        raise DataError(f"the batch size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise DataError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    if repeats < 1:
        raise DataError(f"repeats must be at least 1, got {repeats}")
    if not len(images):
        raise DataError("there are no images to load; check the data and its subset")
    if in_memory or (in_memory is None and is_small(images)):
        images = images if isinstance(images, MemorySet) else MemorySet(images)
    device = torch.device(device)
    batches = Batches(
        images, transform, batch_size, train, seed, repeats, balanced, corruption, rank, world_size,
        finish=device.type == "cpu",
    )  # fmt: skip
    return Loader(batches, epoch, start_batch, workers, device)


@dataclass
class _Schedule:
    """The batches still to come, as (epoch, batch): all that a worker needs to know."""

    count: int
    epoch: int = 0
    start: int = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, batch) for batch in range(self.start, self.count)])

    def __len__(self) -> int:
        return self.count - self.start


def _as_it_is(batch: Any) -> Any:
    return batch

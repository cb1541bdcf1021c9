"""One whole batch at a time, by its number: what a worker process does."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from didicm.data.corruptions import Corruptions
from didicm.data.images import ImageSet, MemorySet, UnreadableImageError
from didicm.data.randomness import generator, keys, preserved
from didicm.data.transforms import EvalTransform, TrainTransform, stack

REPLACEMENT_TRIES = 20


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read."""

    index: int
    reason: str  # names the image


class Batch(NamedTuple):
    """What a worker hands over; it never raises for bad images, as that would lose the message."""

    image: Tensor  # (B, C, H, W), uint8 unless finished
    label: Tensor  # (B,), int64
    shown: Tensor  # (B,), which images these are
    key: np.ndarray  # (B,), one per image, for what is random in finishing
    skipped: list[Skipped]


@dataclass
class Batches(Dataset[Batch]):
    """Whole batches, by (epoch, batch)."""

    images: ImageSet
    transform: TrainTransform | EvalTransform
    batch_size: int
    train: bool
    seed: int
    repeats: int
    balanced: bool
    corruption: Corruptions | None
    rank: int
    world_size: int
    finish: bool  # else that is left to the GPU

    def __post_init__(self) -> None:
        self.labels = self.images.labels
        whole, rest = divmod(len(self.images), self.batch_size * self.world_size)
        # Training drops what does not fill a batch, but has at least one.
        self.count = max(1, whole) if self.train else whole + (rest > self.rank)
        self.stacked: Tensor | None = None
        if isinstance(self.images, MemorySet) and self.corruption is None:
            stacked = self.images.stacked()
            if stacked is not None and self.transform.keeps((stacked.shape[3], stacked.shape[2])):
                self.stacked = stacked
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
        if self.stacked is not None:
            which = torch.from_numpy(index)
            image, skipped = self.stacked[which], list[Skipped]()
        else:
            image, which, key, skipped = self._decode(index, key)
        if self.finish and len(which):
            image = self.transform.finish(image, key)
        return Batch(image, torch.from_numpy(self.labels)[which], which, key, skipped)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if not self.train:
            epoch = 0
        if self._plan[0] != epoch:
            order = np.arange(len(self.images))
            if self.train:
                order = epoch_order(self.labels, self.seed, epoch, repeats=self.repeats, balanced=self.balanced)
                # A set smaller than one batch fills it by starting again.
                order = np.resize(order, self.count * self.batch_size * self.world_size)
            self._plan = (epoch, order, occurrences(order))
        return self._plan[1], self._plan[2]

    def _decode(self, index: np.ndarray, key: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray, list[Skipped]]:
        shown, prepared, kept = [], [], []
        skipped: list[Skipped] = []
        with preserved():
            for row, (i, k) in enumerate(zip(index.tolist(), key.tolist(), strict=True)):
                found = self._load(i, k, skipped)
                if found is None:
                    continue
                used, image = found
                if self.corruption is not None:
                    image = self.corruption(image, np.random.default_rng(k))
                shown.append(used)
                prepared.append(self.transform.prepare(image, k))
                kept.append(row)
        images = stack(prepared) if prepared else torch.zeros(0, dtype=torch.uint8)
        return images, torch.tensor(shown, dtype=torch.int64), key[kept], skipped

    def _load(self, i: int, key: int, skipped: list[Skipped]) -> tuple[int, Image.Image] | None:
        """Load image i, or in training another of its class; notes what could not be read."""
        members: np.ndarray | None = None
        # A corruption acts on the image as it is stored, so it needs all of it.
        shrink = partial(self.transform.shrink, key=key) if self.corruption is None else None
        for attempt in range(REPLACEMENT_TRIES):
            try:
                return i, self.images.load(i, shrink)
            except UnreadableImageError as error:
                skipped.append(Skipped(i, str(error)))
            if not self.train:
                return None
            if members is None:
                members = np.flatnonzero(self.labels == self.labels[i])
            i = int(members[int(keys(key % 2**63, attempt)) % len(members)])
        return None


def epoch_order(
    labels: np.ndarray, seed: int, epoch: int, *, repeats: int = 1, balanced: bool = False
) -> np.ndarray:
    """Indices (N,) of a training epoch over N images: a pure function of the seed and the epoch.

    `repeats` shows each image so many times in a row, and fewer images, as timm's RepeatAugSampler does (but
    without rounding the epoch to a multiple of 256). `balanced` draws every class equally often.
    """
    rng = generator(seed, epoch)
    order = _balanced(labels, rng) if balanced else rng.permutation(len(labels))
    return np.repeat(order, repeats)[: len(labels)] if repeats > 1 else order


def occurrences(order: np.ndarray) -> np.ndarray:
    """For each position, how often its image was shown before: every showing is augmented anew."""
    by_image = np.argsort(order, kind="stable")
    sorted_images = order[by_image]
    first = np.r_[True, sorted_images[1:] != sorted_images[:-1]] if len(order) else np.zeros(0, dtype=bool)
    start = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    seen = np.empty(len(order), dtype=np.int64)
    seen[by_image] = np.arange(len(order)) - start
    return seen


def _balanced(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    classes = rng.permutation(np.unique(labels))  # the order decides who gets the remainder
    share, rest = divmod(len(labels), len(classes))
    drawn = []
    for place, k in enumerate(classes):
        members = np.flatnonzero(labels == k)
        wanted = share + (place < rest)
        rounds = -(-wanted // len(members))
        # Whole rounds through the class: no image is shown twice more often than another.
        drawn.append(np.concatenate([rng.permutation(members) for _ in range(rounds)])[:wanted])
    return rng.permutation(np.concatenate(drawn))

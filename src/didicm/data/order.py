"""Which images an epoch shows, in which order: a pure function of the seed and the epoch."""

import numpy as np

from didicm.data.randomness import generator


def epoch_order(
    labels: np.ndarray, seed: int, epoch: int, *, repeats: int = 1, balanced: bool = False
) -> np.ndarray:
    """Indices (N,) of a training epoch over N images.

    Args:
        labels: (N,), used to balance.
        seed: of the run.
        epoch: counted from 0.
        repeats: show each image so many times in a row and fewer images, as timm's RepeatAugSampler does
            (but without rounding the epoch to a multiple of 256).
        balanced: draw every class equally often; images of a small class come again and again.
    """
    rng = generator(seed, epoch)
    order = _balanced(labels, rng) if balanced else rng.permutation(len(labels))
    return np.repeat(order, repeats)[: len(labels)] if repeats > 1 else order


def count_batches(images: int, batch_size: int, world_size: int, *, train: bool, rank: int = 0) -> int:
    """Batches of an epoch on one rank. Training drops what does not fill a batch, but has at least one."""
    whole, rest = divmod(images, batch_size * world_size)
    return max(1, whole) if train else whole + (rest > rank)


def batch_of(order: np.ndarray, batch: int, batch_size: int, rank: int, world_size: int) -> slice:
    """Positions in the order that one rank sees as its batch.

    A global batch is dealt out like cards, so repeats of an image go to different ranks, as in timm.
    """
    whole = batch_size * world_size
    return slice(batch * whole + rank, min((batch + 1) * whole, len(order)), world_size)


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

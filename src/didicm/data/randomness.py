"""Everything random about data as a pure function of what it is for: the same in any process, after any resume."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from didicm.data.images import DataError
from didicm.diffusion.random import GAMMA, mix


def keys(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers, or arrays of them that broadcast, to 64 well-mixed bits each (splitmix64)."""
    with np.errstate(over="ignore"):
        key = np.uint64(0)
        for part in parts:
            key = mix((key ^ np.asarray(part, dtype=np.int64).astype(np.uint64)) + np.uint64(GAMMA))
    return np.asarray(key)


def uniform(key: np.ndarray, count: int) -> np.ndarray:
    """Draw (N, count) numbers in [0, 1) from keys (N,)."""
    bits = keys(key[:, None].view(np.int64), np.arange(count))
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def seed_all(key: int) -> None:
    """Seed the three global generators that timm's and torchvision's transforms draw from."""
    random.seed(key)
    np.random.seed(key % 2**32)
    # Not torch.manual_seed: that also looks for every GPU, once per image.
    torch.default_generator.manual_seed(key % 2**63)


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the global generators as they were found."""
    state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.default_generator.set_state(state[2])


def subset(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted indices of the same fraction of every class, at least one image each; above 1, of so many images.

    Nested: with one seed, a smaller fraction lies inside a larger one.
    """
    classes = _shuffled_classes(labels, seed)
    if isinstance(fraction, int) and fraction > 1:
        return _join([members[:fraction] for members in classes])
    if not 0 < fraction <= 1:
        raise DataError(f"the fraction of the data must lie in (0, 1], or be a whole number, got {fraction}")
    return _join([members[: max(1, int(fraction * len(members) + 0.5))] for members in classes])


def stratified_split(
    labels: np.ndarray, fraction: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices of a training part and a held-out part with nearly the same share of every class.

    Every class keeps at least one training image, so a class of one goes to training. The held-out part has
    the wanted size overall: where classes are so small that their shares round to nothing, some of them
    (chosen by the seed) give one image and others none. Images of one of `groups` (N,) stay together.
    """
    if not 0 < fraction < 1:
        raise DataError(f"the fraction held out must lie in (0, 1), got {fraction}")
    if groups is not None:
        return split_groups(labels, groups, fraction, seed)
    classes = _shuffled_classes(labels, seed)
    sizes = np.array([len(members) for members in classes], dtype=np.int64)
    held = np.minimum(np.floor(fraction * sizes).astype(np.int64), sizes - 1)
    missing = max(int(fraction * sizes.sum() + 0.5), 1) - held.sum()
    remainder = np.where(held < sizes - 1, fraction * sizes - held, -1)
    order = np.lexsort((np.random.default_rng(seed).random(len(sizes)), -remainder))
    chosen = order[: max(missing, 0)]
    held[chosen[remainder[chosen] >= 0]] += 1
    train = _join([members[n:] for members, n in zip(classes, held, strict=True)])
    return train, _join([members[:n] for members, n in zip(classes, held, strict=True)])


def split_groups(
    labels: np.ndarray, groups: Sequence[str] | np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices of a training and a held-out part that share no group, as evenly as whole groups allow.

    Groups come in an order of the seed's. Each goes to the side that leaves the held-out images of its classes,
    and of all together, closer to the wanted share of those seen so far. Every class keeps training images, so
    perhaps no group can be held out.
    """
    _, group_of = np.unique(groups, return_inverse=True)
    _, class_of = np.unique(labels, return_inverse=True)
    members = np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1])
    sizes = np.bincount(class_of).astype(float)
    held, surplus = np.zeros_like(sizes), np.zeros_like(sizes)  # by class; the second against the wanted share
    chosen, least, nearest = [], np.inf, None
    for group in np.random.default_rng(seed).permutation(len(members)):
        classes, counts = np.unique(class_of[members[group]], return_counts=True)
        total = counts.sum()
        # Squared surplus if the group is held out, less that if it is not; classes count by their share.
        cost = (counts * (2 * surplus[classes] + (1 - 2 * fraction) * counts) / sizes[classes]).sum()
        cost += len(sizes) * total * (2 * surplus.sum() + (1 - 2 * fraction) * total) / sizes.sum()
        surplus[classes] -= fraction * counts
        if (held[classes] + counts >= sizes[classes]).any():
            continue
        if cost < 0:
            chosen.append(group)
            held[classes] += counts
            surplus[classes] += counts
        elif cost < least:
            least, nearest = cost, group
    if not chosen and nearest is not None:  # all are too large: the one that misses by least
        chosen.append(nearest)
    inside = np.isin(group_of, chosen)
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def epoch_order(
    labels: np.ndarray, seed: int, epoch: int, *, repeats: int = 1, balanced: bool = False
) -> np.ndarray:
    """Indices (N,) of a training epoch over N images.

    `repeats` shows each image so many times in a row, and fewer images, as timm's RepeatAugSampler does (but
    without rounding the epoch to a multiple of 256). `balanced` draws every class equally often.
    """
    rng = np.random.default_rng(int(keys(seed, epoch)))
    order = _balanced(labels, rng) if balanced else rng.permutation(len(labels))
    return np.repeat(order, repeats)[: len(labels)]


def occurrences(order: np.ndarray) -> np.ndarray:
    """For each position, how often its image was shown before: every showing is augmented anew."""
    by_image = np.argsort(order, kind="stable")
    _, start, count = np.unique(order[by_image], return_index=True, return_counts=True)
    seen = np.empty(len(order), dtype=np.int64)
    seen[by_image] = np.arange(len(order)) - np.repeat(start, count)
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


def _shuffled_classes(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Indices of each class in an order of its own: what one class holds never changes another's choice."""
    by_class = np.argsort(labels, kind="stable")
    names, starts = np.unique(np.asarray(labels)[by_class], return_index=True)
    groups = np.split(by_class, starts[1:])  # one more than names where there are no images
    return [np.random.default_rng([seed, int(k)]).permutation(g) for k, g in zip(names, groups, strict=False)]


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))

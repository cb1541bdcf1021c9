"""Class by class: a fraction of the data, and a held-out part. Both are pure functions of labels and seed."""

import numpy as np

from didicm.data.images import DataError


def subset(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted indices of the same fraction of every class, at least one image each.

    Nested: with one seed, a smaller fraction lies inside a larger one.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"the fraction of the data must lie in (0, 1], got {fraction}")
    kept = [members[: max(1, int(fraction * len(members) + 0.5))] for members in _shuffled_classes(labels, seed)]
    return _join(kept)


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices of a training part and a held-out part with nearly the same share of every class.

    Every class keeps at least one training image, so a class of one goes to training. The held-out part has
    the wanted size overall: where classes are so small that their shares round to nothing, some of them
    (chosen by the seed) give one image and others none.
    """
    if not 0 < fraction < 1:
        raise DataError(f"the fraction held out must lie in (0, 1), got {fraction}")
    classes = _shuffled_classes(labels, seed)
    sizes = np.array([len(members) for members in classes], dtype=np.int64)
    held = np.minimum(np.floor(fraction * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
    missing = max(int(fraction * sizes.sum() + 0.5), 1) - held.sum()
    remainder = np.where(held < sizes - 1, fraction * sizes - held, -1)
    order = np.lexsort((np.random.default_rng(seed).random(len(sizes)), -remainder))
    chosen = order[: max(missing, 0)]
    held[chosen[remainder[chosen] >= 0]] += 1
    train = _join([members[n:] for members, n in zip(classes, held, strict=True)])
    return train, _join([members[:n] for members, n in zip(classes, held, strict=True)])


def _shuffled_classes(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Indices of each class in an order of its own: what one class holds never changes another's choice."""
    labels = np.asarray(labels)
    by_class = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[by_class], return_index=True)
    groups = np.split(by_class, starts[1:]) if len(names) else []
    return [np.random.default_rng([seed, int(k)]).permutation(g) for k, g in zip(names, groups, strict=True)]


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)

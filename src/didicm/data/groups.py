"""Images that belong together, such as those of one patient, stay on one side of every split."""

import re
from collections.abc import Sequence

import numpy as np

from didicm.data.images import DataError, ImageSet
from didicm.text import readable


def find_groups(images: ImageSet, by: str) -> np.ndarray:
    """The group (N,) of each image: the value of a column, or what a regular expression finds in its name.

    Of an expression with parentheses, what they enclose counts.
    """
    column = images.column(by)
    if column is not None:
        empty = next((i for i, value in enumerate(column) if str(value) in ("", "None")), None)
        if empty is not None:
            raise DataError(f"{images.name(empty)} has no value in the column {by!r} of groups; fill it in")
        return np.array([str(value) for value in column])
    try:
        pattern = re.compile(by)
    except re.error as error:
        raise DataError(f"group_by {by!r} is neither a column nor a regular expression ({error})") from None
    found = [pattern.search(images.name(i)) for i in range(len(images))]
    if None in found:
        name = images.name(found.index(None))
        raise DataError(
            f"group_by {by!r} is not a column here, and as a regular expression it does not match {name}"
        )
    return np.array([" ".join(part or "" for part in match.groups()) or match[0] for match in found if match])


def shared_groups(train: ImageSet, val: ImageSet | None) -> list[str]:
    """Groups with images in both splits."""
    if val is None or train.groups is None or val.groups is None:
        return []
    return [str(group) for group in np.intersect1d(train.groups, val.groups)]


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


def check_groups(train: ImageSet, val: ImageSet | None, uri: str) -> None:
    """Refuse data whose own splits share groups."""
    if shared := shared_groups(train, val):
        raise DataError(
            f"{len(shared)} groups of {uri}, such as {readable(shared[0])!r}, are in training and validation; "
            "move each to one side, or leave the splits out and one is made"
        )

"""Wrong labels on purpose: a share of them at random, or as a confusion matrix says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from didicm.data.images import DataError, ImageSet, normalise
from didicm.data.randomness import keys, uniform
from didicm.data.table import LABEL, read_columns, read_number
from didicm.errors import did_you_mean
from didicm.text import readable
from didicm.values import Range

LabelNoise = Annotated[float, Range(0, 1)] | str  # the share of wrong labels, or the file of a confusion matrix
PURPOSE = 0x6C61_6265_6C73  # tells these draws from others of the same seed


def noisy_labels(images: ImageSet, noise: LabelNoise, seed: int) -> np.ndarray:
    """Labels (N,), some of them wrong: a function of the seed and the image's place in the set.

    With one seed, the labels that are wrong at a low share are wrong, and the same, at a higher one.
    """
    if images.targets is not None:
        raise DataError("label_noise is for labels, and these images have votes; leave one of them out")
    count = len(images.class_names)
    draws = uniform(keys(seed, PURPOSE, np.arange(len(images))), 2)
    if isinstance(noise, str):
        steps = read_confusion(Path(noise).expanduser(), images.class_names).cumsum(axis=1)[images.labels]
        given: np.ndarray = (draws[:, :1] >= steps).sum(axis=1)
        return given.clip(max=count - 1)
    other = 1 + (draws[:, 1] * (count - 1)).astype(np.int64)
    return np.where(draws[:, 0] < noise, (images.labels + other) % count, images.labels)


def read_confusion(file: Path, class_names: Sequence[str]) -> np.ndarray:
    """How often (K, K) the images of each class, by row, are labelled as each class, by column.

    The table has the true class in its column `label`, and a column for every class that is given; one that it
    lacks is never given. Counts become shares.
    """
    where, columns = readable(str(file)), read_columns(file, LABEL)
    index = {normalise(name): k for k, name in enumerate(class_names)}
    given = [name for name in columns if name != LABEL]
    unknown = next((name for name in (*given, *columns[LABEL]) if normalise(name) not in index), None)
    if unknown is not None:
        known = did_you_mean(unknown, class_names)
        raise DataError(f"{where} has {readable(unknown)!r}, which is not a class of the data: {known}")
    matrix = np.zeros((len(class_names), len(class_names)))
    for row, true in enumerate(columns[LABEL]):
        for name in given:
            place = f"{readable(true)!r} labelled as {readable(name)!r}"
            matrix[index[normalise(true)], index[normalise(name)]] += read_number(columns[name][row], where, place)
    empty = np.flatnonzero(matrix.sum(axis=1) == 0)
    if len(empty):
        raise DataError(
            f"{where} does not say how {class_names[empty[0]]!r} is labelled; add a row for every class"
        )
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))

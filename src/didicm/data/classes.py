"""Class names and their indices: they travel with a model and are checked by name."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from didicm.data.images import DataError, ImageSet


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names as timm does: `2` before `10`."""

    def key(name: str) -> list[str | int]:
        return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"([0-9]+)", name))]

    return sorted(names, key=key)


def normalise(name: str) -> str:
    """One spelling of accents: a folder copied from a Mac must match one made on Linux."""
    return unicodedata.normalize("NFC", name)


def match(data_classes: Sequence[str], model_classes: Sequence[str]) -> np.ndarray:
    """Index in `model_classes` of each class of the data, int64; a class the model lacks is an error."""
    index = {normalise(name): k for k, name in enumerate(model_classes)}
    unknown = [name for name in data_classes if normalise(name) not in index]
    if unknown:
        raise DataError(
            f"the data has {_quote(unknown)}, but the classes known are {_quote(model_classes)}; "
            f"rename or remove what is unknown"
        )
    return np.array([index[normalise(name)] for name in data_classes], dtype=np.int64)


def relabel(images: ImageSet, model_classes: Sequence[str]) -> ImageSet:
    """Number labels as a model with `model_classes` does; only classes that have images count."""
    present = np.unique(images.labels)
    table = np.full(len(images.class_names), -1, dtype=np.int64)
    table[present] = match([images.class_names[k] for k in present], model_classes)
    return images.select(np.arange(len(images)), table[images.labels], list(model_classes))


def _quote(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ("class " if len(names) == 1 else "classes ") + shown + more

"""Labelled images with random access, and how their classes are numbered; without PyTorch."""

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, TypeAlias

import numpy as np
from PIL.JpegImagePlugin import JpegImageFile

from didicm.data.decode import to_channels
from didicm.data.picture import MOST_CHANNELS, ORIENTATION, Picture, from_array, from_pixels
from didicm.errors import UserError, reason
from didicm.text import readable as readable

Shrink: TypeAlias = Callable[[tuple[int, int]], int]

SMALL_BYTES = 128 * 2**20


class DataError(UserError):
    """A mistake with data, told in one sentence that names the place and the remedy."""


class UnreadableImageError(DataError):
    """One image that cannot be decoded."""


class ImageSet(ABC):
    """Labelled images with random access. Labels are known without decoding anything."""

    labels: np.ndarray  # (N,), int64
    class_names: list[str]
    channels: int = 3  # what `load` returns: 1 (grey), 3 (RGB), or all that the images have
    targets: np.ndarray | None = None  # (N, K), float32: distributions to train on, where raters disagree
    groups: np.ndarray | None = None  # (N,), text: images of one group stay on one side of every split

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_counts(self) -> np.ndarray:
        """Images of each class, (K,); where raters disagree, the sum of their shares."""
        if self.targets is not None:
            return np.asarray(self.targets.sum(axis=0, dtype=np.float64))
        return np.bincount(self.labels, minlength=len(self.class_names))

    @abstractmethod
    def name(self, i: int) -> str:
        """Say where image i lies, for messages."""

    @abstractmethod
    def original(self, i: int) -> Picture:
        """Open image i as it is stored, in whatever mode."""

    def load(self, i: int, shrink: Shrink | None = None) -> Picture:
        """Decode image i to an upright `L` or `RGB` image, or one of as many channels as were asked for.

        `shrink` tells from the upright width and height by what factor the image may come smaller. Only JPEGs
        make use of it: they decode faster at a half, a quarter or an eighth.
        """
        try:
            image = self.original(i)
            if shrink is not None and isinstance(image, JpegImageFile):
                width, height = image.size
                turned = image.getexif().get(ORIENTATION, 1) > 4
                if (factor := shrink((height, width) if turned else (width, height))) > 1:
                    image.draft(None, (width // factor, height // factor))
            return to_channels(image, self.channels)
        except Exception as error:  # a broken file can raise nearly anything from inside a decoder
            raise UnreadableImageError(f"{self.name(i)} cannot be read as an image ({reason(error)})") from error

    def with_channels(self, channels: int) -> "ImageSet":
        """The same images, decoded to 1 (grey), 3 (RGB) or all of their channels; shares everything else."""
        images = copy(self)
        images.channels = check_channels(channels)
        return images

    def column(self, name: str) -> Sequence[Any] | None:
        """Values (N,) of another column that the source has beside images and labels; None if there is no such."""
        return None

    def select(self, indices: np.ndarray) -> "ImageSet":
        """Keep some images, in the order given; or those that are marked by true."""
        return _Selection(self, np.arange(len(self))[indices])


class _Selection(ImageSet):
    def __init__(self, base: ImageSet, indices: np.ndarray) -> None:
        self._base, self._indices = base, indices
        self.labels, self.class_names, self.channels = base.labels[indices], base.class_names, base.channels
        self.targets = None if base.targets is None else base.targets[indices]
        self.groups = None if base.groups is None else base.groups[indices]

    def name(self, i: int) -> str:
        return self._base.name(int(self._indices[i]))

    def column(self, name: str) -> Sequence[Any] | None:
        values = self._base.column(name)
        return None if values is None else [values[i] for i in self._indices]

    def original(self, i: int) -> Picture:
        return self._base.original(int(self._indices[i]))


class FeatureSet(_Selection):
    """Images with stored features (views, N, D) that loaders hand out; rows of NaN (unreadable) are left out."""

    def __init__(self, images: ImageSet, features: np.ndarray) -> None:
        missing = np.isnan(features[0, :, 0])
        super().__init__(images, np.flatnonzero(~missing))
        self.unreadable = [images.name(int(i)) for i in np.flatnonzero(missing)]
        self._features = features

    def features(self, index: np.ndarray, view: np.ndarray | int) -> np.ndarray:
        """Features (B, D) of images (B,), each of the view of that number, counted round and round."""
        chosen: np.ndarray = self._features[view % len(self._features), self._indices[index]]
        return chosen


class ArraySet(ImageSet):
    """Images held in memory: one array (N, H, W[, C]), or a list of arrays of different sizes."""

    def __init__(
        self,
        images: np.ndarray | Sequence[np.ndarray],
        labels: np.ndarray,
        class_names: list[str],
        *,
        channels: int = 3,
        origin: str | ImageSet = "array",
    ) -> None:
        if len(images) != len(labels):
            raise DataError(f"there are {len(images)} images but {len(labels)} labels")
        self.images = images
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = list(class_names)
        self.channels = check_channels(channels)
        self._origin = origin
        if isinstance(origin, ImageSet):
            self.targets, self.groups = origin.targets, origin.groups

    def name(self, i: int) -> str:
        return f"{self._origin}[{i}]" if isinstance(self._origin, str) else self._origin.name(i)

    def original(self, i: int) -> Picture:
        return from_array(self.images[i])


class MemorySet(ArraySet):
    """Another set's images, decoded and settled once. What could not be read stays unreadable."""

    def __init__(self, source: ImageSet, settle: Callable[[Picture], Picture] = lambda image: image) -> None:
        self._source = source
        self._failed: dict[int, str] = {}
        images = [np.zeros((0, 0), dtype=np.uint8)] * len(source)
        for i in range(len(source)):
            try:
                images[i] = np.array(settle(source.load(i)))
            except UnreadableImageError as error:
                self._failed[i] = str(error)
        super().__init__(images, source.labels, source.class_names, channels=source.channels, origin=source)

    def load(self, i: int, shrink: Shrink | None = None) -> Picture:
        if i in self._failed:
            raise UnreadableImageError(self._failed[i])
        return from_pixels(self.images[i])

    def with_channels(self, channels: int) -> ImageSet:
        return self._source.with_channels(channels)  # what was decoded to grey has lost its colour

    def stacked(self) -> np.ndarray | None:
        """All images as one array (N, H, W, C), uint8; None if sizes differ or one could not be read."""
        if self._failed or len({image.shape for image in self.images}) != 1:
            return None
        return stack(self.images)


def stack(images: Iterable[Picture | np.ndarray]) -> np.ndarray:
    """Stack images of one size to (B, H, W, C), uint8."""
    arrays = np.stack([np.asarray(image) for image in images])
    return arrays.reshape(*arrays.shape[:3], -1)


def is_small(images: ImageSet) -> bool:
    """Whether all images, decoded, fit in memory with ease, judged by a few of them."""
    sizes = []
    for i in np.unique(np.linspace(0, len(images) - 1, 16).astype(int)):
        with suppress(UnreadableImageError):
            width, height = images.load(i).size
            sizes.append(width * height * images.channels)
    return bool(sizes) and float(np.mean(sizes)) * len(images) <= SMALL_BYTES


def check_channels(channels: int) -> int:
    """Return the number of channels if images may have so many."""
    if not 1 <= channels <= MOST_CHANNELS:
        raise DataError(f"channels must be 1 (grey), 3 (RGB) or up to {MOST_CHANNELS}, got {channels}")
    return channels


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names as timm does: `2` before `10`."""

    def key(name: str) -> list[str | int]:
        return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"([0-9]+)", name))]

    return sorted(names, key=key)


def normalise(name: str) -> str:
    """One spelling of accents: a folder copied from a Mac must match one made on Linux."""
    return unicodedata.normalize("NFC", name)


def names_and_labels(values: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Class names, and labels (N,), from the class that each image states; numbers become names too."""
    names = sort_names(set(values))
    index = {name: k for k, name in enumerate(names)}
    return names, np.array([index[v] for v in values], dtype=np.int64)


def relabel(images: ImageSet, model_classes: Sequence[str]) -> ImageSet:
    """Number labels as a model with `model_classes` does; a class with images that it lacks is an error."""
    index = {normalise(name): k for k, name in enumerate(model_classes)}
    used = np.flatnonzero(images.class_counts)
    present = [images.class_names[k] for k in used]
    unknown = [repr(name) for name in present if normalise(name) not in index]
    if unknown:
        known = some([repr(name) for name in model_classes])
        raise DataError(
            f"the data has {some(unknown)}, but the known classes are {known}; rename or remove what is unknown"
        )
    table = np.array([index.get(normalise(name), -1) for name in images.class_names], dtype=np.int64)
    same = images.select(np.arange(len(images)))
    same.labels, same.class_names = table[images.labels], list(model_classes)
    if images.targets is not None:
        same.targets = np.zeros((len(images), len(index)), dtype=np.float32)
        same.targets[:, table[used]] = images.targets[:, used]
    return same


def some(names: Sequence[str]) -> str:
    """The first five names, and how many there are beyond them."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

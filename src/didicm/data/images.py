"""Labelled images with random access, and how any image file becomes an upright 8-bit grey or RGB picture."""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps

from didicm.errors import UserError

Shrink: TypeAlias = Callable[[tuple[int, int]], int]

MODES = {1: "L", 3: "RGB"}


class DataError(UserError):
    """A mistake with data, told in one sentence that names the place and the remedy."""


class UnreadableImageError(DataError):
    """One image that cannot be decoded."""


class ImageSet(ABC):
    """Labelled images with random access. Labels are known without decoding anything."""

    labels: np.ndarray  # (N,), int64
    class_names: list[str]
    channels: int  # 1 or 3: what `load` returns

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, i: int) -> str:
        """Say where image i lies, for messages."""

    @abstractmethod
    def original(self, i: int) -> Image.Image:
        """Open image i as it is stored, in whatever mode."""

    def load(self, i: int, shrink: Shrink | None = None) -> Image.Image:
        """Decode image i to an upright `L` or `RGB` image.

        Args:
            i: which.
            shrink: tells from the stored width and height by what factor the image may come smaller. Only
                JPEGs make use of it: they decode faster at a half, a quarter or an eighth.
        """
        try:
            image = self.original(i)
            if shrink is not None and image.format == "JPEG" and (factor := shrink(image.size)) > 1:
                image.draft(None, (image.width // factor, image.height // factor))
            return to_channels(image, self.channels)
        except Exception as error:  # a broken file can raise nearly anything from inside a decoder
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UnreadableImageError(f"{self.name(i)} cannot be read as an image ({reason})") from error

    def select(
        self,
        indices: np.ndarray,
        labels: np.ndarray | None = None,
        class_names: list[str] | None = None,
    ) -> "ImageSet":
        """Keep some images, if need be with other labels (one per kept image) and class names."""
        return _Selection(self, indices, labels, class_names)


class _Selection(ImageSet):
    def __init__(
        self,
        base: ImageSet,
        indices: np.ndarray,
        labels: np.ndarray | None,
        class_names: list[str] | None,
    ) -> None:
        self.indices = np.asarray(indices, dtype=np.int64)
        self.base = base
        self.labels = base.labels[self.indices] if labels is None else np.asarray(labels, dtype=np.int64)
        self.class_names = base.class_names if class_names is None else class_names
        self.channels = base.channels

    def name(self, i: int) -> str:
        return self.base.name(self.indices[i])

    def original(self, i: int) -> Image.Image:
        return self.base.original(self.indices[i])


class ArraySet(ImageSet):
    """Images held in memory: one array (N, H, W[, 3]), or a list of arrays of different sizes."""

    def __init__(
        self,
        images: np.ndarray | Sequence[np.ndarray],
        labels: np.ndarray,
        class_names: list[str],
        *,
        channels: int = 3,
        origin: str | ImageSet = "array",
    ) -> None:
        if channels not in MODES:
            raise DataError(f"channels must be 1 (grey) or 3 (RGB), got {channels}")
        if len(images) != len(labels):
            raise DataError(f"there are {len(images)} images but {len(labels)} labels")
        self.images = images
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = list(class_names)
        self.channels = channels
        self._origin = origin

    def name(self, i: int) -> str:
        return f"{self._origin}[{i}]" if isinstance(self._origin, str) else self._origin.name(i)

    def original(self, i: int) -> Image.Image:
        return Image.fromarray(self.images[i])


class Strings:
    """Many strings in one block of memory.

    A list would be copied into every worker: reading a string touches its reference count, and with it a
    page that was shared. With a million paths that adds up.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        encoded = [s.encode("utf-8", "surrogateescape") for s in strings]
        self._ends = np.cumsum([0] + [len(s) for s in encoded], dtype=np.int64)
        self._block = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        return self._block[self._ends[i] : self._ends[i + 1]].tobytes().decode("utf-8", "surrogateescape")


def readable(text: str) -> str:
    """Make a file name safe to print, also when it is not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def open_image(source: str | Path | bytes) -> Image.Image:
    """Open a file or the bytes of one; the pixels are decoded later."""
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Turn any PIL image into an upright 8-bit one of 1 (`L`) or 3 (`RGB`) channels.

    Transparency is laid on white. 16-bit grey is scaled, not clipped; by the range of the format and not of
    the image, so that two images keep their relative brightness.
    """
    # A swap of axes must come first: it reads the tag that a conversion may lose.
    if image.getexif().get(0x0112, 1) != 1:  # the EXIF orientation tag
        image = ImageOps.exif_transpose(image)
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        image = _to_8_bit(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    mode = MODES[channels]
    if image.mode != mode:
        # Only RGB is a step that every mode (palette, CMYK, LAB, ...) can take.
        image = image.convert("RGB") if image.mode not in ("L", "1", "RGB") else image
        image = image.convert(mode)
    image.load()
    return image


def _to_8_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    if image.mode == "F":  # by convention 0..1; some programs write 0..255
        top = 1.0 if values.max() <= 1 else 255.0
    else:
        top = 65535.0 if values.max() <= 65535 else 2.0**31 - 1
    return Image.fromarray(np.clip(values * (255 / top) + 0.5, 0, 255).astype(np.uint8))

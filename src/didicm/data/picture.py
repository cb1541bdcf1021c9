"""Images of any number of channels, also those that Pillow has no mode for, and what memory decoding one may take.

Without PyTorch: exported models read their images by the same code.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageFilter

from didicm.errors import UserError

MEMORY = 256 * 2**20  # bytes that decoding one image may take
DECODERS = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JPEG2000": 24}  # bytes per pixel that they hold beside the image
TILE_WIDTH, TILE_LENGTH = 0x0142, 0x0143  # tags of TIFF
Box: TypeAlias = tuple[float, float, float, float]


class Bands:
    """An 8-bit image as one grey image per channel, with as much of Pillow's interface as is needed of it."""

    format = None

    def __init__(self, planes: Sequence[Image.Image]) -> None:
        self.planes = list(planes)

    @property
    def size(self) -> tuple[int, int]:
        return self.planes[0].size

    @property
    def width(self) -> int:
        return self.size[0]

    @property
    def height(self) -> int:
        return self.size[1]

    @property
    def mode(self) -> str:
        return f"{len(self.planes)} channels"

    def each(self, change: Callable[[Image.Image], Image.Image]) -> "Bands":
        """The same change to every channel."""
        return Bands([change(plane) for plane in self.planes])

    def resize(self, size: tuple[int, int], resample: Image.Resampling, box: Box | None = None) -> "Bands":
        return self.each(lambda plane: plane.resize(size, resample, box))

    def crop(self, box: tuple[int, int, int, int]) -> "Bands":
        return self.each(lambda plane: plane.crop(box))

    def filter(self, kernel: ImageFilter.Filter) -> "Bands":
        return self.each(lambda plane: plane.filter(kernel))

    def load(self) -> None:
        """Nothing: it is decoded when it is opened."""

    def close(self) -> None:
        """Nothing: no file is open."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Pixels (H, W, C)."""
        pixels = np.stack([np.asarray(plane) for plane in self.planes], axis=-1)
        return pixels.astype(dtype or np.uint8, copy=False)

    def __enter__(self) -> "Bands":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Picture: TypeAlias = Image.Image | Bands  # an image of any number of channels


def from_pixels(pixels: np.ndarray) -> Picture:
    """An image of 8-bit pixels (H, W) or (H, W, C)."""
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3):
        return Bands([Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(pixels, 2, 0)])
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def viewable(image: Picture) -> Image.Image:
    """What people can look at: of many channels the first three, of two the first."""
    if isinstance(image, Image.Image):
        return image
    return Image.merge("RGB", image.planes[:3]) if len(image.planes) > 2 else image.planes[0]


def check_memory(size: tuple[int, int], needed: int) -> None:
    """Refuse an image of this width and height that would take too many bytes."""
    if needed > MEMORY:
        raise UserError(
            f"its {size[0]} x {size[1]} pixels would take {needed >> 20} MB to decode, "
            f"more than the {MEMORY >> 20} MB allowed: make it smaller"
        )


def check_complete(image: Image.Image) -> None:
    """Refuse a TIFF without some of its strips: Pillow would show what lies in memory there."""
    parts = [tile[1] for tile in getattr(image, "tile", [])]
    there = sum((right - left) * (bottom - top) for left, top, right, bottom in parts)
    if image.format == "TIFF" and there < image.width * image.height:
        raise UserError("some of its pixels are missing")


def decoding_bytes(image: Image.Image) -> int:
    """Memory for an image, its decoder, and what it is converted to."""
    pixels, own = image.width * image.height, stored_bytes(image)
    decoder = DECODERS.get(str(image.format), 0)
    if image.info.get("progressive"):  # a JPEG whose coefficients are all held
        decoder = 2 * len(image.getbands())
    tags = getattr(image, "tag_v2", {})  # of a TIFF, whose tiles may be larger than the image
    tile: int = tags.get(TILE_WIDTH, 0) * tags.get(TILE_LENGTH, 0) * 4
    converted = 4 * pixels if image.mode != "RGB" else 0
    return own + decoder * pixels + tile + converted


def white_value(highest: Any, *, floating: bool) -> float:
    """The value that stands for white in an image of more than 8 bits, by the highest in it."""
    if np.isnan(highest):
        raise UserError("some of its pixels are not numbers")
    if floating:  # by convention 0..1; some programs write 0..255
        return 1.0 if highest <= 1 else 255.0
    return 65535.0 if highest <= 65535 else 2.0**31 - 1


def stored_bytes(image: Image.Image) -> int:
    """Memory that an image takes as Pillow keeps it."""
    per_pixel = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    return per_pixel * image.width * image.height

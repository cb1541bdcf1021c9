"""Images of two channels, or of more than three, which Pillow has no mode for; without PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageFilter

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

"""What a model says about an image, and which images it can be asked about; shared by all ways to run a model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import numpy as np
from PIL import Image

from didicm.data import UnreadableImageError, open_image, readable
from didicm.data.many_channels import MOST_CHANNELS
from didicm.data.picture import Bands, Picture, from_pixels
from didicm.errors import UserError, reason

T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, Any]
# A path, an open file or its bytes, a PIL image, or 8-bit pixels (H, W) or (H, W, C).
Source: TypeAlias = str | Path | bytes | IO[bytes] | Picture | Array


@dataclass(frozen=True)
class Prediction:
    """What a model says about one image. Numbers come as tensors, or as arrays from an exported model."""

    classes: list[tuple[str, float]]  # all class names with their probabilities, the most probable first
    entropy: float  # of the posterior, in nats
    conformal_set: list[str] | None  # classes that hold the true one as often as was calibrated, or None
    probs: Any  # (K,), in the model's order
    # From time 1 to 0, each with probabilities (K,), after the same temperature; None unless asked for.
    trajectory: list[tuple[float, Any]] | None = None
    outlier_score: float | None = None  # how unlike the training images it is; None if that is not known
    unlike_training: bool | None = None  # whether that is too much to rely on the probabilities, or to have a set

    @classmethod
    def of(
        cls,
        probs: Any,
        class_names: Sequence[str],
        inside: Any = None,
        trajectory: list[tuple[float, Any]] | None = None,
        outlier_score: float | None = None,
        unlike_training: bool | None = None,
    ) -> "Prediction":
        """Describe probabilities (K,), of which `inside` (K,) says what is in the conformal set.

        No set covers the truth of an image that is unlike the training images, so such an image has none.
        """
        values: list[float] = probs.tolist()
        order = sorted(range(len(values)), key=lambda k: -values[k])  # of equals the first comes first
        covered = inside is not None and not unlike_training
        return cls(
            classes=[(class_names[k], values[k]) for k in order],
            entropy=math.fsum(-p * math.log(p) for p in values if p > 0),
            conformal_set=[class_names[k] for k in order if inside[k]] if covered else None,
            probs=probs,
            trajectory=trajectory,
            outlier_score=outlier_score,
            unlike_training=unlike_training,
        )


def read_source(image: Source, transform: Callable[[Picture], T]) -> T:
    """What `transform` makes of an image; one that cannot be read is told by its name."""
    if isinstance(image, np.ndarray):
        image = _array_image(image)
    if not isinstance(image, (str, Path, bytes, Image.Image, Bands)) and not hasattr(image, "read"):
        raise UserError(
            f"{type(image).__name__} is not an image: give a path, a file, bytes, a PIL image or pixels"
        )
    try:
        if isinstance(image, (Image.Image, Bands)):
            return transform(image)
        with open_image(image if isinstance(image, (str, Path, bytes)) else image.read()) as opened:
            return transform(opened)
    except Exception as error:  # a broken file can raise nearly anything from inside a decoder
        name = readable(str(image)) if isinstance(image, (str, Path)) else f"the {type(image).__name__} given"
        raise UnreadableImageError(f"{name} cannot be read as an image ({why_unreadable(error)})") from error


def why_unreadable(error: Exception) -> str:
    """What kept an image from being read, without its name."""
    return "no such file" if isinstance(error, FileNotFoundError) else reason(error)


def _array_image(image: Array) -> Picture:
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] > MOST_CHANNELS):
        raise UserError(
            f"an array must be 8-bit pixels of shape (H, W) or (H, W, C), got {image.dtype} of shape "
            f"{image.shape}: convert it, or give a list of such images"
        )
    return Image.fromarray(image) if image.ndim == 3 and image.shape[2] == 4 else from_pixels(image)

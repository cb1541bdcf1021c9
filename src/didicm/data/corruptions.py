"""Data made worse on purpose: images of lower resolution or corrupted at severities 1 to 5, and wrong labels.

Strengths follow ImageNet-C (Hendrycks and Dietterich, 2019) where it has the corruption. Lengths are
fractions of the image's shorter side, so that a severity means about the same at 28 and at 500 pixels. The loader
first brings an image down to the scale at which the network sees it, since shrinking afterwards would average most
of the damage away; then it is corrupted, and only then cropped and augmented: the camera was bad, not the crop.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.nn import functional as F

from didicm.data.images import DataError, ImageSet, normalise
from didicm.data.picture import Picture, each_plane, from_pixels
from didicm.data.randomness import keys, uniform
from didicm.data.table import LABEL, read_columns, read_number
from didicm.errors import did_you_mean
from didicm.text import readable
from didicm.values import Range

Effect = Callable[[Picture, float, np.random.Generator], Picture]

SEVERITIES = (1, 2, 3, 4, 5)
ALIASES = {"noise": "gaussian_noise", "shot": "shot_noise", "motion": "motion_blur"}
LabelNoise = Annotated[float, Range(0, 1)] | str  # the share of wrong labels, or the file of a confusion matrix
PURPOSE = 0x6C61_6265_6C73  # tells the draws of labels from others of the same seed


@dataclass(frozen=True)
class Corruptions:
    """One or more of `SUITE` at severity 1 to 5, or `resolution` with the pixels to keep, in order."""

    parts: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> "Corruptions":
        """Read `name:severity`, joined by `+`, as in `blur:2+jpeg:4`."""
        parts = []
        for part in map(str.strip, text.split("+")):
            name, _, severity = map(str.strip, part.partition(":"))
            name = ALIASES.get(name, name)
            if not severity.isdecimal():
                raise DataError(f"{part!r} is not a corruption; write name:severity, as in noise:3+jpeg:2")
            if name == "resolution":
                if int(severity) < 1:
                    raise DataError(f"resolution is a number of pixels, at least 1, got {severity}")
            elif name not in SUITE:
                known = ("resolution", *SUITE, *ALIASES)
                raise DataError(f"there is no corruption {name!r}; {did_you_mean(name, known)}")
            elif int(severity) not in SEVERITIES:
                raise DataError(f"the severity of {name} must be 1 to 5, got {severity}")
            parts.append((name, int(severity)))
        return cls(tuple(parts))

    def __call__(self, image: Picture, rng: np.random.Generator) -> Picture:
        """Corrupt an 8-bit image of any number of channels; whatever is random is drawn from `rng`."""
        for name, severity in self.parts:
            if name == "resolution":
                image = reduce_resolution(image, severity)
            else:
                effect, strengths = SUITE[name]
                image = effect(image, strengths[severity - 1], rng)
        return image

    def __str__(self) -> str:
        return "+".join(f"{name}:{severity}" for name, severity in self.parts)


def reduce_resolution(image: Picture, pixels: int) -> Picture:
    """Shrink the shorter side to `pixels` by averaging areas; never enlarges."""
    scale = pixels / min(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BOX)


def _gaussian_noise(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    x = _to_floats(image)
    return _to_image(x + strength * rng.standard_normal(x.shape, dtype=np.float32))


def _shot_noise(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    photons = 1 / strength
    return _to_image(rng.poisson(_to_floats(image) * photons) / photons)


def _blur(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    return image.filter(ImageFilter.GaussianBlur(strength * min(image.size)))


def _motion_blur(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    angle = rng.uniform(0, np.pi)
    half = strength * min(image.size) / 2
    reach = int(np.ceil(half)) + 1
    kernel = torch.zeros(2 * reach + 1, 2 * reach + 1)
    along = np.linspace(-half, half, 8 * reach + 1)
    for dx, dy in zip(along * np.cos(angle) + reach, along * np.sin(angle) + reach, strict=True):
        column, row = int(dx), int(dy)
        right, down = dx - column, dy - row
        kernel[row : row + 2, column : column + 2] += torch.tensor(
            [[(1 - down) * (1 - right), (1 - down) * right], [down * (1 - right), down * right]]
        )
    x = _to_floats(image)
    planes = torch.from_numpy(x.reshape(*x.shape[:2], -1)).permute(2, 0, 1).unsqueeze(1)
    planes = F.pad(planes, [reach] * 4, mode="replicate")
    blurred = F.conv2d(planes, (kernel / kernel.sum())[None, None])
    return _to_image(blurred.squeeze(1).permute(1, 2, 0).numpy().reshape(x.shape))


def _jpeg(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    def compressed(plane: Image.Image) -> Image.Image:
        file = io.BytesIO()
        plane.save(file, "JPEG", quality=int(strength))
        return Image.open(file).convert(plane.mode)

    return each_plane(image, compressed)


def _contrast(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    x = _to_floats(image)
    mean = x.mean(axis=(0, 1), keepdims=True)
    return _to_image(mean + strength * (x - mean))


def _brightness(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    return _to_image(_to_floats(image) + strength)


def _occlusion(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    """Cover a share of the area with grey. With the same draws, a larger box contains a smaller one."""
    box = []
    for side in image.size:
        length = max(1, round(side * strength**0.5))
        start = int(np.clip(rng.uniform(0, side) - length / 2, 0, side - length))
        box.append((start, start + length))
    (left, right), (top, bottom) = box
    pixels = np.array(image)
    pixels[top:bottom, left:right] = 127
    return from_pixels(pixels)


def _pixelate(image: Picture, strength: float, rng: np.random.Generator) -> Picture:
    width, height = (max(1, round(side * strength)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BOX).resize(image.size, Image.Resampling.NEAREST)


def _to_floats(image: Picture) -> np.ndarray:
    return np.asarray(image, dtype=np.float32) / 255


def _to_image(x: np.ndarray) -> Picture:
    return from_pixels(np.clip(x * 255 + 0.5, 0, 255).astype(np.uint8))


# Effect, and its strength at severities 1 to 5.
SUITE: dict[str, tuple[Effect, tuple[float, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),  # standard deviation, of white
    "shot_noise": (_shot_noise, (1 / 60, 1 / 25, 1 / 12, 1 / 5, 1 / 3)),  # of white, per photon
    "blur": (_blur, (0.010, 0.015, 0.022, 0.032, 0.045)),  # standard deviation, of the shorter side
    "motion_blur": (_motion_blur, (0.06, 0.09, 0.13, 0.18, 0.25)),  # length, of the shorter side
    "jpeg": (_jpeg, (25, 18, 15, 10, 7)),  # quality
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),  # what is left of it
    "brightness": (_brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),  # what is added, of white
    "occlusion": (_occlusion, (0.05, 0.1, 0.2, 0.3, 0.45)),  # share of the area
    "pixelate": (_pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),  # what is left of each side
}


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

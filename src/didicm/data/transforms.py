"""From a decoded image to what the network sees, in training and in use; timm's transforms inside.

Both transforms work in two halves: `prepare` turns one PIL image into one of the right size, and `finish`
turns a batch of those into a normalised tensor, on any device. All that is random in `finish` is vectorised
over the batch, so images that need no `prepare` never pass through PIL again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from didicm.data.images import DataError, check_channels, to_channels
from didicm.data.randomness import seed_all, uniform
from didicm.errors import did_you_mean

MEAN = {1: (0.5,), 3: (0.485, 0.456, 0.406)}  # ImageNet's for RGB
STD = {1: (0.5,), 3: (0.229, 0.224, 0.225)}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


@dataclass(frozen=True)
class EvalTransform:
    """Resize and crop the centre, normalise. Stored with a model; used in evaluation and in production."""

    size: int = 224  # of the square the network sees: the paper's input resolution
    channels: int = 3
    mean: tuple[float, ...] = ()  # one per channel; none stands for the usual ones
    std: tuple[float, ...] = ()
    crop_pct: float = 0.875  # the size, over the shorter side after resizing; 1 keeps the border
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        check_channels(self.channels)
        for name, usual in (("mean", MEAN), ("std", STD)):
            values = tuple(float(v) for v in getattr(self, name) or usual[self.channels])
            if len(values) != self.channels:
                raise DataError(f"{name} has {len(values)} numbers for {self.channels} channels")
            object.__setattr__(self, name, values)
        if self.size < 1:
            raise DataError(f"size must be at least 1 pixel, got {self.size}")
        if min(self.std) <= 0:
            raise DataError(f"std must be above 0, got {self.std}")
        if not 0 < self.crop_pct <= 1:
            raise DataError(f"crop_pct must lie in (0, 1], got {self.crop_pct}")
        if self.interpolation not in INTERPOLATIONS:
            raise DataError(
                f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Describe the transform by plain numbers, lists and strings."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EvalTransform":
        """Make the transform that was described; an unknown key is an error."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise DataError(f"a transform has no {name!r}; {did_you_mean(name, known)}")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**plain)

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn any PIL image into the tensor (C, H, W) that the network sees."""
        return self.finish(stack([self.prepare(image)]))[0]

    def prepare(self, image: Image.Image, key: int = 0) -> Image.Image:
        """Resize and crop one image of any mode."""
        image = to_channels(image, self.channels)
        return image if self.keeps(image.size) else self._crop(image)

    def finish(self, images: Tensor, key: np.ndarray | None = None) -> Tensor:
        """Normalise prepared images (B, C, H, W), uint8, to float32."""
        mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.std))
        # One memory layout whatever the source: a network's rounding may depend on it.
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        return images.sub_(255 * mean).div_(255 * std)

    def shrink(self, size: tuple[int, int], key: int = 0) -> int:
        """By what factor an image may be decoded smaller: not at all, for results must be exact."""
        return 1

    def keeps(self, size: tuple[int, int]) -> bool:
        """Whether `prepare` leaves images of this width and height as they are."""
        return size == (self.size, self.size) and int(self.size / self.crop_pct) == self.size

    def restore(self, images: Tensor) -> Tensor:
        """Undo the normalisation: (B, C, H, W) back to uint8, to look at."""
        mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return ((images * std + mean) * 255).round().clamp(0, 255).byte()

    @cached_property
    def _crop(self) -> "_Chain":
        from timm.data.transforms_factory import transforms_imagenet_eval

        # timm ends with the conversion to a tensor, which `finish` does for the whole batch.
        steps = transforms_imagenet_eval(
            self.size, crop_pct=self.crop_pct, interpolation=self.interpolation, normalize=False
        ).transforms[:-1]
        return _Chain(steps)


@dataclass(frozen=True)
class Augment:
    """What training does to images and labels; the paper's are in recipes/ (table `tab:aug`)."""

    scale: tuple[float, float] | None = None  # area of the random resized crop; None: no such crop
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 0  # instead: pad by so many black pixels and crop anywhere; for tiny images
    hflip: float = 0.0  # probability
    color_jitter: float = 0.0  # of brightness, contrast and saturation
    auto_augment: str | None = None  # timm's name for it
    train_interpolation: str = "random"  # timm's default: bilinear or bicubic
    repeats: int = 1  # repeated augmentation: views of an image in an epoch
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0  # part of the target, also without mixing

    def __post_init__(self) -> None:
        if self.scale is not None and self.pad:
            raise DataError("scale and pad are two ways to crop; leave one of them out")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale must be two fractions in (0, 1], the smaller first, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio must be two numbers above 0, the smaller first, got {self.ratio}")
        for name in ("hflip", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for name, least in (("pad", 0), ("color_jitter", 0), ("mixup", 0), ("cutmix", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise DataError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.train_interpolation not in ("random", *INTERPOLATIONS):
            raise DataError(f"train_interpolation {self.train_interpolation!r} is not known; use random")
        if self.auto_augment and not self.auto_augment.startswith(("rand", "augmix", "original", "v0", "3a")):
            raise DataError(f"auto_augment {self.auto_augment!r} is not known; try rand-m7-mstd0.5-inc1")


@dataclass(frozen=True)
class TrainTransform:
    """A random view of an image, for training; size and normalisation are those of `eval_transform`."""

    augment: Augment
    eval_transform: EvalTransform

    def prepare(self, image: Image.Image, key: int = 0) -> Image.Image:
        """Crop and colour one image. Draws from the global generators, which `key` seeds."""
        image = to_channels(image, self.eval_transform.channels)
        if self.keeps(image.size):
            return image
        seed_all(key)
        return self._steps(image)

    def shrink(self, size: tuple[int, int], key: int = 0) -> int:
        """By what power of 2 an image of this width and height may be decoded smaller.

        The crop that `key` draws stays at least twice as large as what the network sees, which keeps the
        resizing as good as from the full image: most of its averaging is still to come.
        """
        if self.augment.scale is None or min(size) < 4 * self.eval_transform.size:
            return 1
        seed_all(key)
        crop: Any = self._steps.steps[0]
        _, _, height, width = crop.get_params(Image.new("1", size), crop.scale, crop.ratio)
        spare: int = min(height, width) // (2 * self.eval_transform.size)
        return 1 << max(spare.bit_length() - 1, 0)

    def finish(self, images: Tensor, key: np.ndarray) -> Tensor:
        """Shift and flip prepared images (B, C, H, W), uint8, by keys (B,), then normalise."""
        if self.augment.scale is None and (self.augment.pad or self.augment.hflip):
            images = _shift_and_flip(images, uniform(key, 3), self.augment.pad, self.augment.hflip)
        return self.eval_transform.finish(images)

    def keeps(self, size: tuple[int, int]) -> bool:
        """Whether `prepare` leaves images of this width and height as they are."""
        augment = self.augment
        in_batch = augment.scale is None and not augment.color_jitter and not augment.auto_augment
        return in_batch and self.eval_transform.keeps(size)

    @cached_property
    def _steps(self) -> "_Chain":
        from timm.data.transforms_factory import transforms_imagenet_train

        # In three parts; the last, the conversion to a tensor, is done for the whole batch in `finish`.
        crop, colour, _ = transforms_imagenet_train(
            self.eval_transform.size,
            scale=self.augment.scale,
            ratio=self.augment.ratio,
            hflip=self.augment.hflip,
            color_jitter=self.augment.color_jitter or None,  # type: ignore[arg-type]
            auto_augment=self.augment.auto_augment,
            interpolation=self.augment.train_interpolation,
            mean=self.eval_transform.mean,
            std=self.eval_transform.std,
            separate=True,
        )
        first = crop.transforms if self.augment.scale is not None else [self.eval_transform.prepare]
        return _Chain([*first, *colour.transforms])


def _shift_and_flip(images: Tensor, draws: np.ndarray, pad: int, hflip: float) -> Tensor:
    """Pad, crop anywhere and perhaps flip each image of a batch, with draws (B, 3) in [0, 1)."""
    count, _, height, width = images.shape
    place = images.device
    offset = torch.from_numpy((draws[:, :2] * (2 * pad + 1)).astype(np.int64)).to(place)
    flip = torch.from_numpy(draws[:, 2] < hflip).to(place)
    rows = offset[:, :1] + torch.arange(height, device=place)
    across = torch.arange(width, device=place)
    columns = offset[:, 1:] + torch.where(flip[:, None], across.flip(0), across)
    padded = F.pad(images, [pad] * 4)
    which = torch.arange(count, device=place)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def stack(images: list[Image.Image]) -> Tensor:
    """Stack `L` or `RGB` images of one size to (B, C, H, W), uint8."""
    arrays = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(arrays.reshape(*arrays.shape[:3], -1)).permute(0, 3, 1, 2)


class _Chain:
    """Steps one after the other; torchvision's Compose without its check of every call."""

    def __init__(self, steps: list[Callable[[Image.Image], Image.Image]]) -> None:
        self.steps = steps

    def __call__(self, image: Image.Image) -> Image.Image:
        for step in self.steps:
            image = step(image)
        return image

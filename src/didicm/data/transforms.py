"""From a decoded image to what the network sees, in training and in use; timm's transforms inside.

Both transforms work in two halves: `prepare` turns one PIL image into one of the right size, and `finish`
turns a batch of those into a normalised tensor, on any device. What `prepare` does alike in every epoch is
`settle`, done once for images that are kept in memory; the rest is `vary`. All that is random in `finish` is
vectorised over the batch, so where that is all, images never pass through PIL again. `Mixer` makes the targets.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from didicm.data.decode import MODES, resize_and_crop, to_channels
from didicm.data.images import DataError, check_channels, stack
from didicm.data.picture import Picture, each_plane, from_pixels
from didicm.data.randomness import keys, preserved, seed_all, uniform
from didicm.diffusion.sampler import Views, shift_and_flip
from didicm.errors import reason
from didicm.values import Few, Pixels, Range, Settings, plain

MEAN = {1: (0.5,), 3: (0.485, 0.456, 0.406)}  # ImageNet's for RGB
STD = {1: (0.5,), 3: (0.229, 0.224, 0.225)}  # other numbers of channels have those of the training images

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Probability = Annotated[float, Range(0, 1)]
CropPct = Annotated[float, Range(0.01, 1)]
Steps = list[Callable[[Any], Any]]
SHIFT = 16  # of its size, the part by which a view of an image is shifted after training with random resized crops


@dataclass(frozen=True)
class EvalTransform(Settings):
    """Resize and crop the centre, normalise. Stored with a model; used in evaluation and in production."""

    prefix = "transform."
    size: Pixels = 224  # of the square the network sees: the paper's input resolution
    channels: int = 3
    mean: tuple[Annotated[float, Range(-1000, 1000)], ...] = ()  # one per channel; none stands for the usual ones
    std: tuple[Annotated[float, Range(1e-6, 1000)], ...] = ()
    crop_pct: CropPct = 0.875  # the size, over the shorter side after resizing; 1 keeps the border
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_channels(self.channels)
        for name, usual in (("mean", MEAN), ("std", STD)):
            values = getattr(self, name) or usual.get(self.channels, ())
            if len(values) != self.channels:
                raise DataError(f"{name} has {len(values)} numbers for {self.channels} channels")
            object.__setattr__(self, name, values)

    def to_dict(self) -> dict[str, Any]:
        """Describe the transform by plain numbers, lists and strings."""
        return dict(plain(self))

    def __call__(self, image: Picture) -> Tensor:
        """Turn any image into the tensor (C, H, W) that the network sees."""
        return self.finish(to_tensor([self.prepare(image)]))[0]

    vectorised = True  # see TrainTransform

    def prepare(self, image: Picture, key: int = 0) -> Picture:
        """Resize and crop one image of any mode."""
        return self.settle(image)

    def settle(self, image: Picture) -> Picture:
        """All of `prepare`: nothing varies."""
        image = to_channels(image, self.channels)
        if image.size == (self.size, self.size) and int(self.size / self.crop_pct) == self.size:
            return image
        return resize_and_crop(image, self.size, self.crop_pct, self.interpolation)

    def vary(self, image: Picture, key: int = 0) -> Picture:
        """What `prepare` does after `settle`: nothing."""
        return image

    def scale_down(self, image: Picture) -> Picture:
        """Shrink a whole image to the scale at which the network sees it; never enlarges."""
        shorter, least = math.floor(self.size / self.crop_pct), min(image.size)
        if least <= shorter:
            return image
        width, height = (int(shorter * side / least) for side in image.size)
        return image.resize((width, height), Image.Resampling[self.interpolation.upper()])

    def finish(self, images: Tensor, key: np.ndarray | None = None) -> Tensor:
        """Normalise prepared images (B, C, H, W), uint8, to float32."""
        mean, std = self._statistics(images.device)
        # One memory layout whatever the source: a network's rounding may depend on it.
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        return images.sub_(255 * mean).div_(255 * std)

    def shrink(self, size: tuple[int, int], key: int = 0) -> int:
        """By what factor an image may be decoded smaller: not at all, for results must be exact."""
        return 1

    def restore(self, images: Tensor) -> Tensor:
        """Undo the normalisation: (B, C, H, W) back to uint8, to look at."""
        mean, std = self._statistics(images.device)
        return ((images * std + mean) * 255).round().clamp(0, 255).byte()

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # `non_blocking`: else the copy would wait for all that a GPU still has to do.
        mean, std = (torch.tensor(v).view(-1, 1, 1).to(device, non_blocking=True) for v in (self.mean, self.std))
        return mean, std


@dataclass(frozen=True)
class Augment(Settings):
    """What training does to images and labels; the paper's are in recipes/ (table `tab:aug`)."""

    prefix = "augment."
    scale: tuple[float, float] | None = None  # area of the random resized crop; None: no such crop
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: Annotated[int, Range(0, 4096)] = 0  # instead: pad by so many pixels, crop anywhere; for tiny images
    pad_mode: Literal["black", "edge"] = "black"  # what they show: black, or the border of the image, repeated
    hflip: Probability = 0.0
    color_jitter: Annotated[float, Range(0, 100)] = 0.0  # of brightness, contrast and saturation
    auto_augment: str | None = None  # timm's name for it
    train_interpolation: Literal["random"] | Interpolation = "random"  # timm's default: bilinear or bicubic
    repeats: Few = 1  # repeated augmentation: views of an image in an epoch
    mixup: Annotated[float, Range(0, 1000)] = 0.0
    cutmix: Annotated[float, Range(0, 1000)] = 0.0
    label_smoothing: Probability = 0.0  # part of the target, also without mixing

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and self.pad:
            raise DataError("scale and pad are two ways to crop; leave one of them out")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale must be two fractions in (0, 1], the smaller first, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio must be two numbers above 0, the smaller first, got {self.ratio}")
        if self.auto_augment and not self.auto_augment.startswith(("rand", "augmix", "original", "v0", "3a")):
            raise DataError(f"auto_augment {self.auto_augment!r} is not known; try rand-m7-mstd0.5-inc1")


@dataclass(frozen=True)
class TrainTransform:
    """A random view of an image, for training; size and normalisation are those of `eval_transform`."""

    augment: Augment
    eval_transform: EvalTransform

    def __post_init__(self) -> None:
        colour = [name for name in ("color_jitter", "auto_augment") if getattr(self.augment, name)]
        if colour and self.eval_transform.channels not in MODES:
            raise DataError(
                f"{' and '.join(colour)} are for grey and RGB images, not for {self.eval_transform.channels} "
                "channels: leave them out of augment"
            )

    def prepare(self, image: Picture, key: int = 0) -> Picture:
        """Crop and colour one image. Draws from the global generators, which `key` seeds."""
        return self.vary(self.settle(image), key)

    def settle(self, image: Picture) -> Picture:
        """What is the same in every epoch: channels, and size unless it is cropped at random."""
        if self.augment.scale is None:
            return self.eval_transform.settle(image)
        return to_channels(image, self.eval_transform.channels)

    def vary(self, image: Picture, key: int = 0) -> Picture:
        """What `prepare` does after `settle`."""
        if self.vectorised:
            return image

        def view(plane: Image.Image) -> Image.Image:
            seed_all(key)  # so that every channel is cropped alike
            return reduce(lambda seen, step: step(seen), self._steps, plane)

        return each_plane(image, view)

    def scale_down(self, image: Picture) -> Picture:
        """As for evaluation."""
        return self.eval_transform.scale_down(image)

    def shrink(self, size: tuple[int, int], key: int = 0) -> int:
        """By what power of 2 an image of this width and height may be decoded smaller.

        The crop that `key` draws stays at least twice as large as what the network sees, which keeps the
        resizing as good as from the full image: most of its averaging is still to come.
        """
        if self.augment.scale is None or min(size) < 4 * self.eval_transform.size:
            return 1
        seed_all(key)
        crop: Any = self._steps[0]
        _, _, height, width = crop.get_params(Image.new("1", size), crop.scale, crop.ratio)
        spare: int = min(height, width) // (2 * self.eval_transform.size)
        return 1 << max(spare.bit_length() - 1, 0)

    def check(self) -> None:
        """Try it on an empty image: timm's augmentations tell of their mistakes when they are used."""
        try:
            with preserved():
                self.prepare(from_pixels(np.zeros((32, 32, self.eval_transform.channels), dtype=np.uint8)))
        except Exception as error:  # timm asserts, looks up and converts
            raise DataError(
                f"augment does not work with these values ({reason(error)}); see auto_augment"
            ) from error

    def finish(self, images: Tensor, key: np.ndarray) -> Tensor:
        """Shift and flip prepared images (B, C, H, W), uint8, by keys (B,), then normalise."""
        pad, hflip = self.augment.pad, self.augment.hflip
        if self.augment.scale is None and (pad or hflip):
            draws = uniform(key, 3)
            by, flip = (
                torch.from_numpy(x).to(images.device, non_blocking=True)
                for x in ((draws[:, :2] * (2 * pad + 1)).astype(np.int64) - pad, draws[:, 2] < hflip)
            )
            fill = (0,) if self.augment.pad_mode == "black" else None
            images = shift_and_flip(images, by, flip, fill)
        return self.eval_transform.finish(images)

    @property
    def varies(self) -> bool:
        """Whether two views of an image can differ."""
        augment = self.augment
        flips = augment.hflip not in (0, 1)
        return bool(augment.scale or augment.pad or augment.color_jitter or augment.auto_augment or flips)

    @property
    def views(self) -> Views | None:
        """Views of an image that this taught a network to take alike: shifts and flips; None if it has neither."""
        shown, augment = self.eval_transform, self.augment
        fill, shift = None, augment.pad if augment.scale is None else shown.size // SHIFT
        if augment.pad and augment.pad_mode == "black":
            fill = tuple(-mean / std for mean, std in zip(shown.mean, shown.std, strict=True))
        return Views(shift, augment.hflip > 0, fill) if shift or augment.hflip else None

    @property
    def vectorised(self) -> bool:
        """Whether `vary` leaves all to `finish`."""
        return self.augment.scale is None and not self.augment.color_jitter and not self.augment.auto_augment

    @cached_property
    def _steps(self) -> Steps:
        from timm.data.transforms_factory import transforms_imagenet_train

        augment = self.augment
        crop, colour, _ = transforms_imagenet_train(
            self.eval_transform.size,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter or None,  # type: ignore[arg-type]
            auto_augment=augment.auto_augment,
            interpolation=augment.train_interpolation,
            mean=self.eval_transform.mean,  # the colour of what RandAugment moves into view
            separate=True,
        )
        return [*(crop.transforms if augment.scale is not None else ()), *colour.transforms]


class Mixer:
    """Mixup and CutMix of a batch by timm, as a pure function of (seed, step): nothing to save or restore."""

    def __init__(self, augment: Augment, num_classes: int, seed: int, rank: int = 0) -> None:
        self._smoothing, self._num_classes = augment.label_smoothing, num_classes
        self._seed = (seed, rank)
        self._mixup: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        if augment.mixup or augment.cutmix:
            from timm.data.mixup import Mixup

            # It is told of two classes, the halves of a batch, and so tells us the shares of their images.
            self._mixup = Mixup(  # type: ignore[no-untyped-call]
                augment.mixup, augment.cutmix, label_smoothing=0.0, num_classes=2
            )

    def __call__(self, image: Tensor, label: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mix images (B, C, H, W) and labels (B,) or distributions (B, K); returns targets (B, K), smoothed.

        May change `image` in place, as timm does.
        """
        target = target_distribution(label, self._num_classes, self._smoothing)
        if self._mixup is None:
            return image, target
        count = len(label)
        if count % 2:  # timm mixes pairs, first with last: give the odd one itself
            image, target = torch.cat([image, image[-1:]]), torch.cat([target, target[-1:]])
        half = (torch.arange(len(target), device=image.device) >= len(target) // 2).long()
        with preserved():  # timm draws from numpy's global generator
            np.random.seed(int(keys(*self._seed, step)) % 2**32)
            image, shares = self._mixup(image, half)
        share = shares.gather(1, half[:, None])
        target = share * target + (1 - share) * target.flip(0)
        return image[:count], target[:count]


def to_tensor(images: Iterable[Picture | np.ndarray]) -> Tensor:
    """Stack prepared images to (B, C, H, W), uint8."""
    return torch.from_numpy(stack(images)).permute(0, 3, 1, 2)


def target_distribution(label: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Labels (B,) as distributions (B, K), or such: `smoothing` is spread evenly over all classes."""
    target = label
    if label.ndim == 1:  # `one_hot` would read the largest label, and wait for it
        target = torch.zeros(len(label), num_classes, device=label.device).scatter_(1, label[:, None], 1.0)
    return target * (1 - smoothing) + smoothing / num_classes

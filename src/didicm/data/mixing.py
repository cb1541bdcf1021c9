"""Targets: smoothed labels, and Mixup and CutMix of a batch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from didicm.data.randomness import keys, preserved
from didicm.data.transforms import Augment


class Mixer:
    """Mixup and CutMix of a batch by timm, as a pure function of (seed, step): nothing to save or restore."""

    def __init__(self, augment: Augment, num_classes: int, seed: int, rank: int = 0) -> None:
        self._augment = augment
        self._num_classes = num_classes
        self._seed = (seed, rank)
        self._mixup: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        if augment.mixup or augment.cutmix:
            from timm.data.mixup import Mixup

            self._mixup = Mixup(  # type: ignore[no-untyped-call]
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                label_smoothing=augment.label_smoothing,
                num_classes=num_classes,
            )

    def __call__(self, image: Tensor, label: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mix images (B, C, H, W) and labels (B,); returns targets (B, K) with the smoothing in them.

        May change `image` in place, as timm does.
        """
        if self._mixup is None:
            return image, target_distribution(label, self._num_classes, self._augment.label_smoothing)
        count = len(label)
        if count % 2:  # timm mixes pairs, first with last: give the odd one itself
            image, label = torch.cat([image, image[-1:]]), torch.cat([label, label[-1:]])
        with preserved():  # timm draws from numpy's global generator
            np.random.seed(int(keys(*self._seed, step)) % 2**32)
            image, target = self._mixup(image, label)
        return image[:count], target[:count]


def target_distribution(label: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Labels (B,) as distributions (B, K): `smoothing` is spread evenly over all classes."""
    return F.one_hot(label, num_classes).float() * (1 - smoothing) + smoothing / num_classes

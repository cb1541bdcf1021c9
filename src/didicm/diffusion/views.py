"""Augmented views of an image: the shifted and flipped copies that a network has been trained to take alike."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from didicm.diffusion.random import ImageRandom
from didicm.errors import UserError
from didicm.values import Range, Settings

_SALT = 0x5EED0F71E35  # so that views and a sampler's labels are drawn independently from one seed


@dataclass(frozen=True)
class Views(Settings):
    """Which views of normalised images (B, C, H, W) a network has been trained with; stored with the model."""

    prefix = "views."
    shift: Annotated[int, Range(0, 4096)] = 0  # pixels, at most, in each direction
    hflip: bool = False  # whether every other view is a mirror image
    fill: tuple[float, ...] | None = None  # what is shifted into view, by channel; None: the border, repeated

    def __call__(self, image: Tensor, count: int, seed: int = 0) -> list[Tensor]:
        """`count` views (B, C, H, W) of the images, the first of which are the images themselves.

        Randomness belongs to the image's content, so that no view depends on the batch.
        """
        if count > 1 and image.dim() != 4:
            raise UserError("views are made of images, not of stored features: leave out views")
        random, views = ImageRandom(image, seed ^ _SALT), [image]
        while len(views) < count:
            offset = (random.uniform(2) * (2 * self.shift + 1)).long()
            views.append(self._view(image, offset, self.hflip and len(views) % 2 == 1))
        return views

    def _view(self, image: Tensor, offset: Tensor, flipped: bool) -> Tensor:
        flip = torch.full((len(image),), flipped, device=image.device)
        # One memory layout for all views: a network's rounding may depend on it.
        return crop_and_flip(self._padded(image), offset, flip, image.shape[-2:]).contiguous()

    def _padded(self, image: Tensor) -> Tensor:
        by = [self.shift] * 4
        if self.fill is None:
            return F.pad(image, by, mode="replicate")
        inside = F.pad(torch.ones_like(image[:1, :1]), by).bool()
        return torch.where(inside, F.pad(image, by), image.new_tensor(self.fill).view(-1, 1, 1))


def allowed(views: Views | None) -> Views:
    """The views that a model was trained with, if it was."""
    if views is None:
        raise UserError(
            "this model has no views of an image: train one with augment.pad, augment.scale or augment.hflip, "
            "or leave out views"
        )
    return views


def crop_and_flip(image: Tensor, offset: Tensor, flip: Tensor, size: torch.Size) -> Tensor:
    """A part of each image (B, C, H, W) at its offset (B, 2), of such a height and width, mirrored if `flip`."""
    which, down, across = (torch.arange(n, device=image.device) for n in (len(image), *size))
    rows = offset[:, :1] + down
    columns = offset[:, 1:] + torch.where(flip[:, None], across.flip(0), across)
    cut = image.permute(0, 2, 3, 1)[which[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2)

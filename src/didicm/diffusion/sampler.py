"""How to sample, as one value that settings, checkpoints and flags share; and views of an image."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from didicm.diffusion.process import UniformProcess
from didicm.diffusion.random import ImageRandom
from didicm.diffusion.sampling import (
    Average,
    Callback,
    Posterior,
    Select,
    readout,
    sample_cl,
    sample_cp,
    sample_until_settled,
)
from didicm.diffusion.solver import ScoreFunction, ScoreTime, Solver
from didicm.errors import UserError, did_you_mean
from didicm.values import Count, Few, Fraction, Natural, Range, Settings

Method: TypeAlias = Literal["cp", "cl", "readout"]

_METHODS: dict[str, Callable[..., Posterior]] = {"cp": sample_cp, "cl": sample_cl, "readout": readout}
_SALT = 0x5EED0F71E35  # so that views and a sampler's labels are drawn independently from one seed


@dataclass(frozen=True)
class Views(Settings):
    """Shifted and flipped copies of normalised images (B, C, H, W) that a network was trained to take alike."""

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
            by = (random.uniform(2) * (2 * self.shift + 1)).long() - self.shift
            flip = torch.full((len(image),), self.hflip and len(views) % 2 == 1, device=image.device)
            # One memory layout for all views: a network's rounding may depend on it.
            views.append(shift_and_flip(image, by, flip, self.fill).contiguous())
        return views


def allowed(views: Views | None) -> Views:
    """The views that a model was trained with, if it was."""
    if views is None:
        raise UserError(
            "this model has no views of an image: train one with augment.pad, augment.scale or augment.hflip, "
            "or leave out views"
        )
    return views


def shift_and_flip(image: Tensor, by: Tensor, flip: Tensor, fill: Sequence[float] | None) -> Tensor:
    """Images (B, C, H, W), each moved by its own pixels (B, 2) and mirrored if `flip`; `fill` as in `Views`."""
    height, width = image.shape[-2:]
    which, down, across = (torch.arange(n, device=image.device) for n in (len(image), height, width))
    rows = by[:, :1] + down
    columns = by[:, 1:] + torch.where(flip[:, None], across.flip(0), across)
    inner_rows, inner_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    seen = image.permute(0, 2, 3, 1)[which[:, None, None], inner_rows[:, :, None], inner_columns[:, None, :]]
    if fill is not None:
        inside = (rows == inner_rows)[:, :, None] & (columns == inner_columns)[:, None, :]
        # `non_blocking`: else the copy would wait for all that a GPU still has to do.
        colour = torch.tensor(fill, dtype=image.dtype).to(image.device, non_blocking=True)
        seen = torch.where(inside[..., None], seen, colour)
    return seen.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Sampler(Settings):
    """How to sample, as one value; a method reads the fields that its function takes."""

    method: Method = "cp"
    steps: Annotated[int, Range(1, 10_000)] = 8
    solver: Solver = "exact"
    score_time: ScoreTime = "midpoint"
    floor: bool = False  # as in `sample_cp`
    select: Select = "argmin"
    chains: Annotated[int, Range(1, 10_000)] = 16
    average: Average = "probs"
    chunk: Natural | None = None  # cl: chains that go through the network at once; by default as memory allows
    time: Fraction = 0.5
    seed: Count = 0
    # cp: an image whose posterior moved less than this stops; 0 takes every step
    tolerance: Annotated[float, Range(0, 2)] = 0.0
    # augmented views of the image: the diffusion steps take turns with them, a readout is averaged over them
    views: Few = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "cp" and self.tolerance and self.views > 1:
            raise UserError(
                "sampler.tolerance compares steps that look at the same image: leave it out, or sampler.views"
            )

    def __call__(
        self,
        model: ScoreFunction,
        image: Tensor,
        process: UniformProcess,
        callback: Callback | None = None,
        make_views: Views | None = None,
        masked: bool = False,
    ) -> Posterior:
        """Sample the posterior of images (B, C, H, W).

        `make_views` are the views that the model was trained with, `masked` says whether labels were masked, too.
        """
        settings = {name: getattr(self, name) for name in _READS[self.method]}
        sample, views = _METHODS[self.method], settings.pop("views")
        if settings.pop("tolerance", 0.0):
            sample = partial(sample_until_settled, tolerance=self.tolerance)
        elif views > 1:
            settings["views"] = allowed(make_views)(image, self.encodings, self.seed)
        if self.method == "readout":
            settings["masked"] = masked
        return sample(model, image, process, callback=callback, **settings)

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """Refuse what is no setting of a sampler."""
        for name in names:
            if name not in _SETTINGS:
                raise UserError(f"a sampler has no setting {name!r}: {did_you_mean(name, _SETTINGS)}")

    def changed(self, **settings: Any) -> "Sampler":
        """This sampler with other settings; one that the resulting method does not read is refused."""
        self.check_names(settings)
        sampler = replace(self, **settings)
        for name in settings:
            if name not in ("method", "seed", *_READS[sampler.method]):
                readers = " or ".join(method for method, reads in _READS.items() if name in reads)
                raise UserError(
                    f"sampler {sampler.method} has no {name}: leave it out or choose sampler {readers}"
                )
        return sampler

    @property
    def calls(self) -> int:
        """Network calls per image, unless they end early."""
        return {"cp": self.steps, "cl": self.steps * self.chains, "readout": self.views}[self.method]

    @property
    def encodings(self) -> int:
        """Views of an image that are encoded."""
        return self.views if self.method == "readout" else min(self.views, self.steps)

    def identity(self) -> dict[str, Any]:
        """The method and the settings that decide its answer, without the seed: what a calibration is tied to."""
        unread = {
            "seed",
            "chunk",
            *(["floor"] if self.solver == "exact" else []),
            *([] if self.tolerance else ["tolerance"]),
            *([] if self.views > 1 else ["views"]),
        }
        return {name: getattr(self, name) for name in ("method", *_READS[self.method]) if name not in unread}


_SETTINGS = [field.name for field in fields(Sampler)]
_READS = {  # by method
    method: [
        name for name in _SETTINGS if name in signature(sample).parameters or (method, name) == ("cp", "tolerance")
    ]
    for method, sample in _METHODS.items()
}

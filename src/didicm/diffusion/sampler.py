"""How to sample, as one value that settings, checkpoints and flags share."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from typing import Annotated, Any, Literal, TypeAlias

from torch import Tensor

from didicm.diffusion.early_stop import sample_until_settled
from didicm.diffusion.process import UniformProcess
from didicm.diffusion.sampling import Average, Callback, Posterior, Select, readout, sample_cl, sample_cp
from didicm.diffusion.solver import ScoreFunction, ScoreTime, Solver
from didicm.errors import UserError, did_you_mean
from didicm.values import Count, Fraction, Natural, Range, Settings

Method: TypeAlias = Literal["cp", "cl", "readout"]

_METHODS: dict[str, Callable[..., Posterior]] = {"cp": sample_cp, "cl": sample_cl, "readout": readout}


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

    def __call__(
        self, model: ScoreFunction, image: Tensor, process: UniformProcess, callback: Callback | None = None
    ) -> Posterior:
        """Sample the posterior of images (B, C, H, W)."""
        settings = {name: getattr(self, name) for name in _READS[self.method]}
        sample = _METHODS[self.method]
        if settings.pop("tolerance", 0.0):
            sample = partial(sample_until_settled, tolerance=self.tolerance)
        return sample(model, image, process, callback=callback, **settings)

    def changed(self, **settings: Any) -> "Sampler":
        """This sampler with other settings; one that the resulting method does not read is refused."""
        for name in settings:
            if name not in _SETTINGS:
                raise UserError(f"a sampler has no setting {name!r}: {did_you_mean(name, _SETTINGS)}")
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
        return {"cp": self.steps, "cl": self.steps * self.chains, "readout": 1}[self.method]

    def identity(self) -> dict[str, Any]:
        """The method and the settings that decide its answer, without the seed: what a calibration is tied to."""
        unread = {
            "seed",
            "chunk",
            *(["floor"] if self.solver == "exact" else []),
            *([] if self.tolerance else ["tolerance"]),
        }
        return {name: getattr(self, name) for name in ("method", *_READS[self.method]) if name not in unread}


_SETTINGS = [field.name for field in fields(Sampler)]
_READS = {  # by method
    method: [name for name in _SETTINGS if name in signature(sample).parameters]
    for method, sample in {**_METHODS, "cp": sample_until_settled}.items()
}

"""How to sample, as one value: a method, its settings, and the rules which setting belongs to which method."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Literal, TypeAlias

from torch import Tensor

from didicm.diffusion.process import UniformProcess
from didicm.diffusion.sampling import Average, Callback, Posterior, Select, readout, sample_cl, sample_cp
from didicm.diffusion.solver import ScoreFunction, ScoreTime, Solver, check_choice
from didicm.errors import UserError, did_you_mean

Method: TypeAlias = Literal["cp", "cl", "readout"]

_METHODS: dict[str, Callable[..., Posterior]] = {"cp": sample_cp, "cl": sample_cl, "readout": readout}


@dataclass(frozen=True)
class Sampler:
    """How scores become a posterior; a method reads the fields that its function takes."""

    method: Method = "cp"
    steps: int = 8
    solver: Solver = "exact"
    score_time: ScoreTime = "midpoint"
    select: Select = "argmin"
    chains: int = 16
    average: Average = "probs"
    time: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("steps", "chains", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UserError(f"{name} must be a whole number, got {value!r}")
            if name != "seed" and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not isinstance(self.time, int | float) or not 0 < self.time <= 1:
            raise UserError(f"time must lie in (0, 1], got {self.time!r}")

    def __call__(
        self, model: ScoreFunction, image: Tensor, process: UniformProcess, callback: Callback | None = None
    ) -> Posterior:
        """Sample the posterior of images (B, C, H, W)."""
        settings = {name: getattr(self, name) for name in _READS[self.method]}
        return _METHODS[self.method](model, image, process, callback=callback, **settings)

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

    def identity(self) -> dict[str, Any]:
        """The method and the settings that it reads, without the seed: what a calibration is tied to."""
        return {name: getattr(self, name) for name in ("method", *_READS[self.method]) if name != "seed"}


_CHOICES = {"method": Method, "solver": Solver, "score_time": ScoreTime, "select": Select, "average": Average}
_SETTINGS = [field.name for field in fields(Sampler)]
_READS = {  # by method
    method: [name for name in _SETTINGS if name in signature(sample).parameters]
    for method, sample in _METHODS.items()
}

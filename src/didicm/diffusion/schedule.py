"""Noise schedules: how fast a class label forgets its value.

All schedules speak in one unit: a label keeps its value until time t with probability exp(-total(t)),
and is otherwise drawn anew from all K classes. The paper's rate matrix 11^T - K I is K times faster per
unit of noise; `Exponential`, its example, is the one place where that factor appears.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from didicm.errors import UserError
from didicm.values import Settings

# Near uniform at t = 1: at most 1 % of the labels are still clean, and the true class outweighs any
# other by at most 3 to 1. The second condition is the stricter one from 200 classes on.
MAX_CLEAN = 1e-2
MAX_SIGNAL = 2.0

T = TypeVar("T", Tensor, float)


@dataclass(frozen=True)
class Noise:
    """A schedule at one time that all images share: what a sampler has to know of it, as float64 numbers."""

    time: float
    total: float  # noise accumulated until then
    rate: float  # its derivative
    keep: float  # chance that a label has not been redrawn, exp(-total)
    lost: float  # 1 - keep


@dataclass(frozen=True)
class Schedule(Settings, ABC):
    """Total noise as an increasing function of time t in [0, 1]: a tensor of any shape, or one number.

    Training has a time for each image, as a tensor. A sampler's times are Python's numbers: in float64 on every
    device, and constants of a compiled or exported graph.
    """

    name: ClassVar[str]

    @abstractmethod
    def total(self, t: T) -> T:
        """Noise accumulated until t; 0 at t = 0."""

    @abstractmethod
    def rate(self, t: T) -> T:
        """Derivative of `total`."""

    @abstractmethod
    def remedy(self, min_total: float) -> str:
        """Say which parameter makes total(1) at least `min_total`."""

    def keep(self, t: T) -> T:
        """Chance that a label has not been redrawn by t."""
        return _exp(-self.total(t))

    def lost(self, t: T) -> T:
        """1 - keep(t) without the cancellation: float32 would lose it near t = 0."""
        return -_expm1(-self.total(t))

    def at(self, t: float) -> Noise:
        """All of it at one time."""
        return Noise(t, self.total(t), self.rate(t), self.keep(t), self.lost(t))

    def check(self, num_classes: int) -> None:
        """Raise ValueError unless the process is near uniform at t = 1 for this many classes."""
        own = getattr(self, "num_classes", num_classes)
        if num_classes != own:
            raise ValueError(f"{self} was made for {own} classes, the process has {num_classes}")
        max_keep = min(MAX_CLEAN, MAX_SIGNAL / (MAX_SIGNAL + num_classes))
        keep = self.at(1.0).keep
        if keep > max_keep * (1 + 1e-9):
            stands_out = 1 + keep * num_classes / (1 - keep) if keep < 1 else math.inf
            raise ValueError(
                f"{self} is not near uniform at t = 1 for {num_classes} classes: {keep:.2g} of the labels "
                f"are still clean and the true class stands out {stands_out:.3g} to 1; "
                f"use {self.remedy(-math.log(max_keep))}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Name and parameters as plain values, for a config file."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class LogLinear(Schedule):
    """keep(t) falls linearly from 1 to `eps`: the released code's schedule, and our default."""

    name: ClassVar[str] = "log-linear"
    eps: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eps < 1:
            raise ValueError(f"LogLinear: eps must lie between 0 and 1, got {self.eps}")

    def total(self, t: T) -> T:
        return -_log1p(-self.lost(t))

    def rate(self, t: T) -> T:
        return (1 - self.eps) / self.keep(t)

    def keep(self, t: T) -> T:
        return self.eps + (1 - self.eps) * (1 - t)

    def lost(self, t: T) -> T:
        return (1 - self.eps) * t

    def remedy(self, min_total: float) -> str:
        return f"eps of at most {_two_digits(math.exp(-min_total), math.floor)}"


@dataclass(frozen=True)
class Exponential(Schedule):
    """The paper's example, sigma_t = a b^t log b with a < 0 and 0 < b < 1, for a given number of classes."""

    name: ClassVar[str] = "exponential"
    a: float
    b: float
    num_classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.a < 0 and 0 < self.b < 1):
            raise ValueError(f"Exponential: needs a < 0 and 0 < b < 1, got a = {self.a}, b = {self.b}")
        self.check(self.num_classes)

    def total(self, t: T) -> T:
        return self.num_classes * self.a * _expm1(t * math.log(self.b))

    def rate(self, t: T) -> T:
        return self.num_classes * self.a * math.log(self.b) * _exp(t * math.log(self.b))

    def remedy(self, min_total: float) -> str:
        return f"a of at most {-_two_digits(min_total / (self.num_classes * (1 - self.b)), math.ceil)}"


@dataclass(frozen=True)
class Geometric(Schedule):
    """The geometric schedule of SEDD, shifted to start at zero; `max` must be about 7 or more."""

    name: ClassVar[str] = "geometric"
    min: float = 1e-3
    max: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.min < self.max:
            raise ValueError(f"Geometric: needs 0 < min < max, got min = {self.min}, max = {self.max}")

    def total(self, t: T) -> T:
        return self.min * _expm1(t * self._log_ratio)

    def rate(self, t: T) -> T:
        return self.min * self._log_ratio * _exp(t * self._log_ratio)

    def remedy(self, min_total: float) -> str:
        return f"max of at least {_two_digits(min_total + self.min, math.ceil)}"

    @property
    def _log_ratio(self) -> float:
        return math.log(self.max / self.min)


@dataclass(frozen=True)
class LogRatio(Schedule):
    """The log of how much the true class stands out, keep K / (1 - keep), falls evenly from `max` to `min`.

    So every number of classes gets the same noise, as a classifier feels it. Shifted to start at zero.
    """

    name: ClassVar[str] = "log-ratio"
    num_classes: int
    max: float = 1e4
    min: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.min < self.max:
            raise ValueError(f"LogRatio: needs 0 < min < max, got min = {self.min}, max = {self.max}")
        self.check(self.num_classes)

    def total(self, t: T) -> T:
        # log(1 + a b^t) - log(1 + a), without the cancellation near t = 0
        return _log1p(self._start * _expm1(t * self._log_ratio) / (1 + self._start))

    def rate(self, t: T) -> T:
        grown = self._start * _exp(t * self._log_ratio)
        return self._log_ratio * grown / (1 + grown)

    def remedy(self, min_total: float) -> str:
        top = math.expm1(min_total) * (1 + self._start) + self._start
        return f"min of at most {_two_digits(self.num_classes / top, math.floor)}"

    @property
    def _start(self) -> float:
        return self.num_classes / self.max  # (1 - keep) / keep at t = 0, before the shift

    @property
    def _log_ratio(self) -> float:
        return math.log(self.max / self.min)


SCHEDULES: dict[str, type[Schedule]] = {cls.name: cls for cls in (LogLinear, Exponential, Geometric, LogRatio)}


def schedule_from_dict(config: Mapping[str, Any]) -> Schedule:
    """Rebuild a schedule from `Schedule.to_dict`; unknown names and parameters are errors."""
    parameters = dict(config)
    name = parameters.pop("name", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    try:
        return SCHEDULES[name].from_dict(parameters)
    except UserError as error:
        raise UserError(f"schedule {name}: {error}") from None


def _exp(x: T) -> T:
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)


def _expm1(x: T) -> T:
    return torch.expm1(x) if isinstance(x, Tensor) else math.expm1(x)


def _log1p(x: T) -> T:
    return torch.log1p(x) if isinstance(x, Tensor) else math.log1p(x)


def _two_digits(x: float, rounded: Callable[[float], int]) -> float:
    """Two significant digits, rounded to the safe side, so that following the advice always works."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return float(f"{rounded(x / unit) * unit:.2g}")

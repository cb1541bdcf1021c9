"""Split-conformal sets: classes that hold the true one with a chosen probability, whatever the model.

A score says how strange a class is for an image: LAC, one minus its probability (Sadinle et al. 2019); APS, the
probability of all classes up to and including it, from the most probable down (Romano et al. 2020). The
threshold is the ceil((n + 1) (1 - alpha))-th smallest score of the true classes of n held-out images; then a
new image's set holds its true class with probability at least 1 - alpha, on average over images alike.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.metrics import check, check_probs

Method: TypeAlias = Literal["lac", "aps", "aps-randomised"]


@dataclass(frozen=True)
class Conformal:
    """A rule that turns a posterior into a set of classes."""

    method: Method
    alpha: float  # share of images whose set may miss the true class
    threshold: float  # largest score that enters the set
    n: int  # images it was fitted on

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise UserError(f"a conformal method is one of {', '.join(get_args(Method))}, got {self.method!r}")
        for name, kinds in (("alpha", (int, float)), ("threshold", (int, float)), ("n", (int,))):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
                raise UserError(f"{name} of a conformal rule must be a number, got {value!r}")
        _rank(self.n, self.alpha)

    def sets(self, probs: Tensor, u: Tensor | None = None, *, allow_empty: bool = False) -> Tensor:
        """Classes in the set of each image, bool (N, K), from probabilities (N, K).

        Where even the most probable class is stranger than the threshold, the plain definitions give an empty set;
        we put that class in, which can only raise coverage, unless `allow_empty`.

        Args:
            probs: probabilities from the same model and temperature as in the fit.
            u: one uniform number (N,) per image, for `aps-randomised` only.
            allow_empty: leave empty sets empty.
        """
        probs = check_probs(probs)
        if (u is not None) != (self.method == "aps-randomised"):
            raise UserError("uniform numbers u are for method aps-randomised, which needs them, and for no other")
        inside = (_lac_scores(probs) if self.method == "lac" else _aps_scores(probs, u)) <= self.threshold
        if not allow_empty:
            # The most probable class has the lowest score, so it is in every other set already.
            inside.scatter_(1, probs.argmax(-1, keepdim=True), True)
        return inside

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Conformal":
        """Rebuild a rule; missing and unknown keys are errors."""
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            odd = sorted(set(values) ^ expected)[0]
            raise UserError(f"a conformal rule has {'no' if odd in values else 'a'} key {odd!r}: restore the file")
        return cls(**values)


def fit_lac(probs: Tensor, labels: Tensor, alpha: float) -> Conformal:
    """Fit LAC, the smallest sets on average, on held-out probabilities (N, K)."""
    probs, labels = check(probs, labels)
    return _fit("lac", _lac_scores(probs), labels, alpha)


def fit_aps(probs: Tensor, labels: Tensor, alpha: float, u: Tensor | None = None) -> Conformal:
    """Fit APS, sets that adapt to how hard an image is, on held-out probabilities (N, K).

    Uniform numbers `u` (N,) make it the randomised form, whose coverage does not exceed the target.
    """
    probs, labels = check(probs, labels)
    return _fit("aps" if u is None else "aps-randomised", _aps_scores(probs, u), labels, alpha)


def coverage(sets: Tensor, labels: Tensor) -> float:
    """Share of images whose set (N, K) holds the label (N,)."""
    _check_sets(sets)
    if labels.shape != sets.shape[:1] or labels.min() < 0 or labels.max() >= sets.shape[1]:
        raise UserError(f"labels must be {len(sets)} of the {sets.shape[1]} classes, one per set")
    return sets.gather(1, labels.unsqueeze(1)).double().mean().item()


def mean_size(sets: Tensor) -> float:
    """Mean number of classes in the sets (N, K)."""
    _check_sets(sets)
    return sets.sum(-1).double().mean().item()


def _fit(method: Method, scores: Tensor, labels: Tensor, alpha: float) -> Conformal:
    rank = _rank(len(labels), alpha)
    own = scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    return Conformal(method, alpha, own.sort().values[rank - 1].item(), len(labels))


def _rank(n: int, alpha: float) -> int:
    """Which of n sorted scores is the threshold."""
    if not 0 < alpha < 1:
        raise UserError(f"alpha, the share of sets that may miss, must lie between 0 and 1, got {alpha}")
    rank = math.ceil((n + 1) * (1 - alpha) - 1e-9)  # 10 x (1 - 0.7) is a hair above 3
    if rank > n:
        needed = math.ceil(1 / alpha - 1e-9) - 1
        raise UserError(f"conformal sets with alpha {alpha} need at least {needed} held-out images, got {n}")
    return rank


def _lac_scores(probs: Tensor) -> Tensor:
    return 1 - probs.double()


def _aps_scores(probs: Tensor, u: Tensor | None) -> Tensor:
    """Probability (N, K) of the classes down to each one, less the share u of its own."""
    # Stable: of equally probable classes the first comes first, as in argmax.
    ranked, order = probs.double().sort(dim=-1, descending=True, stable=True)
    scores = ranked.cumsum(-1)
    if u is not None:
        if u.shape != probs.shape[:1] or not bool(((u >= 0) & (u <= 1)).all()):
            raise UserError(f"u must be {len(probs)} numbers between 0 and 1, one per image")
        scores = scores - u.double().unsqueeze(1) * ranked
    return torch.empty_like(scores).scatter_(1, order, scores)


def _check_sets(sets: Tensor) -> None:
    if sets.dim() != 2 or sets.dtype != torch.bool or not len(sets):
        raise UserError("sets must be a table of yes and no, one row per image")

"""The set of classes that a conformal rule makes of a posterior: on plain arrays, as exported models need it.

A score says how strange a class is for an image: LAC, one minus its probability (Sadinle et al. 2019); APS, the
probability of all classes up to and including it, from the most probable down (Romano et al. 2020).
"""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from didicm.errors import UserError
from didicm.values import Range, Settings

Method: TypeAlias = Literal["lac", "aps"]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
TIE = 1e-13  # by which equal scores differ from rank to rank: far below what a probability can tell


def class_scores(method: Method, probs: Floats, ranked_ties: bool = True) -> npt.NDArray[np.float64]:
    """Scores (N, K) of probabilities (N, K).

    Classes of probability 0 add nothing to a sum: `ranked_ties` tells their scores apart by their rank, or all of
    them would be in the set as soon as one is.
    """
    values: npt.NDArray[np.float64] = probs.astype(np.float64)
    if method == "lac":
        return 1 - values
    # Stable: of equally probable classes the first comes first, as in argmax.
    order = np.argsort(-values, axis=-1, kind="stable")
    scores = np.take_along_axis(values, order, -1).cumsum(-1)
    if ranked_ties:
        scores += TIE * np.arange(scores.shape[-1])
    found = np.empty_like(scores)
    np.put_along_axis(found, order, scores, -1)
    return found


@dataclass(frozen=True)
class ConformalRule(Settings):
    """A rule that turns a posterior into a set of classes."""

    prefix = "conformal."
    method: Method
    alpha: float  # share of images whose set may miss the true class
    threshold: Annotated[float, Range(0, 1 + 1e-6)]  # largest score that enters the set, of any class
    n: int  # images it was fitted on
    ranked_ties: bool = False  # as in `class_scores`; version 0.1.0 left them equal
    class_thresholds: tuple[float, ...] | None = None  # (K,), where each class has its own (Mondrian)

    def __post_init__(self) -> None:
        super().__post_init__()
        conformal_rank(self.n, self.alpha)
        if self.class_thresholds is not None and not all(0 <= x <= self.threshold for x in self.class_thresholds):
            raise UserError(f"conformal.class_thresholds must be in [0, {self.threshold}]")

    @property
    def per_class(self) -> bool:
        """Whether images of every class are covered as often, and so those of any mixture of classes."""
        return self.class_thresholds is not None

    def contains(self, probs: Floats) -> npt.NDArray[np.bool_]:
        """Which classes are in the set of each image, (N, K), from probabilities (N, K) as in the fit.

        Where even the most probable class is stranger than the threshold, the plain definitions give an empty set;
        we put that class in, which can only raise coverage.
        """
        if self.class_thresholds is not None and len(self.class_thresholds) != probs.shape[-1]:
            raise UserError(f"a conformal rule of {len(self.class_thresholds)} classes is for another model")
        limits = self.threshold if self.class_thresholds is None else np.array(self.class_thresholds)
        inside: npt.NDArray[np.bool_] = class_scores(self.method, probs, self.ranked_ties) <= limits
        empty = np.flatnonzero(~inside.any(-1))
        inside[empty, probs[empty].argmax(-1)] = True
        return inside

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        thresholds = values.pop("class_thresholds")
        return values if thresholds is None else {**values, "class_thresholds": list(thresholds)}


def conformal_rank(n: int, alpha: float, of: str = "") -> int:
    """Which of n sorted scores is the threshold; `of` says of what the images are."""
    if not 0 < alpha < 1:
        raise UserError(f"alpha, the share of sets that may miss, must lie between 0 and 1, got {alpha}")
    rank = math.ceil((n + 1) * (1 - alpha) - 1e-9)  # 10 x (1 - 0.7) is a hair above 3
    if rank > n:
        raise UserError(
            f"conformal sets with alpha {alpha} need at least {fewest_images(alpha)} held-out images{of}, "
            f"got {n}: give more images or a larger alpha"
        )
    return rank


def fewest_images(alpha: float) -> int:
    """How many images a threshold takes that a share `alpha` may exceed."""
    return math.ceil(1 / alpha - 1e-9) - 1

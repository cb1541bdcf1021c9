"""Split-conformal sets: classes that hold the true one with a chosen probability, whatever the model.

A rule's threshold is the ceil((n + 1) (1 - alpha))-th smallest score of the true classes of n held-out images;
then a new image's set holds its true class with probability at least 1 - alpha, on average over images alike.
With a threshold per class (Mondrian; Vovk 2012), from the n images of that class, this holds for the images of
every class, and so whatever the frequencies of the classes.
"""

import numpy as np
import torch
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.label_sets import ConformalRule, Floats, Method, class_scores, conformal_rank
from didicm.evaluation.metrics import check, check_probs


class Conformal(ConformalRule):
    """A rule that turns a posterior into a set of classes."""

    def sets(self, probs: Tensor, u: Tensor | None = None, *, allow_empty: bool = False) -> Tensor:
        """`contains` of tensors: classes in the set of each image, bool (N, K), from probabilities (N, K)."""
        return torch.from_numpy(self.contains(*_arrays(check_probs(probs), u), allow_empty=allow_empty))


def fit_lac(probs: Tensor, labels: Tensor, alpha: float, *, per_class: bool = False) -> Conformal:
    """Fit LAC, the smallest sets on average, on held-out probabilities (N, K)."""
    probs, labels = check(probs, labels)
    return _fit("lac", probs, labels, alpha, per_class)


def fit_aps(
    probs: Tensor, labels: Tensor, alpha: float, u: Tensor | None = None, *, per_class: bool = False
) -> Conformal:
    """Fit APS, sets that adapt to how hard an image is, on held-out probabilities (N, K).

    Uniform numbers `u` (N,) make it the randomised form, whose coverage does not exceed the target.
    """
    probs, labels = check(probs, labels)
    return _fit("aps" if u is None else "aps-randomised", probs, labels, alpha, per_class, u)


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


def _fit(
    method: Method, probs: Tensor, labels: Tensor, alpha: float, per_class: bool, u: Tensor | None = None
) -> Conformal:
    truth = labels.numpy()
    scores = class_scores(method, *_arrays(probs, u))[np.arange(len(truth)), truth]

    def threshold(scores: Floats, of: str = "") -> float:
        return float(np.sort(scores)[conformal_rank(len(scores), alpha, of) - 1])

    ranked_ties = method != "lac"
    if not per_class:
        return Conformal(method, alpha, threshold(scores), len(truth), ranked_ties)
    limits = tuple(threshold(scores[truth == k], f" of every class (class {k})") for k in range(probs.shape[1]))
    return Conformal(method, alpha, max(limits), len(truth), ranked_ties, limits)


def _arrays(probs: Tensor, u: Tensor | None) -> tuple[Floats, Floats | None]:
    return probs.numpy(), None if u is None else u.numpy()


def _check_sets(sets: Tensor) -> None:
    if sets.dim() != 2 or sets.dtype != torch.bool or not len(sets):
        raise UserError("sets must be a table of yes and no, one row per image")

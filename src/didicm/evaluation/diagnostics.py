"""The data behind the plots and tables, as plain tensors; drawing them is somebody else's task."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.metrics import BINS, Ranking, bin_index, check, entropy, nll


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy in bins of equal width; an empty bin has neither (nan)."""

    confidence: Tensor  # (bins,): mean top-1 probability
    accuracy: Tensor  # (bins,)
    count: Tensor  # (bins,)


@dataclass(frozen=True)
class RiskCoverage:
    """What every threshold on the confidence gives, from the strictest to none."""

    coverage: Tensor  # (G,): share of images answered, rising to 1
    risk: Tensor  # (G,): share of errors among them


@dataclass(frozen=True)
class EntropyHistogram:
    """Number of right and wrong answers by predictive entropy, in nats."""

    edges: Tensor  # (bins + 1,): from 0 to log K
    right: Tensor  # (bins,)
    wrong: Tensor  # (bins,)


@dataclass(frozen=True)
class ClassRow:
    """One class of a per-class table; a mean over no images is nan."""

    name: str
    support: int  # images of the class
    recall: float  # share of them that are recognised, the accuracy of the class
    precision: float  # share of the answers with this class that are right
    confidence: float  # mean top-1 probability over images of the class
    nll: float  # mean over images of the class


def reliability(probs: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """Confidence and accuracy by bins of confidence; their gaps, weighted by count, make the ECE."""
    probs, labels = check(probs, labels)
    confidence, right = probs.amax(-1), probs.argmax(-1) == labels
    index = bin_index(confidence, bins)
    count = index.bincount(minlength=bins)
    return Reliability(
        index.bincount(confidence.double(), bins) / count, index.bincount(right.double(), bins) / count, count
    )


def risk_coverage(probs: Tensor, labels: Tensor) -> RiskCoverage:
    """Risk over coverage when images are answered from the most to the least confident."""
    probs, labels = check(probs, labels)
    ranking = Ranking.of(probs.amax(-1), probs.argmax(-1) == labels)
    curve = ranking.curve(torch.ones(1, len(probs), dtype=torch.float64))
    return RiskCoverage(curve.covered[0, 1:] / len(probs), curve.risk[0])


def entropy_histogram(probs: Tensor, labels: Tensor, bins: int = 30) -> EntropyHistogram:
    """Entropies of right and of wrong answers, over the whole range that K classes allow."""
    probs, labels = check(probs, labels)
    most = math.log(probs.shape[1])
    index, right = bin_index(entropy(probs, labels) / most, bins), probs.argmax(-1) == labels
    return EntropyHistogram(
        torch.linspace(0, most, bins + 1, dtype=torch.float64),
        index[right].bincount(minlength=bins),
        index[~right].bincount(minlength=bins),
    )


def per_class(probs: Tensor, labels: Tensor, class_names: Sequence[str]) -> list[ClassRow]:
    """One row per class, in the order of the classes."""
    probs, labels = check(probs, labels)
    k = probs.shape[1]
    if len(class_names) != k:
        raise UserError(f"got {len(class_names)} class names for {k} classes: give one each")
    answer = probs.argmax(-1)
    hits = labels[answer == labels].bincount(minlength=k)
    support = labels.bincount(minlength=k)
    columns = (
        class_names,
        support.tolist(),
        (hits / support).tolist(),
        (hits / answer.bincount(minlength=k)).tolist(),
        (labels.bincount(probs.amax(-1).double(), k) / support).tolist(),
        (labels.bincount(nll(probs, labels), k) / support).tolist(),
    )
    return [ClassRow(*row) for row in zip(*columns, strict=True)]

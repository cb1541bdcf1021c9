"""How good a posterior is: metrics of stored probabilities (N, K) and true labels (N,).

Every metric is written once, for images that count any whole number of times; `evaluate_probs` counts each
image once, the bootstrap counts them as often as it drew them. Names are those of torch-uncertainty.

Why not torchmetrics: its calibration error gives confidence 1 a bin of its own and passes rows that exceed 1 by
a rounding error through a softmax, and none of its metrics takes counts. The tests compare with scikit-learn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.selective import Ranking, normalized_confidence

# Least probability that NLL and temperature scaling see: a zero costs 87.3 nats, not infinitely many.
TINY = torch.finfo(torch.float32).tiny
BINS = 15
# Metrics in plain English, and whether they are shares.
MEANINGS = {
    "cls/Acc": ("accuracy", True),
    "cls/Acc5": ("truth among the five most probable", True),
    "cls/NLL": ("negative log-likelihood, in nats", False),
    "cls/Brier": ("Brier score, 0 to 2", False),
    "cls/Entropy": ("entropy of the posterior, in nats", False),
    "cal/ECE": ("calibration error: confidence against accuracy", True),
    "cal/aECE": ("the same, in bins of equal mass", True),
    "cal/cwECE": ("the same, class by class", True),
    "sc/AURC": ("area under risk over coverage", False),
    "sc/AURC-pNorm": ("the same, by logit-normalised confidence", False),
    "sc/AUGRC": ("area under generalised risk over coverage", False),
    "sc/Cov@5Risk": ("images that can be answered with 5 % errors", True),
    "sc/Cov@1Risk": ("images that can be answered with 1 % errors", True),
}
TOP = 5
RISKS = {"sc/Cov@5Risk": 0.05, "sc/Cov@1Risk": 0.01}


def evaluate_probs(probs: Tensor, labels: Tensor, *, bins: int = BINS) -> dict[str, float]:
    """All metrics of probabilities (N, K) against labels (N,).

    `cls/Acc`, `cls/Acc5`: share of images whose label is the most probable class, or among the five most
    probable; of equally probable classes the first counts as the more probable, as in `argmax`.
    `cls/NLL`, `cls/Brier`, `cls/Entropy`: means over images; the Brier score sums over classes, up to 2.
    `cal/ECE`: gap of top-1 confidence and accuracy over bins of equal width; `cal/aECE`: of equal mass;
    `cal/cwECE`: equal width, for the probability of each class, averaged over the classes.
    `sc/AURC`, `sc/AUGRC`: areas under the risk-coverage curve and its generalised form; images of equal
    confidence count with their expectation over random order. `sc/AURC-pNorm`: the first with logit-normalised
    confidence, which label smoothing does not distort; see `normalized_confidence`.
    `sc/Cov@5Risk`, `sc/Cov@1Risk`: the largest share of images that a threshold on the confidence can answer with
    at most that share of errors among the answers; 0 if there is none.
    """
    summary = Summary.of(probs, labels, bins)
    once = torch.ones(1, summary.num_images, dtype=torch.float64)
    return {name: value.item() for name, value in summary.metrics(once).items()}


def check(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return valid probabilities (N, K) and labels (N,) on the CPU, or say in one sentence what is wrong."""
    probs = check_probs(probs)
    if labels.shape != probs.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise UserError(
            f"labels must be {len(probs)} whole numbers, one per image, got {_kind(labels)} "
            f"of shape {tuple(labels.shape)}"
        )
    labels = labels.detach().cpu().long()
    outside = (labels < 0) | (labels >= probs.shape[1])
    if outside.any():
        image = int(outside.nonzero()[0])
        raise UserError(f"the label of image {image} is {labels[image]}, outside the {probs.shape[1]} classes")
    return probs, labels


def check_probs(probs: Tensor) -> Tensor:
    """Return valid probabilities (N, K) on the CPU; sums may miss 1 by rounding, no single one exceeds 1."""
    if probs.dim() != 2 or probs.shape[0] < 1 or probs.shape[1] < 2 or not probs.is_floating_point():
        raise UserError(
            "probabilities must be a floating-point table of at least one image and two classes, "
            f"got {_kind(probs)} of shape {tuple(probs.shape)}"
        )
    probs = probs.detach().cpu()
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    total = probs.sum(-1)
    for wrong, what in (
        (~total.isfinite(), "are not all finite"),
        (probs.amin(-1) < 0, "are partly negative"),
        ((total - 1).abs() > 1e-3, "do not sum to 1"),
    ):
        if wrong.any():
            raise UserError(f"the probabilities of image {wrong.nonzero()[0].item()} {what}")
    return probs.clamp_max(1)


def bin_index(probs: Tensor, bins: int) -> Tensor:
    """Bin [b / bins, (b + 1) / bins) of each probability; the last bin includes 1."""
    if bins < 1:
        raise UserError(f"the number of bins must be at least 1, got {bins}")
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(probs.dtype)
    return torch.bucketize(probs, edges, right=True)


def calibration_error(confidence: Tensor, right: Tensor, bins: int = BINS) -> float:
    """`cal/ECE` from the confidence (N,) and the correctness (N,) of the answers alone."""
    gap = bin_index(confidence, bins).bincount(confidence.double() - right, bins)
    return gap.abs().sum().item() / len(confidence)


def nll(probs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood (N,) of labels (N,), clipped at `TINY`."""
    return -probs.gather(1, labels.unsqueeze(1)).squeeze(1).double().clamp_min(TINY).log()


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Brier score (N,): the squared distance of the probabilities from the label, summed over classes."""
    probs = probs.double()
    own = probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    return probs.square().sum(-1) - own.square() + (1 - own).square()


def entropy(probs: Tensor, labels: Tensor) -> Tensor:
    """Entropy (N,) of the probabilities, in nats."""
    values: Tensor = torch.special.entr(probs).sum(-1, dtype=torch.float64)
    return values


# Metrics that are means over images: a function of (N, K) and (N,) to (N,) by name.
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls/NLL": nll,
    "cls/Brier": brier,
    "cls/Entropy": entropy,
}


@dataclass(frozen=True)
class Summary:
    """What the metrics need to know about each image; memory is that of `probs` in float64."""

    values: dict[str, Tensor]  # (N,) each: metrics that are plain means over images
    ranking: Ranking
    normalized: Ranking  # by logit-normalised confidence
    top_gap: Tensor  # (N, bins): confidence minus correctness, in the column of its bin
    low_gap: Tensor  # (N, K): probability minus truth where it falls in the first bin, else 0
    high_gap: Tensor  # (classes and bins, N), sparse: the same in all other bins

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, bins: int = BINS) -> "Summary":
        """Summarise probabilities (N, K) and labels (N,)."""
        probs, labels = check(probs, labels)
        own = probs.gather(1, labels.unsqueeze(1))
        earlier = torch.arange(probs.shape[1]) < labels.unsqueeze(1)
        rank = ((probs > own) | ((probs == own) & earlier)).sum(-1)
        confidence, correct = probs.amax(-1), (rank == 0).double()
        gap = probs.double().scatter_add(1, labels.unsqueeze(1), -torch.ones(len(probs), 1, dtype=torch.float64))
        values = {
            "cls/Acc": correct,
            "cls/Acc5": (rank < TOP).double(),
            **{name: metric(probs, labels) for name, metric in MEANS.items()},
        }
        top_gap = torch.zeros(len(probs), bins, dtype=torch.float64)
        top_gap.scatter_(1, bin_index(confidence, bins).unsqueeze(1), (confidence.double() - correct).unsqueeze(1))
        # Few probabilities leave the first bin when classes are many, so only the first is worth a dense table.
        high = bin_index(probs, bins)
        image, label = high.nonzero(as_tuple=True)
        column, at = torch.unique(label * bins + high[image, label], return_inverse=True)
        high_gap = torch.sparse_coo_tensor(
            torch.stack([at, image]), gap[image, label], (len(column), len(probs)), check_invariants=True
        ).coalesce()
        gap[image, label] = 0
        ranking = Ranking.of(confidence, correct)
        normalized = Ranking.of(normalized_confidence(probs, TINY), correct)
        return cls(values, ranking, normalized, top_gap, gap, high_gap)

    @property
    def num_images(self) -> int:
        """Number of images."""
        return len(self.top_gap)

    def metrics(self, weights: Tensor) -> dict[str, Tensor]:
        """All metrics (R,) for R ways (R, N) of counting the images; every way counts N in total."""
        n, num_classes = self.num_images, self.low_gap.shape[1]
        means = weights @ torch.stack(list(self.values.values()), 1) / n
        classwise = (weights @ self.low_gap).abs().sum(1)
        classwise = classwise + torch.sparse.mm(self.high_gap, weights.T.contiguous()).abs().sum(0)
        curve = self.ranking.curve(weights)
        return {
            **dict(zip(self.values, means.unbind(1), strict=True)),
            "cal/ECE": (weights @ self.top_gap).abs().sum(1) / n,
            "cal/aECE": curve.adaptive_error(self.top_gap.shape[1]),
            "cal/cwECE": classwise / (n * num_classes),
            "sc/AURC": curve.aurc(),
            "sc/AURC-pNorm": self.normalized.curve(weights).aurc(),
            "sc/AUGRC": curve.augrc(),
            **{name: curve.coverage_at(risk) for name, risk in RISKS.items()},
        }


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")

"""How good a posterior is: metrics of stored probabilities (N, K) and true labels (N,).

Every metric is written once, for images that count any whole number of times; `evaluate_probs` counts each
image once, the bootstrap counts them as often as it drew them. Names are those of torch-uncertainty.

Images of equal confidence form a group that no threshold can part. Inside a group the counts of errors grow
evenly, which is their expectation over random order, so nothing depends on the order of the images.

Why not torchmetrics: its calibration error gives confidence 1 a bin of its own and passes rows that exceed 1 by
a rounding error through a softmax, and none of its metrics takes counts. The tests compare with scikit-learn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from didicm.errors import UserError

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
NORM = 4  # p, fixed: fitting it, as its authors do, would take held-out images that small data sets do not have
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
        raise UserError(f"labels must be {len(probs)} whole numbers, one per image, got {_described(labels)}")
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
            f"got {_described(probs)}"
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


def normalized_confidence(probs: Tensor) -> Tensor:
    """Largest logit (N,) over the p-norm of the centred logits of probabilities (N, K), clipped at `TINY`.

    MaxLogit-pNorm of Cattelan and Silva, "How to fix a broken confidence estimator": label smoothing distorts the
    order of the largest probabilities, and no temperature restores it. Log-probabilities are logits up to a
    constant, which centring takes away. Two centred logits differ from image to image in nothing but their length,
    so that two classes keep the largest probability.
    """
    if probs.shape[1] == 2:
        return probs.amax(-1)
    logits = probs.double().clamp_min(TINY).log()
    logits = logits - logits.mean(-1, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(logits, NORM, dim=-1)
    return logits.amax(-1).div(norm.clamp_min(TINY)).float()  # what differs by rounding is equal


@dataclass(frozen=True)
class Ranking:
    """Images from the most to the least confident, in G groups of equal confidence."""

    order: Tensor  # (N,)
    ends: Tensor  # (G,): place of the last image of each group
    wrong: Tensor  # (N,), in order: 1 for an error
    gap: Tensor  # (N,), in order: confidence minus correctness

    @classmethod
    def of(cls, confidence: Tensor, correct: Tensor) -> "Ranking":
        """Rank images by their confidence (N,); `correct` (N,) is 0 or 1."""
        ranked, order = confidence.sort(descending=True)
        ends = torch.cat([(ranked[1:] != ranked[:-1]).nonzero().squeeze(1), torch.tensor([len(ranked) - 1])])
        correct = correct[order].double()
        return cls(order, ends, 1 - correct, ranked.double() - correct)

    def curve(self, weights: Tensor) -> "Curve":
        """Curves of R ways (R, N) of counting the images."""
        weights = weights[:, self.order]

        def count(what: Tensor) -> Tensor:
            return F.pad(what.cumsum(1)[:, self.ends], (1, 0))

        return Curve(count(weights), count(weights * self.wrong), count(weights * self.gap))


@dataclass(frozen=True)
class Curve:
    """Cumulated counts (R, G + 1) at the ends of the groups, from no image to all."""

    covered: Tensor
    wrong: Tensor
    gap: Tensor

    @property
    def total(self) -> Tensor:
        """Number of images (R,)."""
        return self.covered[:, -1]

    @property
    def risk(self) -> Tensor:
        """Share of errors (R, G) among the images up to each group."""
        return self.wrong[:, 1:] / self.covered[:, 1:].clamp_min(1)

    def aurc(self) -> Tensor:
        """Mean risk (R,) over the coverages 1/N .. 1 by the trapezoidal rule."""
        # Inside a group the risk at k images is slope + rest / k, and the sum of 1 / k is a harmonic number.
        most = int(self.total.max())
        harmonic = F.pad((1 / torch.arange(1, most + 1, dtype=torch.float64)).cumsum(0), (1, 0))
        rest = self.wrong[:, :-1] - self.covered[:, :-1] * self._slope
        area = self.wrong[:, -1] + (rest * harmonic[self.covered.long()].diff()).sum(1)
        return self._trapezoid(area, self._first)

    def augrc(self) -> Tensor:
        """Mean generalised risk (R,), the share of all images that are answered and wrong."""
        size = self.covered.diff()
        area = (size * self.wrong[:, :-1] + self._slope * size * (size + 1) / 2).sum(1)
        return self._trapezoid(area / self.total, self._first / self.total)

    def coverage_at(self, risk: float) -> Tensor:
        """Largest coverage (R,) whose risk is at most `risk`, 0 if none is."""
        return (self.covered[:, 1:] * (self.risk <= risk)).amax(1) / self.total

    def adaptive_error(self, bins: int) -> Tensor:
        """Calibration error (R,) over bins of equal mass; a group on an edge is shared out evenly."""
        total = self.total[:, None]
        # The least confident bins take what is left over.
        sizes = total.div(bins, rounding_mode="floor") + (torch.arange(bins) < total % bins)
        edges = F.pad(sizes.flip(1).cumsum(1), (1, 0)).contiguous()
        right = torch.searchsorted(self.covered, edges).clamp_min(1)
        start, stop = self.covered.gather(1, right - 1), self.covered.gather(1, right)
        before, after = self.gap.gather(1, right - 1), self.gap.gather(1, right)
        share = (edges - start) / (stop - start).clamp_min(1)
        return (before + share * (after - before)).diff().abs().sum(1) / self.total

    @cached_property
    def _slope(self) -> Tensor:
        """Share of errors (R, G) inside each group."""
        return self.wrong.diff() / self.covered.diff().clamp_min(1)

    @property
    def _first(self) -> Tensor:
        """Risk (R,) of the most confident image: of the one group that starts at 0 and is not empty."""
        return (self._slope * (self.covered[:, :-1] == 0)).sum(1)

    def _trapezoid(self, area: Tensor, first: Tensor) -> Tensor:
        last = self.wrong[:, -1] / self.total
        return torch.where(self.total > 1, (area - (first + last) / 2) / (self.total - 1).clamp_min(1), last)


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
        normalized = Ranking.of(normalized_confidence(probs), correct)
        return cls(values, ranking, normalized, top_gap, gap, high_gap)

    @property
    def num_images(self) -> int:
        """Number of images."""
        return len(self.top_gap)

    def metrics(self, weights: Tensor) -> dict[str, Tensor]:
        """All metrics (R,) for R ways (R, N) of counting the images."""
        n, num_classes = weights.sum(1), self.low_gap.shape[1]
        means = weights @ torch.stack(list(self.values.values()), 1) / n[:, None]
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


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"

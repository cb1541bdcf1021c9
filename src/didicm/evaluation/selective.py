"""Answering only where the confidence is high: risk against coverage.

Images of equal confidence form a group that no threshold can part. Inside a group the counts of errors grow
evenly, which is their expectation over random order, so nothing depends on the order of the images.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

NORM = 4  # p, fixed: fitting it, as its authors do, would take held-out images that small data sets do not have


def normalized_confidence(probs: Tensor, least: float) -> Tensor:
    """Largest logit (N,) over the p-norm of the centred logits of probabilities (N, K), clipped at `least`.

    MaxLogit-pNorm of Cattelan and Silva, "How to fix a broken confidence estimator": label smoothing distorts the
    order of the largest probabilities, and no temperature restores it. Log-probabilities are logits up to a
    constant, which centring takes away. Two centred logits differ from image to image in nothing but their length,
    so that two classes keep the largest probability.
    """
    if probs.shape[1] == 2:
        return probs.amax(-1)
    logits = probs.double().clamp_min(least).log()
    logits = logits - logits.mean(-1, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(logits, NORM, dim=-1)
    return logits.amax(-1).div(norm.clamp_min(least)).float()  # what differs by rounding is equal


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
        """Curves of R ways (R, N) of counting the images, each N in total."""
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
    def total(self) -> int:
        """Number of images."""
        return int(self.covered[0, -1])

    @property
    def risk(self) -> Tensor:
        """Share of errors (R, G) among the images up to each group."""
        return self.wrong[:, 1:] / self.covered[:, 1:].clamp_min(1)

    def aurc(self) -> Tensor:
        """Mean risk (R,) over the coverages 1/N .. 1 by the trapezoidal rule."""
        # Inside a group the risk at k images is slope + rest / k, and the sum of 1 / k is a harmonic number.
        harmonic = F.pad((1 / torch.arange(1, self.total + 1, dtype=torch.float64)).cumsum(0), (1, 0))
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
        small, extra = divmod(self.total, bins)
        sizes = small + (torch.arange(bins) < extra).double()  # the least confident bins take what is left over
        edges = F.pad(sizes.flip(0).cumsum(0), (1, 0)).expand(len(self.covered), -1).contiguous()
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
        return (area - (first + last) / 2) / (self.total - 1) if self.total > 1 else last

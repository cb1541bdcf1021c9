"""The uniform process over K classes: forward marginals and reverse steps, O(K) per image.

Shapes: a leading batch shape (...), then the K classes last. The forward process takes one time per image (...);
the reverse steps take the `Noise` at a time that all images share. Probabilities keep the dtype they come in.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from didicm.diffusion.random import sample_categorical
from didicm.diffusion.schedule import LogLinear, Noise, Schedule

# Of a class, so that a score without any signal reads as the uniform posterior, and none is divided by zero.
LEAST_SIGNAL = 1e-30


@dataclass(frozen=True)
class UniformProcess:
    """Labels redrawn from all classes at the schedule's rate (Eq. 1); shared by loss and samplers."""

    num_classes: int
    schedule: Schedule = field(default_factory=LogLinear)

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ValueError(f"a process needs at least 2 classes, got {self.num_classes}")
        self.schedule.check(self.num_classes)

    # Forward

    def marginal(self, target: Tensor, t: Tensor) -> Tensor:
        """Noisy distribution q_t (..., K) of hard labels (...) or target distributions (..., K) (Eq. 2)."""
        probs = self.distribution(target)
        keep, lost = (x.unsqueeze(-1).to(probs) for x in (self.schedule.keep(t), self.schedule.lost(t)))
        return keep * probs + lost / self.num_classes

    def add_noise(self, clean: Tensor, noise: Noise) -> Tensor:
        """`marginal` of clean posteriors (..., K) at a time that all images share."""
        return noise.keep * clean + noise.lost / self.num_classes

    def distribution(self, target: Tensor) -> Tensor:
        """Turn hard labels (...) into distributions (..., K); a distribution is returned as it is."""
        if target.is_floating_point():
            return target
        return F.one_hot(target, self.num_classes).to(torch.get_default_dtype())

    def sample_label(self, target: Tensor, t: Tensor, u: Tensor, label_proposal: Tensor | None = None) -> Tensor:
        """Draw noisy labels j ~ q_t (...) of targets (...) or (..., K) with uniform numbers u (..., 3).

        `label_proposal` (...) is the chance to draw a label from all classes, by default the schedule's;
        `label_weight` corrects for another.
        """
        change = self.schedule.lost(t) if label_proposal is None else label_proposal
        label = sample_categorical(target, u[..., 0]) if target.is_floating_point() else target
        drawn = (u[..., 1] * 2**24).long() * self.num_classes >> 24  # floor(u K), exact without float64
        return torch.where(u[..., 2] < change, drawn, label)

    def label_weight(self, target: Tensor, label: Tensor, t: Tensor, label_proposal: Tensor) -> Tensor:
        """Importance weight (...) of labels drawn with `label_proposal`: their chance under q_t over that."""
        at_label = self.distribution(target).gather(-1, label.unsqueeze(-1)).squeeze(-1)
        lost = self.schedule.lost(t)
        drawn = (1 - label_proposal) * at_label + label_proposal / self.num_classes
        return ((1 - lost) * at_label + lost / self.num_classes) / drawn

    # What a score tells

    def noisy_posterior(self, log_score: Tensor, t: Noise, floor: bool = False) -> Tensor:
        """Normalise a score column into q_t (..., K) (Eq. 8).

        No true one falls below (1 - keep) / K, as the scores of a network may; `floor` holds the estimate to that.
        """
        least = t.lost / self.num_classes if floor else LEAST_SIGNAL
        return normalise(log_score.softmax(-1).clamp_min(least))

    def clean_posterior(self, log_score: Tensor, t: Noise) -> Tensor:
        """Undo the noise: the clean posterior (..., K) that one score at time t implies (the readout).

        A consistent score leaves no class a negative signal. Where a network's does, that measures its error, and
        no class gets less than the mean of it: a flat zero would claim more than the network can know.
        """
        signal = log_score.softmax(-1) - t.lost / self.num_classes
        error = (-signal).clamp_min(0).mean(-1, keepdim=True)
        return normalise(signal.maximum(error.clamp_min(LEAST_SIGNAL)))

    # Reverse, over probabilities

    def euler_step(self, p: Tensor, log_score: Tensor, t: Noise, dt: float, floor: bool = False) -> Tensor:
        """Move p (..., K) from t to t - dt by Algorithm 2: (I + Rbar dt) p without the K x K matrix.

        Keeps the sum of p, but overshoots below zero when dt is too long for the rate.
        """
        q = self.noisy_posterior(log_score, t, floor)
        r = p / q
        return p + t.rate * dt / self.num_classes * (q * r.sum(-1, keepdim=True) - r)

    def exact_step(self, p: Tensor, clean: Tensor, t: Noise, s: Noise) -> Tensor:
        """Move p (..., K) from t to s < t by the exact reverse kernel of a clean posterior (..., K).

        Bayes' rule with both kernels known: no discretisation error, never negative.
        """
        stay, move = self._forward_kernel(s, t)
        r = p / self.add_noise(clean, t)
        return normalise(self.add_noise(clean, s) * (stay * r + move * r.sum(-1, keepdim=True)))

    # Reverse, over labels

    def euler_label_step(
        self, label: Tensor, log_score: Tensor, t: Noise, dt: float, floor: bool = False
    ) -> Tensor:
        """Distribution (..., K) of the label at t - dt given `label` (...) at t (Algorithm 3).

        A step too long for the rate leaves no chance to stay; the jumps then share the whole mass.
        """
        if floor:
            log_q = self.noisy_posterior(log_score, t, floor).log()
            log_score = log_q - log_q.gather(-1, label.unsqueeze(-1))
        log_jump = log_score + math.log(t.rate * dt / self.num_classes)
        log_jump = log_jump.scatter(-1, label.unsqueeze(-1), -math.inf)
        log_leave = log_jump.logsumexp(-1, keepdim=True)
        jump = torch.exp(log_jump - log_leave.clamp_min(0))
        return jump.scatter(-1, label.unsqueeze(-1), -torch.expm1(log_leave.clamp_max(0)))

    def exact_label_step(self, label: Tensor, clean: Tensor, t: Noise, s: Noise) -> Tensor:
        """Distribution (..., K) of the label at s < t, given `label` (...) at t and a clean posterior."""
        stay, move = self._forward_kernel(s, t)
        label, q = label.unsqueeze(-1), self.add_noise(clean, s)
        return normalise((move * q).scatter_add(-1, label, stay * q.gather(-1, label)))

    def _forward_kernel(self, s: Noise, t: Noise) -> tuple[float, float]:
        """From s to t > s: the chance to keep the label, and to be redrawn as one given class."""
        between = t.total - s.total
        return math.exp(-between), -math.expm1(-between) / self.num_classes


def log_marginal(log_probs: Tensor, total: Tensor) -> Tensor:
    """Log of `UniformProcess.marginal` (..., K), from log-probabilities: safe where a probability underflows."""
    total = total.unsqueeze(-1).to(log_probs)
    log_redrawn = torch.log(-torch.expm1(-total) / log_probs.shape[-1])
    return torch.logaddexp(log_probs - total, log_redrawn)


def normalise(p: Tensor) -> Tensor:
    """Make each row (..., K) sum to one."""
    return p / p.sum(-1, keepdim=True)


def at_least_float32(x: Tensor) -> Tensor:
    """Undo half precision, which is for networks only."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

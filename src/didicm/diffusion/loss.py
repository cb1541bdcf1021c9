"""Training losses: score entropy (Algorithm 1), its expectation over the noisy label, and the times of both.

The losses are written as sums of s (e^d - 1 - d), with d the error of a log-ratio: each term is non-negative and
zero for a perfect prediction, and nothing cancels, so float32 is enough down to t = 1e-5.
"""

import torch
from torch import Tensor

from didicm.diffusion.process import UniformProcess, at_least_float32

# Earliest time in training: closer to 0 the true ratios leave float32.
MIN_TIME = 1e-5

# Log-scores above this, and above the true one by more than the margin, count by their tangent.
LARGEST_LOG_SCORE, MARGIN = 20.0, 5.0
FARTHEST = 1e20  # beyond this even the tangent would leave float32


def sample_time(u: Tensor) -> Tensor:
    """Times (...) of uniform numbers (...)."""
    return MIN_TIME + (1 - MIN_TIME) * u


def score_entropy(log_score: Tensor, label: Tensor, target: Tensor, t: Tensor, process: UniformProcess) -> Tensor:
    """Loss (B,) of predicted log-scores (B, K) at noisy labels (B,) and times t (B,) > 0 (Algorithm 1, line 7).

    Log-scores are the log of q_t / q_t[label], 0 at the label; the label is drawn from q_t of the target: a hard
    label (B,) or any distribution (B, K), such as smoothed, Mixup or CutMix.

    Where the exponential of a log-score would leave float32 it goes on as its tangent: the loss and its gradient
    stay finite, and pull the network back. (The released code clamps at 20, which leaves no gradient there.)
    """
    with torch.autocast(log_score.device.type, enabled=False):
        log_score = at_least_float32(log_score).clamp(-FARTHEST, FARTHEST)
        log_q = process.marginal(_match(target, log_score), t).log()
        log_s = log_q - log_q.gather(-1, label.unsqueeze(-1))
        s, limit = log_s.exp(), (log_s + MARGIN).clamp_min(LARGEST_LOG_SCORE)
        within, beyond = log_score.minimum(limit), (log_score - limit).clamp_min(0)
        weight = process.schedule.rate(t) / process.num_classes
        return weight * (s * _excess(within - log_s) + (limit.exp() - s) * beyond).sum(-1)


def marginal_score_entropy(log_q: Tensor, target: Tensor, t: Tensor, process: UniformProcess) -> Tensor:
    """Expectation (...) of `score_entropy` over the noisy label, for a network that does not see it.

    `log_q` (..., K) is the predicted log noisy posterior, normalised; leading dimensions of it and of t (...) are
    further draws for the same images. With d = log(q_hat / q) the double sum over labels collapses to
    sum_i excess(-d_i) + K q_i excess(d_i).
    """
    with torch.autocast(log_q.device.type, enabled=False):
        log_q = at_least_float32(log_q)
        q = process.marginal(_match(target, log_q), t)
        d = log_q - q.log()
        weight = process.schedule.rate(t) / process.num_classes
        return weight * (_excess(-d) + process.num_classes * q * _excess(d)).sum(-1)


def _excess(d: Tensor) -> Tensor:
    """e^d - 1 - d; by its Taylor series where the subtraction would cancel."""
    series, near = torch.ones_like(d), d.clamp(-0.1, 0.1)  # far from 0 the series may overflow
    for k in range(8, 2, -1):
        series = 1 + near / k * series
    return torch.where(d.abs() < 0.1, near * near / 2 * series, torch.expm1(d) - d)


def _match(target: Tensor, like: Tensor) -> Tensor:
    """Distributions take the precision of the prediction; hard labels stay integers."""
    return target.to(like.dtype) if target.is_floating_point() else target

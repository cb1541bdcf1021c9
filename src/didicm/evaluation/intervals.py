"""How sure a number is: intervals over images by the bootstrap, and over seeds by Student's t."""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.metrics import BINS, Summary

# Counts held at once: enough to keep the processor busy, few enough to stay near its caches.
CHUNK = 2**21


def bootstrap(
    probs: Tensor,
    labels: Tensor,
    *,
    groups: np.ndarray | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    bins: int = BINS,
) -> dict[str, tuple[float, float]]:
    """Interval (low, high) of every metric of probabilities (N, K) over resamples of the images.

    With `groups` (N,), such as patients, whole groups are drawn: images of one are alike, and count as one.
    Percentiles of the resampled values. Calibration errors (`cal/`) are biased upwards by the finite number of
    images, and a resample has that bias twice; theirs are moved back by it, so they are intervals of what N images
    measure on average. What hangs on a handful of errors gets too narrow an interval: `sc/Cov@1Risk` of hundreds
    of images, or an accuracy near 1, which is of width 0 where no answer is wrong.
    """
    _check_level(level)
    if resamples < 1:
        raise UserError(f"the number of resamples must be at least 1, got {resamples}")
    summary = Summary.of(probs, labels, bins)
    group = None if groups is None else torch.from_numpy(np.unique(groups, return_inverse=True)[1])
    observed = summary.metrics(torch.ones(1, summary.num_images, dtype=torch.float64))
    drawn = [summary.metrics(weights) for weights in _counts(summary.num_images, resamples, seed, group)]
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    intervals = {}
    for name, value in observed.items():
        values = torch.cat([part[name] for part in drawn])
        low, high = values.quantile(tails) - (values.mean() - value if name.startswith("cal/") else 0)
        # Moved back, the interval of a small error can begin below 0, where no error is.
        intervals[name] = (max(low.item(), 0.0), high.item())
    return intervals


def seed_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean over seeds and its Student-t interval, as (mean, low, high)."""
    _check_level(level)
    n = len(values)
    if n < 2:
        raise UserError(f"an interval over seeds needs at least 2 seeds, got {n}: run more")
    if not all(map(math.isfinite, values)):
        raise UserError(f"an interval over seeds needs finite values, got {list(values)}")
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))
    half = _student(n - 1, level) * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def _counts(n: int, resamples: int, seed: int, group: Tensor | None = None) -> Iterator[Tensor]:
    """How often each resample draws each image, (R, N) at a time: as often as the image's group, if it has one."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.ones((), dtype=torch.float64)
    step, units = max(1, CHUNK // n), n if group is None else int(group.max()) + 1
    for start in range(0, resamples, step):
        drawn = torch.randint(units, (min(step, resamples - start), units), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, one.expand_as(drawn))
        yield counts if group is None else counts[:, group]


@cache
def _student(freedom: int, level: float) -> float:
    """Half-width of the central interval of Student's t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""

    def inside(angle: float) -> float:
        """Probability that |t| is at most sqrt(freedom) tan(angle)."""
        sine, cosine = math.sin(angle), math.cos(angle)
        odd = freedom % 2
        term, total = (cosine if odd else 1.0), 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= cosine**2 * k / (k + 1)
        return 2 / math.pi * (angle + sine * total) if odd else sine * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise UserError(f"the level of an interval must lie between 0 and 1, got {level}")

"""Known posteriors, drawn by hand or by hypothesis, and their scores."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from didicm.diffusion import UniformProcess


def one_hot(K: int) -> Tensor:
    p = torch.zeros(K, dtype=torch.float64)
    p[K // 2] = 1
    return p


def ambiguous(K: int) -> Tensor:
    """Three classes share the mass (two when there are only two)."""
    p = torch.zeros(K, dtype=torch.float64)
    p[: min(3, K)] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[: min(3, K)]
    return p / p.sum()


def smoothed(K: int) -> Tensor:
    return 0.9 * one_hot(K) + 0.1 / K


def random(K: int) -> Tensor:
    return torch.distributions.Dirichlet(torch.full((K,), 0.1, dtype=torch.float64)).sample()


def all_kinds(K: int) -> Tensor:
    """One posterior of each kind, (4, K)."""
    torch.manual_seed(K)
    return torch.stack([one_hot(K), ambiguous(K), smoothed(K), random(K)])


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(-1) / 2


@st.composite
def distributions(draw, min_classes=2, max_classes=12, count=1):
    """(count, K) distributions, some with entries of exactly zero.

    All of them from one string of bytes, two to a weight: to draw each weight by itself takes hypothesis far
    longer than what is tested takes.
    """
    K = draw(st.integers(min_classes, max_classes))
    size = 2 * count * K
    drawn = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype="<u2").reshape(count, K)
    weights = np.where(drawn % 3 == 0, 0.0, 1e-3 + (1 - 1e-3) * (drawn / 65_535))
    weights[~weights.any(-1)] = 1.0
    p = torch.from_numpy(weights)
    return p / p.sum(-1, keepdim=True)


def log_score(process: UniformProcess, clean: Tensor, label: int, t: float) -> Tensor:
    log_q = process.marginal(clean, torch.tensor(t, dtype=torch.float64)).log()
    return log_q - log_q[..., label, None]


def sigma_bar(process: UniformProcess, t: float) -> float:
    """Total noise in the paper's units."""
    return process.schedule.at(t).total / process.num_classes


def sigma(process: UniformProcess, t: float) -> float:
    """Noise rate in the paper's units."""
    return process.schedule.at(t).rate / process.num_classes

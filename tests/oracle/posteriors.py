"""Known posteriors, and the model that scores them perfectly."""

import torch
from torch import Tensor


class ExactScore:
    """A score model without a network: the image *is* its posterior (B, K)."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.calls = 0

    def encode(self, image: Tensor) -> Tensor:
        return image

    def score(self, features: Tensor, label: Tensor, total: Tensor) -> Tensor:
        self.calls += 1
        keep = torch.exp(-total.double()).unsqueeze(-1)
        log_q = (keep * features.double() + (1 - keep) / features.shape[-1]).log()
        return (log_q - log_q.gather(-1, label.unsqueeze(-1))).to(self.dtype)


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

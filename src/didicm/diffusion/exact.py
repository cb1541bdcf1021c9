"""A score model without a network, to tell a solver's error from a network's."""

import torch
from torch import Tensor

from didicm.diffusion.solver import Features


class ExactScore:
    """Scores images that are their own posteriors (B, K); `error` is the spread of the noise on its log-ratios."""

    def __init__(self, dtype: torch.dtype = torch.float64, error: float = 0.0) -> None:
        self.dtype, self.error = dtype, error

    def encode(self, image: Tensor) -> Tensor:
        """Nothing to encode."""
        return image

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Log-ratios (B, K) of the noisy posterior; the noise differs from call to call."""
        assert isinstance(features, Tensor)
        keep = torch.exp(-total.double()).unsqueeze(-1)
        log_q = (keep * features.double() + (1 - keep) / features.shape[-1]).log()
        if self.error:
            log_q = log_q + self.error * torch.randn_like(log_q)
        return (log_q - log_q.gather(-1, label.unsqueeze(-1))).to(self.dtype)

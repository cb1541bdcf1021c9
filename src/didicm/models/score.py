"""The contract of every score network, the two things its outputs may mean, and the condition it sees."""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from didicm.diffusion import Features
from didicm.diffusion.process import log_marginal
from didicm.diffusion.solver import check_choice

WIDTH = 128  # of the embedding of the condition

Parameterization: TypeAlias = Literal["score", "posterior"]


class ScoreModel(nn.Module):
    """A network that predicts log q_t / q_t[label] for an image, a noisy label and the total noise.

    A subclass writes `encode` and `outputs`. What the outputs mean is `parameterization`:

    - "score": the log-scores themselves (the paper).
    - "posterior": logits of the clean posterior, from which the log-scores follow. Every noise level then
      speaks about the same quantity, and one call already is an estimate of the posterior.
    """

    num_classes: int
    parameterization: Parameterization

    def predict(self, parameterization: Parameterization, num_classes: int) -> None:
        """Set what the outputs mean, and for how many classes."""
        if num_classes < 2:
            raise ValueError(f"a score model needs num_classes of at least 2, got {num_classes}")
        check_choice("parameterization", parameterization, Parameterization)
        self.num_classes = num_classes
        self.parameterization = parameterization

    def encode(self, image: Tensor) -> Features:
        """Compute once per image all that depends on the image (B, C, H, W) alone."""
        raise NotImplementedError

    def outputs(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Raw outputs (B, K) at noisy labels (B,) and total noise (B,)."""
        raise NotImplementedError

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Log-scores (B, K) in float32 or better, exactly 0 at `label` (B,)."""
        outputs = self.outputs(features, label, total)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        label = label.unsqueeze(-1)
        if self.parameterization == "score":
            return outputs.scatter(-1, label, 0.0)
        log_q = log_marginal(outputs.log_softmax(-1), total)
        return log_q - log_q.gather(-1, label)

    def forward(self, image: Tensor, label: Tensor, total: Tensor) -> Tensor:
        """Encode and score in one call."""
        return self.score(self.encode(image), label, total)


class Condition(nn.Module):
    """Sum of a label embedding and an embedding of the total noise, (B, WIDTH)."""

    wave: Tensor

    def __init__(self, num_classes: int, frequencies: int = 256) -> None:
        super().__init__()
        self.label = nn.Embedding(num_classes, WIDTH)
        self.noise = nn.Sequential(nn.Linear(frequencies, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        half = frequencies // 2
        wave = torch.exp(-math.log(10_000) * torch.arange(half) / half)
        self.register_buffer("wave", wave, persistent=False)

    def forward(self, label: Tensor, total: Tensor) -> Tensor:
        """Embed labels (B,) and total noise (B,)."""
        angle = total.to(self.wave.dtype).unsqueeze(-1) * self.wave
        embedded: Tensor = self.label(label) + self.noise(torch.cat([angle.cos(), angle.sin()], -1))
        return embedded

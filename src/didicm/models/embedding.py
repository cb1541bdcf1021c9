"""Embedding of the noisy label and its noise, the condition of a score network."""

import math

import torch
from torch import Tensor, nn

WIDTH = 128


class Condition(nn.Module):
    """Sum of a label embedding and an embedding of the total noise, (B, width)."""

    def __init__(self, num_classes: int, width: int = WIDTH, frequencies: int = 256) -> None:
        super().__init__()
        self.label = nn.Embedding(num_classes, width)
        self.noise = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        half = frequencies // 2
        wave = torch.exp(-math.log(10_000) * torch.arange(half) / half)
        self.register_buffer("wave", wave, persistent=False)

    def forward(self, label: Tensor, total: Tensor) -> Tensor:
        """Embed labels (B,) and total noise (B,)."""
        angle = total.to(self.wave.dtype).unsqueeze(-1) * self.wave
        return self.label(label) + self.noise(torch.cat([angle.cos(), angle.sin()], -1))

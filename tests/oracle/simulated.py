"""Posteriors made up for the tests."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor


def simulate(
    n: int, classes: int, seed: int, *, temperature: float = 1.0, signal: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Posteriors (n, classes) and labels drawn from them; a temperature below 1 then makes them too sure."""
    generator = torch.Generator().manual_seed(seed)
    logits = signal * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits / temperature).softmax(-1), labels


@st.composite
def posteriors(draw) -> tuple[Tensor, Tensor]:
    """Small posteriors full of ties, zeros and ones: whole numbers divided by their sum.

    All of them from one string of bytes: to draw each number by itself takes hypothesis far longer than what is
    tested takes.
    """
    n, classes = draw(st.integers(1, 30)), draw(st.integers(2, 7))
    size = n * (classes + 1)
    drawn = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).reshape(n, classes + 1)
    counts = torch.tensor(np.array([0, 0, 0, 0, 1, 2, 3, 4], dtype=float)[drawn[:, 1:] % 8])
    labels = torch.tensor(drawn[:, 0] % classes, dtype=torch.long)
    counts[counts.sum(-1) == 0] = 1.0
    return counts / counts.sum(-1, keepdim=True), labels

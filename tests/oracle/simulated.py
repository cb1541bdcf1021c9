"""Posteriors made up for the tests."""

import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
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
    """Small posteriors full of ties, zeros and ones: whole numbers divided by their sum."""
    n, classes = draw(st.integers(1, 30)), draw(st.integers(2, 7))
    counts = torch.from_numpy(draw(hnp.arrays(float, (n, classes), elements=st.sampled_from([0.0, 1, 2, 3, 4]))))
    labels = torch.from_numpy(draw(hnp.arrays(int, n, elements=st.integers(0, classes - 1))))
    counts[counts.sum(-1) == 0] = 1.0
    return counts / counts.sum(-1, keepdim=True), labels

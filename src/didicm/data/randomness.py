"""Random numbers as pure functions of what they are for: the same in any process, after any resume."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from didicm.diffusion.random import GAMMA, mix


def keys(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers, or arrays of them that broadcast, to 64 well-mixed bits each (splitmix64)."""
    with np.errstate(over="ignore"):
        key = np.uint64(0)
        for part in parts:
            key = mix((key ^ np.asarray(part, dtype=np.int64).astype(np.uint64)) + np.uint64(GAMMA))
    return np.asarray(key)


def uniform(key: np.ndarray, count: int) -> np.ndarray:
    """Draw (N, count) numbers in [0, 1) from keys (N,)."""
    bits = keys(key[:, None].view(np.int64), np.arange(count))
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def generator(*parts: int) -> np.random.Generator:
    """Make a generator of its own for these integers."""
    return np.random.default_rng(int(keys(*parts)))


def seed_all(key: int) -> None:
    """Seed the three global generators that timm's and torchvision's transforms draw from."""
    random.seed(key)
    np.random.seed(key % 2**32)
    # Not torch.manual_seed: that also looks for every GPU, once per image.
    torch.default_generator.manual_seed(key % 2**63)


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the global generators as they were found."""
    state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.default_generator.set_state(state[2])

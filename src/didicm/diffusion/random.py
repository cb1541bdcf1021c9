"""Random numbers that belong to an image, not to its place in a batch.

Every number is a hash of (seed, image content, how many were drawn before), so an image gets the same ones
alone, in any batch, in any order, on any device, and different images get independent ones.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood 2014); PyTorch has signed integers only.
GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_SIGNED = 2**64
BITS = 24  # of a random number: as many as float32 has
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ImageRandom:
    """One stream of random numbers per image of a batch (B, ...)."""

    def __init__(self, image: Tensor, seed: int) -> None:
        self._image, self._seed, self._drawn = image, seed, 0
        self._key: Tensor | None = None  # made at the first draw, as many samplers never draw

    def uniform(self, count: int = 1) -> Tensor:
        """Draw (B, count) numbers in [0, 1), float32."""
        return self._bits(count).float() * 2.0**-BITS

    def label(self, num_classes: int, count: int = 1) -> Tensor:
        """Draw (B, count) labels from all classes alike."""
        return self._bits(count) * num_classes >> BITS

    def _bits(self, count: int) -> Tensor:
        """Draw (B, count) whole numbers in [0, 2 ** BITS)."""
        if self._key is None:
            self._key = _hash(self._image, self._seed)
        counter = torch.arange(self._drawn, self._drawn + count, device=self._key.device) * (GAMMA - _SIGNED)
        self._drawn += count
        return _shift(_mix(self._key.unsqueeze(-1) + counter), 64 - BITS)


def sample_categorical(probs: Tensor, u: Tensor) -> Tensor:
    """Draw labels (...) from `probs` (..., K) with uniform numbers (...); never one of probability 0."""
    cumulative = probs.cumsum(-1)
    threshold = u.to(probs) * cumulative[..., -1]
    label = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
    return label.clamp_max(probs.shape[-1] - 1)  # where a sampler has yet to report a NaN


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The hash on NumPy's unsigned integers, which wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    x = x ^ (x >> np.uint64(31))
    return x


def _hash(image: Tensor, seed: int) -> Tensor:
    """Hash of the content and the seed, (B,)."""
    image = image.detach().contiguous()
    bits = image.view(_INTEGERS[image.element_size()]).flatten(1).long()
    position = torch.arange(1, bits.shape[1] + 1, device=image.device) * (GAMMA - _SIGNED)
    content = _mix(bits ^ position).sum(-1)  # integer sums wrap and are exact in any order
    return _mix(content + _mix(torch.tensor(seed, device=image.device)))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, which PyTorch's signed shift does not."""
    return torch.bitwise_and(x >> bits, 2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    """The hash on PyTorch's signed integers."""
    x = (x ^ _shift(x, 30)) * (_MIX_1 - _SIGNED)
    x = (x ^ _shift(x, 27)) * (_MIX_2 - _SIGNED)
    return x ^ _shift(x, 31)

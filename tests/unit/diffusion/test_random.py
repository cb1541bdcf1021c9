import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from didicm.diffusion.random import GAMMA, ImageRandom, _mix, mix, sample_categorical


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_streams_belong_to_the_content(dtype):
    image = (torch.rand(4, 3, 5, 5) * 255).to(dtype)
    u = ImageRandom(image, seed=3).uniform(8)
    assert torch.equal(u[2:3], ImageRandom(image[2:3], seed=3).uniform(8))
    assert u.unique().numel() == u.numel()
    image[0, 0, 0, 0] += 1
    changed = ImageRandom(image, seed=3).uniform(8)
    assert not torch.equal(changed[0], u[0])
    assert torch.equal(changed[1:], u[1:])


def test_the_hash_is_splitmix64_in_numpy_and_in_pytorch():
    """The first numbers of the published generator with seed 1234567."""
    state = (1234567 + np.arange(1, 4, dtype=object) * GAMMA) % 2**64
    hashed = mix(state.astype(np.uint64))
    assert hashed.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert torch.equal(
        _mix(torch.from_numpy(state.astype(np.uint64).view(np.int64))).view(torch.uint64), torch.from_numpy(hashed)
    )


def test_swapping_pixels_changes_the_stream():
    image = torch.arange(6.0).view(1, 6)
    assert not torch.equal(ImageRandom(image, 0).uniform(4), ImageRandom(image.flip(1), 0).uniform(4))


def test_numbers_are_uniform_over_images_seeds_and_draws():
    image = torch.arange(500.0).view(500, 1)
    for u in (
        ImageRandom(image, 0).uniform(20),
        torch.stack([ImageRandom(image[:1], seed).uniform(20) for seed in range(500)]),
        ImageRandom(image[:1], 0).uniform(10_000),
    ):
        assert kstest(u.flatten(), "uniform").pvalue > 1e-3
        assert u.min() >= 0
        assert u.max() < 1


def test_draws_in_parts_are_the_draws_at_once():
    image = torch.rand(3, 7)
    parts, whole = ImageRandom(image, 0), ImageRandom(image, 0)
    assert torch.equal(torch.cat([parts.uniform(2), parts.uniform(3)], 1), whole.uniform(5))


def test_sample_categorical_follows_the_probabilities_and_never_a_zero():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    u = ImageRandom(torch.zeros(1, 1), 0).uniform(20_000)[0]
    counts = sample_categorical(probs.expand(20_000, 6), u).bincount(minlength=6)
    assert counts[probs == 0].sum() == 0
    assert chisquare(counts[probs > 0], 20_000 * probs[probs > 0].double()).pvalue > 1e-3
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert sample_categorical(probs.expand(2, 6), ends).tolist() == [1, 4]
    # A total that is not exactly one must not push the last draw out of range.
    for scale in (0.7, 1 - 1e-7, 1 + 1e-7, 1.3):
        assert sample_categorical(scale * probs[None], ends[1:]).item() == 4

import numpy as np
import pytest
import torch

from didicm.data import Augment, Mixer, target_distribution

STRONG = Augment(mixup=0.2, cutmix=1.0, label_smoothing=0.1)


def batch(count=8, classes=5):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 12, 12, generator=generator), torch.randint(classes, (count,), generator=generator)


def test_smoothed_targets():
    target = target_distribution(torch.tensor([2, 0]), 4, 0.1)
    assert torch.allclose(target, torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]))
    assert torch.equal(target_distribution(torch.tensor([1]), 3), torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_targets_are_smoothed_distributions_for_any_batch(count):
    image, label = batch(count)
    for step in range(6):
        mixed, target = Mixer(STRONG, 5, seed=0)(image.clone(), label, step)
        assert mixed.shape == image.shape
        assert target.shape == (count, 5)
        assert torch.allclose(target.sum(-1), torch.ones(count))
        assert target.min() >= 0.1 / 5 - 1e-6


def test_smoothing_without_mixing():
    image, label = batch()
    mixed, target = Mixer(Augment(label_smoothing=0.2), 5, seed=0)(image, label, 0)
    assert torch.equal(mixed, image)
    assert torch.equal(target, target_distribution(label, 5, 0.2))
    assert torch.equal(Mixer(Augment(), 5, seed=0)(image, label, 0)[1], target_distribution(label, 5))


def test_mixup_weighs_images_and_targets_alike():
    image, label = batch()
    mixed, target = Mixer(Augment(mixup=1.0), 5, seed=3)(image.clone(), label, 1)
    hard = target_distribution(label, 5)
    # The share of the image's own label, read from a pair of different classes.
    row = int((label != label.flip(0)).nonzero()[0])
    share = target[row, label[row]]
    assert 0 < share < 1
    assert torch.allclose(mixed, share * image + (1 - share) * image.flip(0), atol=1e-6)
    assert torch.allclose(target, share * hard + (1 - share) * hard.flip(0), atol=1e-6)


def test_cutmix_share_is_the_area():
    image, label = batch()
    mixed, target = Mixer(Augment(cutmix=1.0), 5, seed=1)(image.clone(), label, 2)
    row = int((label != label.flip(0)).nonzero()[0])
    kept = (mixed[row] == image[row]).all(0).float().mean()
    assert 0 < kept < 1
    assert torch.allclose(target[row, label[row]], kept, atol=1e-6)


def test_a_step_is_a_pure_function_and_leaves_the_global_state():
    image, label = batch()

    def result(seed, step, rank=0):
        return torch.cat([part.flatten() for part in Mixer(STRONG, 5, seed, rank)(image.clone(), label, step)])

    np.random.seed(4)
    expected = np.random.rand(3)
    np.random.seed(4)
    first = result(0, 7)
    assert np.array_equal(np.random.rand(3), expected)
    assert torch.equal(first, result(0, 7))
    for other in (result(0, 8), result(1, 7), result(0, 7, rank=1)):
        assert not torch.equal(first, other)

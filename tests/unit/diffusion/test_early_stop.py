import pytest
import torch

from didicm import DiffusionClassifier, Ensemble, Sampler, UserError, create_model
from didicm.diffusion import UniformProcess, sample_cp
from didicm.diffusion.sampling import sample_until_settled
from didicm.diffusion.solver import ExactScore
from tests.oracle.posteriors import all_kinds, total_variation


class Wavering:
    """Knows the truth at little noise, and errs the more at much noise the more certain an image is."""

    def encode(self, image):
        return image

    def score(self, features, label, total):
        noise = -torch.expm1(-total.double()).unsqueeze(-1)
        seen = (1 - noise**4) * features + noise**4 * features.flip(-1)
        return ExactScore().score(seen, label, total)


@pytest.mark.parametrize("select", ["argmin", "argmax", "sample"])
def test_an_image_that_settles_takes_one_long_step_to_the_end(select):
    process, images, grid = UniformProcess(10), all_kinds(10), torch.linspace(1, 0, 9, dtype=torch.float64)
    found = sample_until_settled(Wavering(), images, process, tolerance=0.02, select=select)
    assert len(found.calls.unique()) > 1  # else this would show little
    assert found.nfe == found.calls.max() <= 8
    for image, probs, calls in zip(images, found.probs, found.calls.tolist(), strict=True):
        # The same by other means: the steps until then, and the rest at once. Alone, for no image sees the others.
        short = torch.cat([grid[:calls], grid[-1:]])
        alone = sample_cp(Wavering(), image.unsqueeze(0), process, grid=short, select=select)
        assert torch.allclose(probs, alone.probs[0], atol=1e-12)


def test_exact_scores_settle_as_soon_as_two_have_agreed():
    truth = all_kinds(100)
    found = sample_until_settled(ExactScore(), truth, UniformProcess(100), tolerance=1e-3)
    assert total_variation(found.probs, truth).max() < 1e-5
    assert found.calls.tolist() == [3] * len(truth)


@pytest.mark.parametrize("solver", ["exact", "euler", "official"])
def test_without_agreement_every_step_is_taken(solver):
    process, images = UniformProcess(10), all_kinds(10)
    found = sample_until_settled(ExactScore(error=0.5), images, process, tolerance=1e-12, solver=solver)
    assert found.calls.tolist() == [8] * len(images)
    found = sample_until_settled(Wavering(), images, process, tolerance=1e-12, solver=solver)
    moving = found.calls == 8
    whole = sample_cp(Wavering(), images, process, solver=solver).probs
    assert torch.allclose(found.probs[moving], whole[moving], atol=1e-12)


def test_no_images_have_no_posteriors():
    found = sample_until_settled(ExactScore(), torch.zeros(0, 10), UniformProcess(10), tolerance=0.1)
    assert (found.probs.shape, found.calls.shape, found.nfe) == ((0, 10), (0,), 0)


def test_the_trajectory_has_every_image_at_every_step():
    steps = []
    found = sample_until_settled(
        Wavering(), all_kinds(10), UniformProcess(10), tolerance=0.02, callback=steps.append
    )
    assert len(steps) == found.nfe
    assert all(step.probs.shape == found.probs.shape for step in steps)
    assert torch.equal(steps[-1].probs, found.probs)


def test_it_is_a_setting_of_the_sampler():
    torch.manual_seed(0)
    model = create_model("didirn8", num_classes=4, in_chans=1, width=0.125)
    classifier, images = DiffusionClassifier(model).eval(), torch.randn(3, 1, 16, 16)
    found = classifier.posterior(images, tolerance=2)
    assert found.calls.tolist() == [3, 3, 3]
    assert classifier.posterior(images).calls is None
    both = Ensemble([classifier, DiffusionClassifier(model, sampler=Sampler(tolerance=2))]).posterior(images)
    assert both.nfe == 11
    assert both.calls.tolist() == [11, 11, 11]
    with pytest.raises(UserError, match="sampler cl has no tolerance"):
        Sampler().changed(method="cl", tolerance=0.1)
    with pytest.raises(UserError, match="tolerance must be at least 0"):
        Sampler(tolerance=-1)
    assert "tolerance" not in Sampler().identity()  # stored calibrations still hold
    assert Sampler(tolerance=0.1).identity()["tolerance"] == 0.1

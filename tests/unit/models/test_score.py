import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from didicm.diffusion import UniformProcess, readout, sample_cl, sample_cp
from didicm.models import ScoreModel
from didicm.models.score import Condition
from tests.oracle.posteriors import all_kinds, total_variation


class Ideal(ScoreModel):
    """A network with ideal outputs: the image is its posterior (B, K)."""

    def __init__(self, parameterization, num_classes):
        super().__init__()
        self.predict(parameterization, num_classes)

    def encode(self, image):
        return image

    def outputs(self, features, label, total):
        if self.parameterization == "posterior" or (label == -1).all():
            return features.log().clamp_min(-200) + 3.0  # logits are free up to a constant
        keep = torch.exp(-total.double())[:, None]
        q = keep * features + (1 - keep) / self.num_classes
        raw = (q / q.gather(-1, label[:, None])).log()
        return raw + 7.0 * torch.nn.functional.one_hot(
            label, self.num_classes
        )  # its own entry is not to be trusted


@pytest.mark.parametrize("parameterization", ["score", "posterior"])
@pytest.mark.parametrize("K", [2, 10, 1000])
def test_ideal_outputs_of_either_kind_give_the_true_posterior(parameterization, K):
    truth, process = all_kinds(K), UniformProcess(K)
    for sample in (sample_cp, lambda *a: sample_cl(*a, steps=1), readout, lambda *a: readout(*a, masked=True)):
        probs = sample(Ideal(parameterization, K), truth, process).probs
        assert total_variation(probs, truth).max() < 1e-5


@pytest.mark.parametrize("parameterization", ["score", "posterior"])
@given(label=st.integers(0, 4), total=st.floats(1e-5, 7))
def test_log_scores_are_float32_and_exactly_zero_at_the_label(parameterization, label, total):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        image = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]], dtype=dtype)
        log_score = Ideal(parameterization, 5)(image, torch.tensor([label]), torch.tensor([total])).to(expected)
        assert log_score.shape == (1, 5)
        assert log_score[0, label] == 0
        assert log_score.isfinite().all() or parameterization == "score"


def test_one_call_equals_many_steps_when_the_posterior_ignores_label_and_noise():
    class Indifferent(Ideal):
        def outputs(self, features, label, total):
            return features

    torch.manual_seed(0)
    model, logits, process = Indifferent("posterior", 10), 3 * torch.randn(6, 10), UniformProcess(10)
    once = readout(model, logits, process).probs
    assert torch.allclose(once, logits.softmax(-1), atol=1e-5)
    for steps in (1, 2, 8, 32):
        for score_time in ("start", "midpoint"):
            assert torch.allclose(
                sample_cp(model, logits, process, steps=steps, score_time=score_time).probs, once, atol=1e-4
            )


@pytest.mark.parametrize(
    ("parameterization", "num_classes", "says"), [("logits", 10, "score, posterior"), ("score", 1, "at least 2")]
)
def test_bad_settings_are_named(parameterization, num_classes, says):
    with pytest.raises(ValueError, match=says):
        Ideal(parameterization, num_classes)


def test_an_unknown_noise_embedding_is_named():
    with pytest.raises(ValueError, match="noise_embedding must be one of linear, log"):
        Condition(3, "cubic")


def test_a_logarithmic_noise_embedding_tells_little_noise_apart():
    torch.manual_seed(0)
    linear, log = Condition(3, "linear"), Condition(3, "log")
    log.load_state_dict(linear.state_dict())  # the same parameters
    label = torch.zeros(2, dtype=torch.long)
    for little in (1e-5, 1e-4, 1e-3):
        total = torch.tensor([little, 2 * little])
        moved = [
            (condition(label, total)[0] - condition(label, total)[1]).abs().max() for condition in (linear, log)
        ]
        assert moved[1] > 20 * moved[0]
    total = torch.tensor([0.0, 1e-7, 7.0, 90.0, 1e4])  # beyond what float32's exponential can hold
    assert log(torch.zeros(5, dtype=torch.long), total).isfinite().all()
    angle = 10 * torch.expm1(torch.tensor(0.3, dtype=torch.float64)).log() * log.wave.double()
    expected = log.noise(torch.cat([angle.cos(), angle.sin()]).float()) + log.label.weight[0]
    assert torch.allclose(log(label[:1], torch.tensor([0.3]))[0], expected, atol=1e-5)

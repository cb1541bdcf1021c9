import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from didicm.errors import UserError
from didicm.evaluation.calibration import apply_temperature, fit_temperature
from didicm.evaluation.metrics import nll
from tests.oracle.simulated import posteriors, simulate


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_finds_the_temperature_that_was_applied(temperature):
    probs, labels = simulate(20_000, 6, seed=0, temperature=temperature)
    fitted = fit_temperature(probs, labels)
    assert fitted.value == pytest.approx(1 / temperature, rel=0.03)
    assert fitted.warning is None


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_scipy(seed):
    probs, labels = simulate(200, 5, seed, temperature=0.3 + 0.4 * seed)
    fitted = fit_temperature(probs, labels)

    def cost(t):
        return nll(apply_temperature(probs, t), labels).mean().item()

    best = minimize_scalar(cost, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-8})
    assert fitted.value == pytest.approx(best.x, rel=1e-4)
    assert cost(fitted.value) == pytest.approx(best.fun, abs=1e-9)


@given(posteriors())
def test_no_other_temperature_is_better_even_with_zeros_and_ones(case):
    probs, labels = case
    fitted = fit_temperature(probs, labels)
    assert 0.05 <= fitted.value <= 20
    assert (fitted.warning is not None) == (fitted.value in (0.05, 20))

    def cost(temperature):
        return nll(apply_temperature(probs, temperature), labels).mean().item()

    least = cost(fitted.value)
    for other in (0.05, 0.3, 0.98 * fitted.value, 1.0, 1.02 * fitted.value, 4.0, 20.0):
        # Far from the clip; a probability that a low temperature pushes below it costs less than it should.
        if 0.05 <= other <= 20 and (found := cost(other)) < 10:
            assert least <= found + 1e-9


def test_bounds_are_told():
    sure = torch.tensor([[0.6, 0.4], [0.4, 0.6]])
    right, wrong = fit_temperature(sure, torch.tensor([0, 1])), fit_temperature(sure, torch.tensor([1, 0]))
    assert (right.value, wrong.value) == (0.05, 20.0)
    assert "0.05" in right.warning
    assert "sharper" in right.warning
    assert "flatter" in wrong.warning


@pytest.mark.parametrize("probs", [torch.full((k, k), 1 / k) for k in (3, 4, 7, 13)] + [torch.eye(3)])
def test_temperature_stays_where_none_is_better(probs):
    fitted = fit_temperature(probs, torch.arange(len(probs)))
    assert (fitted.value, fitted.warning) == (1.0, None)


@given(posteriors())
def test_temperature_one_is_the_identity(case):
    probs, _ = case
    torch.testing.assert_close(apply_temperature(probs, 1.0), probs, atol=1e-12, rtol=0)


@given(posteriors(), st.floats(0.05, 20))
def test_temperature_keeps_a_distribution_and_its_ranking(case, temperature):
    probs, _ = case
    scaled = apply_temperature(probs, temperature)
    torch.testing.assert_close(scaled.sum(-1), torch.ones(len(probs), dtype=torch.float64))
    below = probs.unsqueeze(1) < probs.unsqueeze(2)
    assert (scaled.unsqueeze(1) <= scaled.unsqueeze(2))[below].all()
    assert (scaled.argmax(-1) == probs.argmax(-1)).all()


def test_temperature_two_by_hand_in_its_own_precision():
    scaled = apply_temperature(torch.tensor([[0.64, 0.36]]), 2.0)
    torch.testing.assert_close(scaled, torch.tensor([[0.8 / 1.4, 0.6 / 1.4]]))
    assert scaled.dtype == torch.float32


def test_a_temperature_is_positive():
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="above 0"):
            apply_temperature(torch.eye(2), value)


@pytest.mark.parametrize("prior", [1.0, 10.0])
def test_a_prior_counts_as_images_that_confirm_the_posterior(prior):
    probs, labels = simulate(30, 5, 0, temperature=3.0)
    log_p = probs.log()

    def cost(t):
        log_q = (log_p / t).log_softmax(-1)
        seen = -log_q.gather(1, labels.unsqueeze(1)).mean()
        confirmed = -(probs * log_q).sum(-1).mean()
        return ((30 * seen + prior * confirmed) / (30 + prior)).item()

    best = minimize_scalar(cost, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-8})
    assert fit_temperature(probs, labels, prior).value == pytest.approx(best.x, rel=1e-4)
    # A few images that happen to be all right do not ask for certainty.
    lucky = fit_temperature(probs[:5], probs[:5].argmax(-1), 10.0)
    assert 0.5 < lucky.value < 1

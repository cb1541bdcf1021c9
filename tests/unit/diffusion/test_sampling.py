from itertools import pairwise

import pytest
import torch
from scipy.stats import chisquare

from didicm.diffusion import (
    Exponential,
    Geometric,
    LogLinear,
    LogRatio,
    UniformProcess,
    readout,
    sample_cl,
    sample_cp,
    sample_naive,
)
from didicm.diffusion.solver import ExactScore
from tests.oracle import matrices
from tests.oracle.posteriors import all_kinds, ambiguous, log_score, sigma, smoothed, total_variation

SPREAD = torch.tensor([0.35, 0.05, 0.25, 0.15, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("K", [2, 3, 10, 100, 1000])
@pytest.mark.parametrize("score_time", ["start", "midpoint"])
@pytest.mark.parametrize("steps", [1, 2, 4, 8, 64])
def test_exact_score_in_true_posterior_out(K, score_time, steps):
    truth = all_kinds(K)
    posterior = sample_cp(ExactScore(), truth, UniformProcess(K), steps=steps, score_time=score_time)
    assert total_variation(posterior.probs, truth).max() < 1e-5
    assert posterior.nfe == steps


@pytest.mark.parametrize("steps", [1, 8, 64])
def test_a_float32_network_is_enough(steps):
    truth = all_kinds(1000)
    posterior = sample_cp(ExactScore(torch.float32), truth.float(), UniformProcess(1000), steps=steps)
    assert posterior.probs.dtype == torch.float32
    assert total_variation(posterior.probs, truth).max() < 1e-5


@pytest.mark.parametrize("select", ["argmin", "argmax", "sample"])
@pytest.mark.parametrize(
    "schedule", [Exponential(-1.0, 0.01, 10), Geometric(), LogLinear(1e-4), LogRatio(10)], ids=str
)
def test_the_truth_does_not_depend_on_schedule_or_selection(select, schedule):
    truth = all_kinds(10)
    posterior = sample_cp(ExactScore(), truth, UniformProcess(10, schedule), steps=4, select=select)
    assert total_variation(posterior.probs, truth).max() < 1e-5


@pytest.mark.parametrize("K", [3, 100])
def test_euler_converges_at_first_order(K):
    truth, process = torch.stack([ambiguous(K), smoothed(K)]), UniformProcess(K, Geometric())
    errors = [
        total_variation(sample_cp(ExactScore(), truth, process, steps=n, solver="euler").probs, truth).mean()
        for n in (200, 400, 800)
    ]
    for coarse, fine in pairwise(errors):
        assert 1.8 < coarse / fine < 2.2


@pytest.mark.parametrize("steps", [1, 2, 8, 64])
def test_official_is_the_released_grid_and_clamp(steps):
    K = 7
    process, truth = UniformProcess(K), all_kinds(K)[2:]
    posterior = sample_cp(ExactScore(), truth, process, steps=steps, solver="official")
    for clean, probs in zip(truth, posterior.probs, strict=True):
        reference = matrices.released_cp(
            lambda label, t, clean=clean: log_score(process, clean, label, t).exp(),
            K,
            lambda t: sigma(process, t),
            steps,
        )
        assert (probs - reference).abs().max() < 1e-5


@pytest.mark.parametrize(("solver", "steps"), [("exact", 3), ("euler", 400)])
def test_naive_agrees_with_cp(solver, steps):
    truth, process = all_kinds(10) / 2 + 0.05, UniformProcess(10, Geometric())
    settings = {"solver": solver, "grid": torch.linspace(1, 0, steps + 1)}
    naive = sample_naive(ExactScore(), truth, process, chunk=17, **settings)
    cp = sample_cp(ExactScore(), truth, process, **settings)
    assert total_variation(naive.probs, cp.probs).max() < 1e-7
    assert (naive.nfe, cp.nfe) == (10 * steps, steps)


@pytest.mark.parametrize(("solver", "steps"), [("exact", 1), ("exact", 3), ("euler", 200)])
def test_cl_draws_from_the_posterior(solver, steps):
    truth, chains = torch.stack([ambiguous(5), SPREAD]), 2000
    process = UniformProcess(5, LogLinear(1e-2))
    posterior = sample_cl(
        ExactScore(), truth, process, steps=steps, chains=chains, solver=solver, average="one-hot", seed=1
    )
    for p, ends in zip(truth, posterior.probs, strict=True):
        possible = p * chains > 5
        seen, expected = ends[possible] * chains, p[possible] * chains
        assert seen.sum() > 0.98 * chains
        assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3
    assert posterior.nfe == steps * chains


def test_averaging_last_transitions_beats_averaging_their_draws():
    truth, process, settings = all_kinds(1000)[1:], UniformProcess(1000), {"steps": 2, "chains": 16}
    smooth = sample_cl(ExactScore(), truth, process, **settings)
    rough = sample_cl(ExactScore(), truth, process, average="one-hot", **settings)
    assert total_variation(smooth.probs, truth).mean() < total_variation(rough.probs, truth).mean() / 1.5


@pytest.mark.parametrize("time", [1e-3, 0.5, 1.0])
def test_one_call_reads_the_posterior(time):
    truth, trajectory = all_kinds(100), []
    posterior = readout(ExactScore(), truth, UniformProcess(100), time=time, callback=trajectory.append)
    assert total_variation(posterior.probs, truth).max() < 1e-5
    assert posterior.nfe == len(trajectory) == 1
    assert torch.equal(trajectory[0].probs, posterior.probs)


class LabelDependentScore(ExactScore):
    """A network as imperfect as real ones: what it says depends on the label it is asked about."""

    def score(self, features, label, total):
        return super().score((features + 0.02 * label.unsqueeze(-1) / len(features[0])).softmax(-1), label, total)


SAMPLERS = {
    "argmin": lambda x, p: sample_cp(LabelDependentScore(), x, p, steps=3),
    "sample": lambda x, p: sample_cp(LabelDependentScore(), x, p, steps=3, select="sample"),
    "cl": lambda x, p: sample_cl(LabelDependentScore(), x, p, steps=3, chains=4),
    "cl-chunked": lambda x, p: sample_cl(LabelDependentScore(), x, p, steps=3, chains=4, chunk=3),
    "naive": lambda x, p: sample_naive(LabelDependentScore(), x, p, steps=2),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_result_does_not_depend_on_the_batch(name):
    sample, process = SAMPLERS[name], UniformProcess(6)
    torch.manual_seed(0)
    image = torch.randn(5, 6, dtype=torch.float64)
    together = sample(image, process).probs
    alone = torch.cat([sample(x[None], process).probs for x in image])
    backwards = sample(image.flip(0), process).probs.flip(0)
    assert torch.allclose(together, alone, atol=1e-12)
    assert torch.allclose(together, backwards, atol=1e-12)


def test_the_seed_and_the_image_decide_the_draws():
    process, image = UniformProcess(6), torch.randn(2, 6, dtype=torch.float64)
    run = lambda seed: sample_cl(LabelDependentScore(), image, process, seed=seed).probs  # noqa: E731
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_chunks_bound_the_batch_and_change_nothing():
    class Counting(ExactScore):
        largest = 0

        def score(self, features, label, total):
            self.largest = max(self.largest, len(label))
            return super().score(features, label, total)

    model, image, process = Counting(), all_kinds(6), UniformProcess(6)
    chunked = sample_cl(model, image, process, chains=9, chunk=5)
    assert model.largest == 5
    assert torch.allclose(chunked.probs, sample_cl(ExactScore(), image, process, chains=9).probs, atol=1e-12)


def test_features_may_be_several_tensors():
    class TwoParts(ExactScore):
        def encode(self, image):
            return image / 2, image / 2

        def score(self, features, label, total):
            return super().score(features[0] + features[1], label, total)

    truth = all_kinds(6)
    posterior = sample_cl(TwoParts(), truth, UniformProcess(6), chains=3, chunk=5)
    assert torch.equal(posterior.probs, sample_cl(ExactScore(), truth, UniformProcess(6), chains=3).probs)


@pytest.mark.parametrize(
    "sample",
    [
        lambda m, x, p, c: sample_cp(m, x, p, steps=4, callback=c),
        lambda m, x, p, c: sample_cl(m, x, p, steps=4, callback=c),
        lambda m, x, p, c: sample_naive(m, x, p, steps=4, callback=c),
    ],
)
def test_a_callback_sees_the_trajectory(sample):
    truth, process, trajectory = all_kinds(5), UniformProcess(5), []
    posterior = sample(ExactScore(), truth, process, trajectory.append)
    assert [step.time for step in trajectory] == [0.75, 0.5, 0.25, 0]
    assert torch.equal(trajectory[-1].probs, posterior.probs)
    for step in trajectory:
        assert step.probs.shape == truth.shape
        assert len(step.label) == len(truth)
    distance = [total_variation(step.probs, truth).mean() for step in trajectory]
    assert distance == sorted(distance, reverse=True)


def test_exact_states_on_the_way_are_the_noisy_posteriors():
    truth, process, trajectory = all_kinds(10), UniformProcess(10), []
    sample_cp(ExactScore(), truth, process, steps=5, callback=trajectory.append)
    for step in trajectory:
        q = process.marginal(truth, torch.tensor(step.time, dtype=torch.float64))
        assert total_variation(step.probs, q).max() < 1e-6


def test_the_last_bit_does_not_choose_the_label():
    """A network may say 0 for most classes; rounding, which the batch can change, must not pick one."""
    asked = []

    class Sure(ExactScore):
        def score(self, features, label, total):
            asked.append(label)
            rounding = 1e-7 * torch.randn(len(label), 100)
            return super().score(features, label, total) + rounding

    for _ in range(5):
        sample_cp(Sure(), all_kinds(100)[:2], UniformProcess(100), steps=4)
    runs = torch.stack(asked).view(5, 4, 2)
    assert (runs == runs[0]).all()


@pytest.mark.parametrize("K", [2, 21_841])
def test_extreme_numbers_of_classes_and_a_batch_of_one(K):
    truth, process = all_kinds(K)[3:], UniformProcess(K, LogLinear(1e-5))
    cp = sample_cp(ExactScore(torch.float32), truth.float(), process, steps=2)
    cl = sample_cl(ExactScore(torch.float32), truth.float(), process, steps=1)
    for posterior in (cp, cl):  # a single CL step averages exact transitions: no sampling error is left
        assert posterior.probs.shape == (1, K)
        assert total_variation(posterior.probs, truth).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("solver", ["exact", "euler", "official"])
def test_half_precision_scores_with_large_values_give_float32_posteriors(dtype, solver):
    class Extreme(ExactScore):
        def score(self, features, label, total):
            column = torch.zeros(len(label), 50)
            column[:, 7], column[:, 30:] = 6e4, -6e4
            return column.to(dtype)

    for sample in (sample_cp, sample_cl):
        probs = sample(Extreme(), torch.zeros(2, 3), UniformProcess(50), steps=4, solver=solver).probs
        assert probs.dtype == torch.float32
        assert torch.allclose(probs.sum(-1), torch.ones(2))
        assert (probs.argmax(-1) == 7).all()


@pytest.mark.parametrize("sample", [sample_cp, sample_cl])
@pytest.mark.parametrize("solver", ["exact", "euler", "official"])
@pytest.mark.parametrize("error", [1.0, 30.0, 1000.0])
def test_any_finite_score_gives_a_distribution(sample, solver, error):
    torch.manual_seed(0)
    model, truth = ExactScore(torch.float32, error), all_kinds(30).float()
    for steps in (1, 2, 8):
        probs = sample(model, truth, UniformProcess(30), steps=steps, solver=solver).probs
        assert torch.allclose(probs.sum(-1), torch.ones(4))
        assert probs.min() >= 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sample", [sample_cp, sample_cl, sample_naive, readout])
def test_a_broken_network_is_an_error_that_says_so(bad, sample):
    class Broken(ExactScore):
        def score(self, features, label, total):
            column = super().score(features, label, total)
            column[0, 1] = bad
            return column

    with pytest.raises(FloatingPointError, match="network returned non-finite log-scores at t = "):
        sample(Broken(), all_kinds(5), UniformProcess(5))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 0, "solver": "official"}, "steps must be at least 1"),
        ({"select": "best"}, "select must be one of argmin, argmax, sample"),
        ({"solver": "heun"}, "solver must be one of exact, euler, official"),
        ({"score_time": "end"}, "score_time must be one of start, midpoint"),
        ({"grid": torch.tensor([1.0, 0.5])}, "grid must fall from 1 to 0"),
        ({"grid": torch.tensor([1.0, 0.5, 0.7, 0.0])}, "grid must fall from 1 to 0"),
        ({"grid": torch.linspace(1, 0, 3), "solver": "official"}, "brings its own grid"),
    ],
)
def test_bad_settings_are_named(settings, says):
    with pytest.raises(ValueError, match=says):
        sample_cp(ExactScore(), all_kinds(5), UniformProcess(5), **settings)


def test_model_and_process_must_agree_on_the_classes():
    with pytest.raises(ValueError, match="agree on the number of classes"):
        sample_cp(ExactScore(), all_kinds(5), UniformProcess(6))

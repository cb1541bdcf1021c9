"""What a study will take, against runs that were carried out."""

import pytest

from didicm.experiments.run import forecast, plan_runs
from didicm.experiments.study_file import make_study
from didicm.experiments.tune import trials_of


@pytest.fixture
def plan():
    def make(**changes):
        content = {
            "name": "small", "title": "t", "question": "q", "layout": "comparison", "data": "fashion-mini",
            "fractions": [0.5, 1.0], "resolutions": [7],
            "settings": {"image.channels": 1, "epochs": 2, "batch_size": 50},
            "methods": [{"name": "standard", "method": "standard"}, {"name": "DiDiCM"}],
            "samplers": {"CP": {"method": "cp", "steps": 8}, "CL": {"method": "cl", "steps": 2, "chains": 3}},
            **changes,
        }  # fmt: skip
        return plan_runs(make_study(content, "here"), None, 1, {})[0]

    return make


def test_arithmetic_follows_images_epochs_draws_and_calls(plan):
    runs = plan()
    needs = forecast(runs)
    found = {(str(run.method), run.condition.fraction): needs[key] for key, run in runs.items()}
    standard, diffusion = found["standard", 1.0], found["DiDiCM", 1.0]
    # 1,800 of the 2,000 training images are left beside those held out, in 36 whole batches; forward and backward.
    assert standard.training == 3 * standard.multiply_adds * 1800 * 2
    assert standard.measuring == standard.multiply_adds * (1000 + 200)
    assert found["standard", 0.5].training == standard.training / 2
    # 8 calls and 2 x 3, with the part that is computed once per image counted in both.
    per_call = (diffusion.measuring / 1200 - 2 * diffusion.multiply_adds) / -2
    assert diffusion.multiply_adds > 8 * per_call > 0
    assert diffusion.seconds(1.0) == pytest.approx(2 * (diffusion.training + diffusion.measuring) / 1e12)


def test_mixed_precision_halves_activations_and_several_devices_share_them(plan):
    def memory(**settings):
        large = {"image.channels": 1, "batch_size": 1000}  # so that weights hardly count
        runs = plan(fractions=[1.0], resolutions=[14], settings={**large, **settings})
        return [need.memory for need in forecast(runs).values()]

    whole, mixed = memory(), memory(**{"run.precision": "bf16-mixed"})
    shared = memory(**{"run.devices": 2})
    for one, half, two in zip(whole, mixed, shared, strict=True):
        assert one / 2 < half < 0.75 * one
        assert one / 2 < two < 0.75 * one


@pytest.mark.parametrize("first", [1, 4])
def test_trials_of_an_ensemble_train_one_member(plan, first):
    members = sorted([1, 4], reverse=first == 4)
    methods = [{"name": f"of {n}", "method": "standard", "members": n} for n in members]
    runs = plan(methods=methods, settings={"image.channels": 1, "epochs": 8, "batch_size": 50}, fractions=[0.5])
    trials = trials_of(runs, 1)
    costs = forecast({**runs, **trials})
    single = next(key for key, run in runs.items() if run.method.members == 1)
    assert [costs[key].training for key in trials] == [pytest.approx(costs[single].training)]


def test_trials_take_in_proportion_to_their_epochs_and_measure_nothing(plan):
    runs = plan(settings={"image.channels": 1, "epochs": 8, "batch_size": 50}, fractions=[0.5])
    trials = trials_of(runs, 4)
    costs = forecast({**runs, **trials})
    whole = {str(run.method): costs[key].training for key, run in runs.items()}
    for key, trial in trials.items():
        expected = whole[str(trial.method)] * trial.config.epochs / 8
        assert (costs[key].training, costs[key].measuring) == (pytest.approx(expected), 0)

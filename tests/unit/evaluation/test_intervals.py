import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from didicm.errors import UserError
from didicm.evaluation.intervals import _counts, bootstrap, seed_interval
from didicm.evaluation.metrics import Summary, evaluate_probs
from tests.oracle.simulated import posteriors, simulate


@settings(max_examples=50)
@given(posteriors(), st.integers(0, 2**31), st.booleans())
def test_counting_images_equals_repeating_them(case, seed, grouped):
    probs, labels = case
    group = torch.arange(len(probs)) * 2 // 3 if grouped else None  # one image, two, one, two
    weights = next(_counts(len(probs), 3, seed, group))
    counted = Summary.of(probs, labels).metrics(weights)
    for row, weight in enumerate(weights.long()):
        repeated = evaluate_probs(probs.repeat_interleave(weight, 0), labels.repeat_interleave(weight))
        assert {name: value[row].item() for name, value in counted.items()} == pytest.approx(repeated, abs=1e-9)


def test_every_resample_draws_as_many_images_as_there_are(monkeypatch):
    monkeypatch.setattr("didicm.evaluation.intervals.CHUNK", 70)
    parts = list(_counts(20, 10, seed=1))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert all((part.sum(1) == 20).all() for part in parts)


def test_the_images_of_a_group_count_as_one():
    probs, labels = simulate(100, 5, seed=0)
    apart = bootstrap(probs, labels, resamples=200)
    assert bootstrap(probs, labels, groups=np.arange(100), resamples=200) == apart
    group = np.repeat([f"patient {i:03}" for i in range(100)], 4)
    probs, labels = probs.repeat_interleave(4, 0), labels.repeat_interleave(4)
    together = bootstrap(probs, labels, groups=group, resamples=200)
    for name in ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE"):
        assert together[name] == pytest.approx(apart[name])
    narrow = bootstrap(probs, labels, resamples=200)["cls/NLL"]
    ratio = (apart["cls/NLL"][1] - apart["cls/NLL"][0]) / (narrow[1] - narrow[0])
    assert ratio == pytest.approx(2, abs=0.3)  # four copies of an image halve it, and say nothing new


def test_intervals_depend_on_the_seed_and_on_nothing_else():
    probs, labels = simulate(200, 5, seed=0)
    assert bootstrap(probs, labels, resamples=50) == bootstrap(probs, labels, resamples=50)
    assert bootstrap(probs, labels, resamples=50) != bootstrap(probs, labels, resamples=50, seed=1)


def test_intervals_hold_the_value_and_grow_with_the_level():
    probs, labels = simulate(400, 5, seed=2)
    value = evaluate_probs(probs, labels)
    wide, narrow = bootstrap(probs, labels, level=0.99), bootstrap(probs, labels, level=0.5)
    for name, (low, high) in wide.items():
        assert 0 <= low <= value[name] <= high
        assert low <= narrow[name][0] <= narrow[name][1] <= high


def test_no_interval_goes_below_zero():
    probs = torch.tensor([[0.5, 0.5]] * 10).double()  # right half of the time: a perfect ECE, and worse ones drawn
    low, high = bootstrap(probs, torch.tensor([0, 1] * 5))["cal/ECE"]
    assert low == 0 < high


def test_interval_of_the_accuracy_is_binomial():
    probs, labels = simulate(1000, 5, seed=3)
    low, high = bootstrap(probs, labels, resamples=3000)["cls/Acc"]
    accuracy = evaluate_probs(probs, labels)["cls/Acc"]
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 1000)
    assert low == pytest.approx(accuracy - half, abs=0.1 * half)
    assert high == pytest.approx(accuracy + half, abs=0.1 * half)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """For calibration errors the truth is what as many images measure on average (see `bootstrap`)."""
    repeats, setting = 200, {"classes": 20, "temperature": 0.8, "signal": 5.0}
    cases = [simulate(400, seed=seed, **setting) for seed in range(repeats)]
    truth = evaluate_probs(*simulate(100_000, seed=10**6, **setting))
    measured = [evaluate_probs(*case) for case in cases]
    truth |= {name: sum(m[name] for m in measured) / repeats for name in truth if name.startswith("cal/")}
    shares = dict.fromkeys(truth, 0.0)
    for seed, (probs, labels) in enumerate(cases):
        for name, (low, high) in bootstrap(probs, labels, resamples=200, level=0.9, seed=seed).items():
            shares[name] += (low <= truth[name] <= high) / repeats
    assert shares.pop("sc/Cov@1Risk") > 0.5  # hangs on the first few errors: too narrow for 400 images
    assert all(0.83 <= share <= 0.97 for share in shares.values()), shares


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40), st.floats(0.05, 0.999))
def test_seed_interval_is_students(values, level):
    mean, low, high = seed_interval(values, level)
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert (low, high) == pytest.approx((mean - half, mean + half), rel=1e-6, abs=1e-9)


def test_bad_requests_are_one_sentence():
    probs, labels = simulate(10, 3, seed=0)
    for call, message in (
        (lambda: seed_interval([1.0]), "at least 2 seeds"),
        (lambda: seed_interval([1.0, math.nan]), "finite"),
        (lambda: bootstrap(probs, labels, level=1.0), "level"),
        (lambda: bootstrap(probs, labels, resamples=0), "resamples"),
    ):
        with pytest.raises(UserError, match=message):
            call()

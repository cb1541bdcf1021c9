import math
from dataclasses import replace

import pytest

from didicm.experiments.results import Measurement
from didicm.experiments.spec import Condition, Method
from didicm.report.figures import calls_against_quality
from didicm.report.verdict import worth

HARD, EASY = Condition(16, 20), Condition(16, 200)
STANDARD = {"method": "standard"}
METHODS = (
    Method("standard", settings=STANDARD),
    Method("standard", "ensemble", settings=STANDARD, members=4),
    Method("DiDiCM"),
)
FALLING = {1: 1.2, 2: 1.0, 3: 0.9, 4: 0.86}


def test_worth_is_read_off_the_curve():
    for members, nll in FALLING.items():
        assert worth(nll, FALLING) == pytest.approx(members)
    assert worth(1.1, FALLING) == pytest.approx(1.5)
    assert worth(0.925, FALLING) == pytest.approx(2.75)
    assert worth(1.21, FALLING) == 0
    assert worth(0.85, FALLING) == math.inf


def test_a_lower_nll_is_never_worth_less_however_noisy_the_curve():
    noisy = {1: 1.2, 2: 1.0, 3: 1.1, 4: 1.0, 5: 0.9, 6: 0.95}
    worths = [worth(1.25 - i / 1000, noisy) for i in range(400)]
    assert worths == sorted(worths)
    assert worth(1.0, noisy) == pytest.approx(2)
    assert worth(0.95, noisy) == pytest.approx(4.5)


@pytest.fixture
def fought(result, rows, comparison):
    """An ensemble of four beside DiDiCM, whose main sampler has some NLL under each condition."""

    def fought(ours, seeds=(0, 1), scaled=True):
        results = []
        for condition, nll in ours.items():
            for seed in seeds:
                shift = 0.3 * seed  # what seeds share
                curve = {n: x + shift for n, x in FALLING.items()}
                results.append(result("standard", seed, 0.5, curve[1], condition))
                single = result("standard, ensemble", seed, 0.5, 1.0, condition)
                results.append(replace(single, measurements=tuple(_members(curve))))
            for seed in range(2):
                results.append(result("DiDiCM", seed, 0.5, nll + 0.3 * seed, condition, calls=8))
        if not scaled:
            results = [
                replace(r, measurements=tuple(replace(m, scaled_metrics=None) for m in r.measurements))
                for r in results
            ]
        return rows(results, comparison(*METHODS))

    return fought


def _members(curve):
    for n in sorted(curve, reverse=True):
        words = f"{n} members" if n > 1 else "1 member"
        metrics = {"cls/Acc": 0.5, "cls/NLL": curve[n]}
        raw = {"cls/Acc": 0.5, "cls/NLL": curve[n] + 0.1}
        file = "posteriors.safetensors" if n == max(curve) else None
        yield Measurement(words, "members", {"members": n}, n, 1000 * n, raw, 1.5, metrics, file)


def test_the_verdict_says_what_didicm_is_worth_under_each_condition(fought, says, comparison):
    told = says(fought({EASY: 1.1, HARD: 0.5}), comparison(*METHODS))
    easy, hard = (next(x for x in told if x.startswith(f"Under {condition}")) for condition in (EASY, HARD))
    assert "an ensemble has up to 4 members (standard, ensemble)" in easy
    assert "DiDiCM, 8 steps is worth an ensemble of 1.5; DiDiCM, 1 call is worth an ensemble of 1.5." in easy
    assert "DiDiCM, 8 steps is worth more than all of them" in hard
    worse = says(fought({EASY: 1.4}, scaled=False), comparison(*METHODS))
    assert "DiDiCM, 8 steps is worth less than one standard classifier" in " ".join(worse)
    # Eight times the training is no answer to "which of the two".
    assert "4 members" not in told[0]


def test_only_seeds_in_common_count(fought, says, comparison):
    """Without seed 1 of the ensemble, the mean of both seeds of DiDiCM would be worth less than one."""
    told = says(fought({EASY: 1.1}, seeds=(0,)), comparison(*METHODS))
    assert "DiDiCM, 8 steps is worth an ensemble of 1.5" in " ".join(told)
    assert "worth" not in " ".join(says(fought({EASY: 1.1}, seeds=()), comparison(*METHODS)))


def test_members_are_a_curve_of_the_figure_over_calls(fought):
    figure = calls_against_quality(fought({EASY: 1.1}), [EASY])
    _, nll = figure.axes
    drawn = {line.get_label(): line for line in nll.get_lines()}
    assert "standard" in drawn  # across
    (curve,) = (c for c in nll.containers if c.get_label() == "standard, ensemble")
    assert list(curve.lines[0].get_xdata()) == [1, 2, 3, 4]

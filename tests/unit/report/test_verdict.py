import math
import re
from dataclasses import replace

import pytest

from didicm.experiments.spec import Condition, Method


@pytest.fixture
def compared(result, rows):
    """Results with a little noise that both sides share; `ours` and `standard` are accuracies."""

    def compared(ours, standard, nll=(0.5, 0.5), seeds=4, more=()):
        noise = [0.01 * (seed % 3) for seed in range(seeds)]
        jitter = [0.002 * (-1) ** seed for seed in range(seeds)]
        results = [*more]
        for seed in range(seeds):
            results.append(result("standard", seed, standard + noise[seed], nll[1] + noise[seed]))
            accuracy = ours + noise[seed] + jitter[seed]
            results.append(result("DiDiCM, posterior", seed, accuracy, nll[0] + noise[seed], calls=8))
        return rows(results)

    return compared


def test_it_says_who_wins(compared, says):
    accuracy, posterior, cost = says(compared(0.80, 0.75, (0.4, 0.6)))
    assert accuracy.startswith(
        "DiDiCM is more accurate than the standard classifier: 80.8 % against 75.8 % (DiDiCM, "
    )
    assert "(DiDiCM, posterior, 8 steps; standard)" in accuracy
    assert posterior.startswith("As trained, DiDiCM's probabilities are better: NLL 0.5")
    assert "With a temperature for both, they are better: NLL 0.4" in posterior
    assert cost.startswith("The 8 network calls of DiDiCM cost 8.0 times")
    assert "a single call, at 1.0 times, has NLL 0.508 as trained, 0.408 with a temperature" in cost


def test_it_says_when_the_standard_classifier_wins_and_puts_its_number_first(compared, says):
    accuracy, posterior, _ = says(compared(0.70, 0.75, (0.7, 0.6)))
    assert accuracy.startswith(
        "The standard classifier is more accurate than DiDiCM: 75.8 % against 70.8 % (standard;"
    )
    assert "a difference of +5.0 points (95 % interval +4.6 to +5.4, 4 seeds)" in accuracy
    assert posterior.startswith("As trained, DiDiCM's probabilities are worse")


def test_it_says_when_the_difference_is_noise(compared, says):
    accuracy, posterior, _ = says(compared(0.7505, 0.75, (0.5, 0.5)))
    assert "cannot be told apart" in accuracy
    assert "4 seeds" in accuracy
    assert "neither better nor worse beyond noise" in posterior


def test_a_difference_that_no_digit_shows_is_none(compared, says):
    assert "probabilities are neither better nor worse" in says(compared(0.75, 0.75, (0.5002, 0.5)))[1]
    assert "probabilities are worse" in says(compared(0.75, 0.75, (0.502, 0.5)))[1]


def test_few_seeds_are_told_and_one_claims_nothing(compared, says):
    told = says(compared(0.9, 0.5, seeds=1))
    assert "cannot be told apart" in told[0]
    assert "says little" in told[0]
    assert told[-1].startswith("A single seed: there are no intervals")
    assert says(compared(0.9, 0.5, seeds=2))[-1].startswith("Few seeds: with 2, the intervals are wide")
    assert not [
        sentence for sentence in says(compared(0.9, 0.5, seeds=3)) if "seed:" in sentence or "Few" in sentence
    ]


def test_few_test_images_and_those_that_cannot_be_read_are_told(result, rows, says):
    def told(**changes):
        runs = [
            result(name, seed, 0.8, 0.5, **changes)
            for name in ("standard", "DiDiCM, posterior")
            for seed in (0, 1, 2)
        ]
        return [sentence for sentence in says(rows(runs)) if sentence.startswith(("Few test images", "Left out"))]

    assert told() == []
    assert told(num_test=12) == [
        "Few test images: the intervals are over seeds, and say nothing of others than these 12."
    ]
    assert told(unreadable=2) == ["Left out, because they cannot be read: 2 images; didicm doctor names them."]


def test_training_that_had_not_ended_is_told(result, rows, says):
    results = [
        result(method, seed, 0.5, 1.0, calls=calls, final_epochs_gain=gain)
        for seed in range(3)
        for method, calls, gain in (("standard", 1, 0.01), ("DiDiCM, score", 8, 0.12))
    ]
    last = says(rows(results))[-1]
    assert last.startswith("Still learning when training ended: DiDiCM, score (12 %)")
    assert "standard" not in last


def test_trainings_too_short_to_compare_are_told(result, rows, says):
    """At 12 epochs the learning rate has come down, and so little is lost in the last of them."""
    nll = {"standard": 0.6 * math.log(10), "DiDiCM, score": 0.92 * math.log(10)}
    runs = [result(name, seed, 0.2, x) for seed in range(3) for name, x in nll.items()]

    def hardly(runs):
        return [sentence for sentence in says(rows(runs)) if sentence.startswith("Hardly learnt")]

    (told,) = hardly(runs)
    assert "DiDiCM, score (92 %)" in told
    assert "standard" not in told
    # Overconfident, and right once it is scaled
    sure = [replace(m, metrics={**m.metrics, "cls/NLL": 5.0}) for m in runs[0].measurements]
    assert hardly([replace(runs[0], measurements=tuple(sure))]) == []


def test_answers_that_cost_more_are_no_opponents(result, rows, says):
    def told(calls):
        runs = [result("standard", seed, 0.5 + 0.01 * seed, 1.0) for seed in range(3)]
        runs += [result("standard, snapshots", seed, 0.9 + 0.01 * seed, 0.5, calls=4) for seed in range(3)]
        runs += [result("DiDiCM, score", seed, 0.7 + 0.01 * seed, 0.8, calls=calls) for seed in range(3)]
        runs = [replace(r, measurements=r.measurements[:1]) for r in runs]
        return says(rows(runs))[0]

    assert told(calls=1).startswith("DiDiCM is more accurate than the standard classifier")
    assert told(calls=8).startswith("The standard classifier is more accurate than DiDiCM: 91.0 %")


@pytest.mark.parametrize("K", [2, 3, 10])
def test_trainings_that_learnt_nothing_are_told(result, rows, says, K):
    """A flat posterior that is often right is none of them."""

    def measured(method, seed, accuracy, nll, entropy):
        run = result(method, seed, accuracy, nll, num_classes=K)
        metrics = {**run.measurements[0].metrics, "cls/NLL": nll, "cls/Entropy": entropy}
        return replace(run, measurements=tuple(replace(m, metrics=metrics) for m in run.measurements))

    chance, uniform = 1 / K, math.log(K)
    better = chance + 0.2 * (1 - chance)
    results = [measured("standard", 0, better, 0.97 * uniform, 0.995 * uniform)]
    results += [measured("standard", 1, better, 0.9999 * uniform, uniform)]  # by a hair, but right
    results += [measured("standard", 2, chance, 1.1 * uniform, 0.5 * uniform)]  # wrong, and sure of it
    assert not any("Never left" in sentence for sentence in says(rows(results)))
    found = [(better, 0.9 * uniform), (chance + 0.01, 0.9999 * uniform), (chance - 0.01, 1.001 * uniform)]
    results += [measured("DiDiCM, score", seed, *one, 0.995 * uniform) for seed, one in enumerate(found)]
    assert "Never left the uniform answer: DiDiCM, score, 1 call (2 of 3 trainings)." in says(rows(results))


def test_so_are_those_that_answer_in_one_call_but_not_in_steps(result, rows, says):
    lost = result("DiDiCM, score", 0, 0.7, 1.0, calls=8)
    steps, single = lost.measurements
    steps = replace(steps, metrics={**steps.metrics, "cls/Acc": 0.1, "cls/NLL": 2.3026, "cls/Entropy": 2.3026})
    single = replace(single, metrics={**single.metrics, "cls/Entropy": 1.0})
    runs = [result("standard", 0, 0.6, 1.0), replace(lost, measurements=(single, steps))]
    assert "Never left the uniform answer: DiDiCM, score, 8 steps (1 of 1 trainings)." in says(rows(runs))


def test_it_is_against_the_better_standard_classifier(compared, result, says):
    better = [result("standard, smoothed labels", seed, 0.9 + 0.01 * (seed % 3), 0.5) for seed in range(4)]
    told = says(compared(0.80, 0.75, more=better))
    assert told[0].startswith("The standard classifier is more accurate")
    assert "(standard, smoothed labels; DiDiCM, posterior, 8 steps)" in told[0]


def test_variants_and_views_have_sentences_of_their_own_each_against_the_best_of_its_kind(
    result, rows, comparison, says
):
    names = ("standard", "standard, smoothed labels", "DiDiCM", "DiDiCM, half masked")
    study = comparison(
        *(
            Method(*name.split(", "), settings={"method": "standard"} if "standard" in name else {})
            for name in names
        )
    )

    def seen(run, gain):
        """The run, and beside its main answer one from eight views of an image."""
        first = run.measurements[0]
        metrics = {**first.metrics, "cls/Acc": first.metrics["cls/Acc"] + gain}
        more = replace(first, sampler="8 views", settings={"views": 8}, multiply_adds=8000, metrics=metrics)
        return replace(
            run, measurements=(*run.measurements, more), train_multiply_adds=300 if "DiDi" in run.method else 100
        )

    accuracies = dict(zip(names, (0.5, 0.6, 0.7, 0.4), strict=True))
    results = [
        seen(result(name, seed, accuracy + 0.01 * seed, 1.0 - accuracy, calls=8 if "DiDi" in name else 1), 0.1)
        for seed in range(3)
        for name, accuracy in accuracies.items()
    ]
    told = says(rows(results, study), study)
    assert told[0].startswith("DiDiCM is more accurate than the standard classifier: 71.0 % against 61.0 %")
    assert "(DiDiCM, 8 steps; standard, smoothed labels)" in told[0]
    assert told[2].startswith(
        "The 8 network calls of DiDiCM cost 8.0 times the multiply-adds of standard, smoothed"
    )
    assert "its training 3.0 times" in told[2]
    assert told[3].startswith("DiDiCM, half masked: The standard classifier is more accurate than DiDiCM: 61.0 %")
    assert told[4].startswith("With several augmented views of each image, DiDiCM: DiDiCM is more accurate")
    assert "81.0 % against 71.0 % (DiDiCM, 8 views; standard, smoothed labels, 8 views)" in told[4]
    assert "cost 1.0 times the multiply-adds of standard, smoothed labels, 8 views" in told[4]
    assert told[5].startswith("With several augmented views of each image, DiDiCM, half masked: The standard")


def test_conditions_are_no_seeds(result, rows, says):
    """One seed under many conditions has no interval, and how conditions differ does not widen that over seeds."""
    gains = {Condition(7, 0.1): -0.001, Condition(14, 0.1): 0.006, Condition(28, 0.1): 0.058}

    def results(seeds):
        return rows(
            result(method, seed, 0.5 + 0.001 * seed + gain, 1.0, condition, calls=calls)
            for seed in range(seeds)
            for condition in gains
            for method, gain, calls in (("standard", 0.0, 1), ("DiDiCM, score", gains[condition], 2))
        )

    assert "from a single run each" in says(results(1))[0]
    told = says(results(4))[0]
    assert told.startswith("DiDiCM is more accurate")
    assert "+2.1 points (95 % interval +2.1 to +2.1, 4 seeds)" in told


@pytest.mark.parametrize(
    ("left_out", "conditions", "seeds", "means"),
    [
        ({("hard", 3)}, 2, 3, "77.0 % against 75.5 %"),  # a seed that lacks a condition
        ({("hard", 1), ("hard", 2), ("hard", 3)}, 1, 4, "89.0 % against 88.0 %"),  # a condition just begun
    ],
)
def test_means_and_their_difference_are_of_the_same_runs(result, rows, says, left_out, conditions, seeds, means):
    places = {"easy": (Condition(28, 1.0), 0.88, 0.89), "hard": (Condition(7, 0.1), 0.63, 0.65)}
    told = says(
        rows(
            result(method, seed, accuracy, 1.0, condition, calls=calls)
            for seed in range(4)
            for name, (condition, theirs, ours) in places.items()
            for method, accuracy, calls in (("standard", theirs, 1), ("DiDiCM, score", ours, 2))
            if method == "standard" or (name, seed) not in left_out
        )
    )[0]
    assert f"{means}{' on average over 2 conditions' if conditions == 2 else ''} (" in told
    before, after = (float(number) for number in re.findall(r"([\d.]+) %", means))
    assert f"a difference of {before - after:+.1f} points" in told
    assert f"{seeds} seeds" in told


def test_only_what_both_sides_were_run_in_is_compared(result, rows, says):
    easy, hard = Condition(28, 1.0), Condition(7, 0.1)
    results = [
        result(method, seed, accuracy, 1.0, condition, calls=2 if method == "DiDiCM, score" else 1)
        for seed in range(2)
        for method, condition, accuracy in (
            ("standard", easy, 0.88),
            ("standard", hard, 0.64),
            ("standard, smoothed labels", easy, 0.895),
            ("DiDiCM, score", easy, 0.90),
            ("DiDiCM, score", hard, 0.66),
        )
    ]
    assert "78.0 % against 76.0 %" in says(rows(results))[0]
    apart = [result("standard", 0, 0.5, 1.0, easy), result("DiDiCM, score", 0, 0.5, 1.0, hard, calls=2)]
    assert says(rows(apart))[0].startswith("There is nothing to compare")


def test_a_variant_is_compared_even_if_the_first_cannot_be(result, rows, says):
    easy, hard = Condition(28, 1.0), Condition(7, 0.1)
    results = [result("DiDiCM, score", 0, 0.5, 1.0, easy, calls=2)]
    results += [result(method, 0, 0.5, 1.0, hard) for method in ("standard", "DiDiCM, posterior")]
    assert says(rows(results))[0].startswith("DiDiCM, posterior: In accuracy, DiDiCM and the standard classifier")


def test_a_method_whose_main_answer_is_of_several_views_is_told_with_those(result, rows, says):
    run = result("DiDiCM, score", 0, 0.6, 1.0, calls=8)
    first, single = run.measurements
    seen = replace(first, sampler="8 views", settings={**first.settings, "views": 8})
    results = [
        result("standard", 0, 0.5, 1.0),
        replace(run, measurements=(seen, single)),
        result("DiDiCM, posterior", 0, 0.7, 1.0),
    ]
    told = says(rows(results))
    assert "(DiDiCM, score, 1 call; standard)" in told[0]
    assert told[3].startswith("DiDiCM, posterior: ")
    assert not told[4].startswith("DiDiCM, posterior: ")


def test_without_a_baseline_there_is_nothing_to_compare(result, rows, says):
    for method in ("standard", "DiDiCM, score"):
        assert says(rows([result(method, 0, 0.5, 1.0)]))[0].startswith("There is nothing to compare")

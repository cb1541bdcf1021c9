import pytest

from didicm.experiments import Setting, cost_table, difference_table, main_table, rows_of, verdict
from tests.unit.study.making import record


def rows(ours, standard, nll=(0.5, 0.5), seeds=4):
    """Results with a little noise that both sides share; `ours` and `standard` are accuracies."""
    noise = [0.01 * (seed % 3) for seed in range(seeds)]
    jitter = [0.002 * (-1) ** seed for seed in range(seeds)]
    results = []
    for seed in range(seeds):
        results.append(record("standard", seed, standard + noise[seed], nll[1] + noise[seed]))
        results.append(
            record("didicm-posterior", seed, ours + noise[seed] + jitter[seed], nll[0] + noise[seed], calls=8)
        )
    return rows_of(results)


def test_the_verdict_says_who_wins():
    says = verdict(rows(0.80, 0.75, (0.4, 0.6)))
    assert says[0].startswith("DiDiCM is more accurate")
    assert "81.0 % against 75.8 %" not in says[0]  # means are of the stored values, not typed in
    assert says[1].startswith("As trained, DiDiCM's probabilities are better: NLL 0.5")
    assert "with a temperature for both they are better: NLL 0.4" in says[1]
    assert "8 network calls cost 8.0 times" in says[1]
    assert len(says) == 2


def test_the_verdict_says_when_the_standard_classifier_wins():
    says = verdict(rows(0.70, 0.75, (0.7, 0.6)))
    assert says[0].startswith("The standard classifier is more accurate")
    assert says[1].startswith("As trained, DiDiCM's probabilities are worse")


def test_the_verdict_says_when_the_difference_is_noise():
    says = verdict(rows(0.7505, 0.75, (0.5, 0.5)))
    assert "cannot be told apart" in says[0]
    assert "within noise" in says[1]
    assert "4 seeds" in says[0]


def test_a_single_run_claims_nothing():
    says = verdict(rows(0.9, 0.5, seeds=1))
    assert "cannot be told apart" in says[0]
    assert "says little" in says[0]


def test_the_verdict_is_against_the_better_standard_classifier():
    results = rows(0.80, 0.75)
    better = rows_of([record("standard-smooth", seed, 0.9 + 0.01 * (seed % 3), 0.5) for seed in range(4)])
    assert verdict([*results, *better])[0].startswith("The standard classifier is more accurate")


def test_settings_are_no_seeds():
    """One seed in many settings has no interval, and how settings differ does not widen that over seeds."""
    settings = [Setting(7, 0.1), Setting(14, 0.1), Setting(28, 0.1)]
    gains = {settings[0]: -0.001, settings[1]: 0.006, settings[2]: 0.058}

    def results(seeds):
        return rows_of(
            record(method, seed, 0.5 + 0.001 * seed + gain, 1.0, setting, calls=calls)
            for seed in range(seeds)
            for setting in settings
            for method, gain, calls in (("standard", 0.0, 1), ("didicm-score", gains[setting], 2))
        )

    assert "from a single run each" in verdict(results(1))[0]
    assert verdict(results(4))[0].startswith("DiDiCM is more accurate")
    assert "+2.1 points (95 % interval +2.1 to +2.1, 4 seeds)" in verdict(results(4))[0]


def test_only_what_both_sides_were_run_in_is_compared():
    easy, hard = Setting(28, 1.0), Setting(7, 0.1)
    results = [
        record(method, seed, accuracy, 1.0, setting, calls=2 if method == "didicm-score" else 1)
        for seed in range(2)
        for method, setting, accuracy in (
            ("standard", easy, 0.88),
            ("standard", hard, 0.64),
            ("standard-smooth", easy, 0.895),
            ("didicm-score", easy, 0.90),
            ("didicm-score", hard, 0.66),
        )
    ]
    assert "78.0 % against 76.0 %" in verdict(rows_of(results))[0]
    apart = [record("standard", 0, 0.5, 1.0, easy), record("didicm-score", 0, 0.5, 1.0, hard, calls=2)]
    assert verdict(rows_of(apart))[0].startswith("There is nothing to compare")


def test_without_an_opponent_there_is_no_verdict():
    assert verdict(rows_of([record("standard", 0, 0.5, 1.0)]))[0].startswith("There is nothing to compare")


def test_differences_are_paired_by_seed():
    # Seeds differ by tens of points, the methods by exactly one: only pairing can see it.
    results = []
    for seed, level in enumerate((0.3, 0.5, 0.9)):
        results += [record("standard", seed, level, 1.0), record("didicm-score", seed, level + 0.01, 1.0, calls=8)]
    table = difference_table(rows_of(results))
    assert table.rows[1][0].strip() == "DiDiCM score, 8 steps \N{MINUS SIGN} standard"
    assert table.rows[1][1] == "+1.0 ± 0.0 *"
    assert "±" in main_table(rows_of(results)).rows[1][1]


def test_settings_go_from_telling_to_hardly_telling():
    settings = [Setting(7, 1.0), Setting(28, 0.5), Setting(28, 1.0), Setting(28, 1.0, "noise:3")]
    table = main_table(rows_of([record("standard", 0, 0.5, 1.0, s) for s in settings]))
    shown = [table.rows[i][0] for i in table.groups]
    assert shown == [str(settings[i]) for i in (2, 3, 1, 0)]


@pytest.mark.parametrize("make", [main_table, difference_table, cost_table])
def test_tables_fit_a_narrow_screen(make):
    table = make(rows(0.8, 0.75))
    wide, narrow = table.to_rich(1000), table.to_rich(80)
    assert len(wide.columns) == len(table.header)
    assert len(narrow.columns) <= len(wide.columns)
    assert narrow.columns[1].header == "top-1 %"

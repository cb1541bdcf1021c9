"""What a report says of a search: from trials that nobody had to train for."""

from dataclasses import replace

import pytest

from didicm.experiments.results import Trial, append_result, read_plan, write_plan
from didicm.experiments.spec import Condition
from didicm.report import html
from didicm.report.figures import length_curves
from didicm.report.html import read_search, write_report
from didicm.report.tables import search_table
from didicm.report.verdict import on_search, verdict

EASY, HARD = Condition(14, 0.05), Condition(7, 0.05)
# Held-out NLL by condition and method; trials are (epochs, NLL).
TRIED = {
    (EASY, "standard"): [(30, 1.5), (15, 1.3), (60, None), (8, 1.6), (15, 1.2)],
    (EASY, "DiDiCM, score"): [(30, 1.4), (15, 1.9), (60, 1.1), (8, 2.0), (15, 1.8)],
    (HARD, "standard"): [(30, 2.5), (15, 2.3), (60, 2.9), (8, 2.1), (15, 2.2)],
    (HARD, "DiDiCM, score"): [(30, 2.4), (15, 2.5), (60, 2.4), (8, 2.6), (15, 2.7)],
}


@pytest.fixture
def study(comparison):
    whole = comparison(conditions=(EASY, HARD), tune=5, seeds=2)
    return replace(whole, methods=tuple(m for m in whole.methods if str(m) in ("standard", "DiDiCM, score")))


@pytest.fixture
def trials():
    made = []
    for (condition, method), tried in TRIED.items():
        for number, (epochs, nll) in enumerate(tried):
            settings = {"epochs": epochs, "optimizer.lr": 0.005 * (1 + number), "optimizer.weight_decay": 0.05}
            metrics = None if nll is None else {"cls/NLL": nll, "cls/Acc": 0.5}
            key = f"{method}-{condition}-{number}"
            made.append(Trial(key, method, condition, number, settings, 90, 10, 1.0, metrics, {}))
    return sorted(made, key=lambda trial: (trial.method != "standard", trial.number))


def test_the_table_has_every_trial_and_the_chosen_one_of_each_method(trials):
    table = search_table(trials, [EASY, HARD])
    assert [table.rows[i][0] for i in table.groups] == [str(EASY), str(HARD)]
    chosen = [[cell.strip() for cell in row] for row in table.rows if row[-1] == "chosen"]
    assert [row[:5] for row in chosen] == [
        ["standard, trial 4", "15", "0.025", "0.05", "1.200"],
        ["DiDiCM, score, trial 2", "60", "0.015", "0.05", "1.100"],
        ["standard, trial 3", "8", "0.02", "0.05", "2.100"],
        ["DiDiCM, score, trial 0", "30", "0.005", "0.05", "2.400"],  # of equals the first
    ]
    assert len(table.rows) == 20 + 2
    assert sum(row[4] == "diverged" for row in table.rows) == 1
    assert "no trial has met a test image" in table.note


def test_the_curve_has_the_best_trial_of_each_length_with_the_peak_in_a_ring(study, trials):
    figure = length_curves(study, trials, [EASY, HARD])
    easy, hard = figure.axes
    assert [plot.get_title() for plot in (easy, hard)] == [str(EASY), str(HARD)]
    lines = {line.get_label(): line.get_xydata().tolist() for line in easy.lines}
    assert lines["standard"] == [[8, 1.6], [15, 1.2], [30, 1.5]]  # the trial that diverged has no place
    assert lines["DiDiCM, score"] == [[8, 2.0], [15, 1.8], [30, 1.4], [60, 1.1]]
    rings = [line.get_xydata().tolist() for line in hard.lines if line.get_markerfacecolor() == "none"]
    assert rings == [[[8, 2.1]], [[30, 2.4]]]
    figure.draw_without_rendering()


def test_it_says_what_trials_differ_in_and_whose_best_lay_at_the_end_of_what_was_tried(study, trials):
    how, chance, longest, shortest, highest = on_search(study, trials)
    assert "as few as 10 held-out images" in chance
    assert "--holdouts 5" in chance
    assert chance not in on_search(study, [replace(trial, num_held_out=500) for trial in trials])
    assert "the best of up to 5 trials under each condition" in how
    assert "each condition (0.27 to 2 times its epochs, 1 to 5 times its learning rate), by the NLL" in how
    assert longest.endswith(f"so more may be better: DiDiCM, score ({EASY}, 60).")
    assert shortest.endswith(f"so less may be better: standard ({HARD}, 8).")
    assert highest.startswith("Best at the highest learning rate that was tried")
    assert f"standard ({EASY}, 0.025)" in highest
    assert f"DiDiCM, score ({HARD}" not in highest  # whose best has the usual rate


def test_it_says_where_methods_differ_in_length_by_chance(study, trials):
    """The standard classifier kept 30 epochs and DiDiCM 60, which both tried; only one of them can tell."""

    def tried(method, means):
        for number, (epochs, mean) in enumerate(means):
            losses = tuple(mean + 0.1 * (-1) ** (k >> number) for k in range(16))
            settings = {**trials[0].settings, "optimizer.lr": 0.005, "epochs": epochs}
            yield replace(trials[0], method=method, number=number, settings=settings, losses=losses,
                          metrics={"cls/NLL": mean}, key=f"{method}-{number}")  # fmt: skip

    ours = [*tried("DiDiCM, score", [(30, 2.0), (60, 1.5)])]
    (told,) = [
        x for x in on_search(study, [*tried("standard", [(30, 1.50), (60, 1.501)]), *ours]) if "length wh" in x
    ]
    assert told.endswith(f"may be those of length: standard ({EASY}, 30 not told from 60).")
    clear = on_search(study, [*tried("standard", [(30, 1.5), (60, 1.6)]), *ours])
    same = on_search(study, [*tried("standard", [(30, 1.501), (60, 1.5)]), *ours])
    older = [replace(trial, losses=None) for trial in (*tried("standard", [(30, 1.50), (60, 1.501)]), *ours)]
    assert not [x for x in (*clear, *same, *on_search(study, older)) if "length wh" in x]


def test_a_search_of_one_trial_or_without_weight_decay_is_told_too(study, trials):
    (only,) = on_search(replace(study, tune=1), [trial for trial in trials if trial.number == 0])
    assert only.endswith(
        "has the best of up to 1 trial under each condition, by the NLL of held-out training images."
    )
    none = [replace(trial, settings={**trial.settings, "optimizer.weight_decay": 0.0}) for trial in trials]
    assert on_search(study, none) == on_search(study, trials)


def test_draws_of_held_out_images_are_one_line_of_the_table_and_one_point_of_the_curve(study, trials):
    def moved(trial, repeat):
        metrics = trial.metrics and {**trial.metrics, "cls/NLL": trial.nll + repeat - 1}
        return replace(trial, repeat=repeat, key=f"{trial.key}-{repeat}", metrics=metrics)

    drawn = [moved(trial, repeat) for trial in trials for repeat in (1, 2, 3)]
    once, thrice = (search_table(found, [EASY, HARD]) for found in (trials, drawn))
    assert len(once.rows) == len(thrice.rows)
    assert [row[-1] for row in once.rows] == [row[-1] for row in thrice.rows]  # the same is chosen
    assert f"({trials[0].num_held_out} images)" in once.note
    assert f"(3 draws of {trials[0].num_held_out} images)" in thrice.note
    line = length_curves(study, drawn, [EASY, HARD]).axes[0].lines[0]
    assert line.get_xydata().tolist() == [[8, 2.6], [15, 2.2], [30, 2.5]]
    how, cost, *_ = on_search(replace(study, holdouts=3), drawn)
    assert how.endswith("by the NLL of held-out training images, drawn 3 times.")
    assert "would have been 0.000" in cost  # draws differ, but not in what is best


def test_a_chosen_length_takes_the_place_of_the_caution_on_the_training_loss(study, trials, result, rows):
    runs = [
        result(str(m), seed, 0.5, 1.0, c, final_epochs_gain=0.2)
        for m in study.methods
        for c in (EASY, HARD)
        for seed in (0, 1, 2)
    ]
    assert any("Still learning" in sentence for sentence in verdict(study, rows(runs, study)))
    assert not any("Still learning" in sentence for sentence in verdict(study, rows(runs, study), trials))


def test_the_report_has_table_curve_and_sentences_under_the_names_of_today(
    tmp_path, study, trials, store, monkeypatch, unrendered
):
    monkeypatch.setattr(html, "_draw_posteriors", lambda *_: [])  # the same in every report, and slow
    store(tmp_path, study)
    plan = read_plan(tmp_path)
    for trial in reversed(trials):  # the order in which they finished says nothing
        append_result(tmp_path, replace(trial, method="its name when it was tried"))
    assert read_search(plan, tmp_path) == []
    assert "Over training length" not in write_report(tmp_path).path.read_text()
    write_plan(tmp_path, replace(plan, runs={**plan.runs, **{trial.key: trial.method for trial in trials}}))
    found = read_search(read_plan(tmp_path), tmp_path)
    assert [(trial.method, trial.number) for trial in found] == [(trial.method, trial.number) for trial in trials]
    assert {trial.key: trial for trial in found} == {trial.key: trial for trial in trials}
    report = write_report(tmp_path)
    page = report.path.read_text()
    assert (report.tables[-1].title, report.tables[-1].groups) == ("Search", [0, 11])
    assert (tmp_path / "figures" / "lengths.svg").is_file()
    for words in ("Over training length", "Search", "are chosen from 5 trials", "the longest training"):
        assert words in page

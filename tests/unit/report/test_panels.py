from dataclasses import replace

import pytest

from didicm.experiments.spec import Condition, published_tables
from didicm.experiments.study_file import make_study
from didicm.report.panels import column_name, our_panel, published_panel
from didicm.report.records import TOP1, TOP5, Rows, rows_of
from didicm.report.tables import panel_table

UNCERTAINTY = {
    "name": "mine",
    "title": "Ours",
    "question": "Why?",
    "layout": "uncertainty",
    "methods": [{"name": "standard", "method": "standard"}, {"name": "DiDiCM-CP"}],
}


@pytest.fixture
def study():
    return lambda **changes: make_study({**UNCERTAINTY, **changes}, "here")


def test_published_numbers_agree_with_each_other_and_with_the_papers_text():
    """The same networks appear in several tables; a slip in copying one would show."""
    panels = {name: published_panel(name) for name in published_tables()}
    lines = {name: {line.name: line for line in panel.lines} for name, panel in panels.items()}
    main, nfe, selection = lines["tab:main_results"], lines["tab:nfe"], lines["tab:selection"]
    sizes = lines["tab:all_resnet"]
    for metric in (TOP1, TOP5):
        assert selection["argmin"].values[metric] == main["DiDiCM-CP, Strong Aug"].values[metric]
        assert nfe["standard"].values[metric] == main["standard, Strong Aug"].values[metric]
        assert sizes["standard"].values[metric][2] == main["standard, Strong Aug"].values[metric][0]
        assert sizes["DiDiCM-CP"].values[metric][2] == main["DiDiCM-CP, Strong Aug"].values[metric][0]
    for panel in panels.values():
        for line in panel.lines:
            assert all(len(values) == len(panel.columns) for values in line.values.values())
            assert all(a.mean < b.mean for a, b in zip(line.values[TOP1], line.values[TOP5], strict=True))
    weak = panels["tab:main_results"].gains[0]
    assert (weak.name, weak.over) == ("DiDiCM-CP, Weak Aug", "standard, Weak Aug")
    # "reaching 13.1% (top-1) and 13.8% (top-5) accuracy gains at the highest uncertainty level"
    assert 100 * weak.values[TOP1][0].mean == pytest.approx(13.1, abs=0.05)
    assert 100 * weak.values[TOP5][0].mean == pytest.approx(13.8, abs=0.05)
    assert 100 * panels["tab:all_resnet"].gains[0].values[TOP1][-1].mean == pytest.approx(8.7, abs=0.1)


def test_our_numbers_stand_in_the_papers_columns(study, result, says):
    conditions = [Condition(14, 1.0), Condition(7, 0.25), Condition(14, 0.25)]
    rows = rows_of(
        (
            result(method, seed, 0.5 + 0.01 * i + gain + 0.001 * seed * (1 - 2 * seed), 1.0, condition)
            for seed in range(3)
            for i, condition in enumerate(conditions)
            for method, gain in (("standard", 0.0), ("DiDiCM-CP", 0.02))
        ),
        study(),
    )
    panel = our_panel(study(), rows)
    assert list(map(column_name, panel.columns)) == ["25 %, 7 px", "25 %, 14 px", "100 %, 14 px"]
    assert [gain.mean for gain in panel.gains[0].values[TOP1]] == pytest.approx([0.02, 0.02, 0.02])
    table = panel_table(panel)
    assert table.header == ["", "metric", *map(column_name, panel.columns)]
    assert table.rows[0][:2] == ["standard", "top-1"]
    assert table.rows[0][2].startswith("50.77 ± ")
    assert [row[1] for row in table.rows[:5]] == ["top-1", "top-5", "NLL", "NLL, T", "M multiply-adds"]
    assert table.rows[4][2:] == ["0.00", "0.00", "0.00"]
    assert not any("M multiply-adds" in row for row in panel_table(published_panel("tab:main_results")).rows)
    told = says(rows, study(published="tab:main_results"))
    assert told[0].startswith("DiDiCM-CP against standard, mean over 3 columns of the table: +2.0 points of top-1")
    assert "ahead beyond noise in 3 of them" in told[0]
    assert "top-1 with 25 % +2.0, 100 % +2.0; at 1.0 times the multiply-adds per image" in told[0]
    assert "Weak Aug +6.2 and +5.9 (top-1 with 25 % +8.1, 50 % +6.1, 100 % +4.3)" in told[-1]  # published


def test_crossed_stems_say_how_much_of_the_published_gain_is_the_stem(study, result, says):
    found = {"standard, 7x7 stem": 0.5, "standard, 3x3 stem": 0.54, "DiDiCM-CP, 7x7 stem": 0.51}
    found |= {"DiDiCM-CP, 3x3 stem": 0.56}
    methods = [
        {"name": name, "variant": stem, "method": method}
        for name, method in (("standard", "standard"), ("DiDiCM-CP", "diffusion"))
        for stem in ("7x7 stem", "3x3 stem")
    ]
    crossed = study(methods=methods)
    results = [
        result(name, 0, accuracy, 1.0, Condition(size, 0.25))
        for name, accuracy in found.items()
        for size in (7, 14)
    ]
    dear = replace(results[-1].measurements[0], multiply_adds=3500)  # the others take 1000
    results[-1] = replace(results[-1], measurements=(dear,))
    told = says(rows_of(results, crossed), crossed)
    assert "at 1.0 times the multiply-adds" in told[0]
    assert "at 1.0 to 3.5 times the multiply-adds" in told[1]
    assert (
        "With stems as published, DiDiCM-CP with the 3x3 stem against standard with the 7x7 stem, the difference "
        "in top-1 is +6.0 points; with the 7x7 stem on both sides it is +1.0, with the 3x3 stem +2.0. So the 3x3 "
        "stem by itself is worth +5.0 points to DiDiCM-CP and +4.0 to standard."
    ) in told


def test_samplers_of_one_method_never_share_a_cell(study, result):
    """Also where only the standard classifier has several, and where a row has place for one alone."""
    baseline, ours = (result(name, 0, 0.5, 1.0) for name in ("standard", "DiDiCM-CP"))
    (single,) = baseline.measurements
    views = replace(single, sampler="8 views", metrics={**single.metrics, "cls/Acc": 0.7})
    rows = rows_of([replace(baseline, measurements=(single, views)), ours], study())
    lines = {line.name: line.values[TOP1][0] for line in our_panel(study(), rows).lines}
    assert {name: x.mean for name, x in lines.items()} == {
        "standard": 0.5,
        "standard, 8 views": 0.7,
        "DiDiCM-CP, 1 call": 0.5,
    }
    sized = [{"name": "standard", "size": "8", "method": "standard"}, {"name": "DiDiCM-CP", "size": "8"}]
    sizes = study(layout="sizes", methods=sized)
    run = result("DiDiCM-CP, 8", 0, 0.5, 1.0, calls=8)
    other = replace(run.measurements[1], metrics={**run.measurements[1].metrics, "cls/Acc": 0.9})
    run = replace(run, measurements=(run.measurements[0], other))
    (line,) = our_panel(sizes, rows_of([run], sizes)).lines
    assert (line.values[TOP1][0].mean, line.values[TOP1][0].n) == (0.5, 1)


def test_with_five_classes_top_5_is_left_out(study, result):
    rows = rows_of([result("standard", 0, 0.5, 1.0, num_classes=5)], study())
    assert TOP5 not in our_panel(study(), rows).metrics


def test_model_sizes_have_a_row_each(study, result):
    methods = [
        {"name": name, "size": size, "method": method}
        for name, method in (("standard", "standard"), ("DiDiCM-CP", "diffusion"))
        for size in (8, 10)
    ]
    sizes = study(layout="sizes", methods=methods)
    table = panel_table(our_panel(sizes, rows_of([result(str(m), 0, 0.5, 1.0) for m in sizes.methods], sizes)))
    assert [row[:3] for row in table.rows] == [
        ["standard", "8", "0.0"],
        ["", "10", "0.0"],
        ["DiDiCM-CP", "8", "0.0"],
        ["", "10", "0.0"],
    ]
    sizes = study(layout="sizes", methods=[*methods, {"name": "DiDiCM-CP", "variant": "log", "size": 10}])
    table = panel_table(our_panel(sizes, rows_of([result(str(m), 0, 0.5, 1.0) for m in sizes.methods], sizes)))
    assert [row[:2] for row in table.rows[4:]] == [["DiDiCM-CP, log", "10"]]  # it has no other size
    assert panel_table(published_panel("tab:all_resnet")).rows[5][:3] == ["DiDiCM-CP", "18", "12.1"]


def test_solvers_stand_over_their_steps(study, result, says):
    samplers = {"exact": {"steps": [1, 2]}, "readout": {"method": "readout"}}
    steps = study(layout="steps", methods=[{"name": "score"}], samplers=samplers)
    run = result("score", 0, 0.5, 1.0)
    measurements = [
        replace(run.measurements[0], sampler=spec.name, group=spec.group, settings=dict(spec.settings))
        for spec in steps.samplers
    ]
    better = {**measurements[1].metrics, "cls/Acc": 0.6, "cls/NLL": 0.9}
    measurements[1] = replace(measurements[1], metrics=better, multiply_adds=3_000_000)
    rows = rows_of([replace(run, measurements=tuple(measurements))], steps)
    panel = our_panel(steps, rows)
    assert panel.columns == [1, 2]
    assert [line.name for line in panel.lines] == ["score: exact", "score: readout"]
    assert panel.lines[1].values[TOP1][1] is None
    told = says(rows, steps)
    assert "2: score: exact (60.0)" in told[0]
    assert told[2].endswith("exact 2 (0.900, 3.0 M).")
    dear = replace(measurements[0], multiply_adds=9_000_000)  # no better than what costs less
    dearest = rows_of([replace(run, measurements=(dear, *measurements[1:]))], steps)
    assert "9.0 M" not in says(dearest, steps)[2]


def test_without_a_baseline_the_verdict_is_a_ranking(study, result, says):
    two = study(methods=[{"name": "a"}, {"name": "b"}])
    results = [result("a", 0, 0.5, 1.0, calls=2), result("b", 0, 0.6, 1.2, calls=2)]
    told = says(Rows(row for row in rows_of(results, two) if row.main), two)
    assert told[0] == "By mean top-1, best first: b 60.0, a 50.0; the table shows how far seeds differ."
    assert told[1].startswith("By mean NLL, best first: a")

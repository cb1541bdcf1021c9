import pytest

from didicm.experiments import Setting, rows_of
from didicm.experiments.definition import make_study, published_tables
from didicm.report.panel import our_panel, panel_table, published_panel
from didicm.report.verdict import study_verdict
from tests.unit.study.making import record

BASE = {"name": "mine", "title": "Ours", "question": "Why?"}
UNCERTAINTY = {
    **BASE,
    "layout": "uncertainty",
    "contestants": {"standard": {"method": "standard"}, "DiDiCM-CP": {}},
}


def test_published_numbers_agree_with_each_other_and_with_the_papers_text():
    """The same networks appear in several tables; a slip in copying one would show."""
    tables = published_tables()
    lines = {name: {line["name"]: line for line in table["lines"]} for name, table in tables.items()}
    main, nfe, selection = lines["tab:main_results"], lines["tab:nfe"], lines["tab:selection"]
    for metric in ("top-1", "top-5"):
        assert selection["argmin"][metric] == main["DiDiCM-CP, Strong Aug"][metric]
        assert nfe["standard"][metric] == main["standard, Strong Aug"][metric]
        sizes = lines["tab:all_resnet"]
        assert sizes["standard"][metric][2] == main["standard, Strong Aug"][metric][0]
        assert sizes["DiDiCM-CP"][metric][2] == main["DiDiCM-CP, Strong Aug"][metric][0]
    for table in tables.values():
        for line in table["lines"]:
            for values in (value for value in line.values() if isinstance(value, list)):
                assert len(values) == len(table["columns"])
            assert all(one < five for one, five in zip(line["top-1"], line["top-5"], strict=True))
    weak = published_panel("tab:main_results").gains["DiDiCM-CP, Weak Aug", "standard, Weak Aug"]
    # "reaching 13.1% (top-1) and 13.8% (top-5) accuracy gains at the highest uncertainty level"
    assert weak["top-1"][0].mean == pytest.approx(13.1, abs=0.05)
    assert weak["top-5"][0].mean == pytest.approx(13.8, abs=0.05)
    largest = published_panel("tab:all_resnet").gains["DiDiCM-CP", "standard"]
    assert largest["top-1"][-1].mean == pytest.approx(8.7, abs=0.1)


def test_our_numbers_stand_in_the_papers_columns():
    study = make_study(UNCERTAINTY, "here")
    settings = [Setting(14, 1.0), Setting(7, 0.25), Setting(14, 0.25)]
    results = [
        record(method, seed, 0.5 + 0.01 * i + gain + 0.001 * seed * (1 - 2 * seed), 1.0, setting)
        for seed in range(2)
        for i, setting in enumerate(settings)
        for method, gain in (("standard", 0.0), ("DiDiCM-CP", 0.02))
    ]
    panel = our_panel(study, rows_of(results))
    assert panel.columns == ["25 %, 7 px", "25 %, 14 px", "100 %, 14 px"]
    gains = panel.gains["DiDiCM-CP", "standard"]["top-1"]
    assert [gain.mean for gain in gains] == pytest.approx([2, 2, 2])
    table = panel_table(panel, study.layout)
    assert table.header == ["", "metric", *panel.columns]
    assert table.rows[0][:2] == ["standard", "top-1"]
    assert table.rows[0][2].startswith("50.95 ± ")
    says = study_verdict(study, panel, published_panel("tab:main_results"))
    assert says[0].startswith("DiDiCM-CP against standard, mean over 3 columns of the table: +2.0 points of top-1")
    assert "ahead beyond noise in 3 of them" in says[0]
    assert "top-1 with 25 % +2.0, 100 % +2.0" in says[0]
    assert "Weak Aug +6.2 and +5.9 (top-1 with 25 % +8.1, 50 % +6.1, 100 % +4.3)" in says[-1]  # published


def test_model_sizes_have_a_line_each():
    contestants = {
        f"{line}, {size}": {"line": line, "column": size, "method": method}
        for line, method in (("standard", "standard"), ("DiDiCM-CP", "diffusion"))
        for size in (8, 10)
    }
    study = make_study({**BASE, "layout": "sizes", "contestants": contestants}, "here")
    panel = our_panel(study, rows_of([record(name, 0, 0.5, 1.0) for name in contestants]))
    table = panel_table(panel, "sizes")
    assert [row[:3] for row in table.rows] == [
        ["standard", "8", "0.0"],
        ["", "10", "0.0"],
        ["DiDiCM-CP", "8", "0.0"],
        ["", "10", "0.0"],
    ]
    assert panel_table(published_panel("tab:all_resnet"), "sizes").rows[5][:3] == ["DiDiCM-CP", "18", "12.1"]


def test_solvers_stand_over_their_steps():
    readings = {"exact": {"steps": [1, 2]}, "readout": {"method": "readout"}}
    study = make_study({**BASE, "layout": "steps", "contestants": {"score": {}}, "readings": readings}, "here")
    result = record("score", 0, 0.5, 1.0)
    result["readings"] = [
        {**result["readings"][0], "name": reading.name, "group": reading.group, "settings": dict(reading.settings)}
        for reading in study.cells(1)[0].readings
    ]
    result["readings"][1]["metrics"] = {**result["readings"][1]["metrics"], "cls/Acc": 0.6}
    panel = our_panel(study, rows_of([result]))
    assert panel.columns == ["1", "2"]
    assert [line.name for line in panel.lines] == ["score: exact", "score: readout"]
    assert panel.lines[1].values["top-1"][1] is None
    assert "2: score: exact (60.0)" in study_verdict(study, panel, None)[0]


def test_without_an_opponent_the_verdict_is_a_ranking():
    study = make_study({**UNCERTAINTY, "contestants": {"a": {}, "b": {}}}, "here")
    results = rows_of([record("a", 0, 0.5, 1.0, calls=2), record("b", 0, 0.6, 1.2, calls=2)])
    results = [row for row in results if row.main]
    says = study_verdict(study, our_panel(study, results), None)
    assert says[0] == "By mean top-1, best first: b 60.0, a 50.0; the table shows how far seeds differ."
    assert says[1].startswith("By mean NLL, best first: a")

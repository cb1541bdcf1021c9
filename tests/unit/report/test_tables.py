from dataclasses import replace

import pytest

from didicm.experiments.spec import Condition, Method
from didicm.report.panels import baselines_of
from didicm.report.records import Entry, Estimate
from didicm.report.tables import cost_table, difference_table, main_table

MINUS = "\N{MINUS SIGN}"


@pytest.fixture
def paired(result, rows):
    """Seeds differ by tens of points, the methods by exactly one."""
    levels = enumerate((0.3, 0.5, 0.9))
    pairs = [
        (result("standard", s, x, 1.0), result("DiDiCM, score", s, x + 0.01, 1.0, calls=8)) for s, x in levels
    ]
    return rows([one for pair in pairs for one in pair])


def test_differences_are_paired_by_seed(paired):
    table = difference_table(paired)  # only pairing can see it
    assert table.rows[1][0].strip() == f"DiDiCM, score, 8 steps {MINUS} standard"
    assert table.rows[1][1] == "+1.0 ± 0.0 *"
    assert "±" in main_table(paired).rows[1][1]


def test_no_interval_is_wider_than_a_share_can_be(result, rows, says):
    pairs = [
        (result("standard", s, x, 1.0), result("DiDiCM, score", s, 0.9 - x, 1.0, calls=8))
        for s, x in enumerate((0.3, 0.7))
    ]
    found = rows([one for pair in pairs for one in pair])
    assert main_table(found).rows[1][1] == "50.0 ± >100"
    assert difference_table(found).rows[1][1] == f"{MINUS}10.0 ± >100"
    assert f"(95 % interval {MINUS}100.0 to +100.0, 2 seeds)" in says(found)[0]


def test_without_a_temperature_the_differences_are_those_as_trained(result, rows):
    results = [result("standard", 0, 0.5, 1.0), result("DiDiCM, score", 0, 0.6, 1.0, calls=8)]
    bare = [
        replace(r, measurements=tuple(replace(m, scaled_metrics=None, temperature=None) for m in r.measurements))
        for r in results
    ]
    table = difference_table(rows(bare))
    assert table.header[1:] == ["top-1 %", "NLL", "Brier", "ECE %", "AURC %"]
    assert table.rows[1][1:3] == ["+10.0", "+0.000"]


def test_conditions_go_from_informative_to_hardly_informative(result, rows):
    conditions = [Condition(7, 1.0), Condition(28, 0.5), Condition(28, 1.0), Condition(28, 1.0, "noise:3")]
    table = main_table(rows([result("standard", 0, 0.5, 1.0, c) for c in conditions]))
    assert [table.rows[i][0] for i in table.groups] == [str(conditions[i]) for i in (2, 3, 1, 0)]


@pytest.mark.parametrize("make", [main_table, difference_table, cost_table])
def test_tables_fit_a_narrow_screen(paired, make):
    table = make(paired)
    wide, narrow = table.to_rich(1000), table.to_rich(80)
    assert len(wide.columns) == len(table.header)
    assert len(narrow.columns) <= len(wide.columns)
    assert str(narrow.columns[1].header) == "top-1 %"


def test_a_narrow_screen_names_no_column_that_the_report_has_not(result, rows):
    older = main_table(rows([result("standard", 0, 0.5, 1.0)]))  # without the cost of its training
    assert "training, G" not in older.header
    left_out = str(older.to_rich(60).caption).partition("report.html also has ")[2].partition(", intervals")[0]
    names = [name for name in older.spare if name in left_out]
    assert names
    assert set(names) <= set(older.header)


@pytest.mark.parametrize(("calls", "shown"), [(8, "8"), (5.28125, "5.28"), (2048, "2048")])
def test_network_calls_are_shown_to_the_point(result, rows, says, calls, shown):
    run = result("DiDiCM, score", 0, 0.5, 1.0, calls=8)
    run = replace(run, measurements=tuple(replace(m, calls=calls) for m in run.measurements[:1]))
    found = rows([result("standard", 0, 0.5, 1.0), run])
    for table in (main_table(found), cost_table(found)):
        assert table.rows[-1][table.header.index("calls")] == shown
    assert says(found)[2].startswith(f"The {shown} network calls of DiDiCM")


def test_the_verdict_and_the_cost_table_have_the_same_ratio(result, rows, says):
    """Also where conditions cost differently: both speak of the largest resolution."""

    def costly(one, cost):
        return replace(one, measurements=tuple(replace(m, multiply_adds=cost) for m in one.measurements))

    results = [
        costly(result(method, seed, 0.5, 1.0, Condition(pixels, 0.5), calls=calls), cost)
        for seed in range(2)
        for pixels, method, calls, cost in (
            (14, "standard", 1, 1000),
            (9, "standard", 1, 100),
            (14, "DiDiCM, score", 8, 6200),
            (9, "DiDiCM, score", 8, 720),
        )
    ]
    table = cost_table(rows(results))
    assert table.rows[1][table.header.index("ratio")] == "6.2 x"
    assert "cost 6.2 times" in says(rows(results))[2]


def test_every_row_says_what_its_training_cost_where_that_is_known(result, rows):
    results = [
        result("standard", 0, 0.5, 1.0),
        result("standard, smoothed labels", 0, 0.5, 1.0, train_multiply_adds=2_500_000_000),
        result("standard, smoothed labels", 1, 0.5, 1.0, train_multiply_adds=3_500_000_000),
        result("DiDiCM, score", 0, 0.6, 1.0, calls=8, train_multiply_adds=1_234_567_000_000),
    ]
    wanted = ["-", "3.00", "1,235", "1,235"]
    for table, column in ((main_table(rows(results)), "training, G"), (cost_table(rows(results)), -2)):
        at = table.header.index(column) if isinstance(column, str) else column
        assert [row[at] for row in table.rows if any(row[1:])] == wanted
    older = rows(results[:1])
    assert "training, G" not in main_table(older).header
    assert cost_table(older).rows[0][-2] == "-"


def test_a_method_is_compared_with_baselines_of_its_variant_if_there_are_any():
    weak, strong, ours, other = (
        Entry(Method(name, variant, settings={"method": "standard"} if name == "standard" else {}), "8 steps")
        for name, variant in (
            ("standard", "Weak Aug"),
            ("standard", "Strong Aug"),
            ("DiDiCM", "Weak Aug"),
            ("DiDiCM", "score"),
        )
    )
    assert baselines_of(ours, [weak, strong, ours, other]) == [weak]
    assert baselines_of(other, [weak, strong, ours, other]) == [weak, strong]


def test_two_equal_differences_tell_no_spread():
    """Of few test images two seeds often agree to the image."""
    assert (Estimate(-0.002, 0.0, 2).sign, Estimate(-0.002, 0.001, 2).sign) == (0, -1)

from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from didicm.experiments.results import read_plan, read_results
from didicm.experiments.spec import Condition
from didicm.experiments.study_file import METHODS
from didicm.report import figures
from didicm.report.images import Pictures, Traced, draw_trajectory, errors, trajectory_picture
from didicm.report.panels import our_panel
from didicm.report.records import NLL, TOP1, Entry, Rows, rows_of
from didicm.report.style import STYLE, legend_below, looks, make_axes
from didicm.report.tables import main_table


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context(fname=STYLE):
        yield


@pytest.fixture
def drawn(result, rows, comparison):
    """The figure over conditions of two methods with very different seeds."""

    def drawn(conditions):
        found = rows(
            result(method, seed, 0.01 + 0.3 * seed, 1.0, condition)
            for seed in range(2)
            for condition in conditions
            for method in ("standard", "DiDiCM, score")
        )
        return figures.over_columns([our_panel(comparison(), found)], [TOP1, NLL])

    return drawn


def test_no_percentage_is_drawn_below_0_or_above_100(drawn):
    plot = drawn([Condition(7, 0.1), Condition(14, 0.1)]).axes[0]
    low, high = plot.get_ylim()
    assert 0 <= low < high <= 100
    for bars in plot.containers:  # the intervals themselves reach far beyond
        for (_, bottom), (_, top) in bars.lines[2][0].get_segments():
            assert (bottom, top) == (pytest.approx(0), pytest.approx(100))


def test_neither_is_the_quality_of_network_calls(result, rows):
    found = rows(result("DiDiCM, score", 0, accuracy, 1.0, Condition(7, 0.1)) for accuracy in (0.01, 0.6))
    many = [replace(row, measured=replace(row.measured, calls=1 + i)) for i, row in enumerate(found)]
    figure = figures.calls_against_quality(Rows(many), [Condition(7, 0.1)])
    assert all(plot.get_ylim()[0] >= 0 for plot in figure.axes)


def test_no_line_joins_conditions_without_an_order(drawn):
    def lengths(figure):
        return {len(bars.lines[0].get_xdata()) for bars in figure.axes[0].containers}

    assert lengths(drawn([Condition(7, 1.0, "noise:3"), Condition(7, 1.0, "blur:3")])) == {1}
    assert lengths(drawn([Condition(7, 1.0, "noise:3"), Condition(7, 1.0, "noise:1")])) == {2}


def test_the_reliability_diagram_has_the_tables_ece_and_its_bins(tmp_path, store, comparison):
    study = comparison(conditions=(Condition(7, 0.5),))
    store(tmp_path, study)
    rows = rows_of(read_results(tmp_path), read_plan(tmp_path).study)
    hard = rows.conditions()[-1]
    figure = figures.reliability_diagrams(figures.load_stored(rows, hard, tmp_path), rows, hard)
    table = main_table(rows)
    at = table.header.index("ECE %")
    shown = {row[0].strip(): row[at].partition(" ±")[0] for row in table.rows}
    for plot in figure.axes:
        name, _, error = plot.get_title(loc="left").replace("\n", " ").partition(" ECE ")
        assert error == f"{shown[name]} %"
        assert len(plot.patches) == 15
    assert "15 bins" in figure.get_suptitle()


def test_no_two_methods_look_the_same():
    palette = looks([(f"standard {i}", True) for i in range(3)] + [(f"DiDiCM {i}", False) for i in range(20)])
    assert len(set(palette.values())) == len(palette)
    assert looks([("a", False), ("a", False), ("b", False)])["b"] == looks([("a", False), ("b", False)])["b"]


def test_a_trajectory_names_its_classes_where_they_end():
    figure = Figure()
    states = np.array([[0.25] * 4, [0.1, 0.6, 0.05, 0.25]])
    item = Traced("", None, [1.0, -0.01], states, ["a", "b", "c", "$d"], truth="$d")
    draw_trajectory(figure.subplots(), item, top=3)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts][::-1] == ["b  60.0 %", "$d ✓  25.0 %", "a  10.0 %"]
    assert axes.get_xlim() == (1, 0)
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert min(np.diff(heights)) > 0.1  # far enough apart to read


@pytest.mark.parametrize("name", ["short", "a method with a rather long name", "a name wider than a plot " * 4])
def test_a_legend_lies_inside_a_figure_of_one_plot(name):
    figure, (plot,) = make_axes(1, 1, size=(4.2, 3.6))
    for i in range(3):
        plot.plot([1, 2], label=f"{name}, {i}")
    legend_below(figure, [plot])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1
    assert 0 <= box.y0 <= box.y1 <= plot.get_tightbbox().y0


@pytest.mark.parametrize("columns", [1, 2])
def test_nothing_of_a_picture_of_trajectories_is_clipped(columns):
    states = np.linspace([0.5, 0.5], [0.9, 0.1], 5)
    image, names = Image.new("RGB", (40, 20)), ["a class with a very long name indeed", "b"]
    item = Traced("a title that is longer than it should be", image, [1, 0.75, 0.5, 0.25, 0], states, names)
    figure = trajectory_picture([item, item._replace(truth="b"), item], columns=columns)
    figure.draw_without_rendering()
    whole = figure.bbox
    for plot in figure.axes:
        for text in [plot.title, *plot.texts]:
            box = text.get_window_extent()
            assert whole.x0 <= box.x0 <= box.x1 <= whole.x1
            assert whole.y0 <= box.y0 <= box.y1 <= whole.y1


@pytest.mark.parametrize("top", [2, 8, 12])
def test_a_picture_of_trajectories_shows_as_many_classes_as_asked_for(top):
    last = np.arange(12, 0, -1) / 78
    item = Traced(
        "", Image.new("RGB", (40, 20)), [1, 0], np.stack([np.full(12, 1 / 12), last]), list("abcdefghijkl")
    )
    figure = trajectory_picture([item], top=top)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[1].texts]  # without their arrows
    assert len(figure.axes[1].lines) == len(boxes) == top
    assert not any(a.y0 < b.y0 < a.y1 for a in boxes for b in boxes if a is not b)  # no label hides another
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


def pictures(order, wrong):
    """Test images in some order, each of a class of its own, so that its title tells which it is."""
    labels = torch.tensor(order)
    answers = torch.tensor([(k + 1) % len(order) if wrong(k) else k for k in order])
    probs = torch.nn.functional.one_hot(answers, len(order)).float()
    names = [f"number {k}" for k in range(len(order))]
    return Pictures(labels, torch.zeros(len(order), 1, 4, 4).byte(), probs, labels, names, None, None, None)


def test_ten_images_that_both_get_wrong_are_drawn_at_random_the_same_ones_always():
    entries = Entry(METHODS["didicm-score"], "8 steps"), Entry(METHODS["standard"], "1 call")

    def shown(order):
        figure = errors(pictures(order, lambda k: k % 2 == 0), pictures(order, lambda k: k % 3 == 0), entries)
        return [int(axes.get_title().split()[-1]) for axes in figure.axes[::2]]

    numbers = shown(list(range(150)))
    assert numbers == [18, 126, 54, 84, 120, 72, 66, 132, 144, 42]
    assert shown(list(reversed(range(150)))) == numbers
    assert sorted(shown(list(range(30)))) == [0, 6, 12, 18, 24]  # all there are
    none = [pictures([0, 1], lambda k, right=right: k == right) for right in range(2)]
    assert errors(*none, entries) is None


def test_a_line_joins_conditions_that_have_an_order():
    clean, noise, more, blur = (Condition(7, 1.0, c) for c in (None, "noise:2", "noise:4", "blur:2"))
    assert figures.joined([clean, noise, more]) == [[0, 1, 2]]
    assert figures.joined([clean, noise, blur]) == [[0, 1], [2]]
    assert figures.joined([Condition(7, 0.1), Condition(14, 0.1), Condition(14, 0.5)]) == [[0, 1, 2]]
    grid = [Condition(size, share) for size in (28, 14) for share in (1.0, 0.25)]
    assert figures.joined(grid) == [[0, 1], [2, 3]]
    mixed = [Condition(7, 1.0, c) for c in ("blur:2+jpeg:4", "blur:4+jpeg:2", "blur:4+jpeg:5")]
    assert figures.joined(mixed) == [[0], [1, 2]]
    assert figures.joined([Condition(28, 1.0, "noise:3"), Condition(14, 1.0)]) == [[0], [1]]
    assert figures.joined([Condition(28, 20), Condition(28, 1.0)]) == [[0], [1]]
    labels = [Condition(7, 1.0, labels=name) for name in (None, "a.csv", "b.csv")]
    assert figures.joined(labels) == [[0], [1], [2]]
    assert figures.joined([Condition(7, 1.0, label_noise=x) for x in (0.0, 0.2, 0.4)]) == [[0, 1, 2]]
    assert figures.joined([1, 2, 4]) == [[0, 1, 2]]

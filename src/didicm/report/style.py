"""How figures look: Okabe-Ito colours, each with a marker and a line style, so that they can be told in grey."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("agg")
import matplotlib.pyplot as plt

STYLES = {
    "standard": ("#000000", "o", "-"),
    "standard-smooth": ("#999999", "s", "--"),
    "didicm-score": ("#E69F00", "^", "-."),
    "didicm-posterior": ("#0072B2", "D", "-"),
}
SPARE = [("#009E73", "v", ":"), ("#D55E00", "P", "--"), ("#CC79A7", "X", "-."), ("#56B4E9", "*", "-")]
TOP5 = [
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "v", ":"),
    ("#999999", "D", "-"),
]
RIGHT, WRONG = "#56B4E9", "#D55E00"

Look = tuple[str, str, str]  # colour, marker, line


RC = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#777777",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "figure.facecolor": "white",
    "text.parse_math": False,  # names may hold dollar signs
    "svg.hashsalt": "didicm",  # the same picture is the same file
    "svg.fonttype": "path",
}

_assigned: dict[str, Look] = {}


def look(method: str) -> Look:
    """Colour, marker and line of a method; others than the usual ones get theirs in `styled`."""
    return STYLES.get(method) or _assigned.get(method, SPARE[0])


@contextmanager
def styled(methods: Sequence[str] = ()) -> Iterator[None]:
    """Settings for all figures, and a look of its own for every method."""
    colours = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999999"]
    markers, lines = "Dov^sPX*<", ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
    _assigned.clear()
    for i, method in enumerate(dict.fromkeys(methods)):
        _assigned[method] = colours[i % len(colours)], markers[i % len(markers)], lines[i % len(lines)]
    with plt.rc_context(RC):
        yield


def legend_below(figure: plt.Figure, axes: Axes, columns: int = 2) -> None:
    """One legend for all axes of a figure, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def bare(axes: Axes) -> None:
    """No ticks, no grid: for an image."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color("#cccccc")

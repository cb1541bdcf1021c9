"""How figures look: Okabe-Ito colours, each with a marker and a line style, so that they can be told in grey."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("agg")
import matplotlib.pyplot as plt


class Look(NamedTuple):
    """Keyword arguments of a plot."""

    color: str
    marker: str
    linestyle: str


BASELINES = [Look("#000000", "o", "-"), Look("#999999", "s", "--")]
COLOURS = [
    Look("#0072B2", "D", "-"),
    Look("#E69F00", "^", "-."),
    Look("#009E73", "v", ":"),
    Look("#D55E00", "P", "--"),
    Look("#CC79A7", "X", "-."),
    Look("#56B4E9", "*", "-"),
]
RIGHT, WRONG, FRAME = "#56B4E9", "#D55E00", "#cccccc"

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


def looks(lines: Iterable[tuple[str, bool]]) -> dict[str, Look]:
    """A look per name: baselines, which are marked so, in black and grey, DiDiCM in colours."""
    baselines, colours = cycle(BASELINES), cycle(COLOURS)
    return {name: next(baselines if baseline else colours) for name, baseline in lines}


def make_axes(
    columns: int, rows: int = 1, *, size: tuple[float, float], sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of plots of one size each in inches, row by row."""
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int = 2) -> None:
    """One legend for all plots of a figure, under them."""
    found: dict[str, object] = {}
    for plot in axes:
        for handle, label in zip(*plot.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)


def bare(axes: Axes) -> None:
    """No ticks, no grid: for an image."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, color=FRAME)


__all__ = ["COLOURS", "RC", "RIGHT", "WRONG", "Look", "bare", "legend_below", "looks", "make_axes", "plt"]

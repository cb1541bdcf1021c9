"""How figures look: Okabe-Ito colours, each with a marker and a line style, so that they can be told in grey."""

from contextlib import AbstractContextManager

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


def look(method: str) -> Look:
    """Colour, marker and line of a method; an unknown one gets a spare look, always the same."""
    return STYLES.get(method) or SPARE[sum(method.encode()) % len(SPARE)]


def styled() -> AbstractContextManager[None]:
    """Settings for all figures."""
    return plt.rc_context(
        {
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
            "svg.hashsalt": "didicm",  # the same picture is the same file
            "svg.fonttype": "path",
        }
    )


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

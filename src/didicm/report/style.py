"""How figures look: Okabe-Ito colours, each with a marker and a line style, so that they can be told in grey."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Look(NamedTuple):
    """Keyword arguments of a plot."""

    color: str
    marker: str
    linestyle: str | tuple[int, tuple[int, ...]]


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
GREYS = ("#000000", "#999999", "#555555", "#bbbbbb")
MARKERS, LINES = "Do^vsPX", ("-", "-.", ":", "--", (0, (5, 1, 1, 1)))
RIGHT, WRONG, FRAME = "#56B4E9", "#D55E00", "#cccccc"

STYLE = Path(__file__).with_name("report.mplstyle")


@contextmanager
def drawing() -> Iterator[None]:
    """Figures look so inside; letters that the font lacks are drawn as boxes, without a warning for each."""
    with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def looks(lines: Iterable[tuple[str, bool]]) -> dict[str, Look]:
    """A look per name: baselines, which are marked so, in black and grey, DiDiCM in colours."""
    found: dict[str, Look] = {}
    count = {True: 0, False: 0}
    for name, baseline in dict(lines).items():
        colours, i = GREYS if baseline else COLOURS, count[baseline]
        found[name] = Look(colours[i % len(colours)], MARKERS[len(found) % len(MARKERS)], LINES[i % len(LINES)])
        count[baseline] += 1
    return found


def make_axes(
    count: int, across: int, *, size: tuple[float, float], ylabel: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure of plots of one size each in inches, row by row; a `ylabel` is for all of them and their axis."""
    columns = min(count, across)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=bool(ylabel)).flat)
    for spare in axes[count:]:
        spare.remove()
    for plot in axes[:count:columns]:
        plot.set_ylabel(ylabel)
    return figure, axes[:count]


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int = 2) -> None:
    """One legend for all plots of a figure, under them, in fewer columns or a wider figure if names are long."""
    found: dict[str, Artist] = {}
    for plot in axes:
        for handle, label in zip(*plot.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    while found:
        legend = figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)
        width = legend.get_window_extent().width / figure.dpi + 0.1  # letters are not as wide in every format
        if columns == 1 or width <= figure.get_figwidth():
            figure.set_figwidth(max(width, figure.get_figwidth()))
            break
        legend.remove()
        columns -= 1
    figure.set_figheight(figure.get_figheight() + 0.24 * -(-len(found) // columns))

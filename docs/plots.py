"""Figures of the results pages that are of several studies."""

import io
import re
from collections.abc import Mapping
from statistics import fmean

from compared import TUNED, Compared
from matplotlib.figure import Figure

from didicm.report.records import MINUS, SCALED_NLL, TOP1
from didicm.report.style import COLOURS, GREYS, drawing, make_axes

Files = dict[str, str | bytes]  # pages and figures, by path in docs/
Interval = tuple[float, float, float]  # a mean, and the ends of its interval
Points = Mapping[str, Mapping[str, list[float]]]  # values of the seeds, by plot and name


def keep(files: Files, path: str, title: str, figure: Figure) -> str:
    """A figure as a file; how docs/results.md shows it."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    files[path] = content.getvalue()
    return f"![{title}]({path})\n"


def draw_gaps(files: Files, asked: list[Compared]) -> str:
    """DiDiCM minus the standard classifier with its interval, a line per condition."""
    places = list(dict.fromkeys(x.place for x in asked))[::-1]
    with drawing():
        figure, axes = make_axes(2, 2, size=(5.6, 1.3 + 0.27 * len(places)))
        for plot, metric in zip(axes, (TOP1, SCALED_NLL), strict=True):
            for k, augmentation in enumerate(TUNED):
                here = [x for x in asked if x.augmentation == augmentation]
                gaps = [x.gaps[metric].difference for x in here]
                plot.errorbar(
                    [metric.scale * gap.mean for gap in gaps],
                    [places.index(x.place) + 0.15 - 0.3 * k for x in here],
                    xerr=[metric.scale * (gap.half or 0) for gap in gaps],
                    fmt="Do"[k],
                    color=COLOURS[3 * k],
                    markersize=4,
                    elinewidth=1,
                    label=augmentation,
                )
            better = "right" if metric is TOP1 else "left"
            what = "points of top-1" if metric is TOP1 else "temperature-scaled NLL"
            plot.axvline(0, color="#333333", linewidth=1)
            plot.set_ylim(-0.6, len(places) - 0.4)
            plot.set_yticks(range(len(places)), places if metric is TOP1 else [""] * len(places), fontsize=8)
            plot.set_title(f"DiDiCM {MINUS} standard, {what}\n{better} of 0, DiDiCM is better")
        axes[1].legend(loc="lower right", fontsize=8)
        return keep(files, "results/ahead.svg", "Differences under every condition", figure)


def draw_differences(
    files: Files, path: str, title: str, found: Mapping[str, Mapping[str, Interval]], axis: str
) -> str:
    """Means with their intervals, a line per place, by what was asked; 0 is no difference."""
    places = list(dict.fromkeys(place for gaps in found.values() for place in gaps))[::-1]
    with drawing():
        figure, (plot,) = make_axes(1, 1, size=(6.4, 1.3 + 0.3 * len(places)))
        for k, (name, gaps) in enumerate(found.items()):
            plot.errorbar(
                [mean for mean, _, _ in gaps.values()],
                [places.index(place) + 0.15 - 0.3 * k for place in gaps],
                xerr=[
                    [mean - low for mean, low, _ in gaps.values()],
                    [high - mean for mean, _, high in gaps.values()],
                ],
                fmt="Do"[k],
                color=COLOURS[3 * k],
                markersize=4,
                elinewidth=1,
                label=name,
            )
        plot.axvline(0, color="#333333", linewidth=1)
        plot.set_yticks(range(len(places)), places, fontsize=8)
        plot.set_xlabel(axis)
        plot.legend(fontsize=8)
        return keep(files, path, title, figure)


def draw_dots(
    files: Files, path: str, title: str, points: Points, axis: str, *, ours: str = r"DiDiCM|teacher|student"
) -> str:
    """A plot per heading with a line per name: the seeds, and their mean as a dot; ours in colour, by name."""
    with drawing():
        rows = max(map(len, points.values()))
        across = min(2, len(points))
        size = (5.4 if across > 1 else 6, 1.1 + 0.22 * rows)
        figure, axes = make_axes(len(points), across, size=size)
        for plot, (heading, found) in zip(axes, points.items(), strict=True):
            order = sorted(found, key=lambda name: -fmean(found[name]))
            for i, name in enumerate(order):
                colour = COLOURS[0] if re.match(ours, name) else GREYS[1]
                plot.plot(found[name], [i] * len(found[name]), "|", color=colour)
                plot.plot(fmean(found[name]), i, "o", color=colour)
            plot.set_yticks(range(len(order)), order, fontsize=8)
            plot.set_title(heading, fontsize=9)
            plot.set_xlabel(axis)
        return keep(files, path, title, figure)

"""The figure of `didicm evaluate --shift`: how metrics change with the severity of corruptions."""

from typing import Any

from matplotlib.figure import Figure

from didicm.data.corruptions import SEVERITIES
from didicm.evaluation.assess import ShiftEvaluation
from didicm.report.style import legend_below, looks, make_axes

TITLES = {
    "cls/Acc": "accuracy, %",
    "cls/NLL": "negative log-likelihood",
    "cal/ECE": "calibration error, %",
    "unlike": "flagged as unlike training, %",
}


def shift_figure(shift: ShiftEvaluation) -> Figure:
    """A plot per metric over the severity: a thin line per corruption, a bold one for their mean."""
    palette = looks((name, False) for name in shift.corruptions)
    styles: dict[str, dict[str, Any]] = {
        name: {**look._asdict(), "alpha": 0.7, "linewidth": 1.2, "markersize": 4} for name, look in palette.items()
    }
    styles["mean"] = {"color": "black", "linewidth": 3}
    figure, axes = make_axes(len(shift.clean), len(shift.clean), size=(3.8, 3.4))
    for plot, (metric, clean) in zip(axes, shift.clean.items(), strict=True):
        scale = 1 if metric == "cls/NLL" else 100
        for name, levels in {**shift.corruptions, "mean": shift.mean}.items():
            values = [scale * value for value in (clean, *(level[metric] for level in levels))]
            plot.plot((0, *SEVERITIES), values, label=name.replace("_", " "), **styles[name])
        plot.set_title(TITLES[metric])
        plot.set_xlabel("severity")
        plot.set_xticks((0, *SEVERITIES), ("clean", *map(str, SEVERITIES)))
        plot.set_ylim(bottom=0)
    legend_below(figure, axes, 5)
    return figure

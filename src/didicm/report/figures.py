"""Figures of numbers: lines over columns, quality against network calls, a search, and stored posteriors."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from didicm.data.corruptions import SEVERITIES
from didicm.evaluation.assess import ShiftEvaluation
from didicm.evaluation.calibration import apply_temperature
from didicm.evaluation.diagnostics import entropy_histogram, reliability, risk_coverage
from didicm.evaluation.metrics import BINS
from didicm.evaluation.store import load_posteriors
from didicm.experiments.results import Trial
from didicm.experiments.spec import Condition, Study
from didicm.experiments.tune import choose, combine
from didicm.report.panels import Column, Line, Panel, column_name
from didicm.report.records import NLL, SCALED_NLL, TOP1, Entry, Estimate, Metric, Rows
from didicm.report.style import RIGHT, WRONG, Look, legend_below, looks, make_axes
from didicm.text import count

ACROSS = 4  # plots side by side
PAPERS = Condition(56, 1.0)  # the condition of the paper's figure of network calls

Stored: TypeAlias = dict[Entry, tuple[Tensor, Tensor]]  # probabilities (N, K) and labels (N,), over all seeds
Curves: TypeAlias = dict[tuple[str, bool], dict[float, Estimate]]  # by name and whether a baseline: by calls
TITLES = {
    "cls/Acc": "accuracy, %",
    "cls/NLL": "negative log-likelihood",
    "cal/ECE": "calibration error, %",
    "unlike": "flagged as unlike training, %",
}


def over_columns(panels: Sequence[Panel], metrics: Sequence[Metric], *, gains: bool = False) -> Figure | None:
    """Metrics of every line, or what it gains, over the columns (figures main_figure, gain and all_resnet)."""
    shown = [(panel, lines) for panel in panels if (lines := panel.gains if gains else panel.lines)]
    metrics = [metric for metric in metrics if any(metric in panel.metrics for panel, _ in shown)]
    if not metrics:
        return None
    palette = looks((str(line), line.method.baseline and not gains) for _, lines in shown for line in lines)
    wide = max(len(panel.columns) for panel, _ in shown) > ACROSS
    columns, rows = (len(shown), len(metrics)) if len(shown) > 1 else (len(metrics), 1)
    figure, axes = make_axes(columns * rows, columns, size=(5.6 if wide else 4.2, 4.2))
    for plot, (metric, (panel, lines)) in zip(axes, product(metrics, shown), strict=True):
        source = ("published: " if panel.published else "ours: ") if len(shown) > 1 else ""
        plot.set_title(f"{source}{_axis_name(metric, gains)}")
        if metric in panel.metrics:
            _draw_lines(plot, panel, lines, metric, palette, gains)
        else:
            plot.remove()
    legend_below(figure, axes, 2 if wide else 1)
    return figure


def _draw_lines(
    plot: Axes, panel: Panel, lines: Sequence[Line], metric: Metric, palette: dict[str, Look], gains: bool
) -> None:
    steps = [column for column in panel.columns if isinstance(column, int)]
    for k, line in enumerate(lines):
        shift, name = 0.06 * (k - (len(lines) - 1) / 2), str(line)
        for places in joined(panel.columns):
            found = [(i, x) for i in places if (x := line.values[metric][i])]
            # Over steps there are too many points for intervals.
            points = [(steps[i], Estimate(x.mean)) if steps else (i + shift, x) for i, x in found]
            _draw(plot, points, metric, palette[str(line)], name, gains)
            name = f"_{line}"  # once in the legend
    if steps:
        _log_axis(plot, "steps")
    else:
        names = [column_name(column).replace(", ", "\n") for column in panel.columns]
        plot.set_xticks(range(len(names)), names, fontsize=8)
        plot.margins(x=0.08)
    if gains:
        plot.axhline(0, color="#333333", linewidth=1)
    elif steps and metric == NLL:  # the worst would hide the rest
        best = min(x.mean for line in lines for x in line.values[NLL] if x is not None)
        plot.set_ylim(0.98 * best, 1.6 * best)
    else:
        _clamp(plot, metric)


def _clamp(plot: Axes, metric: Metric) -> None:
    """No axis goes beyond what a metric can be."""
    low, high = plot.get_ylim()
    plot.set_ylim(max(0.0, low), min(100.0, high) if metric.percent else high)


def joined(columns: Sequence[Column]) -> list[list[int]]:
    """Places of columns that a line may join: neighbours, one of them as informative in every respect."""
    groups: list[list[int]] = []
    for i, column in enumerate(columns):
        if i and _have_order(columns[i - 1], column):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _have_order(one: Column, other: Column) -> bool:
    if not (isinstance(one, Condition) and isinstance(other, Condition)):
        return True  # steps, or sizes of networks
    (kind, first), (other_kind, second) = _informative(one), _informative(other)
    if kind != other_kind or (one.corruption and other.corruption and first.keys() != second.keys()):
        return False
    names = {**first, **second}
    return any(all(sign * first.get(n, 0) >= sign * second.get(n, 0) for n in names) for sign in (1, -1))


def _informative(condition: Condition) -> tuple[tuple[object, ...], dict[str, float]]:
    """What cannot be put in order, and how informative a condition is in every other respect."""
    noise = condition.labels or condition.label_noise
    found = {"resolution": condition.resolution or math.inf, "images": condition.fraction}
    if not isinstance(noise, str):
        found["right labels"] = -noise
    for corruption, severity in re.findall(r"([^+:]+):(\d+)", condition.corruption or ""):
        found[corruption] = -float(severity)
    return (condition.fraction > 1, noise if isinstance(noise, str) else None), found


def calls_against_quality(
    rows: Rows, conditions: Sequence[Condition], published: Panel | None = None
) -> Figure | None:
    """Accuracy and NLL over network calls of the same trained networks (figure nfe)."""
    if len({row.measured.calls for row in rows if not row.method.baseline}) < 2:
        return None
    theirs: Curves = {}
    if published and PAPERS in published.columns:
        at = published.columns.index(PAPERS)
        found = [(line, line.calls, line.values[TOP1][at]) for line in published.lines]
        theirs = {(line.name, line.method.baseline): {calls: x} for line, calls, x in found if calls and x}
    plots: list[tuple[str, Metric, Curves]] = []
    for metric in (TOP1, NLL):
        if theirs:
            plots.append((f"published: {column_name(PAPERS)}", metric, theirs if metric == TOP1 else {}))
        for condition in conditions[: ACROSS - bool(theirs)]:
            plots.append((column_name(condition), metric, _curves(rows.select(condition=condition), metric)))
    palette = looks(curve for _, _, curves in plots for curve in curves)
    figure, axes = make_axes(len(plots), len(plots) // 2, size=(3.8, 3.2))
    for plot, (title, metric, curves) in zip(axes, plots, strict=True):
        for (name, baseline), values in curves.items():
            points, look = sorted(values.items()), palette[name]
            if baseline and set(values) == {1}:
                level = metric.scale * points[0][1].mean
                plot.axhline(level, color=look.color, linestyle=look.linestyle, label=name)
            else:
                _draw(plot, points, metric, look, name, gains=False)
        _log_axis(plot, "network calls")
        plot.set(title=title if metric == TOP1 else "", ylabel=_axis_name(metric))
        _clamp(plot, metric)
        if not curves:
            plot.remove()
    legend_below(figure, axes, 2)
    return figure


def _curves(rows: Rows, metric: Metric) -> Curves:
    """Those of one condition; of samplers with as many calls on one curve, the first."""
    found: Curves = {}
    values = {entry: rows.select(entry).estimate(metric) for entry in dict.fromkeys(row.entry for row in rows)}
    for row in rows:
        settings = row.measured.settings
        steps = f", {count(settings['steps'], 'step')}" if "steps" in settings else ""
        kinds = {"cl": f": over labels{steps}", "readout": ": one call (readout)"}
        kind = "" if row.method.baseline else kinds.get(settings.get("method", "cp"), ": over probabilities")
        kind += ", augmented views" if settings.get("views", 1) > 1 else ""
        if value := values[row.entry]:
            curve = found.setdefault((f"{row.method}{kind}", row.method.baseline), {})
            curve.setdefault(row.measured.calls, value)
    return found


def length_curves(study: Study, trials: Sequence[Trial], conditions: Sequence[Condition]) -> Figure:
    """Held-out NLL over the epochs, by the best trial of each length; what was chosen in a ring."""
    trials = combine(trials)
    best = choose(trials)
    palette = looks((str(method), method.baseline) for method in study.methods)
    figure, axes = make_axes(len(conditions), 3, size=(4.2, 3.6), ylabel="held-out NLL (lower is better)")
    for plot, condition in zip(axes, conditions, strict=True):
        there = [trial for trial in trials if trial.condition == condition]
        epochs = sorted({trial.settings["epochs"] for trial in there})
        for name, look in palette.items():
            own = [t for t in there if t.method == name and t.metrics is not None]
            found = {n: [t.nll for t in own if t.settings["epochs"] == n] for n in epochs}
            curve = {n: min(nlls) for n, nlls in found.items() if nlls}
            if curve:
                plot.plot(list(curve), list(curve.values()), **look._asdict(), label=name)
                peak = best[name, condition]
                at = [peak.settings["epochs"]], [peak.nll]
                plot.plot(*at, "o", color=look.color, markersize=13, markerfacecolor="none", markeredgewidth=1.5)
        plot.set_xscale("log", base=2)
        plot.set_xticks(epochs, [f"{x:g}" for x in epochs])
        plot.minorticks_off()
        plot.set(title=str(condition), xlabel="epochs")
    legend_below(figure, axes)
    return figure


def reliability_diagrams(stored: Stored, rows: Rows, condition: Condition) -> Figure:
    """Confidence against accuracy in the bins of the ECE, with the gap between them, as trained."""
    figure, axes = make_axes(len(stored), ACROSS, size=(3.2, 3.9), ylabel="accuracy")
    palette = _palette(stored)
    for plot, (entry, (probs, labels)) in zip(axes, stored.items(), strict=True):
        curve, look = reliability(probs, labels, BINS), palette[str(entry)]
        kept = curve.count > 0
        x, y = curve.confidence[kept].numpy(), curve.accuracy[kept].numpy()
        plot.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":")
        plot.fill_between(x, x, y, color=look.color, alpha=0.15, linewidth=0)
        plot.plot(x, y, **look._asdict())
        share = (curve.count / curve.count.sum()).numpy()
        plot.bar((np.arange(BINS) + 0.5) / BINS, 0.5 * share, 0.9 / BINS, color="#cccccc", zorder=0.5)
        error = rows.select(entry, condition).estimate(Metric("cal/ECE"))  # the number of the table
        plot.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence")
        plot.set_title(f"{fill(str(entry), 30)}\nECE {100 * error.mean:.1f} %" if error else fill(str(entry), 30))
    title = f"{condition}; as trained; {BINS} bins; grey: share of the images"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def risk_coverage_curves(stored: Stored, condition: Condition) -> Figure:
    """Share of errors when only the most confident answers are given."""
    figure, (plot,) = make_axes(1, 1, size=(6.4, 4.6))
    palette = _palette(stored)
    for entry, (probs, labels) in stored.items():
        curve = risk_coverage(probs, labels)
        keep = curve.coverage > 0.02
        x, y = 100 * curve.coverage[keep].numpy(), 100 * curve.risk[keep].numpy()
        plot.plot(x, y, **palette[str(entry)]._asdict(), markevery=max(1, len(x) // 8), label=str(entry))
    xlabel = "images answered, the most confident first, %"
    plot.set(xlabel=xlabel, ylabel="errors among them, %", title=str(condition), ylim=(0, None))
    plot.legend(loc="upper left")
    return figure


def entropies(stored: Stored, condition: Condition) -> Figure:
    """Entropy of right and of wrong answers, as trained."""
    figure, axes = make_axes(len(stored), ACROSS, size=(3.2, 3.4), ylabel="share of the images")
    for plot, (entry, (probs, labels)) in zip(axes, stored.items(), strict=True):
        bars = entropy_histogram(probs, labels, 15)
        total = bars.right.sum() + bars.wrong.sum()
        edges = bars.edges.numpy()
        plot.stairs((bars.right / total).numpy(), edges, fill=True, color=RIGHT, alpha=0.75, label="right")
        plot.stairs((bars.wrong / total).numpy(), edges, color=WRONG, linewidth=2, hatch="//", label="wrong")
        plot.set(xlabel="entropy, nats", title=fill(str(entry), 30))
    axes[0].legend()
    figure.suptitle(f"{condition}; as trained", x=0.01, ha="left", fontsize=10)
    return figure


def load_stored(rows: Rows, condition: Condition, folder: Path, *, scaled: bool = False) -> Stored:
    """Posteriors of every method's main sampler under one condition, over all seeds."""
    stored: Stored = {}
    for entry in rows.entries(main=True):
        measured = [row.measured for row in rows.select(entry, condition) if row.measured.posteriors]
        files = [load_posteriors(folder / str(m.posteriors)) for m in measured]
        if files:
            temperatures = [(m.temperature if scaled else None) or 1.0 for m in measured]
            probs = [apply_temperature(f.probs, t) for f, t in zip(files, temperatures, strict=True)]
            stored[entry] = torch.cat(probs), torch.cat([f.labels for f in files])
    return stored


def _draw(
    plot: Axes, points: Sequence[tuple[float, Estimate]], metric: Metric, look: Look, label: str, gains: bool
) -> None:
    """Draw means with their intervals, cut at the metric's bounds; a gain is better the higher it is."""
    at, values = [x for x, _ in points], [-y if gains and metric.sign < 0 else y for _, y in points]
    lowest, highest = (-np.inf, np.inf) if gains else (0.0, 1.0 if metric.percent else np.inf)
    means, halves = np.array([y.mean for y in values]), np.array([y.half or 0.0 for y in values])
    spread = np.array([np.minimum(halves, means - lowest), np.minimum(halves, highest - means)])
    error = metric.scale * spread if halves.any() else None
    plot.errorbar(at, metric.scale * means, error, **look._asdict(), capsize=3, elinewidth=1.2, label=label)


def _palette(entries: Iterable[Entry]) -> dict[str, Look]:
    return looks((str(entry), entry.method.baseline) for entry in entries)


def _log_axis(plot: Axes, label: str) -> None:
    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_formatter("{x:g}")
    plot.set_xlabel(label)


def _axis_name(metric: Metric, gains: bool = False) -> str:
    name = "NLL, temperature-scaled" if metric == SCALED_NLL else metric.heading.replace(" %", ", %")
    if gains:
        return f"gain in {name.replace(', %', ', points')}"
    return name if metric.sign > 0 else f"{name} (lower is better)"


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

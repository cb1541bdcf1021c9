"""Figures of stored posteriors: does a probability mean what it says, and is it low where the answer is wrong?"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from didicm.evaluation import (
    apply_temperature,
    entropy_histogram,
    evaluate_probs,
    load_posteriors,
    reliability,
    risk_coverage,
)
from didicm.experiments.cells import LABELS, Setting
from didicm.report.records import Row, main_variants, select
from didicm.report.style import RIGHT, WRONG, look, plt

ACROSS = 4  # at most so many plots side by side

Stored = dict[str, tuple[Tensor, Tensor]]  # probabilities and labels of a method, over all its seeds


def reliability_diagrams(stored: Stored, setting: Setting) -> plt.Figure:
    """Confidence against accuracy, with the gap between them, before temperature."""
    figure, axes = _panels(len(stored), "accuracy")
    for panel, (method, (probs, labels)) in zip(axes, stored.items(), strict=True):
        curve = reliability(probs, labels, 10)
        kept = curve.count > 0
        x, y = curve.confidence[kept].numpy(), curve.accuracy[kept].numpy()
        colour, marker, style = look(method)
        panel.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":")
        panel.fill_between(x, x, y, color=colour, alpha=0.15, linewidth=0)
        panel.plot(x, y, color=colour, marker=marker, linestyle=style)
        share = curve.count / curve.count.sum()
        panel.bar(np.linspace(0.05, 0.95, 10), share.numpy() * 0.5, 0.09, color="#cccccc", zorder=0.5)
        error = evaluate_probs(probs, labels)["cal/ECE"]
        panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="confidence")
        panel.set_title(f"{LABELS.get(method, method)}\nECE {100 * error:.1f} %")
    figure.suptitle(f"{setting}; as trained; grey: share of the images", x=0.01, ha="left", fontsize=10)
    return figure


def risk_coverage_curves(stored: Stored, setting: Setting) -> plt.Figure:
    """Share of errors when only the surest images are answered."""
    figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    for method, (probs, labels) in stored.items():
        curve = risk_coverage(probs, labels)
        colour, marker, style = look(method)
        keep = curve.coverage > 0.02
        x, y = curve.coverage[keep].numpy(), 100 * curve.risk[keep].numpy()
        every = max(1, len(x) // 8)
        axes.plot(
            100 * x,
            y,
            color=colour,
            linestyle=style,
            marker=marker,
            markevery=every,
            label=LABELS.get(method, method),
        )
    axes.set(xlabel="images answered, the surest first, %", ylabel="errors among them, %", title=str(setting))
    axes.legend(loc="upper left")
    return figure


def entropies(stored: Stored, setting: Setting) -> plt.Figure:
    """Entropy of right and of wrong answers, before temperature."""
    figure, axes = _panels(len(stored), "share of the images", height=3.4)
    for panel, (method, (probs, labels)) in zip(axes, stored.items(), strict=True):
        bars = entropy_histogram(probs, labels, 15)
        total = bars.right.sum() + bars.wrong.sum()
        edges = bars.edges.numpy()
        panel.stairs((bars.right / total).numpy(), edges, fill=True, color=RIGHT, alpha=0.75, label="right")
        panel.stairs((bars.wrong / total).numpy(), edges, color=WRONG, linewidth=2, hatch="//", label="wrong")
        panel.set(xlabel="entropy, nats", title=LABELS.get(method, method))
    axes[0].legend()
    figure.suptitle(f"{setting}; as trained", x=0.01, ha="left", fontsize=10)
    return figure


def load_stored(rows: Sequence[Row], setting: Setting, folder: Path, tempered: bool = False) -> Stored:
    """Posteriors of every method as its recipe reads it, in one setting, over all seeds."""
    stored: Stored = {}
    for variant in main_variants(rows):
        files = [
            (row, load_posteriors(folder / row.posteriors))
            for row in select(rows, variant, setting)
            if row.posteriors
        ]
        if files:
            probs = [apply_temperature(p.probs, (tempered and row.temperature) or 1.0) for row, p in files]
            stored[variant.method] = torch.cat(probs), torch.cat([p.labels for _, p in files])
    return stored


def _panels(count: int, name: str, height: float = 3.9) -> tuple[plt.Figure, list[Axes]]:
    columns = min(count, ACROSS)
    lines = -(-count // columns)
    size = 3.1 * columns + 0.4, height * lines
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for line in axes:
        line[0].set_ylabel(name)
    for spare in axes.flat[count:]:
        spare.remove()
    return figure, list(axes.flat[:count])

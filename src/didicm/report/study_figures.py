"""Figures of the paper's studies, the published numbers beside ours."""

from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes

from didicm.report.panel import METRICS, Line, Panel
from didicm.report.records import Estimate, Row, Variant, estimate, select, settings_of, variants_of
from didicm.report.style import SPARE, STYLES, Look, legend_below, plt

LOOKS = [*STYLES.values(), *SPARE]
PAPERS = "100 %, 56 px"  # the setting of the paper's figure


def over_columns(panels: Sequence[Panel], metric: str, x_label: str = "") -> plt.Figure:
    """A metric of every line over the columns (figure main_figure), one plot a panel."""
    figure, axes = _plots(panels)
    for plot, panel in zip(axes, panels, strict=True):
        looks = _looks(panel.lines)
        for line in panel.lines:
            _draw(plot, line.values[metric], looks[line.name], line.name)
        _dress(plot, panel, x_label)
    axes[0].set_ylabel(_with_unit(metric))
    for plot in axes:
        _legend(plot)
    return figure


def gains(panels: Sequence[Panel], x_label: str = "") -> plt.Figure | None:
    """What DiDiCM gains in top-1 and top-5 (figures gain and all_resnet), one plot a panel."""
    panels = [panel for panel in panels if panel.gains]
    if not panels:
        return None
    figure, axes = _plots(panels)
    for plot, panel in zip(axes, panels, strict=True):
        styles = iter(2 * LOOKS[2:])
        for (a, b), by_metric in panel.gains.items():
            colour, marker, _ = next(styles)
            for metric, style in (("top-1", "-"), ("top-5", "--")):
                if metric not in by_metric:
                    continue
                _draw(plot, by_metric[metric], (colour, marker, style), f"{a} over {b}, {metric}")
        plot.axhline(0, color="#333333", linewidth=1)
        _dress(plot, panel, x_label)
        _legend(plot)
    axes[0].set_ylabel("gain, points")
    return figure


def calls(rows: Sequence[Row], published: Panel | None) -> plt.Figure:
    """Top-1 over network calls of all readings (figure nfe), in the setting with most images and fewest pixels."""
    setting = min(settings_of(rows), key=lambda s: (-s.fraction, s.resolution or 0))
    if published and (
        PAPERS not in published.columns or None in [n for line in published.lines for n in line.calls]
    ):
        published = None
    figure, axes = _plots([0, 1] if published else [0])
    found = [row for row in rows if row.setting == setting]
    for variant in variants_of(found):
        if variant.standard:
            x = estimate(select(found, variant), "cls/Acc")
            axes[-1].axhline(100 * x.mean, color=LOOKS[0][0], label=variant.method)
    kinds: dict[str, dict[int, Variant]] = {}
    for row in found:
        if not row.standard:
            kind = _kind(row)
            kinds.setdefault(kind, {}).setdefault(row.calls, row.variant)
    for (kind, by_calls), look in zip(kinds.items(), cycle(LOOKS[2:])):
        values = [estimate(select(found, by_calls[n]), "cls/Acc") for n in sorted(by_calls)]
        colour, marker, style = look
        means, spread = [100 * x.mean for x in values], [100 * (x.high - x.mean) if x.high else 0 for x in values]
        bars = spread if any(spread) else None
        axes[-1].errorbar(
            sorted(by_calls), means, yerr=bars, color=colour, marker=marker, linestyle=style, label=kind, capsize=3
        )
    axes[-1].set_title(f"ours: {setting}")
    if published:
        at = published.columns.index(PAPERS)
        looks = _looks(published.lines)
        for line in published.lines:
            colour, marker, _ = looks[line.name]
            x, y = line.calls[at], line.values["top-1"][at].mean
            axes[0].plot(x, y, color=colour, marker=marker, label=line.name, linestyle="")
        axes[0].set_title("published: ImageNet, 56 px")
    for plot in axes:
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter("{x:g}")
        plot.set_xlabel("network calls")
        _legend(plot)
    axes[0].set_ylabel("top-1, %")
    return figure


def over_steps(panel: Panel) -> plt.Figure:
    """Accuracy and NLL of every solver over its steps."""
    metrics = [m for m in ("top-1", "NLL") if m in panel.lines[0].values]
    figure, axes = plt.subplots(1, len(metrics), figsize=(11, 5), layout="constrained")
    looks = _looks(panel.lines)
    for plot, metric in zip(axes, metrics, strict=True):
        for line in panel.lines:
            values = line.values[metric]
            at = [(int(c), x) for c, x in zip(panel.columns, values, strict=True) if x is not None]
            colour, marker, style = looks[line.name]
            xs, ys = [c for c, _ in at], [x.mean for _, x in at]
            plot.plot(xs, ys, color=colour, marker=marker, linestyle=style, label=line.name)
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter("{x:g}")
        plot.set(xlabel="steps", title=_with_unit(metric))
    best = min(x.mean for line in panel.lines for x in line.values["NLL"] if x is not None)
    axes[-1].set_ylim(0.95 * best, 3 * best)  # the worst would hide the rest
    legend_below(figure, axes[0])
    return figure


def _kind(row: Row) -> str:
    """What readings have in common that differ in the number of calls alone."""
    if row.sampler.get("method") == "cl":
        return f"{row.method}, over labels (CL), {row.sampler.get('steps')} steps"
    return f"{row.method}, over probabilities (CP)"


def _plots(panels: Sequence[object]) -> tuple[plt.Figure, list[Axes]]:
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.6 * len(panels), 4.6), layout="constrained", squeeze=False
    )
    return figure, list(axes[0])


def _looks(lines: Sequence[Line]) -> dict[str, Look]:
    """Standard classifiers in black and grey, DiDiCM in colours, published or ours."""
    grey, colours = iter(2 * LOOKS[:2]), iter(2 * LOOKS[2:])
    return {line.name: next(grey if line.standard else colours) for line in lines}


def _legend(plot: Axes) -> None:
    plot.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)


def _draw(plot: Axes, values: Sequence[Estimate | None], look: Look, label: str) -> None:
    colour, marker, style = look
    at = [(i, x) for i, x in enumerate(values) if x is not None]
    spread = [x.high - x.mean if x.high is not None else 0 for _, x in at]
    plot.errorbar(
        [i for i, _ in at],
        [x.mean for _, x in at],
        yerr=spread if any(spread) else None,
        color=colour,
        marker=marker,
        linestyle=style,
        label=label,
        capsize=3,
    )


def _dress(plot: Axes, panel: Panel, x_label: str) -> None:
    plot.set_xticks(range(len(panel.columns)), [c.replace(", ", "\n") for c in panel.columns], fontsize=8)
    plot.set_title("published" if panel.title.startswith("Published") else "ours")
    plot.set_xlabel(x_label)


def _with_unit(metric: str) -> str:
    return f"{metric}, %" if metric in METRICS and METRICS[metric].scale == 100 else f"{metric} (lower is better)"

"""Figures of a comparison: numbers over settings and network calls."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from didicm.experiments.cells import LABELS, Setting
from didicm.experiments.measure import ONE_CALL
from didicm.report.records import (
    Estimate,
    Row,
    difference,
    estimate,
    main_variants,
    select,
    settings_of,
    variants_of,
)
from didicm.report.style import legend_below, look, plt

PANELS = 4  # at most so many settings side by side


def over_uncertainty(rows: Sequence[Row]) -> plt.Figure:
    """Accuracy and NLL of each method from the most to the least telling setting."""
    settings = settings_of(rows)
    metrics = (
        ("cls/Acc", 100, "top-1 accuracy, %"),
        ("cls/NLL", 1, "NLL as trained (lower is better)"),
        ("cls/NLL, T", 1, "NLL with temperature"),
    )
    metrics = metrics[: 3 if any(row.tempered for row in rows) else 2]
    figure, axes = plt.subplots(1, len(metrics), figsize=(4.2 * len(metrics), 4.2), layout="constrained")
    for panel, (metric, scale, title) in zip(axes, metrics, strict=True):
        for i, variant in enumerate(main_variants(rows)):
            found = [estimate(select(rows, variant, s), metric) for s in settings]
            at = [j + 0.06 * (i - 1.5) for j, x in enumerate(found) if x]
            _with_bars(panel, at, [x for x in found if x], scale, variant.method, str(variant))
        panel.set(title=title)
        _setting_ticks(panel, settings)
    legend_below(figure, axes[0])
    return figure


def gains(rows: Sequence[Row]) -> plt.Figure | None:
    """What DiDiCM gains over each standard classifier, with paired intervals."""
    settings, variants = settings_of(rows), variants_of(rows)
    standard = [v for v in variants if v.standard]
    ours = [v for v in main_variants(rows) if v not in standard]
    if not standard or not ours:
        return None
    metrics = (
        ("cls/Acc", 100, "gain in accuracy, points"),
        ("cls/NLL", -1, "gain in NLL, as trained"),
        ("cls/NLL, T", -1, "gain in NLL, with temperature"),
    )
    metrics = metrics[: 3 if any(row.tempered for row in rows) else 2]
    figure, axes = plt.subplots(1, len(metrics), figsize=(4.2 * len(metrics), 4.4), layout="constrained")
    pairs = [(v, o) for v in ours for o in standard]
    for panel, (metric, scale, title) in zip(axes, metrics, strict=True):
        for i, (variant, opponent) in enumerate(pairs):
            found = [difference(select(rows, variant, s), select(rows, opponent, s), metric) for s in settings]
            at = [j + 0.12 * (i - (len(pairs) - 1) / 2) for j, x in enumerate(found) if x]
            label = f"{LABELS.get(variant.method, variant.method)} over {opponent!s}"
            kept, filled = [x for x in found if x], opponent == standard[0]
            _with_bars(panel, at, kept, scale, variant.method, label, filled=filled, line="")
        panel.axhline(0, color="#333333", linewidth=1)
        panel.set(title=title)
        _setting_ticks(panel, settings)
    legend_below(figure, axes[0], 1 if len(pairs) < 3 else 2)
    return figure


def calls_against_quality(rows: Sequence[Row]) -> plt.Figure | None:
    """Accuracy and NLL over the number of network calls of one trained network."""
    settings = settings_of(rows)[:PANELS]
    diffusion = [v for v in main_variants(rows) if not v.standard]
    if not diffusion:
        return None
    figure, grid = plt.subplots(
        2, len(settings), figsize=(3.4 * len(settings) + 1, 6), layout="constrained", squeeze=False, sharex=True
    )
    for column, setting in enumerate(settings):
        for line, (metric, scale, name) in enumerate(
            (("cls/Acc", 100, "top-1, %"), ("cls/NLL", 1, "NLL, as trained"))
        ):
            panel: Axes = grid[line][column]
            for variant in (v for v in main_variants(rows) if v.standard):
                found = estimate(select(rows, variant, setting), metric)
                if found:
                    colour, _, style = look(variant.method)
                    panel.axhline(scale * found.mean, color=colour, linestyle=style, label=str(variant))
            for variant in diffusion:
                own = [r for r in rows if r.method == variant.method and r.setting == setting]
                _curve(panel, own, metric, scale)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
            if line == 0:
                panel.set_title(str(setting))
            else:
                panel.set_xlabel("network calls")
            if column == 0:
                panel.set_ylabel(name)
    legend_below(figure, grid[0][0], 3)
    return figure


def _curve(panel: Axes, rows: Sequence[Row], metric: str, scale: float) -> None:
    if not rows:
        return
    method = rows[0].method
    colour, marker, style = look(method)
    label = LABELS.get(method, method)
    steps = {row.calls: row.variant for row in rows if row.reading != ONE_CALL}
    found = [estimate(select(rows, steps[calls]), metric) for calls in sorted(steps)]
    means = [scale * x.mean for x in found]
    panel.plot(sorted(steps), means, color=colour, marker=marker, linestyle=style, label=label)
    single = estimate([row for row in rows if row.reading == ONE_CALL], metric)
    if single:
        panel.plot(
            [1],
            [scale * single.mean],
            marker="*",
            markersize=13,
            color=colour,
            linestyle="",
            mec="white",
            label=f"{label}: read in one call",
        )


def _with_bars(
    panel: Axes,
    at: Sequence[float],
    found: Sequence[Estimate],
    scale: float,
    method: str,
    label: str,
    *,
    filled: bool = True,
    line: str | None = None,
) -> None:
    """Draw means with their intervals, where they have any."""
    colour, marker, style = look(method)
    spread = [abs(scale) * (x.high - x.mean) if x.high is not None else 0 for x in found]
    panel.errorbar(
        at,
        [scale * x.mean for x in found],
        yerr=spread if any(spread) else None,
        color=colour,
        marker=marker,
        mfc=colour if filled else "white",
        linestyle=style if line is None else line,
        capsize=3,
        elinewidth=1.2,
        label=label,
    )


def _setting_ticks(panel: Axes, settings: Sequence[Setting]) -> None:
    panel.set_xticks(range(len(settings)), [s.short for s in settings])
    panel.margins(x=0.12)

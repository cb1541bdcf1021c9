"""A study's numbers as lines over columns, as in the paper's tables, and what they say; published ones alike."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias, TypeVar

from didicm.experiments.spec import Condition, Method, Study, published_tables
from didicm.report.records import NLL, SCALED_NLL, TOP1, TOP5, Entry, Estimate, Metric, Row, Rows
from didicm.text import count

PUBLISHED_STEMS = "3x3 stem", "7x7 stem"  # of DiDiCM and of the standard classifier beside it
CLEAR_GAIN = 0.005  # of NLL, for which a higher price is named
FEW_CLASSES = 5  # with so many or fewer, top-5 says nothing

Column: TypeAlias = Condition | str | int  # a condition, a model size, or a number of steps


@dataclass(frozen=True)
class Line:
    """One method over the columns of a panel, or what it gains over a baseline."""

    name: str
    method: Method
    values: dict[Metric, list[Estimate | None]]  # one per column
    parameters: list[int | None] = field(default_factory=list)  # one per column
    multiply_adds: list[int | None] = field(default_factory=list)  # per image, one per column; none was published
    calls: int | None = None  # network calls per image, of a published line
    over: str = ""  # the baseline's name, for a gain

    def __str__(self) -> str:
        return f"{self.name} over {self.over}" if self.over else self.name


@dataclass(frozen=True)
class Panel:
    """Lines over columns, as in the paper's tables: ours or the published ones."""

    title: str
    columns: list[Column]
    lines: list[Line]
    gains: list[Line]
    published: bool = False

    @property
    def metrics(self) -> list[Metric]:
        """What the lines have."""
        return list(self.lines[0].values)


C = TypeVar("C", Entry, Line)


def baselines_of(one: C, among: Iterable[C]) -> list[C]:
    """The baselines to compare with: those of the same variant if there are any, else all; likewise by size."""
    found = [other for other in among if other.method.baseline]
    found = [other for other in found if other.method.variant == one.method.variant] or found
    return [other for other in found if other.method.size == one.method.size] or found


def panels_of(study: Study, rows: Rows) -> tuple[Panel, Panel | None]:
    """Our numbers, and the published ones that the study stands beside."""
    return our_panel(study, rows), published_panel(study.published) if study.published else None


def our_panel(study: Study, rows: Rows) -> Panel:
    """The study's numbers in its layout; samplers that only make a curve stand over steps alone."""
    if study.layout in ("comparison", "sizes"):  # a sampler per method
        rows = Rows(row for row in rows if row.main)
    elif study.layout != "steps":
        rows = Rows(row for row in rows if row.measured.posteriors is not None)
    entries = set(rows.entries())
    several = len({entry.sampler for entry in entries if not entry.method.baseline}) > 1
    several = several or len(entries) > len({str(entry.method) for entry in entries})
    cells: dict[tuple[str, Column], Rows] = {}
    for row in rows:
        cells.setdefault(_place(study, row, several), Rows()).append(row)
    columns = _columns(study, rows, {column for _, column in cells})
    few = all(row.run.num_classes <= FEW_CLASSES for row in rows)
    metrics = [m for m in (TOP1, TOP5, NLL, SCALED_NLL) if rows.values(m) and not (few and m == TOP5)]
    lines, at = [], {}
    for name in dict.fromkeys(name for name, _ in cells):
        at[name] = [cells.get((name, column), Rows()) for column in columns]
        values = {m: [cell.estimate(m) for cell in at[name]] for m in metrics}
        parameters = [cell[0].run.parameters if cell else None for cell in at[name]]
        costs = [cell[0].measured.multiply_adds if cell else None for cell in at[name]]
        lines.append(Line(name, next(filter(None, at[name]))[0].method, values, parameters, costs))
    gains = []
    for a, b in _pairs(lines):
        pairs = list(zip(at[a.name], at[b.name], strict=True))
        values = {m: [x.minus(y, m) for x, y in pairs] for m in metrics}
        gains.append(Line(a.name, a.method, values, over=b.name))
    return Panel(study.title, columns, lines, gains)


def published_panel(name: str) -> Panel:
    """A table of the paper."""
    content = published_tables()[name]
    columns: list[Column] = content.get("sizes") or [
        Condition(r, f) for f, r in product(content["fractions"], content["resolutions"])
    ]
    lines = []
    for entry in content["lines"]:
        settings = {"method": "standard"} if entry.get("baseline") else {}
        method = Method(entry["name"], entry.get("variant", ""), settings=settings)
        values: dict[Metric, list[Estimate | None]]
        values = {m: [Estimate(x / 100) for x in entry[str(m)]] for m in (TOP1, TOP5)}
        parameters = [round(1e6 * x) for x in entry.get("M parameters", [])]
        lines.append(Line(str(method), method, values, [*parameters], calls=entry.get("calls")))
    gains = [
        Line(a.name, a.method, {m: list(map(_minus, a.values[m], b.values[m])) for m in a.values}, over=b.name)
        for a, b in _pairs(lines)
    ]
    return Panel(f"Published: {content['title']} ({name})", columns, lines, gains, published=True)


def column_name(column: Column) -> str:
    """A column's heading; of conditions, the share of the images first."""
    if not isinstance(column, Condition):
        return str(column)
    size = f"{column.resolution} px" if column.resolution else ""
    part = f"{100 * column.fraction:g} %" if column.fraction <= 1 else f"{column.fraction} per class"
    return ", ".join(filter(None, [part, size, column.corruption, column.noise]))


def _place(study: Study, row: Row, several: bool) -> tuple[str, Column]:
    """Line and column of a row in the study's layout; `several` if a method's name leaves the sampler open."""
    if study.layout == "sizes":
        return row.method.line, row.method.size
    if study.layout == "steps":
        return f"{row.method}: {row.measured.group}", int(row.measured.settings.get("steps", 1))
    if study.layout != "comparison" and not several:
        return str(row.method), row.run.condition
    alone = study.layout != "comparison" and len(study.methods) == 1
    return row.measured.sampler if alone else str(row.entry), row.run.condition


def _columns(study: Study, rows: Rows, found: set[Column]) -> list[Column]:
    if study.layout == "sizes":
        return [size for size in dict.fromkeys(method.size for method in study.methods) if size in found]
    if study.layout == "steps":
        return sorted(found, key=lambda steps: int(str(steps)))
    conditions = rows.conditions()
    if study.layout == "uncertainty":  # as in the paper: fewest images first, and within them the smallest
        conditions.sort(key=lambda c: (*c.noise_order, c.corruption or "", c.fraction, c.resolution or 0))
    return [*conditions]


def _pairs(lines: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Each DiDiCM line with its baselines."""
    return [(a, b) for a in lines if not a.method.baseline for b in baselines_of(a, lines)]


def _minus(x: Estimate | None, y: Estimate | None) -> Estimate | None:
    return None if x is None or y is None else Estimate(x.mean - y.mean)


# What they say, in sentences


def on_study(study: Study, rows: Rows) -> list[str]:
    """What a study shows beside what was published: gains over the baselines, or else who comes first."""
    panel, published = panels_of(study, rows)
    if study.layout == "steps":
        return [*(_winners(panel, metric) for metric in (TOP1, NLL)), *_on_price(panel)]
    if study.layout == "metrics" or not panel.gains:
        sentences = []
        for metric in (TOP1, NLL):
            text = f"By mean {metric}, best first: {_ranked(panel, metric)}; the table shows how far seeds differ."
            if published is not None and metric in published.metrics:
                text += f" Published: {_ranked(published, metric)}."
            sentences.append(text)
        return sentences
    sentences = [*(_on_gain(panel, gain) for gain in panel.gains), *_on_stems(panel)]
    if published is not None and published.gains:
        gains = [
            f"{gain} {_mean_of(gain, TOP1)} and {_mean_of(gain, TOP5)} (top-1 with {_by_group(published, gain)})"
            for gain in published.gains
        ]
        sentences.append(f"Published, on ImageNet, in points of top-1 and top-5: {'; '.join(gains)}.")
    return sentences


def _on_gain(panel: Panel, gain: Line) -> str:
    found = [x for x in gain.values[TOP1] if x is not None]
    if not found:
        return f"{gain.name} and {gain.over} have no condition and seed in common yet."
    shown = [f"{_mean_of(gain, m)}{' points' * m.percent} of {m}" for m, x in gain.values.items() if any(x)]
    columns = count(len(found), "column")
    text = f"{gain.name} against {gain.over}, mean over {columns} of the table: {', '.join(shown)}; "
    text += f"top-1 with {_by_group(panel, gain)}; at {_cost_ratio(panel, gain)} the multiply-adds per image"
    if all(x.half is None for x in found):
        return f"{text}; a single seed, so noise may explain it."
    ahead, behind = (sum(x.sign == sign for x in found) for sign in (1, -1))
    return f"{text}; in top-1 it is ahead beyond noise in {ahead} of them and behind in {behind}."


def _cost_ratio(panel: Panel, gain: Line) -> str:
    """Multiply-adds of a line relative to its baseline's, over the columns."""
    costs = {line.name: line.multiply_adds for line in panel.lines}
    pairs = zip(costs[gain.name], costs[gain.over], strict=True)
    ratios = [f"{x / max(y, 1):.1f}" for x, y in pairs if x is not None and y is not None]
    low, high = (pick(ratios, key=float) for pick in (min, max))
    return f"{low} times" if low == high else f"{low} to {high} times"


def _on_stems(panel: Panel) -> list[str]:
    """What part of the published comparison, of different stems, is the stem: where both methods have both."""
    lines = {(line.method.name, line.method.variant): line.values[TOP1] for line in panel.lines}
    baseline = next((line.method.name for line in panel.lines if line.method.baseline), "")
    ours, theirs = PUBLISHED_STEMS
    told = []
    for name in dict.fromkeys(line.method.name for line in panel.lines if not line.method.baseline):
        crossed = [lines.get(key, []) for key in product((name, baseline), PUBLISHED_STEMS)]
        if not all(crossed):
            continue
        whole = [[x.mean for x in column if x] for column in zip(*crossed, strict=True) if all(column)]
        if not whole:
            continue
        small, large, other_small, other_large = (sum(means) / len(whole) for means in zip(*whole, strict=True))
        published, both_large, both_small = small - other_large, large - other_large, small - other_small
        gains = published, both_large, both_small, small - large, other_small - other_large
        x, y, z, own, other = (TOP1.text(gain, "+") for gain in gains)
        told.append(
            f"With stems as published, {name} with the {ours} against {baseline} with the {theirs}, the "
            f"difference in top-1 is {x} points; with the {theirs} on both sides it is {y}, with the {ours} {z}. "
            f"So the {ours} by itself is worth {own} points to {name} and {other} to {baseline}."
        )
    return told


def _by_group(panel: Panel, gain: Line) -> str:
    """Gains in top-1 by fraction of the images, or by model size."""
    groups: dict[str, list[Estimate | None]] = {}
    for column, x in zip(panel.columns, gain.values[TOP1], strict=True):
        name = column_name(Condition(fraction=column.fraction) if isinstance(column, Condition) else column)
        groups.setdefault(name, []).append(x)
    return ", ".join(f"{name} {TOP1.text(_mean(x), '+')}" for name, x in groups.items() if any(x))


def _winners(panel: Panel, metric: Metric) -> str:
    """Who comes first with how many steps."""
    found = []
    for i, column in enumerate(panel.columns):
        means = {line.name: x.mean for line in panel.lines if (x := line.values[metric][i]) is not None}
        best = max(means, key=lambda name: metric.sign * means[name])
        found.append(f"{column}: {best} ({metric.text(means[best])})")
    return f"Best {metric} by number of steps: {'; '.join(found)}."


def _on_price(panel: Panel) -> list[str]:
    """What more multiply-adds buy each method: from the cheapest answer on, every one that is clearly better."""
    offers: dict[str, list[tuple[int, float, str]]] = {}
    for line in panel.lines:
        for steps, price, found in zip(panel.columns, line.multiply_adds, line.values[NLL], strict=True):
            if price is not None and found is not None:
                sampler = line.name.removeprefix(f"{line.method}: ")
                offers.setdefault(str(line.method), []).append((price, found.mean, f"{sampler} {steps}"))
    told = []
    for method, offered in offers.items():
        worth, best = list[str](), math.inf
        for price, nll, name in sorted(offered):
            if nll < best - CLEAR_GAIN:
                best = nll
                worth.append(f"{name} ({NLL.text(nll)}, {price / 1e6:.1f} M)")
        told.append(f"What each price buys {method}, by steps (NLL, multiply-adds): {'; '.join(worth)}.")
    return told


def _ranked(panel: Panel, metric: Metric) -> str:
    """Lines with their means over the columns that all of them have."""
    columns = zip(*(line.values[metric] for line in panel.lines), strict=True)
    whole = [i for i, column in enumerate(columns) if None not in column]
    if not whole:
        return "no column is complete yet"
    means = {line.name: _mean(line.values[metric][i] for i in whole) for line in panel.lines}
    order = sorted(means, key=lambda name: -metric.sign * means[name])
    return ", ".join(f"{name} {metric.text(means[name])}" for name in order)


def _mean_of(line: Line, metric: Metric) -> str:
    return metric.text(_mean(line.values[metric]), "+")


def _mean(values: Iterable[Estimate | None]) -> float:
    found = [x.mean for x in values if x is not None]
    return sum(found) / len(found)

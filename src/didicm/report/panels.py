"""A study's numbers as lines over columns, as in the paper's tables; ours and the published ones alike."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from didicm.experiments.spec import Condition, Method, Study, published_tables
from didicm.report.records import (
    NLL,
    SCALED_NLL,
    TOP1,
    TOP5,
    Estimate,
    Metric,
    Row,
    baselines_of,
    conditions_of,
    difference,
    estimate,
)

FEW_CLASSES = 5  # with so many or fewer, top-5 says nothing

Column: TypeAlias = Condition | str | int  # a condition, a model size, or a number of steps


@dataclass(frozen=True)
class Line:
    """One method over the columns of a panel, or what it gains over a baseline."""

    name: str
    method: Method
    values: dict[Metric, list[Estimate | None]]  # one per column
    calls: list[int | None]  # one per column
    parameters: list[int | None]  # one per column
    over: str = ""  # the baseline's name, for a gain


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


def our_panel(study: Study, rows: Sequence[Row]) -> Panel:
    """The study's numbers in its layout; samplers that only make a curve stand over steps alone."""
    if study.layout == "steps":
        rows = [row for row in rows if not row.method.baseline]
    elif study.layout == "comparison":
        rows = [row for row in rows if row.main]
    else:
        rows = [row for row in rows if row.measured.posteriors is not None]
    several = len({row.measured.sampler for row in rows if not row.method.baseline}) > 1
    cells: dict[tuple[str, Column], list[Row]] = {}
    for row in rows:
        cells.setdefault(_place(study, row, several), []).append(row)
    columns = _columns(study, rows, {column for _, column in cells})
    metrics = [m for m in (TOP1, TOP5, NLL, SCALED_NLL) if any(row.value(m) is not None for row in rows)]
    if all(row.run.num_classes <= FEW_CLASSES for row in rows):
        metrics.remove(TOP5)
    lines = []
    for name in dict.fromkeys(name for name, _ in cells):
        found = [cells.get((name, column), []) for column in columns]
        values = {metric: [estimate(cell, metric) for cell in found] for metric in metrics}
        calls = [cell[0].measured.calls if cell else None for cell in found]
        parameters = [cell[0].run.parameters if cell else None for cell in found]
        lines.append(Line(name, next(c for c in found if c)[0].method, values, calls, parameters))
    gains = [
        Line(a.name, a.method, {m: [difference(*pair, m) for pair in pairs] for m in metrics}, [], [], b.name)
        for a, b in _pairs(lines)
        for pairs in [[(cells.get((a.name, c), []), cells.get((b.name, c), [])) for c in columns]]
    ]
    return Panel(study.title, columns, lines, gains)


def published_panel(name: str) -> Panel:
    """A table of the paper."""
    content = published_tables()[name]
    columns: list[Column] = content.get("sizes") or [
        Condition(r, f) for f, r in product(content["fractions"], content["resolutions"])
    ]
    lines = []
    for entry in content["lines"]:
        method = Method(
            entry["name"],
            entry.get("variant", ""),
            settings={"method": "standard"} if entry.get("baseline") else {},
        )
        values: dict[Metric, list[Estimate | None]] = {
            m: [Estimate(x / 100) for x in entry[str(m)]] for m in (TOP1, TOP5)
        }
        parameters = [round(1e6 * x) for x in entry.get("M parameters", [])]
        lines.append(Line(str(method), method, values, [entry.get("calls")] * len(columns), [*parameters]))
    gains = [
        Line(a.name, a.method, {m: list(map(_minus, a.values[m], b.values[m])) for m in a.values}, [], [], b.name)
        for a, b in _pairs(lines)
    ]
    return Panel(f"Published: {content['title']} ({name})", columns, lines, gains, published=True)


def have_order(columns: Iterable[Column]) -> bool:
    """Whether a line may join the columns: corruptions of different kinds have no order."""
    corruptions = {c.corruption for c in columns if isinstance(c, Condition) and c.corruption}
    return len({re.sub(r":\d+", "", corruption) for corruption in corruptions}) <= 1


def _pairs(lines: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Each DiDiCM line with its baselines."""
    return [(a, b) for a in lines if not a.method.baseline for b in baselines_of(a, lines)]


def _place(study: Study, row: Row, several: bool) -> tuple[str, Column]:
    """Line and column of a row in the study's layout."""
    if study.layout == "sizes":
        return row.method.line, row.method.size
    if study.layout == "steps":
        return f"{row.method}: {row.measured.group}", int(row.measured.settings.get("steps", 1))
    if study.layout != "comparison" and not row.method.baseline:
        if not several:
            return str(row.method), row.run.condition
        if len(study.methods) == 1:
            return row.measured.sampler, row.run.condition
    return str(row.entry), row.run.condition


def _columns(study: Study, rows: Sequence[Row], found: set[Column]) -> list[Column]:
    if study.layout == "sizes":
        return [size for size in dict.fromkeys(method.size for method in study.methods) if size in found]
    if study.layout == "steps":
        return sorted(found, key=lambda steps: int(str(steps)))
    conditions = conditions_of(rows)
    if study.layout == "uncertainty":  # as in the paper: fewest images first, and within them the smallest
        conditions.sort(key=lambda c: (c.corruption or "", c.fraction, c.resolution or 0))
    return [*conditions]


def _minus(x: Estimate | None, y: Estimate | None) -> Estimate | None:
    return None if x is None or y is None else Estimate(x.mean - y.mean)

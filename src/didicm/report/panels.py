"""A study's numbers as lines over columns, as in the paper's tables; ours and the published ones alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias, TypeVar

from didicm.experiments.spec import Condition, Method, Study, published_tables
from didicm.report.records import NLL, SCALED_NLL, TOP1, TOP5, Entry, Estimate, Metric, Row, Rows

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
    if study.layout == "comparison":
        rows = Rows(row for row in rows if row.main)
    elif study.layout != "steps":
        rows = Rows(row for row in rows if row.measured.posteriors is not None)
    several = len({row.measured.sampler for row in rows if not row.method.baseline}) > 1
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
    gains = [
        Line(a.name, a.method, {m: [x.minus(y, m) for x, y in pairs] for m in metrics}, over=b.name)
        for a, b in _pairs(lines)
        for pairs in [list(zip(at[a.name], at[b.name], strict=True))]
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
    """Line and column of a row in the study's layout; `several` if DiDiCM has more than one sampler."""
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

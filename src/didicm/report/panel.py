"""A study's numbers by line and column, as in the paper's tables; ours and the published ones in the same form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from didicm.experiments.cells import Setting
from didicm.experiments.definition import Study, published_tables
from didicm.report.records import Estimate, Row, difference, estimate, settings_of
from didicm.report.table import Table
from didicm.report.tables import Column, show

METRICS = {
    "top-1": Column("cls/Acc", "top-1", 100, 2),
    "top-5": Column("cls/Acc5", "top-5", 100, 2),
    "NLL": Column("cls/NLL", "NLL", 1, 3),
    "NLL, T": Column("cls/NLL, T", "NLL, T", 1, 3),
}
PARAMETERS = "M parameters"


@dataclass(frozen=True)
class Line:
    """One method over the columns."""

    name: str
    standard: bool
    values: dict[str, list[Estimate | None]]  # by metric, one a column
    calls: list[int | None]  # one a column


@dataclass(frozen=True)
class Panel:
    """Lines over columns."""

    title: str
    columns: list[str]
    lines: list[Line]
    gains: dict[tuple[str, str], dict[str, list[Estimate | None]]]  # of a line over a standard one, by metric

    def pairs(self) -> list[tuple[Line, Line]]:
        """Each DiDiCM line with the standard line of the same recipe, or with all of them."""
        standard = [line for line in self.lines if line.standard]
        ours = [line for line in self.lines if not line.standard]
        recipe = {line.name: line.name.partition(", ")[2] for line in self.lines}
        return [
            (a, b)
            for a in ours
            for b in standard
            if recipe[a.name].startswith(recipe[b.name]) or len(standard) == 1
        ]


def published_panel(name: str) -> Panel:
    """A table of the paper."""
    content = published_tables()[name]
    lines, count = [], len(content["columns"])
    for entry in content["lines"]:
        values = {k: [Estimate(x, None, None, 1) for x in v] for k, v in entry.items() if isinstance(v, list)}
        lines.append(Line(entry["name"], entry.get("standard", False), values, [entry.get("calls")] * count))
    panel = Panel(f"Published: {content['title']} ({name})", content["columns"], lines, {})
    gains = {
        (a.name, b.name): {m: list(map(_minus, a.values[m], b.values[m])) for m in ("top-1", "top-5")}
        for a, b in panel.pairs()
    }
    return Panel(panel.title, panel.columns, lines, gains)


def our_panel(study: Study, rows: Sequence[Row]) -> Panel:
    """The study's own numbers; a curve's readings are left to the figures, but for those over steps."""
    if study.layout == "steps":
        kept = [row for row in rows if not row.standard]
    else:
        kept = [row for row in rows if row.posteriors is not None]
    kept.sort(key=lambda row: list(study.contestants).index(row.method))
    name_of, column_of = _naming(study, kept)
    columns = _columns(study, kept, column_of)
    names = list(dict.fromkeys(name_of(row) for row in kept))
    by_place: dict[tuple[str, str], list[Row]] = {}
    for row in kept:
        by_place.setdefault((name_of(row), column_of(row)), []).append(row)
    chosen = [m for m in METRICS if any(row.value(METRICS[m].metric) is not None for row in kept)]
    if all(row.value("cls/Acc5") == 1 for row in kept):  # five classes or fewer
        chosen.remove("top-5")
    lines = []
    for name in names:
        found = [by_place.get((name, column), []) for column in columns]
        values = {m: [_scaled(estimate(rows, METRICS[m].metric), m) for rows in found] for m in chosen}
        if study.layout == "sizes":
            millions = [Estimate(own[0].parameters / 1e6, None, None, 1) if own else None for own in found]
            values = {PARAMETERS: millions, **values}
        standard = any(row.standard for rows in found for row in rows)
        lines.append(Line(name, standard, values, [rows[0].calls if rows else None for rows in found]))
    panel = Panel(study.title, columns, lines, {})

    def gain(a: Line, b: Line, metric: str) -> list[Estimate | None]:
        pairs = [(by_place.get((a.name, c), []), by_place.get((b.name, c), [])) for c in columns]
        return [_scaled(difference(*pair, METRICS[metric].metric), metric) for pair in pairs]

    gains = {(a.name, b.name): {m: gain(a, b, m) for m in chosen} for a, b in panel.pairs()}
    return Panel(panel.title, columns, lines, gains)


def panel_table(panel: Panel, layout: str, note: str = "") -> Table:
    """The panel as the paper prints it: metrics below each other; model sizes have a line each."""
    if layout == "sizes":
        metrics = list(panel.lines[0].values)
        rows = []
        for line in panel.lines:
            for i, column in enumerate(panel.columns):
                cells = [_text(line.values[m][i], m) for m in metrics]
                rows.append([line.name if i == 0 else "", column, *cells])
        return Table(panel.title, ["", "model", *metrics], rows, [], note)
    rows = []
    for line in panel.lines:
        for i, (metric, values) in enumerate(line.values.items()):
            rows.append([line.name if i == 0 else "", metric, *(_text(x, metric) for x in values)])
    return Table(panel.title, ["", "metric", *panel.columns], rows, [], note)


def _naming(study: Study, rows: Sequence[Row]) -> tuple[Callable[[Row], str], Callable[[Row], str]]:
    """How a row's line and column are called in the study's layout."""
    single = len({row.reading for row in rows if not row.standard}) == 1
    many = len(study.contestants) > 1

    def uncertainty(row: Row) -> str:
        if row.standard or single:
            return row.method
        return f"{row.method}, {row.reading}" if many else row.reading

    if study.layout == "sizes":
        return (lambda row: study.line(row.method)), (lambda row: study.column(row.method))
    if study.layout == "steps":
        return (lambda row: f"{row.method}: {row.group}"), (lambda row: str(row.sampler.get("steps", 1)))
    return uncertainty, lambda row: _setting_name(row.setting)


def _columns(study: Study, rows: Sequence[Row], column_of: Callable[[Row], str]) -> list[str]:
    if study.layout == "sizes":
        return list(dict.fromkeys(study.column(method) for method in study.contestants))
    if study.layout == "steps":
        return sorted({column_of(row) for row in rows}, key=int)
    # As in the paper: fewest images first, and within them the smallest.
    settings = sorted(settings_of(rows), key=lambda s: (s.corruption or "", s.fraction, s.resolution or 0))
    return [_setting_name(setting) for setting in settings]


def _setting_name(setting: Setting) -> str:
    size = f", {setting.resolution} px" if setting.resolution else ""
    return f"{100 * setting.fraction:g} %{size}" + (f", {setting.corruption}" if setting.corruption else "")


def _scaled(x: Estimate | None, metric: str) -> Estimate | None:
    scale = METRICS[metric].scale
    if x is None or scale == 1:
        return x
    low, high = (None if v is None else scale * v for v in (x.low, x.high))
    return Estimate(scale * x.mean, low, high, x.n)


def _minus(x: Estimate, y: Estimate) -> Estimate:
    return Estimate(x.mean - y.mean, None, None, 1)


def _text(x: Estimate | None, metric: str) -> str:
    digits = 1 if metric == PARAMETERS else METRICS[metric].digits
    return show(x, Column(metric, metric, 1, digits))

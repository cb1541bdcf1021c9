"""The tables of a report: every entry under every condition, differences, cost, and the layouts of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table as RichTable

from didicm.experiments.spec import Condition
from didicm.report.panels import Column, Panel
from didicm.report.records import (
    NLL,
    SCALED_NLL,
    TOP1,
    Estimate,
    Metric,
    Row,
    baselines_of,
    conditions_of,
    cost_ratio,
    difference,
    entries_of,
    estimate,
    largest,
    select,
)

MINUS = "\N{MINUS SIGN}"
METRICS = (
    TOP1,
    NLL,
    SCALED_NLL,
    Metric("cls/Brier", scaled=True),
    Metric("cal/ECE"),
    Metric("cal/ECE", scaled=True),
    Metric("sc/AURC", scaled=True),
)
SPREAD = "mean over the seeds ± half of its 95 % interval, where there are several; T: temperature-scaled"


@dataclass(frozen=True)
class Table:
    """A table as text, for the screen and for documents."""

    title: str
    header: list[str]
    rows: list[list[str]]
    groups: list[int] = field(default_factory=list)  # rows that head a group
    note: str = ""
    spare: tuple[str, ...] = ()  # columns to leave out where there is no room, the most dispensable first

    def to_rich(self, width: int = 1000) -> RichTable:
        """For a screen of so many characters."""
        dropped: list[str] = []
        for name in self.spare:
            if self._width(dropped) <= width:
                break
            dropped.append(name)
        narrow = self._width(dropped) > width
        left_out = [*dropped, *(["intervals"] if narrow else [])]
        note = self.note + (f"; report.html also has {', '.join(left_out)}" if left_out else "")
        table = RichTable(
            title=escape(self.title), caption=escape(note), title_justify="left", caption_justify="left"
        )
        kept = [i for i, name in enumerate(self.header) if name not in dropped]
        for i in kept:
            heading = self.header[i].replace(", ", "\n") if narrow else self.header[i]
            table.add_column(escape(heading), justify="right" if i else "left")
        for number, row in enumerate(self.rows):
            if number in self.groups and number:
                table.add_section()
            cells = [row[i].partition(" ± ")[0] if narrow and i else row[i] for i in kept]
            table.add_row(*map(escape, cells))
        return table

    def to_markdown(self) -> str:
        """For a document."""
        lines = [
            f"## {self.title}",
            "",
            f"| {' | '.join(self.header)} |",
            "|---|" + "---:|" * (len(self.header) - 1),
        ]
        lines += [f"| {' | '.join(cell.strip() for cell in row)} |" for row in self.rows]
        return "\n".join([*lines, *(["", f"{self.note}."] if self.note else []), ""])

    def _width(self, dropped: Sequence[str]) -> int:
        columns = [column for column in zip(self.header, *self.rows, strict=True) if column[0] not in dropped]
        return sum(max(map(len, column)) for column in columns) + 3 * len(columns) + 1


def main_table(rows: Sequence[Row]) -> Table:
    """Every entry under every condition."""
    body: list[list[str]] = []
    groups = []
    metrics = [m for m in METRICS if any(row.value(m) is not None for row in rows)]
    for condition in conditions_of(rows):
        groups.append(len(body))
        body.append([str(condition)] + [""] * (len(metrics) + 2))
        for entry in entries_of(rows):
            if found := select(rows, entry, condition):
                measured = found[0].measured
                cells = [show(estimate(found, m), m) for m in metrics]
                body.append([f"  {entry}", *cells, str(measured.calls), _millions(measured.multiply_adds)])
    seeds = len({row.run.seed for row in rows})
    note = f"mean over {seeds} seeds ± half of its 95 % interval" if seeds > 1 else "a single seed: no intervals"
    if any(m.scaled for m in metrics):
        note += "; T: temperature-scaled (fitted on held-out training images)"
    note += "; M: millions of multiply-adds per image"
    spare = ("Brier, T", "AURC, T %", "ECE %", "NLL", "M")
    return Table("Test images", ["", *map(heading, metrics), "calls", "M"], body, groups, note, spare)


def difference_table(rows: Sequence[Row]) -> Table:
    """DiDiCM minus its baselines, paired by seed."""
    metrics = [TOP1, *(Metric(m.name, _are_scaled(rows)) for m in METRICS if m.scaled)]
    body: list[list[str]] = []
    groups = []
    entries = entries_of(rows)
    for condition in [*conditions_of(rows), None]:
        groups.append(len(body))
        body.append([str(condition) if condition else "all conditions together"] + [""] * len(metrics))
        for entry in (e for e in entries if not e.method.baseline):
            for baseline in baselines_of(entry, entries):
                a, b = select(rows, entry, condition), select(rows, baseline, condition)
                found = [difference(a, b, m) for m in metrics]
                if any(found):
                    shown = [show(x, m, signed=True) for x, m in zip(found, metrics, strict=True)]
                    body.append([f"  {entry} {MINUS} {baseline}", *shown])
    note = "± half of the 95 % interval over seeds, paired by condition and seed; * where it lies on one side of 0"
    spare = tuple(heading(m) for m in (metrics[2], metrics[4], metrics[3]))
    return Table("Differences", ["", *map(heading, metrics)], body, groups, note, spare)


def cost_table(rows: Sequence[Row]) -> Table:
    """What each entry costs beside its accuracy, averaged over the conditions."""
    body, nll = [], Metric("cls/NLL", _are_scaled(rows))
    for entry in entries_of(rows):
        found, top = select(rows, entry), largest(rows, entry)
        seconds = [row.run.train_seconds for row in found if row.run.train_seconds is not None]
        body.append(
            [
                str(entry),
                show(estimate(found, TOP1), TOP1, spread=False),
                show(estimate(found, nll), nll, spread=False),
                f"{top.run.parameters / 1e6:.2f}",
                str(top.measured.calls),
                _millions(top.measured.multiply_adds),
                f"{cost_ratio(rows, entry):.1f} x",
                f"{sum(seconds) / len(seconds):.0f}" if seconds else "",
            ]
        )
    header = ["", "top-1 %", str(nll), "M parameters", "calls", "M multiply-adds", "ratio", "training, s"]
    note = "means over all conditions; multiply-adds per image at the largest resolution"
    return Table("Cost", header, body, note=note, spare=("M parameters", "training, s", "M multiply-adds"))


def panel_table(panel: Panel) -> Table:
    """The panel as the paper prints it: metrics below each other; model sizes have a row each."""
    note = "" if panel.published else SPREAD
    rows = []
    if all(isinstance(column, str) for column in panel.columns):
        for line in panel.lines:
            for i, size in enumerate(panel.columns):
                cells = [show(line.values[m][i], m, digits=2 if m.percent else 3) for m in panel.metrics]
                count = line.parameters[i]
                millions = "" if count is None else f"{count / 1e6:.1f}"
                rows.append([line.name if i == 0 else "", str(size), millions, *cells])
        return Table(panel.title, ["", "model", "M parameters", *map(str, panel.metrics)], rows, note=note)
    for line in panel.lines:
        for i, (metric, values) in enumerate(line.values.items()):
            cells = [show(x, metric, digits=2 if metric.percent else 3) for x in values]
            rows.append([line.name if i == 0 else "", str(metric), *cells])
    return Table(panel.title, ["", "metric", *map(column_name, panel.columns)], rows, note=note)


def heading(metric: Metric) -> str:
    """A metric with its unit."""
    return f"{metric} %" if metric.percent else str(metric)


def column_name(column: Column) -> str:
    """A column's heading; of conditions, the share of the images first."""
    if not isinstance(column, Condition):
        return str(column)
    size = f"{column.resolution} px" if column.resolution else ""
    return ", ".join(filter(None, [f"{100 * column.fraction:g} %", size, column.corruption]))


def show(
    x: Estimate | None, metric: Metric, *, digits: int | None = None, signed: bool = False, spread: bool = True
) -> str:
    """An estimate as text; a signed one that noise does not explain gets a star."""
    if x is None:
        return ""
    scale = 100 if metric.percent else 1
    digits = digits or (1 if metric.percent else 3)
    text = f"{scale * x.mean:{'+' if signed else ''}.{digits}f}".replace("-", MINUS)
    if spread and x.half is not None:
        text += f" ± {scale * x.half:.{digits}f}"
    return text + (" *" if signed and x.sign else "")


def _millions(multiply_adds: int) -> str:
    return f"{multiply_adds / 1e6:,.{0 if multiply_adds >= 1e8 else 2}f}"


def _are_scaled(rows: Sequence[Row]) -> bool:
    return any(row.measured.scaled_metrics for row in rows)

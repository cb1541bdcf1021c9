"""The tables of a report: every entry under every condition, differences, cost, the paper's layouts, a search."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

from didicm.experiments.results import Trial
from didicm.experiments.spec import Condition
from didicm.experiments.tune import SEARCHED, choose, combine
from didicm.report.panels import Panel, baselines_of, column_name
from didicm.report.records import MINUS, NLL, SCALED_NLL, TOP1, Estimate, Metric, Rows
from didicm.text import readable

BRIER, ECE, AURC = "cls/Brier", "cal/ECE", "sc/AURC"
NORMALIZED_AURC = Metric("sc/AURC-pNorm")
METRICS = (
    TOP1, NLL, SCALED_NLL, Metric(BRIER, True), Metric(ECE), Metric(ECE, True), Metric(AURC, True), NORMALIZED_AURC
)  # fmt: skip
SPREAD = "mean over the seeds ± half of its 95 % interval, where there are several; T: temperature-scaled"
PANEL_NOTE = f"{SPREAD}; multiply-adds per image, all network calls together"


@dataclass(frozen=True)
class Table:
    """A table as text, for the screen and for documents."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    spare: tuple[str, ...] = ()  # columns to leave out where there is no room, the most dispensable first

    @property
    def groups(self) -> list[int]:
        """Rows that head a group: they have a name and nothing else."""
        return [i for i, row in enumerate(self.rows) if not any(row[1:])]

    def to_rich(self, width: int = 1000) -> RichTable:
        """For a screen of so many characters."""
        spare = (self.spare[:count] for count in range(len(self.spare)))
        dropped = next((names for names in spare if self._width(names) <= width), self.spare)
        narrow = self._width(dropped) > width
        left_out = [*(name for name in dropped if name in self.header), *(["intervals"] if narrow else [])]
        note = self.note + (f"; report.html also has {', '.join(left_out)}" if left_out else "")
        table = RichTable(title=_plain(self.title), caption=_plain(note))
        table.title_justify = table.caption_justify = "left"
        kept = [i for i, name in enumerate(self.header) if name not in dropped]
        for i in kept:
            heading = _plain(self.header[i], ", " if narrow else "")
            table.add_column(heading, justify="right" if i else "left")
        for number, row in enumerate(self.rows):
            if number in self.groups and number:
                table.add_section()
            cells = [row[i].partition(" ± ")[0] if narrow and i else row[i] for i in kept]
            table.add_row(*map(_plain, cells))
        return table

    def to_markdown(self) -> str:
        """For a document."""
        lines = [f"## {readable(self.title)}", "", _markdown_row(self.header)]
        lines.append("|---|" + "---:|" * (len(self.header) - 1))
        lines += [_markdown_row([cell.strip() for cell in row]) for row in self.rows]
        return "\n".join([*lines, *(["", f"{self.note}."] if self.note else []), ""])

    def _width(self, dropped: Sequence[str]) -> int:
        columns = [column for column in zip(self.header, *self.rows, strict=True) if column[0] not in dropped]
        return sum(max(map(len, column)) for column in columns) + 3 * len(columns) + 1


def main_table(rows: Rows) -> Table:
    """Every entry under every condition."""
    metrics = [m for m in METRICS if rows.values(m)]
    trainings = any(row.run.train_multiply_adds is not None for row in rows)  # no column for older results alone
    header = ["", *(m.heading for m in metrics), "calls", "M", *(["training, G"] if trainings else [])]
    body: list[list[str]] = []
    for condition in rows.conditions():
        body.append([str(condition)] + [""] * (len(header) - 1))
        for entry in rows.entries():
            if found := rows.select(entry, condition):
                measured = found[0].measured
                cells = [show(found.estimate(m), m) for m in metrics]
                cells += [f"{round(measured.calls, 2):g}", _in_units(measured.multiply_adds, 1e6)]
                body.append([f"  {entry}", *cells, *([_training_cost(found)] if trainings else [])])
    seeds = len({row.run.seed for row in rows})
    note = f"mean over {seeds} seeds ± half of its 95 % interval" if seeds > 1 else "a single seed: no intervals"
    if any(m.scaled for m in metrics):
        note += "; T: temperature-scaled (fitted on held-out training images)"
    if NORMALIZED_AURC in metrics:
        note += "; normalised: confidence by normalised logits"
    note += "; M: millions of multiply-adds per image"
    if trainings:
        note += "; G: billions of multiply-adds in the whole training"
    spare = "training, G", "Brier, T", NORMALIZED_AURC.heading, "AURC, T %", "ECE %", "NLL", "M"
    return Table("Test images", header, body, note, spare)


def difference_table(rows: Rows) -> Table:
    """DiDiCM minus its baselines, paired by seed."""
    metrics = [TOP1, *(Metric(m.name, _are_scaled(rows)) for m in METRICS if m.scaled)]
    entries = rows.entries()
    pairs = [(e, baseline) for e in entries if not e.method.baseline for baseline in baselines_of(e, entries)]
    body: list[list[str]] = []
    conditions = rows.conditions()
    for condition in [*conditions, *([None] if len(conditions) > 1 else [])]:
        body.append([str(condition) if condition else "all conditions together"] + [""] * len(metrics))
        for entry, baseline in pairs:
            ours, theirs = rows.select(entry, condition), rows.select(baseline, condition)
            found = [ours.minus(theirs, m) for m in metrics]
            if any(found):
                shown = [show(x, m, signed=True) for x, m in zip(found, metrics, strict=True)]
                body.append([f"  {entry} {MINUS} {baseline}", *shown])
    note = "± half of the 95 % interval over seeds, paired by condition and seed; * where it lies on one side of 0"
    spare = tuple(metrics[i].heading for i in (2, 4, 3))
    return Table("Differences", ["", *(m.heading for m in metrics)], body, note, spare)


def cost_table(rows: Rows) -> Table:
    """What each entry costs beside its accuracy, averaged over the conditions."""
    body, nll = [], Metric("cls/NLL", _are_scaled(rows))
    for entry in rows.entries():
        found, top = rows.select(entry), rows.largest(entry)
        seconds = [row.run.train_seconds for row in found if row.run.train_seconds is not None]
        quality = [show(found.estimate(m), m, spread=False) for m in (TOP1, nll)]
        cost = [f"{top.run.parameters / 1e6:.2f}", f"{round(top.measured.calls, 2):g}"]
        cost += [_in_units(top.measured.multiply_adds, 1e6), f"{rows.cost_ratio(entry):.1f} x"]
        training = [_training_cost(found), f"{sum(seconds) / len(seconds):.0f}" if seconds else ""]
        body.append([str(entry), *quality, *cost, *training])
    header = ["", "top-1 %", str(nll), "M parameters", "calls", "M multiply-adds", "ratio"]
    header += ["training, G multiply-adds", "training, s"]
    note = "means over all conditions; multiply-adds per image at the largest resolution, in millions, and of the "
    note += "whole training, in billions; ratio: to the first standard classifier, or else the first line; "
    note += "-: not stored by older versions"
    spare = "M parameters", "training, s", "training, G multiply-adds", "M multiply-adds"
    return Table("Cost", header, body, note, spare)


def panel_table(panel: Panel) -> Table:
    """The panel as the paper prints it: metrics below each other; model sizes have a row each."""
    rows = []
    by_size = all(isinstance(column, str) for column in panel.columns)
    cost = [] if panel.published else ["M multiply-adds"]
    header = ["", "metric", *map(column_name, panel.columns)]
    if by_size:
        header = ["", "model", "M parameters", *map(str, panel.metrics), *cost]
    for line in panel.lines:
        shown = {str(m): [show(x, m, digits=2 if m.percent else 3) for x in line.values[m]] for m in panel.metrics}
        shown |= {name: ["" if x is None else _in_units(x, 1e6) for x in line.multiply_adds] for name in cost}
        if by_size:
            millions = ["" if count is None else f"{count / 1e6:.1f}" for count in line.parameters]
            own = [list(map(str, cells)) for cells in zip(panel.columns, millions, *shown.values(), strict=True)]
            own = [cells for cells in own if any(cells[1:])]  # not every method has every size
        else:
            own = [[name, *cells] for name, cells in shown.items()]
        rows += [[line.name if i == 0 else "", *cells] for i, cells in enumerate(own)]
    return Table(panel.title, header, rows, note="" if panel.published else PANEL_NOTE)


def search_table(trials: Sequence[Trial], conditions: Sequence[Condition]) -> Table:
    """Every trial, and which was chosen."""
    held_out = ", ".join(map(str, sorted({trial.num_held_out for trial in trials})))
    draws = len({trial.repeat for trial in trials})
    trials = combine(trials)
    best, body = choose(trials), []
    for condition in conditions:
        body.append([str(condition), *[""] * 6])
        for trial in trials:
            if trial.condition == condition:
                found = ["diverged", ""]
                if trial.metrics is not None:
                    found = [NLL.text(trial.nll), TOP1.text(trial.metrics[TOP1.name])]
                chosen = "chosen" if best.get((trial.method, condition)) is trial else ""
                searched = [f"{value:g}" for value in trial.settings.values()]
                body.append([f"  {trial.method}, trial {trial.number}", *searched, *found, chosen])
    header = ["", *SEARCHED.values(), "held-out NLL", "top-1 %", " "]
    kept = any(trial.losses for trial in trials)  # earlier versions had no such rule
    note = (
        "as many trials for every method, the first with its settings as they are; what two trials share "
        "is listed once; judged by the NLL of held-out training images as trained "
        f"({f'{draws} draws of ' if draws > 1 else ''}{held_out} images)"
        f"{'; another learning rate or weight decay must be better by two standard errors' if kept else ''}"
        "; no trial has met a test image"
    )
    return Table("Search", header, body, note, ("top-1 %",))


def show(
    x: Estimate | None, metric: Metric, *, digits: int | None = None, signed: bool = False, spread: bool = True
) -> str:
    """An estimate as text; a signed one that noise does not explain gets a star."""
    if x is None:
        return ""
    text = metric.text(x.mean, "+" if signed else "", digits)
    if spread and x.half is not None:
        # With two seeds an interval may be wider than what a share can be.
        text += " ± >100" if metric.percent and x.half > 1 else f" ± {metric.text(x.half, digits=digits)}"
    return text + (" *" if signed and x.sign else "")


def _plain(text: str, break_at: str = "") -> Text:
    """Text that is no markup; names come from the user's files."""
    shown = readable(text)
    return Text(shown.replace(break_at, "\n") if break_at else shown)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(readable(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _training_cost(rows: Rows) -> str:
    """Billions of multiply-adds of a training."""
    cost = rows.training_cost()
    return "-" if cost is None else _in_units(cost, 1e9)


def _in_units(multiply_adds: float, unit: float) -> str:
    return f"{multiply_adds / unit:,.{0 if multiply_adds >= 100 * unit else 2}f}"


def _are_scaled(rows: Rows) -> bool:
    return any(row.measured.scaled_metrics for row in rows)

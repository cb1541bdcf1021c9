"""The tables of a comparison: every variant in every setting, differences, cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from didicm.report.records import Estimate, Row, difference, estimate, select, settings_of, variants_of
from didicm.report.table import Table

MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Column:
    """How a metric is shown."""

    metric: str
    name: str
    scale: float = 1.0
    digits: int = 1


COLUMNS = (
    Column("cls/Acc", "top-1 %", 100),
    Column("cls/NLL", "NLL", 1, 3),
    Column("cls/NLL, T", "NLL, T", 1, 3),
    Column("cls/Brier, T", "Brier, T", 1, 3),
    Column("cal/ECE", "ECE %", 100),
    Column("cal/ECE, T", "ECE, T %", 100),
    Column("sc/AURC, T", "AURC, T %", 100),
)
DIFFERENCES = (COLUMNS[0], *COLUMNS[2:4], *COLUMNS[5:])


def main_table(rows: Sequence[Row]) -> Table:
    """Every variant in every setting."""
    body, groups = [], []
    columns = [c for c in COLUMNS if any(row.value(c.metric) is not None for row in rows)]
    for setting in settings_of(rows):
        groups.append(len(body))
        body.append([str(setting)] + [""] * (len(columns) + 2))
        for variant in variants_of(rows):
            found = select(rows, variant, setting)
            if found:
                cells = [show(estimate(found, c.metric), c) for c in columns]
                body.append(["  " + str(variant), *cells, str(found[0].calls), _millions(found[0])])
    seeds = len({row.seed for row in rows})
    note = f"mean over {seeds} seeds ± half of its 95 % interval" if seeds > 1 else "a single seed: no intervals"
    if any(row.tempered for row in rows):
        note += "; T: with a temperature fitted on held-out training images"
    note += "; M: millions of multiply-adds an image"
    header = ["", *(c.name for c in columns), "calls", "M"]
    spare = ("Brier, T", "AURC, T %", "ECE %", "NLL", "M")
    return Table("Test images", header, body, groups, note, spare)


def difference_table(rows: Sequence[Row]) -> Table:
    """DiDiCM minus the standard classifiers, paired by seed."""
    body, groups = [], []
    variants = variants_of(rows)
    standard = [v for v in variants if v.standard]
    for setting in [*settings_of(rows), None]:
        groups.append(len(body))
        body.append([str(setting) if setting else "all settings together"] + [""] * len(DIFFERENCES))
        for variant in (v for v in variants if v not in standard):
            for opponent in standard:
                a, b = select(rows, variant, setting), select(rows, opponent, setting)
                found = [difference(a, b, c.metric) for c in DIFFERENCES]
                if any(found):
                    shown = [show(x, c, signed=True) for x, c in zip(found, DIFFERENCES, strict=True)]
                    body.append([f"  {variant} {MINUS} {opponent}", *shown])
    note = "± half of the 95 % interval over seeds, paired by setting and seed; * where it lies on one side of 0"
    spare = ("Brier, T", "AURC, T %", "ECE, T %")
    return Table("Differences", ["", *(c.name for c in DIFFERENCES)], body, groups, note, spare)


def cost_table(rows: Sequence[Row]) -> Table:
    """What each variant costs beside its accuracy, averaged over the settings."""
    body = []
    base: int | None = None
    for variant in variants_of(rows):
        found = select(rows, variant)
        seconds = [row.train_seconds for row in found if row.train_seconds is not None]
        largest = max(found, key=lambda row: row.setting.resolution or 0)
        base = base or largest.multiply_adds  # of the first, a standard one if there is any
        body.append(
            [
                str(variant),
                show(estimate(found, "cls/Acc"), COLUMNS[0], spread=False),
                show(estimate(found, "cls/NLL, T"), COLUMNS[2], spread=False),
                f"{largest.parameters / 1e6:.2f}",
                str(largest.calls),
                _millions(largest),
                f"{largest.multiply_adds / max(base, 1):.1f} x",
                f"{sum(seconds) / len(seconds):.0f}" if seconds else "",
            ]
        )
    header = ["", "top-1 %", "NLL, T", "M parameters", "calls", "M multiply-adds", "ratio", "training, s"]
    note = "means over all settings; multiply-adds an image at the largest resolution"
    return Table("Cost", header, body, [], note, ("M parameters", "training, s", "M multiply-adds"))


def show(x: Estimate | None, column: Column, *, signed: bool = False, spread: bool = True) -> str:
    """An estimate as text; a signed one that noise does not explain gets a star."""
    if x is None:
        return ""
    digits = column.digits
    text = f"{column.scale * x.mean:{'+' if signed else ''}.{digits}f}".replace("-", MINUS)
    if spread and x.high is not None:
        text += f" ± {column.scale * (x.high - x.mean):.{digits}f}"
    return text + (" *" if signed and x.sign else "")


def _millions(row: Row) -> str:
    return f"{row.multiply_adds / 1e6:,.2f}" if row.multiply_adds < 1e8 else f"{row.multiply_adds / 1e6:,.0f}"

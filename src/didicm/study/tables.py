"""From stored results to tables: means with intervals over seeds, and differences paired seed by seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from didicm.evaluation import seed_interval
from didicm.study.cells import LABELS, Setting
from didicm.study.table import Table

LEVEL = 0.95
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Variant:
    """What is the same over settings and seeds: a method, and how its network is read."""

    method: str
    reading: str
    standard: bool  # a standard classifier, not DiDiCM

    def __str__(self) -> str:
        label = LABELS.get(self.method, self.method)
        return label if self.standard else f"{label}, {self.reading}"


@dataclass(frozen=True)
class Row:
    """One posterior measured on the test images: a trained cell, read in one way."""

    method: str
    standard: bool
    reading: str
    group: str  # what the reading shares with those that differ in their steps alone
    sampler: dict[str, Any]  # settings of the reading
    main: bool  # the reading that the recipe asks for; others are of the same trained network
    setting: Setting
    seed: int
    calls: int
    multiply_adds: int
    parameters: int
    num_train: int
    train_seconds: float | None
    temperature: float | None
    metrics: dict[str, float]
    tempered: dict[str, float] | None
    posteriors: str | None
    key: str

    @property
    def variant(self) -> Variant:
        """What is the same over settings and seeds."""
        return Variant(self.method, self.reading, self.standard)

    def value(self, metric: str) -> float | None:
        """A metric, with the temperature if its name ends in `, T`."""
        name, _, treated = metric.partition(", ")
        values = self.tempered if treated else self.metrics
        return None if values is None else values[name]


@dataclass(frozen=True)
class Estimate:
    """A mean over n values and its interval, which a single value has not."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval lies on one side of 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


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


def rows_of(results: Iterable[dict[str, Any]]) -> list[Row]:
    """One row a reading of a cell."""
    shared = ("method", "standard", "seed", "parameters", "num_train", "train_seconds", "key")
    own = ("calls", "multiply_adds", "temperature", "metrics", "tempered", "posteriors")
    return [
        Row(
            reading=reading["name"],
            group=reading.get("group", reading["name"]),
            sampler=reading["settings"],
            main=i == 0,
            setting=Setting(record["resolution"], record["fraction"], record["corruption"]),
            **{name: record[name] for name in shared},
            **{name: reading[name] for name in own},
        )
        for record in results
        for i, reading in enumerate(record["readings"])
    ]


def settings_of(rows: Iterable[Row]) -> list[Setting]:
    """Settings from the most to the least telling: less resolution, then fewer images, then corruption."""
    found = {row.setting for row in rows}
    return sorted(found, key=lambda s: (-(s.resolution or 1 << 30), -s.fraction, _severity(s), s.corruption or ""))


def _severity(setting: Setting) -> int:
    """Sum of the severities in a corruption such as blur:2+jpeg:4."""
    parts = (setting.corruption or "").split("+")
    return sum(int(part.rpartition(":")[2]) for part in parts if part.rpartition(":")[2].isdigit())


def variants_of(rows: Iterable[Row]) -> list[Variant]:
    """Methods in their usual order, each with its readings, but for those that only make a curve."""
    found = dict.fromkeys(row.variant for row in rows if row.posteriors is not None)
    order = list(LABELS)
    return sorted(found, key=lambda v: order.index(v.method) if v.method in order else len(order))


def select(rows: Iterable[Row], variant: Variant, setting: Setting | None = None) -> list[Row]:
    """Rows of a variant, in one setting or all, by setting and seed."""
    found = [r for r in rows if r.variant == variant and (setting is None or r.setting == setting)]
    return sorted(found, key=lambda r: (str(r.setting), r.seed))


def estimate(rows: Sequence[Row], metric: str) -> Estimate | None:
    """Mean of a metric and its interval."""
    return _estimate([value for row in rows if (value := row.value(metric)) is not None])


def difference(a: Sequence[Row], b: Sequence[Row], metric: str) -> Estimate | None:
    """Mean of `a` minus `b`, paired by setting and seed; the interval is over seeds.

    Of several settings, each seed's mean over those that all seeds have: how settings differ is no noise.
    """
    other = {(row.setting, row.seed): row.value(metric) for row in b}
    by_seed: dict[int, dict[Setting, float]] = {}
    for row in a:
        x, y = row.value(metric), other.get((row.setting, row.seed))
        if x is not None and y is not None:
            by_seed.setdefault(row.seed, {})[row.setting] = x - y
    if not by_seed:
        return None
    shared = set.intersection(*(set(found) for found in by_seed.values()))
    if not shared:
        first = min(by_seed)
        by_seed, shared = {first: by_seed[first]}, set(by_seed[first])
    return _estimate([sum(found[s] for s in shared) / len(shared) for found in by_seed.values()])


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


def _estimate(values: Sequence[float]) -> Estimate | None:
    if len(values) < 2:
        return Estimate(values[0], None, None, 1) if values else None
    return Estimate(*seed_interval(values, LEVEL), len(values))


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

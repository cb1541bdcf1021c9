"""Stored results as rows, and what they say on average: means with intervals over seeds, paired differences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from didicm.evaluation import seed_interval
from didicm.experiments.cells import LABELS, Setting

LEVEL = 0.95


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


def main_variants(rows: Sequence[Row]) -> list[Variant]:
    """Every method as its recipe reads it."""
    main = {row.variant for row in rows if row.main}
    return [variant for variant in variants_of(rows) if variant in main]


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


def _estimate(values: Sequence[float]) -> Estimate | None:
    if len(values) < 2:
        return Estimate(values[0], None, None, 1) if values else None
    return Estimate(*seed_interval(values, LEVEL), len(values))

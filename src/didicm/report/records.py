"""Stored results as rows, and what they say on average: means with intervals over seeds, paired differences."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

from didicm.evaluation.intervals import seed_interval
from didicm.experiments.results import Measurement, RunResult
from didicm.experiments.spec import ONE_CALL, Condition, Method, Study

Place: TypeAlias = tuple[Condition, int]  # a condition and a seed
LEVEL = 0.95
MINUS = "\N{MINUS SIGN}"

_NAMES = {  # all in per cent
    "cls/Acc": "top-1",
    "cls/Acc5": "top-5",
    "cal/ECE": "ECE",
    "sc/AURC": "AURC",
    "sc/AURC-pNorm": "AURC, normalised",
}


@dataclass(frozen=True)
class Metric:
    """A metric by its name in `didicm.evaluation`, as trained or temperature-scaled."""

    name: str
    scaled: bool = False

    def __str__(self) -> str:
        return _NAMES.get(self.name, self.name.rpartition("/")[2]) + (", T" if self.scaled else "")

    @property
    def heading(self) -> str:
        """The metric with its unit."""
        return f"{self} %" if self.percent else str(self)

    @property
    def percent(self) -> bool:
        """Whether it is shown in per cent."""
        return self.name in _NAMES

    @property
    def scale(self) -> int:
        """What a value is multiplied by to be shown."""
        return 100 if self.percent else 1

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.name in ("cls/Acc", "cls/Acc5") else -1

    def text(self, value: float, sign: str = "", digits: int | None = None) -> str:
        """A value as it is shown, without the unit; `+` signs it."""
        digits = digits or (1 if self.percent else 3)
        return f"{self.scale * value:{sign}.{digits}f}".replace("-", MINUS)


TOP1, TOP5 = Metric("cls/Acc"), Metric("cls/Acc5")
NLL, SCALED_NLL = Metric("cls/NLL"), Metric("cls/NLL", scaled=True)
ENTROPY = Metric("cls/Entropy")


@dataclass(frozen=True)
class Estimate:
    """A mean over n values and half of its interval, which a single value has not."""

    mean: float
    half: float | None = None
    n: int = 1

    def __neg__(self) -> "Estimate":
        return Estimate(-self.mean, self.half, self.n)

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval lies on one side of 0, else 0; two equal values tell no spread."""
        if self.half is None or abs(self.mean) <= self.half or (self.n == 2 and not self.half):
            return 0
        return 1 if self.mean > 0 else -1


@dataclass(frozen=True)
class Entry:
    """What is the same over conditions and seeds: a method, and how its network is sampled."""

    method: Method = field(hash=False)
    sampler: str

    def __str__(self) -> str:
        usual = self.method.baseline and self.sampler == ONE_CALL
        return str(self.method) if usual else f"{self.method}, {self.sampler}"


@dataclass(frozen=True)
class Row:
    """One posterior measured on the test images: a trained network, sampled in one way."""

    method: Method
    run: RunResult
    measured: Measurement
    main: bool  # the study's first sampler; others are of the same trained network

    @property
    def entry(self) -> Entry:
        """What is the same over conditions and seeds."""
        return Entry(self.method, self.measured.sampler)

    @property
    def place(self) -> Place:
        """Where it was trained and measured."""
        return self.run.condition, self.run.seed

    @property
    def views(self) -> int:
        """Augmented views of an image that the network looked at."""
        return int(self.measured.settings.get("views", 1))

    def value(self, metric: Metric) -> float | None:
        """The metric, if it was measured."""
        values = self.measured.scaled_metrics if metric.scaled else self.measured.metrics
        return None if values is None else values.get(metric.name)


def complete(places: Collection[Place]) -> set[Place]:
    """Those of the same conditions for every seed: all conditions, or all seeds, whichever leaves more of them.

    Of seeds without a condition in common, the first alone.
    """
    by_seed: dict[int, set[Condition]] = {}
    for condition, seed in places:
        by_seed.setdefault(seed, set()).add(condition)
    if not by_seed:
        return set()
    every, shared = set.union(*by_seed.values()), set.intersection(*by_seed.values())
    whole = [seed for seed, found in by_seed.items() if found == every]
    found = max(set(product(every, whole)), set(product(shared, by_seed)), key=len)
    return found or set(product(by_seed[min(by_seed)], [min(by_seed)]))


class Rows(list[Row]):
    """Rows of any entries, conditions and seeds."""

    def conditions(self) -> list[Condition]:
        """From the most to the least informative: less resolution, then fewer images, corruption, wrong labels."""

        def informative(c: Condition) -> tuple[Any, ...]:
            severities = re.findall(r":(\d+)", c.corruption or "")
            corruption = sum(map(int, severities)), c.corruption or ""
            return -(c.resolution or 1 << 30), -c.fraction, *corruption, *c.noise_order

        return sorted({row.run.condition for row in self}, key=informative)

    def entries(self, *, main: bool = False) -> list[Entry]:
        """Entries whose posteriors are stored, or only those with the main sampler."""
        kept = (row for row in self if (row.main if main else row.measured.posteriors is not None))
        return list(dict.fromkeys(row.entry for row in kept))

    def select(self, entry: Entry | None = None, condition: Condition | None = None) -> "Rows":
        """Rows of one entry or all, under one condition or all."""
        found = (r for r in self if condition is None or r.run.condition == condition)
        if entry is None:
            return Rows(found)
        sampler, method = entry.sampler, entry.method  # to compare names first saves most comparisons of methods
        return Rows(r for r in found if r.measured.sampler == sampler and r.method == method)

    def values(self, metric: Metric) -> list[float]:
        """The metric of the rows that have it."""
        return [value for row in self if (value := row.value(metric)) is not None]

    def estimate(self, metric: Metric) -> Estimate | None:
        """Mean of a metric and its interval."""
        return _estimate(self.values(metric))

    def minus(self, other: "Rows", metric: Metric) -> Estimate | None:
        """Mean difference, paired by condition and seed; the interval is over seeds.

        Of several conditions, each seed's mean over the `complete` ones: how conditions differ is no noise.
        """
        theirs = {row.place: row.value(metric) for row in other}
        gaps: dict[Place, float] = {}
        for row in self:
            x, y = row.value(metric), theirs.get(row.place)
            if x is not None and y is not None:
                gaps[row.place] = x - y
        by_seed: dict[int, list[float]] = {}
        for condition, seed in sorted(complete(gaps), key=lambda place: place[1]):
            by_seed.setdefault(seed, []).append(gaps[condition, seed])
        return _estimate([sum(found) / len(found) for found in by_seed.values()]) if by_seed else None

    def largest(self, entry: Entry) -> Row:
        """The row that an entry's cost is told by: at its largest resolution."""
        return max(self.select(entry), key=lambda row: row.run.condition.resolution or 0)

    def cost_ratio(self, entry: Entry, to: Entry | None = None) -> float:
        """Multiply-adds per image relative to another entry's; else to the first one's, if possible a baseline."""
        to = to or min(self.entries(), key=lambda other: not other.method.baseline)
        return self.largest(entry).measured.multiply_adds / max(self.largest(to).measured.multiply_adds, 1)

    def training_cost(self) -> float | None:
        """Multiply-adds of a training, the mean over those that say it."""
        known = [cost for row in self if (cost := row.run.train_multiply_adds) is not None]
        return sum(known) / len(known) if known else None


def rows_of(results: Iterable[RunResult], study: Study) -> Rows:
    """One row per sampler of each run, in the order of the study's methods."""
    methods = {str(method): method for method in study.methods}
    order = list(methods)
    runs = sorted((run for run in results if run.method in methods), key=lambda run: order.index(run.method))
    return Rows(Row(methods[run.method], run, m, i == 0) for run in runs for i, m in enumerate(run.measurements))


def _estimate(values: Sequence[float]) -> Estimate | None:
    if len(values) < 2:
        return Estimate(values[0]) if values else None
    mean, _, high = seed_interval(values, LEVEL)
    return Estimate(mean, high - mean, len(values))

"""Stored results as rows, and what they say on average: means with intervals over seeds, paired differences."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from didicm.evaluation import seed_interval
from didicm.experiments.results import Measurement, RunResult
from didicm.experiments.spec import Condition, Method, Study

LEVEL = 0.95

_NAMES = {"cls/Acc": "top-1", "cls/Acc5": "top-5", "cal/ECE": "ECE", "sc/AURC": "AURC"}


@dataclass(frozen=True)
class Metric:
    """A metric by its name in `didicm.evaluation`, as trained or temperature-scaled."""

    name: str
    scaled: bool = False

    def __str__(self) -> str:
        return _NAMES.get(self.name, self.name.rpartition("/")[2]) + (", T" if self.scaled else "")

    @property
    def percent(self) -> bool:
        """Whether it is shown in per cent."""
        return self.name in _NAMES

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.name in ("cls/Acc", "cls/Acc5") else -1


TOP1, TOP5, NLL, SCALED_NLL = (
    Metric("cls/Acc"),
    Metric("cls/Acc5"),
    Metric("cls/NLL"),
    Metric("cls/NLL", scaled=True),
)


@dataclass(frozen=True)
class Entry:
    """What is the same over conditions and seeds: a method, and how its network is sampled."""

    method: Method = field(hash=False)
    sampler: str

    def __str__(self) -> str:
        return str(self.method) if self.method.baseline else f"{self.method}, {self.sampler}"


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

    def value(self, metric: Metric) -> float | None:
        """The metric, if it was measured."""
        values = self.measured.scaled_metrics if metric.scaled else self.measured.metrics
        return None if values is None else values.get(metric.name)


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
        """-1 or 1 if the interval lies on one side of 0, else 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1


class _Compared(Protocol):
    @property
    def method(self) -> Method: ...


C = TypeVar("C", bound=_Compared)


def rows_of(results: Iterable[RunResult], study: Study) -> list[Row]:
    """One row per sampler of each run, in the order of the study's methods."""
    methods = {str(method): method for method in study.methods}
    order = list(methods)
    known = sorted((run for run in results if run.method in methods), key=lambda run: order.index(run.method))
    return [
        Row(methods[run.method], run, measured, i == 0)
        for run in known
        for i, measured in enumerate(run.measurements)
    ]


def conditions_of(rows: Iterable[Row]) -> list[Condition]:
    """Conditions from the most to the least informative: less resolution, then fewer images, then corruption."""

    def informative(c: Condition) -> tuple[int, float, int, str]:
        severities = re.findall(r":(\d+)", c.corruption or "")
        return -(c.resolution or 1 << 30), -c.fraction, sum(map(int, severities)), c.corruption or ""

    return sorted({row.run.condition for row in rows}, key=informative)


def entries_of(rows: Iterable[Row], *, main: bool = False) -> list[Entry]:
    """Entries whose posteriors are stored, or only those with the main sampler."""
    return list(dict.fromkeys(r.entry for r in rows if (r.main if main else r.measured.posteriors is not None)))


def baselines_of(one: _Compared, among: Iterable[C]) -> list[C]:
    """The baselines to compare with: those of the same variant if there are any, else all; likewise by size."""
    found = [other for other in among if other.method.baseline]
    found = [other for other in found if other.method.variant == one.method.variant] or found
    return [other for other in found if other.method.size == one.method.size] or found


def select(rows: Iterable[Row], entry: Entry, condition: Condition | None = None) -> list[Row]:
    """Rows of an entry under one condition or all."""
    return [r for r in rows if r.entry == entry and condition in (None, r.run.condition)]


def largest(rows: Iterable[Row], entry: Entry) -> Row:
    """The row that an entry's cost is told by: at its largest resolution."""
    return max(select(rows, entry), key=lambda row: row.run.condition.resolution or 0)


def cost_ratio(rows: Sequence[Row], entry: Entry) -> float:
    """Multiply-adds per image relative to the first entry's, a baseline if there is any."""
    entries = entries_of(rows)
    first = next((other for other in entries if other.method.baseline), entries[0])
    return largest(rows, entry).measured.multiply_adds / max(largest(rows, first).measured.multiply_adds, 1)


def estimate(rows: Iterable[Row], metric: Metric) -> Estimate | None:
    """Mean of a metric and its interval."""
    return _estimate([value for row in rows if (value := row.value(metric)) is not None])


def difference(a: Iterable[Row], b: Iterable[Row], metric: Metric) -> Estimate | None:
    """Mean of `a` minus `b`, paired by condition and seed; the interval is over seeds.

    Of several conditions, each seed's mean over those that all seeds have: how conditions differ is no noise.
    """
    other = {(row.run.condition, row.run.seed): row.value(metric) for row in b}
    by_seed: dict[int, dict[Condition, float]] = {}
    for row in a:
        x, y = row.value(metric), other.get((row.run.condition, row.run.seed))
        if x is not None and y is not None:
            by_seed.setdefault(row.run.seed, {})[row.run.condition] = x - y
    if not by_seed:
        return None
    shared = set.intersection(*(set(found) for found in by_seed.values()))
    if not shared:
        first = min(by_seed)
        by_seed, shared = {first: by_seed[first]}, set(by_seed[first])
    return _estimate([sum(found[c] for c in shared) / len(shared) for found in by_seed.values()])


def _estimate(values: Sequence[float]) -> Estimate | None:
    if len(values) < 2:
        return Estimate(values[0]) if values else None
    mean, _, high = seed_interval(values, LEVEL)
    return Estimate(mean, high - mean, len(values))

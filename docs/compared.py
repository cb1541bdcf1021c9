"""DiDiCM beside the best standard classifier of the same price, under every condition of the studies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from didicm.evaluation.intervals import seed_interval
from didicm.experiments.results import Plan, Trial, read_plan, read_results, read_trials
from didicm.experiments.spec import ONE_CALL, Condition
from didicm.experiments.tune import choose, combine
from didicm.report.records import MINUS, NLL, SCALED_NLL, TOP1, Entry, Estimate, Metric, Rows, rows_of
from didicm.report.verdict import ALIKE

FOLDER = Path(__file__).parent / "results"
RECOMMENDED = "ResNet blocks"  # the variant of DiDiCM that is compared
BRIER, ECE = Metric("cls/Brier"), Metric("cal/ECE")
ADVISED = (TOP1, NLL, SCALED_NLL, BRIER, Metric("cls/Brier", scaled=True))
CROPS, STRONG = "crops and flips", "strong augmentation"
# Studies in which every method chose its own length. Of a condition that several have, the first is taken.
TUNED = {
    CROPS: (
        "batches-cpu",
        "holdouts-cpu",
        "borders-cpu",
        "breadth-cpu",
        "many-cpu",
        "classes-border-cpu",
        "classes-cpu",
        "labels-cpu",
        "noise-cpu",
        "fashion-cpu",
    ),
    STRONG: (
        "lengths-strong-cpu",
        "borders-strong-cpu",
        "strong-breadth-cpu",
        "strong-many-cpu",
        "strong-classes-cpu",
        "strong-labels-cpu",
        "strong-fashion-cpu",
    ),
}
VIEWED = {  # those with several augmented views of each image, too
    CROPS: (
        "batches-cpu",
        "breadth-cpu",
        "many-cpu",
        "classes-border-cpu",
        "ensembles-cpu",
        "labels-cpu",
        "noise-cpu",
    ),
    STRONG: ("lengths-strong-cpu",),
}
BLACK = "black"  # how variants end that say what the border is worth
DATA = {
    "hf://cifar10": "CIFAR-10",
    "cifar10n": "CIFAR-10",
    "hf://tiny100": "100 classes of Tiny-ImageNet",
    "fashion-mini": "Fashion-MNIST",
}
PEOPLE = {  # tables of labels of the studies labels-cpu and strong-labels-cpu
    "labels of aggre.csv": "labels of people, 9 % wrong",
    "labels of random1.csv": "labels of people, 17 % wrong",
    "labels of worse.csv": "labels of people, 40 % wrong",
}
FEW, MANY = 50, 1000  # images per class


@cache
def read_study(name: str) -> tuple[Plan, Rows] | None:
    """A study that was taken over, if it was; several pages tell of the same one."""
    plan = read_plan(FOLDER / name)
    return None if plan is None else (plan, rows_of(read_results(FOLDER / name), plan.study))


def link(name: str, text: str = "study") -> str:
    """A link from the results page to the page of a study."""
    return f"[{text}](results/{name}/README.md)"


@dataclass(frozen=True)
class Gap:
    """A metric of DiDiCM beside the best standard classifier's."""

    ours: float
    theirs: float
    difference: Estimate  # paired by seed
    sign: int  # 1 or -1 where DiDiCM is better or worse beyond noise


@dataclass(frozen=True)
class Compared:
    """An answer of DiDiCM under one condition."""

    study: str
    augmentation: str
    data: str
    condition: Condition
    entry: Entry  # of several variants, the one that held-out images prefer
    best: Entry  # of the standard classifiers, likewise
    shows_black: bool  # where images are shifted in training; else their border is repeated
    predicts_scores: bool  # else the posterior
    gaps: dict[Metric, Gap]
    by_temperature: float  # what it adds to the NLL of the best
    inference: float  # multiply-adds relative to those of the best
    costs: tuple[float, float] | None  # multiply-adds of both trainings

    @property
    def training(self) -> float | None:
        """Multiply-adds relative to those of the best, as they are printed: 1.32 is not more than 1.3."""
        return self.costs and round(self.costs[0] / self.costs[1], 1)

    @property
    def place(self) -> str:
        """Data and condition in words."""
        return place_of(self.data, self.condition)

    @property
    def ahead(self) -> int:
        """1, 0 or -1: by temperature-scaled NLL, and where that is level by top-1."""
        return self.gaps[SCALED_NLL].sign or self.gaps[TOP1].sign

    @property
    def wrong_labels(self) -> bool:
        """Whether training labels are wrong."""
        return bool(self.condition.noise)


def place_of(data: str, condition: Condition) -> str:
    """A condition in words, labels by what they are instead of the name of their table."""
    return f"{data}, {condition}".replace(condition.noise, PEOPLE.get(condition.noise, condition.noise))


def compare_all(views: bool = False) -> list[Compared]:
    """DiDiCM under every condition of the tuned studies, each once for each augmentation and sampler."""
    found: dict[tuple[str, str, str], Compared] = {}  # of the first study that has it
    for augmentation, names in (VIEWED if views else TUNED).items():
        for name in names:
            for x in _compare_study(name, augmentation, views):
                found.setdefault((augmentation, x.place, x.entry.sampler), x)
    data = list(dict.fromkeys(DATA.values()))

    def order(x: Compared) -> tuple[float, ...]:
        return x.wrong_labels, data.index(x.data), -x.condition.resolution, -x.condition.fraction

    return sorted(found.values(), key=order)


def _compare_study(name: str, augmentation: str, views: bool = False) -> Iterator[Compared]:
    """DiDiCM under every condition of a tuned study that was taken over."""
    if (stored := read_study(name)) is None:
        return
    plan, rows = stored
    rows = Rows(row for row in rows if (row.views > 1) == views and not row.method.variant.endswith(BLACK))
    for condition in rows.conditions():
        here = rows.select(condition=condition)
        theirs = [e for e in here.entries() if e.method.baseline and e.method.members == 1]
        price = min((here.select(e)[0].measured.multiply_adds for e in theirs), default=0)
        theirs = [e for e in theirs if here.select(e)[0].measured.multiply_adds <= ALIKE * price]
        mine = [e for e in here.entries() if e.method.variant.startswith(RECOMMENDED)]
        for sampler in dict.fromkeys(e.sampler for e in mine if theirs):
            same_sampler = [e for e in mine if e.sampler == sampler]
            ours, best = (choose_variant(plan, here, condition, side) for side in (same_sampler, theirs))
            gaps = {}
            for metric in (*ADVISED, ECE):
                difference = here.select(ours).minus(here.select(best), metric)
                means = (here.select(e).estimate(metric).mean for e in (ours, best))
                gaps[metric] = Gap(*means, difference, difference.sign * metric.sign)
            costs = [here.select(e).training_cost() for e in (ours, best)]
            nll, scaled = (here.select(best).estimate(m).mean for m in (NLL, SCALED_NLL))
            # A study that was run in parts has stored the settings of its last part alone.
            same = [plan.settings.get(f"{ours.method}, {x}") for x in (condition, *rows.conditions())]
            settings = next(x for x in same if x is not None)
            yield Compared(
                plan.study.name,
                augmentation,
                DATA[plan.data],
                condition,
                ours,
                best,
                settings.get("augment.pad_mode", BLACK) == BLACK,  # as all did before it was a setting
                settings["model_args"].get("parameterization", "score") == "score",
                gaps,
                scaled - nll,
                here.cost_ratio(ours, best),
                (costs[0], costs[1]) if all(costs) else None,
            )


def choose_variant(plan: Plan, here: Rows, condition: Condition, entries: list[Entry]) -> Entry:
    """Of several variants the one that held-out images prefer, by the trials that chose their lengths.

    They are judged as trained, by NLL. Variants without trials of their own, if there are any, are left out.
    """
    judged = {
        str(method): trial.nll for (method, at), trial in chosen_trials(plan.study.name).items() if at == condition
    }
    return min(entries, key=lambda entry: judged.get(str(entry.method), math.inf))


@cache
def chosen_trials(study: str) -> dict[tuple[str, Condition], Trial]:
    """What the search of a study kept, by method and condition."""
    return choose(read_trials(FOLDER / study))


def of_study(name: str) -> list[Compared]:
    """One call of DiDiCM under every condition of a tuned study."""
    augmentation = next((a for a, names in TUNED.items() if name in names), None)
    return one_call(list(_compare_study(name, augmentation))) if augmentation else []


def ends_longest(x: Compared, entry: Entry) -> bool | None:
    """Whether the length that was chosen is the longest that was tried; None without a search."""
    trials = [t for t in combine(read_trials(FOLDER / x.study)) if t.condition == x.condition and t.metrics]
    epochs = [t.settings["epochs"] for t in trials if t.method == str(entry.method)]
    chosen = chosen_trials(x.study).get((str(entry.method), x.condition))
    return None if chosen is None else chosen.settings["epochs"] == max(epochs)


def one_call(found: list[Compared]) -> list[Compared]:
    """The answers that cost what the standard classifier's does."""
    return [x for x in found if x.entry.sampler == ONE_CALL]


def pooled(found: list[Compared]) -> Estimate:
    """Temperature-scaled NLL of DiDiCM minus the standard classifier's, over conditions instead of seeds."""
    gaps = [x.gaps[SCALED_NLL].difference.mean for x in found]
    if len(gaps) < 2:
        return Estimate(gaps[0])
    mean, _, high = seed_interval(gaps)
    return Estimate(mean, high - mean, len(gaps))


def spread(values: list[float], digits: int = 1) -> str:
    """The smallest and the largest of some numbers."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def signed(values: list[float], digits: int = 3) -> str:
    """The lowest and the highest of some differences."""
    low, high = (f"{x:+.{digits}f}".replace("-", MINUS) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def with_interval(gaps: list[float], digits: int = 3) -> str:
    """The mean of differences over seeds, and its interval."""
    mean, low, high = seed_interval(gaps)
    return f"{signed([mean], digits)} (95 % interval {signed([low, high], digits)})"

"""The first section of docs/results.md, which method to use; `make_results.py` writes the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

from didicm.experiments.results import Plan, read_plan, read_results, read_trials
from didicm.experiments.spec import ONE_CALL, Condition, Method
from didicm.experiments.tune import combine, cost_of_one_draw
from didicm.report.records import NLL, SCALED_NLL, TOP1, Entry, Metric, Rows, rows_of
from didicm.report.tables import NORMALIZED_AURC
from didicm.text import count

SHORT = """## Which method to use

Take what is in bold; of *either*, the standard classifier is the simpler one. The numbers count the conditions
of the studies below under which DiDiCM is ahead, level or behind beyond noise, by temperature-scaled NLL, and
where that is level by top-1. Its answer takes {inference} times the multiply-adds of the standard classifier's,
its training {training} times.
"""
ADVICE = """
With few images, strong augmentation (RandAugment, Mixup, CutMix) and long training are worth more than the choice
of method, if they leave an image in its class: `didicm train --recipe few`, with `--method standard` for a
standard classifier. On your own images, `didicm compare --data photos --tune 8 --recipe few --out runs/compare`
answers it.

### What this rests on

The lists of who is ahead, and the tables, come from the studies in which each method's length of training was
chosen on held-out images, in some also its learning rate and weight decay. Lines that rest on another study name
it. Held-out images judged DiDiCM by the one call that is compared here where it has strong augmentation or the
border repeated, elsewhere by its eight steps. DiDiCM has the blocks of the standard classifier. With strong
augmentation 90 % of its labels are masked, which is recipe `few`, elsewhere half (`--mask 0.5`); the studies have
its other variants. The standard classifier is the best of its variants, chosen for each condition and metric in
its favour.
**+** and **-** mark where DiDiCM is better or worse than it beyond the 95 % interval of the difference over seeds,
paired; of a hundred such comparisons, five would be marked by chance, and close ones change when a training is
repeated ([trained again](#trained-again)). T: temperature-scaled.
"""
OWN_IMAGES = """- **On your own images**, `didicm compare --data photos --tune 8 --out runs/compare` answers it,
  with crops and flips for all methods; add `--recipe few` for strong augmentation, which takes several times as
  long. DiDiCM as compared here is `didicm train --recipe few`, which predicts the posterior, so that its steps
  work as well as its one call; all but the latest studies predict scores (`--model-args.parameterization score`).
  With crops and flips alone, add `--mask 0.5 --augment.auto-augment none --augment.mixup 0 --augment.cutmix 0`.
"""
RECOMMENDED = "ResNet blocks"  # the variant of DiDiCM that all tuned studies have
BRIER = Metric("cls/Brier")
ADVISED = (TOP1, NLL, SCALED_NLL, BRIER, Metric("cls/Brier", scaled=True))
ECE = Metric("cal/ECE")
_MARKS = {1: " +", 0: "", -1: " -"}
TUNED = (
    "fair-cpu",
    "borders-cpu",
    "holdouts-cpu",
    "strong-cpu",
    "borders-strong-cpu",
    "breadth-cpu",
    "strong-breadth-cpu",
    "strong-many-cpu",
    "classes-cpu",
    "strong-classes-cpu",
    "labels-cpu",
    "strong-labels-cpu",
    "noise-cpu",
)
PEOPLE = {  # tables of labels of the studies labels-cpu and strong-labels-cpu
    "labels of aggre.csv": "labels of people, 9 % wrong",
    "labels of random1.csv": "labels of people, 17 % wrong",
    "labels of worse.csv": "labels of people, 40 % wrong",
}
CIFAR = "hf://cifar10"
DATA = {
    CIFAR: "CIFAR-10",
    "cifar10n": "CIFAR-10",
    "hf://tiny100": "100 classes of Tiny-ImageNet",
    "fashion-mini": "Fashion-MNIST",
}
AUGMENTED = {"With crops and flips": False, "With strong augmentation": True}  # whether it is strong
FEW, MANY = 50, 1000  # images per class
SEEN_BRIEFLY = 20_000  # images in all; the studies see each of so many some ten times
STRONGLY, BORDER = ", strong augmentation", ", border repeated"
BORDERS = {"borders-cpu": BORDER, "borders-strong-cpu": STRONGLY + BORDER}
BROADER = {"strong-breadth-cpu": STRONGLY + BORDER}
LENGTH_ALONE = dict.fromkeys(("strong-many-cpu", "strong-classes-cpu"), STRONGLY + BORDER)
AGAIN = {"borders-cpu": "holdouts-cpu"}  # a study whose conditions another one searched with more held-out images
BLACK = "black"  # how their variants end that show it, as all other studies do
AUGMENTATIONS = {  # studies of the same conditions
    "crops and flips": ("fair-cpu", "breadth-cpu", "classes-cpu", "labels-cpu"),
    "strong augmentation": (
        "strong-cpu",
        "strong-breadth-cpu",
        "strong-many-cpu",
        "strong-classes-cpu",
        "strong-labels-cpu",
    ),
}
OPPONENTS = ("ensembles-cpu", "ensembles-labels-cpu", "ensembles-noise-cpu")
ANSWERS = {  # of those studies: variant of the standard classifier or of DiDiCM, and the sampler if it matters
    "standard": (True, "", ONE_CALL),
    "SWA": (True, "SWA", ONE_CALL),
    "snapshots": (True, "snapshots", ""),
    "8 views": (True, "", "8 views"),
    "ensemble": (True, "ensemble", ""),
    "DiDiCM, 1 call": (False, RECOMMENDED, ONE_CALL),
    "DiDiCM, 8 views": (False, RECOMMENDED, "8 views"),
}
# Studies that chose learning rate and weight decay too; those of strong-cpu are among the trials of the last.
SEARCHED = ("fair-cpu", *OPPONENTS[1:], *BORDERS, *BROADER)
WIDER = {  # studies without a search of learning rate and weight decay, and with one; and their methods
    ("labels-cpu", "ensembles-labels-cpu"): (
        ("standard, smoothed labels", "standard"),
        ("DiDiCM, ResNet blocks",) * 2,
    ),
    ("noise-cpu", "ensembles-noise-cpu"): (
        ("standard, smoothed labels", "standard"),
        ("DiDiCM, ResNet blocks",) * 2,
    ),
}
AIM = 1.3  # times the multiply-adds of the standard classifier, at most, for an answer


@cache
def read_study(folder: Path) -> tuple[Plan, Rows] | None:
    """A study that was taken over, if it was; several sections tell of the same one."""
    plan = read_plan(folder)
    return None if plan is None else (plan, rows_of(read_results(folder), plan.study))


@dataclass(frozen=True)
class Compared:
    """An answer of DiDiCM under one condition beside the best standard classifier, metric by metric."""

    condition: str  # with the name of the data
    images: float  # per class
    entry: Entry
    best: Entry  # of the standard classifiers, by temperature-scaled NLL
    variants: int  # how many of them there are
    values: dict[
        Metric, tuple[float, float, int]
    ]  # ours, the best of theirs, 1 or -1 if better or worse beyond noise
    by_temperature: float  # what it adds to the NLL of the best
    inference: float  # multiply-adds relative to those of the best
    training: float | None


def write_advice(folders: list[Path]) -> Iterator[str]:
    """What a practitioner can act on: DiDiCM and the best standard classifier, with one and with several views."""
    stored = {folder.name: study for folder in folders if (study := read_study(folder))}
    studies = []
    for name, (plan, rows) in stored.items():
        again = stored[AGAIN[name]][1].conditions() if AGAIN.get(name) in stored else []
        kept = Rows(r for r in rows if not _shows_black(r.method) and r.run.condition not in again)
        studies.append((DATA[plan.data] + augmentation(name), kept))
    if not studies:
        return
    titles = ("One view of each image", "Several augmented views of each image")
    found = {
        title: [
            x
            for data, rows in studies
            for x in compare(data, Rows(r for r in rows if (r.views > 1) == several))
            if x.entry.method.variant == RECOMMENDED
        ]
        for title, several in zip(titles, (False, True), strict=True)
    }
    augmented = _augmented({name: (DATA[plan.data], rows) for name, (plan, rows) in stored.items()})
    once, often = found.values()
    yield from _in_short([x for x in once if x.entry.sampler == ONE_CALL])
    yield ADVICE
    yield from _on_augmentation(augmented, folders[0].with_name("main-cpu"))
    yield from _on_borders([folders[0].with_name(name) for name in BORDERS])
    yield from _conclude(once)
    yield from _on_backbones(folders[0].with_name("finetune-cpu"))
    yield from _on_calibration(once, often)
    yield from _on_tuning([folder for folder in folders if folder.name not in AGAIN.values()])
    yield from _on_rates([folders[0].with_name(name) for name in SEARCHED])
    yield from _on_holdouts(*(folders[0].with_name(f"{name}-cpu") for name in ("borders", "holdouts")))
    yield from _on_confidence([rows for _, rows in studies])
    priced = _priced([folders[0].with_name(name) for name in OPPONENTS])
    yield from _on_prices(priced)
    yield from _on_training([folders[0].with_name(f"{name}-cpu") for name in ("training-short", "training")])
    yield from _on_mask(*(folders[0].with_name(f"{name}-cpu") for name in ("mask", "mask-strong")))
    yield from _on_parameterization(folders[0].with_name("parameterization-cpu"))
    yield OWN_IMAGES
    for title, compared in found.items():
        yield from _write_compared(title, compared) if compared else ()
    yield from _write_augmented(augmented)
    yield from _write_prices(priced)
    yield from _on_aim([x for compared in found.values() for x in compared if x.inference <= AIM])


def augmentation(study: str) -> str:
    """What tells a study's augmentation from crops and flips that show black, under all its conditions."""
    return {**BORDERS, **BROADER, **LENGTH_ALONE, "holdouts-cpu": BORDER}.get(
        study, STRONGLY if study in AUGMENTATIONS["strong augmentation"] else ""
    )


def _shows_black(method: Method) -> bool:
    """Whether this is a variant that only says what the border is worth."""
    return method.variant.endswith(BLACK)


def _condition(condition: Condition) -> str:
    """A condition, its labels by what they are instead of the name of their table."""
    return str(condition).replace(condition.noise, PEOPLE.get(condition.noise, condition.noise))


def _in_short(asked: list[Compared]) -> Iterator[str]:
    """What to use, and how often DiDiCM is ahead with one call: a table of four columns."""
    training = _range([x.training for x in asked if x.training])
    yield SHORT.format(inference=_range([x.inference for x in asked]), training=training)
    columns = {
        "up to 50 images per class": lambda x: x.images <= FEW and not _has_wrong_labels(x),
        "100 to 250": lambda x: FEW < x.images < MANY and not _has_wrong_labels(x),
        "2,000": lambda x: x.images >= MANY and not _has_wrong_labels(x),
        "wrong labels": _has_wrong_labels,
    }
    yield f"| | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(columns)
    for title, strong in AUGMENTED.items():
        here = [x for x in asked if (STRONGLY in x.condition) == strong]
        cells = [_choice([_ahead(x) for x in here if belongs(x)]) for belongs in columns.values()]
        yield f"| {title.lower()} | {' | '.join(cells)} |"


def _choice(ahead: list[int]) -> str:
    """What to use where DiDiCM is ahead (1), level (0) or behind (-1) under so many conditions."""
    if not ahead:
        return "not measured"
    better, level, worse = (ahead.count(sign) for sign in (1, 0, -1))
    if 2 * better >= len(ahead) and not worse:
        use = "DiDiCM"
    elif 2 * worse >= len(ahead) and not better:
        use = "standard"
    else:
        use = "compare both" if better and worse else "either"
    return f"**{use}**: ahead {better}, level {level}, behind {worse}"


def _ahead(x: Compared) -> int:
    return x.values[SCALED_NLL][2] or x.values[TOP1][2]


def _conclude(once: list[Compared]) -> Iterator[str]:
    """Which method is ahead when, with one call for an answer: it follows from the marks alone."""
    for title, strong in AUGMENTED.items():
        told: dict[int, list[str]] = {1: [], -1: [], 0: []}
        for x in once:
            if x.entry.sampler != ONE_CALL or (STRONGLY in x.condition) != strong:
                continue
            marked = {
                word: [str(m).replace(", T", " (T)") for m in ADVISED if x.values[m][2] == sign]
                for word, sign in (("better in", 1), ("worse in", -1))
            }
            why = "; ".join(f"{word} {', '.join(names)}" for word, names in marked.items() if names)
            condition = x.condition.replace(STRONGLY, "")
            told[_ahead(x)].append(f"        - {condition}{f': DiDiCM is {why}' if why else ''}")
        names = {1: "DiDiCM is ahead", -1: "the standard classifier is ahead", 0: "neither is ahead beyond noise"}
        yield f"- **{title}**, by temperature-scaled NLL, and where that is level by top-1,"
        for ahead, conditions in told.items():
            yield from [f"    - {names[ahead]} with", *conditions] if conditions else []


def _on_calibration(once: list[Compared], often: list[Compared]) -> Iterator[str]:
    """Who is calibrated as trained, and what smoothed labels, a temperature and several views are worth."""
    asked = [x for x in once if x.entry.sampler == ONE_CALL]
    better, worse = (sum(x.values[ECE][2] == sign for x in asked) for sign in (1, -1))
    yield (
        "- **Calibrated as trained**: the ECE of one call of DiDiCM is lower than that of any standard "
        f"classifier under {better} of {len(asked)} conditions, higher under {worse}, and cannot be told apart "
        "under the others."
    )
    chosen = [str(x.best.method) for x in asked if x.variants > 1]
    usual = max(set(chosen), key=chosen.count)
    yield (
        f"- **Of the standard classifiers**, where there are several, *{usual}* has the lowest "
        f"temperature-scaled NLL under {chosen.count(usual)} of {len(chosen)} conditions."
    )
    wrong = [x.by_temperature for x in asked if _has_wrong_labels(x)]
    right = [x.by_temperature for x in asked if not _has_wrong_labels(x)]
    yield (
        f"- **Fit a temperature** on images whose labels are right: it changed the NLL of the best standard "
        f"classifier by {min(right):+.3f} to {max(right):+.3f}, {fmean(right):+.3f} in the mean, and by "
        f"{min(wrong):+.3f} to {max(wrong):+.3f} where it was fitted on wrong labels."
    )
    gains = [y.values[SCALED_NLL][1] - x.values[SCALED_NLL][1] for y, x in _same_condition(asked, often)]
    if gains and min(gains) > 0:
        yield (
            f"- **Look at several augmented views** of an image where the calls can be afforded: they lower the "
            f"temperature-scaled NLL of the standard classifier by {min(gains):.3f} to {max(gains):.3f}."
        )


def _has_wrong_labels(x: Compared) -> bool:
    return "wrong" in x.condition or "label noise" in x.condition


def _on_tuning(folders: list[Path]) -> Iterator[str]:
    """Who is ahead before anything is chosen, and whether the choice had a longer training to choose."""
    ahead, conditions, longest = 0, 0, {"DiDiCM": 0, "the standard classifier": 0}
    for folder in folders:
        plan, trials = read_plan(folder), combine(read_trials(folder))
        methods = {
            str(m): m
            for m in plan.study.methods
            if (m.baseline and not _shows_black(m)) or m.variant == RECOMMENDED
        }
        for condition in dict.fromkeys(trial.condition for trial in trials):
            here = [t for t in trials if t.condition == condition and t.method in methods and t.metrics]
            sides = [[t for t in here if methods[t.method].baseline == side] for side in (False, True)]
            first = [min(t.metrics[NLL.name] for t in side if t.number == 0) for side in sides]
            conditions += 1
            ahead += first[0] < first[1]
            for name, side in zip(longest, sides, strict=True):
                best = min(side, key=lambda trial: trial.metrics[NLL.name])
                lengths = {t.settings["epochs"] for t in side if t.method == best.method}
                longest[name] += best.settings["epochs"] == max(lengths)
    told = " and ".join(f"for {name} under {found}" for name, found in longest.items())
    yield (
        f"- **Without tuning**, at the length that a study gives to all its methods, DiDiCM has the lower NLL on "
        f"held-out images under {ahead} of {conditions} conditions (one training each)."
    )
    yield (
        f"- **Not every peak was reached**: the longest training that was tried was the best one {told} of "
        f"{conditions} conditions. More may be better for both."
    )


def _on_rates(folders: list[Path]) -> Iterator[str]:
    """What a length of its own is worth to a method, and what learning rate and weight decay add to that."""
    by_length, by_rates = list[float](), list[float]()
    for trials in (combine(read_trials(folder)) for folder in folders if read_study(folder)):
        for kind in dict.fromkeys((t.method, t.condition) for t in trials):
            own = [t for t in trials if (t.method, t.condition) == kind and t.metrics]
            start = next(t for t in own if t.number == 0)
            rates = {name: start.settings[name] for name in start.settings if name != "epochs"}
            lengths = [t.nll for t in own if rates.items() <= t.settings.items()]
            if len(lengths) < len(own):
                by_length.append(start.nll - min(lengths))
                by_rates.append(min(lengths) - min(t.nll for t in own))
    tried = [
        found
        for (length, all_three), methods in WIDER.items()
        for found in _wider(folders[0].with_name(length), folders[0].with_name(all_three), methods)
    ]
    if by_rates and tried:
        tested, held_out = zip(*tried, strict=True)
        more = "less" if fmean(by_rates) < fmean(by_length) else "no less"
        yield (
            f"- **Learning rate and weight decay matter {more} than length**: the best of four lengths lowered "
            f"the NLL on held-out images by {fmean(by_length):.3f} in the mean, learning rate and weight decay by "
            f"another {fmean(by_rates):.3f}, at most {max(by_rates):.3f} ({len(by_rates)} searches). On test "
            "images, where both were tried (wrong labels, with "
            f"{min(held_out)} to {max(held_out)} held-out images), "
            f"choosing them too by the lowest NLL changed it by {min(tested):+.3f} to {max(tested):+.3f}, "
            f"{fmean(tested):+.3f} in the mean: few held-out images choose by chance. `--tune` now keeps them "
            "unless others are better by more than two standard errors, as "
            "in [strong augmentation](#strong-augmentation)."
        )


def _on_holdouts(once: Path, several: Path) -> Iterator[str]:
    """What it is worth to judge the trials of a search by several draws of held-out images."""
    if read_study(once) is None or (stored := read_study(several)) is None:
        return
    study, cost = stored[0].study, cost_of_one_draw(read_trials(several))
    changes = [x for x, _ in _wider(once, several, tuple((str(m), str(m)) for m in study.methods))]
    images = sorted({row.run.num_held_out for row in stored[1]})
    yield (
        f"- **Which images are held out {'matters' if cost > 0 else 'hardly matters'} when they are few** "
        f"({' or '.join(map(str, images))}): chosen by a single draw of them, lengths have an NLL "
        f"{abs(cost):.3f} {'higher' if cost > 0 else 'lower'} on another draw than chosen by "
        f"{study.holdouts - 1}. With {study.holdouts} draws instead of one, the NLL of test images, as trained, "
        f"changed by {min(changes):+.3f} to {max(changes):+.3f} ({fmean(changes):+.3f} in the mean of "
        f"{len(changes)} methods and conditions; `--tune 4 --holdouts {study.holdouts}`, "
        f"[study](#several-draws-of-held-out-images))."
    )


def _wider(length: Path, all_three: Path, methods: tuple[tuple[str, str], ...]) -> Iterator[tuple[float, int]]:
    """How the NLL of methods changes, as trained, between studies of the same conditions, and images held out."""
    if (one := read_study(length)) and (other := read_study(all_three)):
        for condition in (c for c in other[1].conditions() if c in one[1].conditions()):
            for names in methods:
                before, after = (
                    Rows(
                        row
                        for row in rows.select(condition=condition)
                        if str(row.method) == name and row.entry.sampler == ONE_CALL
                    ).estimate(NLL)
                    for (_, rows), name in zip((one, other), names, strict=True)
                )
                yield after.mean - before.mean, other[1].select(condition=condition)[0].run.num_held_out


def _on_backbones(folder: Path) -> Iterator[str]:
    """Which head to put on a pretrained backbone, and whether to fine-tune it."""
    if (stored := read_study(folder)) is None:
        return
    told, heads, frozen = list[str](), dict[int, list[Condition]](), dict[bool, list[Condition]]()
    for condition in stored[1].conditions():
        here = stored[1].select(condition=condition)
        best = []
        for baseline in (True, False):
            entries = [e for e in here.entries() if e.method.baseline == baseline]
            best.append(min(entries, key=lambda e: here.select(e).estimate(SCALED_NLL).mean))
        gap = here.select(best[1]).minus(here.select(best[0]), SCALED_NLL)
        heads.setdefault(gap.sign if gap else 0, []).append(condition)
        means = [
            f"{TOP1.text(here.select(e).estimate(TOP1).mean)} % and "
            f"{SCALED_NLL.text(here.select(e).estimate(SCALED_NLL).mean)} ({e})"
            for e in best
        ]
        told.append(f"{' against '.join(means)} with {condition}")
        frozen.setdefault(best[0].method.variant.startswith("frozen"), []).append(condition)
    words = {
        -1: "DiDiCM's head is ahead",
        0: "a linear layer and DiDiCM's head are level",
        1: "take a linear layer",
    }
    ways = {True: "freeze it", False: "fine-tune it"}
    advice = [f"{words[sign]} with {_per_class(found)}" for sign, found in heads.items()]
    advice += [f"{ways[is_frozen]} with {_per_class(found)}" for is_frozen, found in frozen.items()]
    yield (
        f"- **With a pretrained backbone**, {'; '.join(advice)} (`--recipe finetune`, with "
        "`--model-args.frozen true` to freeze it, and `--method standard` for a linear layer). The lowest "
        "temperature-scaled NLL without and with DiDiCM's head, after its top-1: "
        f"{'; '.join(told)} ([study](#few-images-and-a-pretrained-backbone))."
    )


def _per_class(conditions: list[Condition]) -> str:
    """Conditions that differ in the number of images alone."""
    *others, last = (f"{condition.fraction:g}" for condition in conditions)
    return f"{', '.join(others)}{' and ' if others else ''}{last} images per class"


def _on_confidence(studies: list[Rows]) -> Iterator[str]:
    """Whether confidence by normalised logits ranks answers better than their probability."""
    pairs = [
        (row.value(NORMALIZED_AURC), row.value(Metric("sc/AURC")))
        for rows in studies
        for row in rows
        if row.method.baseline and row.value(NORMALIZED_AURC) is not None
    ]
    lower = sum(normalised < plain for normalised, plain in pairs)
    advice = "their probability" if 2 * lower < len(pairs) else "normalised logits"
    yield (
        f"- **Rank answers by {advice}**: confidence by normalised logits (AURC, normalised), which was made for "
        f"networks with smoothed labels, ranks those of standard classifiers better in {lower} of {len(pairs)} "
        "measurements."
    )


def _same_condition(once: list[Compared], often: list[Compared]) -> list[tuple[Compared, Compared]]:
    by_condition = {x.condition: x for x in once}
    return [(by_condition[x.condition], x) for x in {x.condition: x for x in often}.values()]


def compare(data: str, rows: Rows) -> Iterator[Compared]:
    """Every answer of DiDiCM under every condition."""
    for condition in rows.conditions():
        where = f"{data}, {_condition(condition)}"
        here = rows.select(condition=condition)
        theirs = [e for e in here.entries() if e.method.baseline and e.method.members == 1]
        for ours in (e for e in here.entries() if not e.method.baseline and theirs):
            values = {}
            for metric in (*ADVISED, ECE):
                best = max(theirs, key=lambda e: metric.sign * here.select(e).estimate(metric).mean)
                gap = here.select(ours).minus(here.select(best), metric)
                means = (here.select(e).estimate(metric).mean for e in (ours, best))
                values[metric] = (*means, gap.sign * metric.sign)
            best = min(theirs, key=lambda e: here.select(e).estimate(SCALED_NLL).mean)
            costs = [here.select(e).training_cost() for e in (ours, best)]
            nll, scaled = (here.select(best).estimate(m).mean for m in (NLL, SCALED_NLL))
            yield Compared(
                where,
                condition.fraction,
                ours,
                best,
                len({str(e.method) for e in theirs}),
                values,
                scaled - nll,
                here.cost_ratio(ours, best),
                costs[0] / costs[1] if all(costs) else None,
            )


def _write_compared(title: str, found: list[Compared]) -> Iterator[str]:
    yield f"### {title}\n"
    yield f"| condition | | {' | '.join(m.heading for m in ADVISED)} | inference | training |"
    yield "|---|---|" + "---:|" * (len(ADVISED) + 2)
    for condition in dict.fromkeys(x.condition for x in found):
        here = [x for x in found if x.condition == condition]
        cells = [metric.text(here[0].values[metric][1]) for metric in ADVISED]
        yield f"| {condition} | standard, the best | {' | '.join(cells)} | 1 | 1 |"
        for x in here:
            cells = [metric.text(x.values[metric][0]) + _MARKS[x.values[metric][2]] for metric in ADVISED]
            cells += [f"{x.inference:.1f}", "" if x.training is None else f"{x.training:.1f}"]
            yield f"| | {x.entry} | {' | '.join(cells)} |"
    yield "\nInference and training: multiply-adds relative to the standard classifier's.\n"


Means = dict[tuple[str, str], dict[Metric, float]]  # by method and augmentation
Augmented = dict[tuple[str, Condition], Means]  # by data and condition


def _augmented(studies: dict[str, tuple[str, Rows]]) -> Augmented:
    """Both methods in one call, with crops and flips and with strong augmentation."""
    found: Augmented = {}
    for name, names in AUGMENTATIONS.items():
        for data, rows in (studies[study] for study in names if study in studies):
            for condition in rows.conditions():
                here = Rows(r for r in rows.select(condition=condition) if r.views == 1)
                ours = [e for e in here.entries() if e.method.variant == RECOMMENDED and e.sampler == ONE_CALL]
                theirs = [e for e in here.entries() if e.method.baseline and e.method.members == 1]
                for method, entries in (("standard, the best", theirs), ("DiDiCM", ours)):
                    means = {m: [here.select(e).estimate(m).mean for e in entries] for m in (TOP1, SCALED_NLL)}
                    best = {m: max(values) if m.sign > 0 else min(values) for m, values in means.items()}
                    found.setdefault((data, condition), {})[method, name] = best
    return {place: means for place, means in found.items() if len(means) == 2 * len(AUGMENTATIONS)}


def _on_augmentation(found: Augmented, other: Path) -> Iterator[str]:
    """What strong augmentation gains, as one line of advice, and where it does not."""
    if not found:
        return
    changes, winners = dict[bool, list[float]](), list[str]()  # with many images, and without
    for (data, condition), means in found.items():
        nll = {who: values[SCALED_NLL] for who, values in means.items()}
        mixed, cropped = (nll["standard, the best", name] for name in reversed(AUGMENTATIONS))
        many = condition.fraction * (100 if data.startswith("100 classes") else 10) >= SEEN_BRIEFLY
        changes.setdefault(many, []).append(mixed - cropped)
        if not many:
            method, augmentation = min(nll, key=nll.__getitem__)
            winners.append(f"{method.partition(',')[0]} with {augmentation}")
    usual = max(set(winners), key=winners.count)
    text = (
        "- **With some hundred to a few thousand images, augment strongly and train long** (RandAugment, Mixup, "
        "CutMix: `didicm train --recipe few --method standard`). For the standard classifier this "
        f"{_moves('the temperature-scaled NLL', changes[False])}, and {usual} has the lowest of the four in the "
        f"[table](#crops-and-flips-or-strong-augmentation) under {winners.count(usual)} of {len(winners)} "
        "conditions."
    )
    if True in changes:
        text += (
            f" With 20,000 images and more, each seen some ten times, it {_moves('the NLL', changes[True])}: it "
            "takes long trainings."
        )
    if (stored := read_study(other)) is not None:
        (plan, rows), raised = stored, 0
        for condition in rows.conditions():
            nll = {
                e.method.variant: rows.select(e, condition).estimate(SCALED_NLL).mean
                for e in rows.entries()
                if e.method.baseline
            }
            raised += nll["Strong Aug"] > nll["Weak Aug"]
        text += (
            f" It is not always a gain: with Mixup and CutMix at an unchanged length, {DATA['fashion-mini']} has "
            f"a higher one under {raised} of {len(rows.conditions())} conditions "
            f"([study](#{_anchor(plan.study.title)}))."
        )
    yield text


def _on_borders(folders: list[Path]) -> Iterator[str]:
    """What it is worth to repeat the border of images that are shifted, as one line of advice."""
    gains: dict[tuple[bool, Metric], list[float]] = {}
    clear, conditions, links = 0, 0, list[str]()
    for plan, rows in (study for folder in folders if (study := read_study(folder))):
        links.append(f"[{plan.study.title.lower()}](#{_anchor(plan.study.title)})")
        for condition, baseline in product(rows.conditions(), (True, False)):
            here = Rows(
                row
                for row in rows.select(condition=condition)
                if row.method.baseline == baseline and row.entry.sampler == ONE_CALL
            )
            black, border = (Rows(r for r in here if _shows_black(r.method) == shown) for shown in (True, False))
            for metric in (TOP1, SCALED_NLL):
                gap = border.minus(black, metric)
                gains.setdefault((baseline, metric), []).append(gap.mean)
            clear += gap.sign * SCALED_NLL.sign > 0
            conditions += 1
    if not gains:
        return
    told = [
        f"{name}, top-1 {TOP1.text(min(gains[baseline, TOP1]), '+')} to "
        f"{TOP1.text(max(gains[baseline, TOP1]), '+')} points and temperature-scaled NLL "
        f"{SCALED_NLL.text(min(gains[baseline, SCALED_NLL]), '+')} to "
        f"{SCALED_NLL.text(max(gains[baseline, SCALED_NLL]), '+')}"
        for name, baseline in (("standard classifier", True), ("one call of DiDiCM", False))
    ]
    yield (
        "- **Repeat the border of small images that are shifted in training** (`augment.pad_mode: edge`, as "
        f"recipes `small` and `few` do) instead of showing black: {'; '.join(told)}; the NLL is lower beyond "
        f"noise in {clear} of {conditions} cases ({', '.join(links)}). Studies show black unless they name the "
        "border."
    )


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _on_training(folders: list[Path]) -> Iterator[str]:
    """What trains fastest and what ends best, at equal multiply-adds of training; short trainings first."""
    told, ahead = list[str](), list[bool]()
    for plan, rows in (study for folder in folders if (study := read_study(folder))):
        nll = {str(e.method): rows.select(e).estimate(SCALED_NLL).mean for e in rows.entries(main=True)}
        theirs, ours = (
            min((str(m) for m in plan.study.methods if m.baseline == side), key=nll.__getitem__)
            for side in (True, False)
        )
        cost = rows.training_cost() or 0
        numbers = f"{nll[theirs]:.3f} ({theirs}) against {nll[ours]:.3f} ({ours})"
        told.append(f"{numbers} with {cost / 1e9:.0f} billion multiply-adds of training")
        ahead.append(nll[theirs] < nll[ours])
    if told:
        yield (
            f"- **{'A standard classifier' if ahead[0] else 'DiDiCM'} is ahead in short trainings**: the lowest "
            "temperature-scaled NLL of a standard classifier (one call) against that of a diffusion classifier "
            f"(eight steps) is {'; '.join(told)} ([a quarter of the training](#a-quarter-of-the-training), "
            "[training](#training))."
        )


def _on_mask(folder: Path, strong: Path) -> Iterator[str]:
    """How many labels to mask, as one line of advice."""
    if (stored := read_study(folder)) is None:
        return
    rows, best = stored[1], list[str]()
    for condition in rows.conditions():
        here = rows.select(condition=condition)
        entry = min(here.entries(), key=lambda e, here=here: here.select(e).estimate(SCALED_NLL).mean)
        best.append(f"{condition} ({entry.method.variant})")
    text = (
        "- **Why DiDiCM is ahead with few images and behind with many**: seeing labels regularises it, and "
        "teaches it little about an answer without one. At one length for all, how many labels are masked in the "
        f"training with the lowest temperature-scaled NLL depends on the images: {'; '.join(best)} ([all "
        "masked](#masked-labels) is a standard classifier)."
    )
    if stored := read_study(strong):
        rows, told = stored[1], []
        for condition in rows.conditions():
            here = rows.select(condition=condition)
            values = [
                f"{here.select(e).estimate(SCALED_NLL).mean:.3f} ({e.method.variant or e.method.name})"
                for e in here.entries()
                if e.sampler == ONE_CALL
            ]
            told.append(f"{', '.join(values)} with {condition}")
        text += (
            " Strong augmentation regularises by itself: one call then has "
            f"{'; '.join(told)} ([study](#{_anchor(stored[0].study.title)}))."
        )
    yield text


def _on_parameterization(folder: Path) -> Iterator[str]:
    """What a network with ResNet blocks should predict: whether its steps work, and how good one call is."""
    if (stored := read_study(folder)) is None:
        return
    told = []
    for name in ("score", "posterior"):
        rows = Rows(row for row in stored[1] if row.method.variant == name)
        single, steps = (
            {r.place: r for r in rows if (r.entry.sampler == ONE_CALL) == one} for one in (True, False)
        )
        failed = sum(steps[place].value(TOP1) < single[place].value(TOP1) / 2 for place in steps)
        values = [Rows(single.values()).estimate(metric).mean for metric in (TOP1, SCALED_NLL)]
        one_call = f"{TOP1.text(values[0])} % and a temperature-scaled NLL of {values[1]:.3f}"
        told.append(f"with `{name}`, {failed} of {len(steps)}, where one call has {one_call}")
    yield (
        "- **What a network with ResNet blocks predicts** decides whether its steps work. They are right less "
        f"than half as often as one call in some trainings: {'; '.join(told)} ([study]"
        f"(#{_anchor(stored[0].study.title)}), {len(stored[1].conditions())} conditions)."
    )


def _write_augmented(found: Augmented) -> Iterator[str]:
    """The table of the same."""
    if not found:
        return
    heads = [f"{metric.heading}, {name}" for name, metric in product(AUGMENTATIONS, (TOP1, SCALED_NLL))]
    yield "### Crops and flips, or strong augmentation\n"
    yield f"| condition | | {' | '.join(heads)} |"
    yield "|---|---|" + "---:|" * len(heads)
    for (data, condition), means in found.items():
        for method in dict.fromkeys(method for method, _ in means):
            values = [means[method, name] for name in AUGMENTATIONS]
            cells = [metric.text(mean) for each in values for metric, mean in each.items()]
            place = f"{data}, {_condition(condition)}" if method != "DiDiCM" else ""
            yield f"| {place} | {method} | {' | '.join(cells)} |"
    yield (
        "\nOne call for an answer; means over the seeds of each study. Crops show black, and so does strong "
        "augmentation with CIFAR-10 at 16 px and up to 200 images per class; elsewhere it repeats the border.\n"
    )


def _on_aim(found: list[Compared]) -> Iterator[str]:
    """Whether DiDiCM beats the standard classifier at nearly the same cost of an answer."""
    yield "### The aim\n"
    yield (
        f"At equal training compute and at most {AIM} times the cost of an answer, better NLL and Brier score "
        "than the tuned standard classifier under every condition, and better top-1 under most:\n"
    )
    for entry in dict.fromkeys(str(x.entry) for x in found):
        mine = [x for x in found if str(x.entry) == entry]
        better, worse = ({m: sum(x.values[m][2] == sign for x in mine) for m in ADVISED} for sign in (1, -1))
        costs = [x.training for x in mine if x.training]
        met = min(better[NLL], better[BRIER]) == len(mine) and better[TOP1] > len(mine) / 2 and max(costs) <= 1
        counts = "; ".join(f"{m} {better[m]} better, {worse[m]} worse" for m in (TOP1, NLL, BRIER))
        yield (
            f"- {entry}: {'met' if met else 'missed'}. Of {len(mine)} conditions, beyond noise: {counts}. Its "
            f"trainings took {min(costs):.1f} to {max(costs):.1f} times the multiply-adds."
        )
    yield ""


Priced = dict[str, dict[str, tuple[float, float]]]  # NLL and multiply-adds by condition and answer


def _priced(folders: list[Path]) -> Priced:
    """Answers of several prices: temperature-scaled NLL, and inference relative to a standard classifier."""
    found: Priced = {}
    for plan, rows in (study for folder in folders if (study := read_study(folder))):
        for condition in rows.conditions():
            here = rows.select(condition=condition)
            place = found.setdefault(f"{DATA[plan.data]}, {_condition(condition)}", {})
            for entry, (name, (baseline, variant, sampler)) in product(here.entries(), ANSWERS.items()):
                same = (entry.method.baseline, entry.method.variant) == (baseline, variant)
                if same and sampler in ("", entry.sampler):
                    place[name] = here.select(entry).estimate(SCALED_NLL).mean, rows.cost_ratio(entry)
    return found


def _on_prices(found: Priced) -> Iterator[str]:
    """What is the best use of a higher price, as one line of advice."""
    if not found:
        return
    told = []
    for name in (name for name in ANSWERS if name != "standard"):
        pairs = [(place["standard"][0], place[name]) for place in found.values() if name in place]
        changes = sorted({f"{nll - standard:+.3f}" for standard, (nll, _) in pairs}, key=float)
        prices = _range([cost for _, (_, cost) in pairs])
        told.append(f"{name} {' to '.join(dict.fromkeys((changes[0], changes[-1])))} (price {prices})")
    yield (
        f"- **What a higher price buys** under {count(len(found), 'condition')}, relative to one call of the "
        "standard classifier, in temperature-scaled NLL; the price is in multiply-adds of inference, and each "
        f"member of an ensemble is a training of its own: {'; '.join(told)} ([table](#answers-at-other-prices))."
    )


def _moves(what: str, changes: list[float]) -> str:
    """What changes of a number do to it, as in "raises the NLL by 0.1 to 0.2"."""
    if min(changes) < 0 < max(changes):
        return f"changes {what} by {min(changes):+.3f} to {max(changes):+.3f}"
    low, high = sorted((abs(min(changes)), abs(max(changes))))
    return f"{'raises' if max(changes) > 0 else 'lowers'} {what} by {low:.3f} to {high:.3f}"


def _range(costs: list[float]) -> str:
    low, high = f"{min(costs):.1f}", f"{max(costs):.1f}"
    return low if low == high else f"{low} to {high}"


def _write_prices(found: Priced) -> Iterator[str]:
    """Temperature-scaled NLL of answers of several prices, by condition."""
    if not found:
        return
    yield "### Answers at other prices\n"
    yield f"| NLL, T (inference) | {' | '.join(ANSWERS)} |"
    yield "|---|" + "---:|" * len(ANSWERS)
    for condition, place in found.items():
        cells = [f"{place[name][0]:.3f} ({place[name][1]:.1f})" if name in place else "" for name in ANSWERS]
        yield f"| {condition} | {' | '.join(cells)} |"
    yield "\nInference: multiply-adds relative to the standard classifier's.\n"

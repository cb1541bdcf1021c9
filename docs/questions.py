"""The questions of the results page: each has a plain sentence, a figure and a table, from stored results."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from compared import (
    CROPS,
    DATA,
    ECE,
    FOLDER,
    RECOMMENDED,
    STRONG,
    TUNED,
    Compared,
    ends_longest,
    link,
    place_of,
    read_study,
    signed,
    spread,
    with_interval,
)
from measured import SHIFTED, Line, mean_and_spread, read_json, read_lines, read_people, same_entry
from plots import Files, Interval, draw_differences, draw_dots, draw_gaps

from didicm.evaluation.intervals import seed_interval
from didicm.experiments.results import read_results, read_trials
from didicm.experiments.spec import ONE_CALL, Condition, Method
from didicm.experiments.tune import combine
from didicm.report.records import MINUS, NLL, SCALED_NLL, TOP1, Rows, rows_of
from didicm.report.verdict import worth
from didicm.text import count

ANSWERS = {  # variant of the standard classifier or of DiDiCM, and the sampler if it matters
    "standard": (True, "", ONE_CALL),
    "labels not smoothed": (True, "labels not smoothed", ONE_CALL),
    "generalised cross-entropy": (True, "generalised cross-entropy", ONE_CALL),
    "SWA": (True, "SWA", ONE_CALL),
    "4 snapshots": (True, "snapshots", ""),
    "8 views": (True, "", "8 views"),
    "ensemble of 4": (True, "ensemble", "4 members"),
    "DiDiCM": (False, RECOMMENDED, ONE_CALL),
    "DiDiCM, 8 steps": (False, RECOMMENDED, "8 steps"),
    "DiDiCM, 8 augmented steps": (False, RECOMMENDED, "8 augmented steps"),
    "DiDiCM, 8 views": (False, RECOMMENDED, "8 views"),
}
AUGMENTED_ANSWERS = ("standard, strong augmentation", "DiDiCM, strong augmentation")
ANSWERED = (TOP1, NLL, SCALED_NLL)
TOLD = {
    "generalised cross-entropy",
    "SWA",
    "4 snapshots",
    "8 views",
    "ensemble of 4",
    "DiDiCM",
    AUGMENTED_ANSWERS[0],
}
PEOPLE = ("standard", "standard, smoothed labels", "DiDiCM, ResNet blocks")
PEOPLE_SAMPLERS = (ONE_CALL, "8 views")
STEPS = {"steps-cpu": "10 classes", "steps-classes-cpu": "100 classes"}
AUGMENTED = "argmin, augmented steps"
SHORTER = ("argmin", AUGMENTED)
CHAINS = ("CL, 1 chain", "CL, 4 chains", "CL, 16 chains", "CL, 64 chains")
SAMPLERS = (*SHORTER, "argmax", "sample", *CHAINS)

LENGTHS = {"training-short-cpu": "a quarter of the training", "training-cpu": "all of it"}
TEACHER, PLAIN, VIEWS = "teacher, 8 augmented steps", "standard classifier", "standard classifier, 8 views"
NEAR = 0.01  # of NLL: the aim of distillation, and what a further step should gain


@dataclass(frozen=True)
class Place:
    """What was measured under one condition: rows of every answer, and the NLL, T of so many ensemble members."""

    name: str
    condition: Condition
    answers: dict[str, Rows]
    members: dict[int, float]

    @property
    def short(self) -> str:
        """The name, without what places with wrong labels have in common."""
        return self.name.replace(
            f"{self.condition.resolution} px, {self.condition.fraction} images per class, ", ""
        )

    def nll(self, answer: str) -> float:
        """Temperature-scaled, the mean over seeds."""
        return self.answers[answer].estimate(SCALED_NLL).mean

    def price(self, answer: str) -> float:
        """Multiply-adds relative to one call of the standard classifier."""
        ours, one = (self.answers[name][0].measured.multiply_adds for name in (answer, "standard"))
        return ours / one


def read_places(*studies: str) -> Iterator[Place]:
    """Every condition of some studies."""
    for plan, rows in (study for name in studies if (study := read_study(name))):
        for condition in rows.conditions():
            here, answers, members = rows.select(condition=condition), dict[str, Rows](), dict[int, list[float]]()
            for row, (name, (baseline, variant, sampler)) in product(here, ANSWERS.items()):
                same = (row.method.baseline, row.method.variant) == (baseline, variant)
                if same and (
                    row.entry.sampler == sampler or (not sampler and row.measured.posteriors is not None)
                ):
                    answers.setdefault(name, Rows()).append(row)
            for row in (row for row in here if row.method.members > 1):
                members.setdefault(int(row.measured.calls), []).append(row.value(SCALED_NLL))
            curve = {n: fmean(values) for n, values in sorted(members.items())}
            yield Place(place_of(DATA[plan.data], condition), condition, answers, curve)


def _counted(found: list[Compared]) -> str:
    """Under how many conditions DiDiCM is ahead, level and behind, by augmentation."""
    told = []
    for augmentation in TUNED:
        ahead = [x.ahead for x in found if x.augmentation == augmentation]
        counts = zip(("ahead", "level", "behind"), (1, 0, -1), strict=True)
        first, second, third = (f"{word} in {ahead.count(sign)}" for word, sign in counts)
        told.append(f"{first}, {second} and {third} of {count(len(ahead), 'condition')} with {augmentation}")
    return "; ".join(told)


def on_peaks(files: Files, asked: list[Compared]) -> Iterator[str]:
    """Who is ahead, each method with its own length."""
    by_place: dict[str, dict[str, Compared]] = {}
    for x in asked:
        by_place.setdefault(x.place, {})[x.augmentation] = x
    yield f"**DiDiCM is {_counted(asked)}**, by NLL, T, and where that is level by top-1.\n"
    yield draw_gaps(files, asked)
    lowest = [
        min((getattr(x.gaps[SCALED_NLL], side), a, side) for a, x in found.items() for side in ("ours", "theirs"))
        for found in by_place.values()
        if len(found) == len(TUNED) and len({x.shows_black for x in found.values()}) == 1
    ]
    yield (
        f"- **Who has the higher peak?** Of {count(len(lowest), 'condition')} where both augmentations show the "
        "same border, the lowest NLL, T of all four answers is one with strong augmentation under "
        f"{sum(a == STRONG for _, a, _ in lowest)}, and one of DiDiCM under "
        f"{sum(side == 'ours' for *_, side in lowest)}."
    )
    yield _without_tuning(asked)
    signs = [x.gaps[ECE].sign for x in asked]
    yield (
        "- **Who is better calibrated as trained?** The ECE of DiDiCM is lower than that of the standard "
        f"classifier in {signs.count(1)} of {len(asked)} comparisons, higher in {signs.count(-1)}, and level in "
        "the others.\n"
    )
    yield "Top-1 in per cent and NLL, T, means over seeds; in bold the lowest NLL, T of a row.\n"
    sides = list(product(TUNED, ("theirs", "ours")))
    heads = [f"{'DiDiCM' if side == 'ours' else 'standard'}, {a}" for a, side in sides]
    yield f"| | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(sides)
    for place, found in by_place.items():
        gaps = [(found[a].gaps, side) if a in found else None for a, side in sides]
        values = [g and tuple(getattr(g[0][metric], g[1]) for metric in (TOP1, SCALED_NLL)) for g in gaps]
        best = min(value[1] for value in values if value)
        cells = ["" if v is None else _pair(*v, bold=v[1] == best) for v in values]
        marks = [_marks(found[a], side) if a in found else "" for a, side in sides]
        yield f"| {place} | {' | '.join(map(''.join, zip(cells, marks, strict=True)))} |"
    yield (
        "\n† Where images are shifted in training, black comes into view; elsewhere the border is repeated. ‡ The "
        "longest training that was tried was the best. § Predicts scores; elsewhere DiDiCM predicts the "
        "posterior. All metrics, several views, and the study of each: [condition by "
        "condition](results/conditions.md).\n"
    )


def _marks(x: Compared, side: str) -> str:
    """What to know of a result: the border, the end of the search, what the network predicts."""
    entry = x.entry if side == "ours" else x.best
    found = (x.shows_black, ends_longest(x, entry), x.predicts_scores and side == "ours")
    marks = "".join(mark for mark, holds in zip("†‡§", found, strict=True) if holds)
    return f" {marks}" if marks else ""


def _pair(top1: float, nll: float, *, bold: bool = False) -> str:
    stars = "**" if bold else ""
    return f"{TOP1.text(top1)} / {stars}{nll:.3f}{stars}"


def _without_tuning(asked: list[Compared]) -> str:
    """Who is ahead before anything is chosen, and whether the choice had a longer training to choose."""
    ahead, conditions, longest = 0, 0, {"DiDiCM": 0, "the standard classifier": 0}
    for x in asked:
        trials = [t for t in combine(read_trials(FOLDER / x.study)) if t.condition == x.condition and t.metrics]
        sides = [[t for t in trials if t.method == str(entry.method)] for entry in (x.entry, x.best)]
        if all(sides):
            conditions += 1
            first = [next(t.metrics[NLL.name] for t in side if t.number == 0) for side in sides]
            ahead += first[0] < first[1]
            for name, entry in zip(longest, (x.entry, x.best), strict=True):
                longest[name] += bool(ends_longest(x, entry))
    told = " and ".join(f"for {name} under {found}" for name, found in longest.items())
    return (
        "- **Who is better without tuning?** At the length that a study gives to all its methods, DiDiCM has the "
        f"lower NLL on held-out images under {ahead} of {conditions} (a trial each). The longest training that "
        f"was tried was the best {told}, so more may be better for both."
    )


def on_wrong_labels(files: Files, asked: list[Compared]) -> Iterator[str]:
    """Labels that people gave, and labels redrawn; all answers, whatever they cost."""
    wrong = [x for x in asked if x.wrong_labels]
    places = [place for place in read_places("labels-cpu", "noise-cpu") if place.condition.noise]
    for place, x in product(places, (x for x in wrong if x.augmentation == STRONG)):
        if x.place == place.name:
            rows = read_study(x.study)[1]
            for name, entry in zip(AUGMENTED_ANSWERS, (x.best, x.entry), strict=True):
                place.answers[name] = rows.select(entry, x.condition)
    changes: dict[str, list[float]] = {}
    for place in places:
        for name in TOLD & place.answers.keys():
            changes.setdefault(name, []).append(place.nll(name) - place.nll("standard"))
    shared = [place for place in places if place.answers.keys() >= TOLD]
    order = sorted(changes, key=lambda name: fmean(place.nll(name) - place.nll("standard") for place in shared))
    told = "; ".join(f"{signed(changes[name])} ({name})" for name in order)
    first = [(name, fmean(p.nll(name) - p.nll("standard") for p in shared)) for name in order[:2]]
    most = " and ".join(
        f"*{name}* ({signed([gain])} of NLL, T, an answer costs {spread([p.price(name) for p in shared])} times "
        "as much)"
        for name, gain in first
    )
    yield f"**With wrong labels, DiDiCM is {_counted(wrong)}. Most gain where all were tried: {most}.**"
    scaled = [place.nll("standard") - place.answers["standard"].estimate(NLL).mean for place in places]
    yield (
        f"Beside one call of the standard classifier, NLL, T changes by {told}. The temperature, fitted to images "
        f"whose labels are wrong as well, itself changes the NLL of the standard classifier by {signed(scaled)}: "
        "calibrate on images whose labels were checked.\n"
    )
    points = {p.short: {name: rows.values(SCALED_NLL) for name, rows in p.answers.items()} for p in places}
    yield draw_dots(files, "results/wrong-labels.svg", "NLL, T with wrong labels", points, "NLL, T")
    yield (
        "Top-1 in per cent, NLL as trained, and NLL, T, means over seeds; inference: multiply-adds relative to "
        "one call of the standard classifier. Labels are smoothed unless said otherwise; trials of generalised "
        "cross-entropy are judged by NLL, too, which it does not minimise.\n"
    )
    yield from _write_answers(places)
    yield "The same answers where labels are right:\n"
    right = [place for place in read_places("ensembles-cpu", "noise-cpu") if not place.condition.noise]
    yield from _write_answers(right)
    studies = {
        "labels-cpu": "labels that people gave",
        "strong-labels-cpu": "the same with strong augmentation",
        "noise-cpu": "labels redrawn at random",
        "ensembles-cpu": "right labels",
    }
    yield f"Studies: {', '.join(link(name, text) for name, text in studies.items())}.\n"


def _write_answers(places: list[Place]) -> Iterator[str]:
    """Every answer under every condition, what it costs, and what one call is worth."""
    yield f"| | {' | '.join(place.short for place in places)} | inference |"
    yield "|---|" + "---:|" * (len(places) + 1)
    for name in (*ANSWERS, *AUGMENTED_ANSWERS):
        having = [place for place in places if name in place.answers]
        if having:
            means = [[p.answers[name].estimate(m).mean for m in ANSWERED] if p in having else [] for p in places]
            cells = [" / ".join(m.text(x) for m, x in zip(ANSWERED, found, strict=False)) for found in means]
            yield f"| {name} | {' | '.join(cells)} | {spread([place.price(name) for place in having])} |"
    worths = [worth(place.nll("DiDiCM"), place.members) if place.members else None for place in places]
    cells = ["" if x is None else _members(x) for x in worths]
    yield f"| *members of an ensemble that DiDiCM is worth* | {' | '.join(cells)} | |\n"


def _members(value: float) -> str:
    return "less than 1" if value < 1 else "more than all" if math.isinf(value) else f"{value:.1f}"


def on_people(files: Files) -> Iterator[str]:
    """How far posteriors are from those of some 50 people per image."""
    lines = [line for line in read_people() if line["method"] in PEOPLE]
    found = dict(sorted(same_entry(lines).items(), key=lambda item: _informative(item[0][1])))
    sides: dict[tuple[str, str], dict[str, list[float]]] = {}  # the best answers, by augmentation and condition
    for (*place, method, sampler), same in found.items():
        who = f"{'DiDiCM' if method.startswith('DiDiCM') else 'standard'}, {sampler}"
        values, here = [x["temperature"]["divergence"] for x in same], sides.setdefault(tuple(place), {})
        here[who] = min(here.get(who, values), values, key=fmean)
    told, shown = [], dict[str, dict[str, Interval]]()
    for sampler in PEOPLE_SAMPLERS:
        for place, here in sides.items():
            pair = [here[answer] for who in ("DiDiCM", "standard") if (answer := f"{who}, {sampler}") in here]
            if len(pair) == 2:
                gap = seed_interval([ours - theirs for ours, theirs in zip(*pair, strict=True)])
                shown.setdefault(sampler, {})[", ".join(place[::-1])] = gap
        gaps = list(shown[sampler].values())
        lower, higher = sum(high < 0 for *_, high in gaps), sum(low > 0 for _, low, _ in gaps)
        told.append(
            f"{signed([mean for mean, *_ in gaps])} with {sampler} (beyond noise lower in {lower} and higher in "
            f"{higher} of {len(gaps)} conditions)"
        )
    known = {
        ", ".join(key): fmean(x["as trained"]["rank correlation"] for x in same) for key, same in found.items()
    }
    clearest = max(known, key=known.__getitem__)
    yield (
        "**DiDiCM's divergence from the labels of some 50 people differs from the best standard classifier's by "
        f"{' and by '.join(told)}.**"
    )
    yield (
        "Neither is much less sure where people disagree: the rank correlation of the entropies is at most "
        f"{known[clearest]:.2f} ({clearest}). They saw the images in full size, the networks a few pixels.\n"
    )
    axis = f"DiDiCM {MINUS} standard, divergence, T (nats)\nleft of 0, DiDiCM is nearer to people"
    yield draw_differences(files, "results/people.svg", "Divergence from people", shown, axis)
    answers = [f"{who}, {sampler}" for sampler, who in product(PEOPLE_SAMPLERS, ("standard", "DiDiCM"))]
    yield f"| divergence, T | {' | '.join(answers)} |"
    yield "|---|" + "---:|" * len(answers)
    for place, here in sides.items():
        cells = [mean_and_spread(here.get(answer, [])) for answer in answers]
        yield f"| {', '.join(place[::-1])} | {' | '.join(cells)} |"
    yield (
        "\nNats, mean and standard deviation over seeds; of the standard classifier with smoothed labels and "
        "without, the better. With crops and flips, 16 px and up to 200 images per class the models are "
        f"those of {link('fair-cpu', 'an older study')}, which shows black and predicts scores. [All "
        "measures](results/human/README.md).\n"
    )


def _informative(condition: str) -> list[int]:
    """Pixels and images per class, the most first."""
    return [-int(number) for number in re.findall(r"\d+", condition)]


def on_steps() -> Iterator[str]:
    """How many steps, which label in each, how many chains, augmented steps."""
    found: dict[tuple[str, str], dict[str, dict[int, Rows]]] = {}  # by classes and network, sampler, steps
    for name, classes in STEPS.items():
        rows = read_study(name)[1]
        for entry in dict.fromkeys(row.entry for row in rows):
            here = rows.select(entry)
            steps, group = int(here[0].measured.settings.get("steps", 1)), here[0].measured.group
            found.setdefault((classes, str(entry.method)), {}).setdefault(group, {})[steps] = here
    gains: dict[tuple[bool, str], list[float]] = {}  # over one step, by whether the posterior is predicted
    prices: dict[str, list[float]] = {}
    for ((_, network), here), sampler in product(found.items(), SHORTER):
        eight, one = here[sampler][8], here["argmin"][1]
        gains.setdefault((network == "posterior", sampler), []).append(eight.minus(one, SCALED_NLL).mean)
        prices.setdefault(sampler, []).append(_price(eight) / _price(one))
    told = [
        f"{signed(gains[kind, 'argmin'])} where networks predict {what}, {signed(gains[kind, AUGMENTED])} if "
        "every step sees another view of the image"
        for kind, what in ((False, "scores"), (True, "the posterior"))
    ]
    yield (
        f"**Eight steps instead of one change the NLL, T by {'; and by '.join(told)}.** They cost "
        f"{spread(prices['argmin'])} times the multiply-adds, with views {spread(prices[AUGMENTED])} times.\n"
    )
    for (classes, network), here in found.items():
        yield f"- **{classes}, {network}**: {_say_default(here)}."
    yield ""
    for name, classes in STEPS.items():
        yield f"![NLL over steps, {classes}](results/{name}/steps.svg)\n"
    steps = sorted({n for here in found.values() for by_steps in here.values() for n in by_steps})
    yield f"| NLL, T, steps | {' | '.join(map(str, steps))} | M multiply-adds |"
    yield "|---|" + "---:|" * (len(steps) + 1)
    for ((classes, network), here), sampler in product(found.items(), SAMPLERS):
        by_steps = here[sampler]
        cells = [f"{by_steps[n].estimate(SCALED_NLL).mean:.3f}" if n in by_steps else "" for n in steps]
        costs = spread([_price(rows) for rows in by_steps.values()])
        yield f"| {classes}, {network}: {sampler} | {' | '.join(cells)} | {costs} |"
    yield (
        "\nSo the default stays `argmin` with eight steps for the paper's recipes, and one call for `few` and "
        "`finetune`, whose networks predict the posterior. Studies: "
        f"{', '.join(link(name, text) for name, text in STEPS.items())}.\n"
    )


def _say_default(here: Mapping[str, Mapping[int, Rows]]) -> str:
    """How many steps of argmin are enough for a network, and how far the best of other samplers is from it."""
    argmin = {n: rows.estimate(SCALED_NLL).mean for n, rows in here["argmin"].items()}
    lowest = min(argmin, key=argmin.__getitem__)
    enough = min(n for n, nll in argmin.items() if nll <= argmin[lowest] + NEAR)
    price = f"{_price(here['argmin'][enough]):.1f} M multiply-adds"
    words = f"argmin has {argmin[enough]:.3f} with {count(enough, 'step')} ({price})"
    if argmin[enough] - argmin[lowest] > NEAR / 10:
        words += f", within {NEAR} of the {argmin[lowest]:.3f} with {lowest}"
    told = []
    for what, samplers in (("argmax and sample", ("argmax", "sample")), ("CL", CHAINS)):
        options = [(sampler, n) for sampler in samplers for n in here[sampler]]
        sampler, n = min(options, key=lambda option: here[option[0]][option[1]].estimate(SCALED_NLL).mean)
        gap = here[sampler][n].minus(here["argmin"][enough], SCALED_NLL)
        told.append(
            f"the best {what}, {sampler} with {count(n, 'step')} ({_price(here[sampler][n]):.1f} M), differs from "
            f"that by {signed([gap.mean])} ± {gap.half:.3f}"
        )
    return f"{words}; {'; '.join(told)}"


def _price(rows: Rows) -> float:
    """Millions of multiply-adds per image."""
    return rows[0].measured.multiply_adds / 1e6


def on_training(files: Files) -> Iterator[str]:
    """What trains fastest and ends best, at equal multiply-adds."""
    found: dict[tuple[str, str], dict[str, Rows]] = {}  # by length and sampler, by method
    for (name, title), sampler in product(LENGTHS.items(), (ONE_CALL, "8 steps")):
        for row in (*read_study(name)[1], *read_stratified(name)):
            if row.entry.sampler == sampler:
                found.setdefault((title, sampler), {}).setdefault(str(row.method), Rows()).append(row)
    told = []
    for title in LENGTHS.values():
        methods, steps = found[title, ONE_CALL], found[title, "8 steps"]
        order = sorted(methods, key=lambda name, methods=methods: methods[name].estimate(SCALED_NLL).mean)
        first = methods[order[0]]
        level = [name for name in order[1:] if not methods[name].minus(first, SCALED_NLL).sign]
        best = min(steps, key=lambda name, steps=steps: steps[name].estimate(SCALED_NLL).mean)
        told.append(
            f"with {title} that of *{order[0]}* ({first.estimate(SCALED_NLL).mean:.3f}), with which "
            f"{' and '.join(f'*{name}*' for name in level) or 'none'} {'are' if len(level) > 1 else 'is'} level, "
            f"and with eight steps that of *{best}* ({steps[best].estimate(SCALED_NLL).mean:.3f})"
        )
    yield f"**The lowest NLL, T of one call at equal multiply-adds of training is {'; '.join(told)}.**\n"
    points = {
        f"{title.capitalize()}, {sampler}": {name: rows.values(SCALED_NLL) for name, rows in methods.items()}
        for (title, sampler), methods in found.items()
    }
    yield draw_dots(
        files,
        "results/training.svg",
        "NLL, T at equal multiply-adds of training",
        points,
        "NLL, T",
        ours=r"(?!cross-entropy)",
    )
    yield f"| top-1 / NLL, T | {' | '.join(map(', '.join, found))} |"
    yield "|---|" + "---:|" * len(found)
    for method in dict.fromkeys(name for methods in found.values() for name in methods):
        each = [methods.get(method) for methods in found.values()]
        cells = [_pair(r.estimate(TOP1).mean, r.estimate(SCALED_NLL).mean) if r else "" for r in each]
        yield f"| {method} | {' | '.join(cells)} |"
    yield (
        "\nEight steps cost five times as much as one call. All have the "
        "same compute, and none a length of its own: cross-entropy is overconfident after all of the training. "
        f"Other times: {link('times-cpu', 'squared')}, {link('stratified', 'stratified')}. Draws per image, "
        f"importance-sampled labels and objectives at one length: {link('objectives-cpu', 'objectives')}. "
        f"Masks: {link('mask-cpu', 'crops and flips')}, {link('mask-strong-cpu', 'strong augmentation')}. "
        f"Studies: {', '.join(link(name, text) for name, text in LENGTHS.items())}.\n"
    )


def read_stratified(study: str) -> Rows:
    """What docs/make_stratified.py found with the trainings of a study."""
    results = read_results(FOLDER / "stratified" / study)
    plan, names = read_study(study)[0], dict.fromkeys(result.method for result in results)
    return rows_of(results, replace(plan.study, methods=tuple(Method(name) for name in names)))


def compare_stratified() -> dict[str, tuple[Rows, Rows]]:
    """Trainings with uniform and with stratified times, by their length."""
    return {
        title: (
            Rows(row for row in read_study(name)[1] if str(row.method) == "log embedding"),
            read_stratified(name),
        )
        for name, title in LENGTHS.items()
    }


def on_distillation(files: Files) -> Iterator[str]:
    """What is left of eight augmented steps in one call."""
    seeds = [run["found"] for run in read_json("distill")]
    means = {name: fmean(seed[name][NLL.name] for seed in seeds) for name in seeds[0]}
    near = [name for name in means if name.startswith("student") and means[name] < means[TEACHER] + NEAR]
    yield (
        f"**{'Yes' if near else 'No'}, in the mean: {' and '.join(f'*{name}*' for name in near) or 'no student'} "
        f"{'have' if len(near) > 1 else 'has'} an NLL of at most {NEAR} above that of the teacher's eight "
        f"augmented steps ({means[TEACHER]:.3f}). But a standard classifier that learnt from the labels has "
        f"{means[PLAIN]:.3f} in one call and {means[VIEWS]:.3f} with eight views.**"
    )
    told = []
    for name in (name for name in means if name.startswith("student")):
        gaps = ([seed[name][NLL.name] - seed[other][NLL.name] for seed in seeds] for other in (TEACHER, PLAIN))
        told.append(f"*{name}* {' and '.join(map(with_interval, gaps))}")
    yield (
        f"Beside the teacher's steps, and beside that one call: {'; '.join(told)}. The teacher trained for 120 "
        "epochs, the others for 60; the student with the same network starts from the teacher's weights.\n"
    )
    points = {"NLL as trained": {name: [seed[name][NLL.name] for seed in seeds] for name in means}}
    yield draw_dots(files, "results/one-call.svg", "NLL of one call and of several", points, "NLL")
    yield "| | top-1 % | NLL | multiply-adds, relative |"
    yield "|---|---:|---:|---:|"
    for name in means:
        top1 = mean_and_spread([100 * seed[name][TOP1.name] for seed in seeds], 1)
        cost = seeds[0][name]["multiply_adds"] / seeds[0][PLAIN]["multiply_adds"]
        yield f"| {name} | {top1} | {mean_and_spread([s[name][NLL.name] for s in seeds])} | {cost:.1f} |"
    yield "\n[How it was measured](results/distill/README.md).\n"


def on_shift(files: Files) -> Iterator[str]:
    """What images that get worse than those of training do."""
    runs = read_lines("shift")
    last = len(runs[0]["by_severity"]) - 1
    gaps: dict[str, list[tuple[float, float, float]]] = {}  # DiDiCM minus standard, by metric
    for metric, (fraction, a) in product(("cls/NLL", "cls/Acc"), _shift_kinds(runs)):
        sides = [_at(runs, fraction, a, method, metric, last) for method in ("DiDiCM", "standard")]
        found = [SHIFTED[metric][1] * (ours - theirs) for ours, theirs in zip(*sides, strict=True)]
        gaps.setdefault(metric, []).append(seed_interval(found))
    changes = []
    for fraction in dict.fromkeys(fraction for fraction, _ in _shift_kinds(runs)):
        strong, crops = (fmean(_at(runs, fraction, a, "standard", "cls/NLL", last)) for a in (STRONG, CROPS))
        changes.append(strong - crops)
    lower: dict[str, list[int]] = {}  # severities, by condition
    cases, higher = list(product(_shift_kinds(runs), range(1, last + 1))), 0
    for (fraction, a), severity in cases:
        sides = [_at(runs, fraction, a, method, "cls/NLL", severity) for method in ("DiDiCM", "standard")]
        _, low, high = seed_interval([ours - theirs for ours, theirs in zip(*sides, strict=True)])
        higher += low > 0
        if high < 0:
            lower.setdefault(f"{a}, {fraction} images per class", []).append(severity)
    told = [f"{where}: severity {', '.join(map(str, found))}" for where, found in lower.items()]
    at = f" ({'; '.join(told)})" if told else ""
    yield (
        f"**Under {last} severities and the {len(_shift_kinds(runs))} conditions below, DiDiCM's NLL is lower "
        f"than the standard classifier's beyond noise in {sum(map(len, lower.values()))} of {len(cases)} "
        f"cases{at} and higher in {higher}; strong augmentation changes that of the standard classifier by "
        f"{signed(changes)} at the highest severity.** Fashion-MNIST at 14 px.\n"
    )
    panels = {
        f"{fraction} images per class, {a}": {
            f"{method}, severity {k}": _at(runs, fraction, a, method, "cls/NLL", k)
            for k, method in product((0, 1, 3, last), ("standard", "DiDiCM"))
        }
        for fraction, a in _shift_kinds(runs)
    }
    yield draw_dots(files, "results/shift.svg", "NLL of worse images", panels, "NLL")
    yield f"| NLL | clean | {' | '.join(f'severity {k}' for k in range(1, last + 1))} |"
    yield "|---|" + "---:|" * (last + 1)
    for (fraction, a), method in product(_shift_kinds(runs), ("standard", "DiDiCM")):
        cells = [mean_and_spread(_at(runs, fraction, a, method, "cls/NLL", k)) for k in range(last + 1)]
        yield f"| {method}, {a}, {fraction} images per class | {' | '.join(cells)} |"
    yield f"\n| DiDiCM {MINUS} standard at severity {last} | NLL | top-1, points |"
    yield "|---|---:|---:|"
    for (fraction, a), nll, top1 in zip(_shift_kinds(runs), *gaps.values(), strict=True):
        shown = ((nll, 3), (top1, 1))
        cells = [f"{signed([mean], d)} ({signed([low, high], d)})" for (mean, low, high), d in shown]
        yield f"| {a}, {fraction} images per class | {' | '.join(cells)} |"
    yield (
        "\nMean over the corruptions, then mean and standard deviation over seeds; the temperature is fitted to "
        "clean images. [All metrics](results/shift/README.md). Which score tells foreign images apart: [foreign "
        "images](results/outliers/README.md).\n"
    )


def _shift_kinds(runs: list[Line]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((run["fraction"], run["augmentation"]) for run in runs))


def _at(
    runs: list[Line], fraction: int, augmentation: str, method: str, metric: str, severity: int
) -> list[float]:
    """Values by seed."""
    kind = fraction, augmentation, method
    mine = [run for run in runs if (run["fraction"], run["augmentation"], run["method"]) == kind]
    return [run["by_severity"][severity][metric] for run in sorted(mine, key=lambda run: run["seed"])]

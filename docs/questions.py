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
    link,
    place_of,
    pooled,
    read_study,
    signed,
    spread,
    with_interval,
)
from measured import SHIFTED, Line, mean_and_spread, read_json, read_lines, read_people, same_entry
from plots import Files, draw_dots, draw_gaps

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
CROSS_ENTROPY = "cross-entropy"
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
        words = ", ".join(f"{word} under {ahead.count(sign)}" for word, sign in counts)
        told.append(f"{words} conditions with {augmentation}")
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
    told = []
    for a in TUNED:
        here = [x for x in asked if x.augmentation == a]
        gap, higher = pooled(here), sum(x.gaps[SCALED_NLL].difference.mean > 0 for x in here)
        told.append(
            f"with {a} DiDiCM's NLL, T is higher under {higher} of {len(here)}, by {signed([gap.mean])} in the "
            f"mean ({signed([gap.mean - gap.half])} to {signed([gap.mean + gap.half])} over conditions)"
        )
    yield f"- **All conditions together**, noise or not: {'; '.join(told)}."
    yield _without_tuning(asked)
    signs = [x.gaps[ECE].sign for x in asked]
    yield (
        "- **Who is better calibrated as trained?** The ECE of DiDiCM is lower than that of any standard "
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
        signs = [" †" if a in found and found[a].shows_black else "" for a, _ in sides]
        yield f"| {place} | {' | '.join(map(''.join, zip(cells, signs, strict=True)))} |"
    yield (
        "\n† Where images are shifted in training, black comes into view; elsewhere the border is repeated. All "
        "metrics, several views, and the study of each: [condition by condition](results/conditions.md).\n"
    )


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
            for name, side in zip(longest, sides, strict=True):
                best = min(side, key=lambda trial: trial.metrics[NLL.name])
                longest[name] += best.settings["epochs"] == max(t.settings["epochs"] for t in side)
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
    order = sorted(changes, key=lambda name: fmean(changes[name]))
    told = "; ".join(f"{signed(changes[name])} ({name})" for name in order)
    yield f"**With wrong labels, DiDiCM is {_counted(wrong)}; the most is gained by: {order[0]}.**"
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
    sides: dict[
        tuple[str, str], dict[str, list[float]]
    ] = {}  # of each augmentation and condition, the best answers
    for (*place, method, sampler), same in found.items():
        who = f"{'DiDiCM' if method.startswith('DiDiCM') else 'standard'}, {sampler}"
        values, here = [x["temperature"]["divergence"] for x in same], sides.setdefault(tuple(place), {})
        here[who] = min(here.get(who, values), values, key=fmean)
    told = []
    for sampler in PEOPLE_SAMPLERS:
        gaps = [
            seed_interval([ours - theirs for ours, theirs in zip(*pair, strict=True)])
            for here in sides.values()
            if len(pair := [here[w] for who in ("DiDiCM", "standard") if (w := f"{who}, {sampler}") in here]) == 2
        ]
        lower, higher = sum(high < 0 for *_, high in gaps), sum(low > 0 for _, low, _ in gaps)
        told.append(
            f"{signed([mean for mean, *_ in gaps])} with {sampler} (beyond noise lower under {lower} and higher "
            f"under {higher} of {len(gaps)} conditions)"
        )
    known = {
        f"{', '.join(key[:3])}": fmean(x["as trained"]["rank correlation"] for x in same)
        for key, same in found.items()
        if key[3] == ONE_CALL
    }
    clearest = max(known, key=known.__getitem__)
    yield (
        "**DiDiCM's divergence from the labels of some 50 people differs from the best standard classifier's by "
        f"{' and by '.join(told)}.**"
    )
    yield (
        "Neither is unsure where people disagree: the rank correlation of the entropies is at most "
        f"{known[clearest]:.2f} ({clearest}). They saw the images in full size, the networks a few pixels.\n"
    )
    points = {
        a: {f"{who}, {place}": x for (b, place), here in sides.items() if a == b for who, x in here.items()}
        for a in TUNED
    }
    yield draw_dots(files, "results/people.svg", "Divergence from people", points, "divergence, T (nats)")
    answers = [f"{who}, {sampler}" for sampler, who in product(PEOPLE_SAMPLERS, ("standard", "DiDiCM"))]
    yield f"| divergence, T | {' | '.join(answers)} |"
    yield "|---|" + "---:|" * len(answers)
    for place, here in sides.items():
        cells = [mean_and_spread(here.get(answer, [])) for answer in answers]
        yield f"| {', '.join(place[::-1])} | {' | '.join(cells)} |"
    yield (
        "\nNats, mean and standard deviation over seeds; the standard classifier is the better of smoothed labels "
        "and others. [All measures](results/human/README.md).\n"
    )


def _informative(condition: str) -> list[int]:
    """Pixels and images per class, the most first."""
    return [-int(number) for number in re.findall(r"\d+", condition)]


def on_steps() -> Iterator[str]:
    """How many steps, which label in each, how many chains, augmented steps."""
    found: dict[
        tuple[str, str, str], dict[int, tuple[float, float]]
    ] = {}  # by study, network and sampler, by steps
    for name, classes in STEPS.items():
        if stored := read_study(name):
            rows = stored[1]
            for entry in dict.fromkeys(row.entry for row in rows):
                here = rows.select(entry)
                measured = here[0].measured
                steps = int(measured.settings.get("steps", 1))
                value = here.estimate(NLL).mean, measured.multiply_adds
                found.setdefault((classes, str(entry.method), measured.group), {})[steps] = value
    gains: dict[tuple[bool, str], list[float]] = {}  # over one step, by what the network predicts and what else
    prices: dict[str, list[float]] = {}
    for (classes, network, sampler), by_steps in found.items():
        if sampler in SHORTER:
            one, eight = found[classes, network, "argmin"][1], by_steps[8]
            gains.setdefault((network == "posterior", sampler), []).append(eight[0] - one[0])
            prices.setdefault(sampler, []).append(eight[1] / one[1])
    told = [
        f"{signed(gains[kind, 'argmin'])} where networks predict {what}, {signed(gains[kind, AUGMENTED])} if "
        "every step sees another view of the image"
        for kind, what in ((False, "scores"), (True, "the posterior"))
    ]
    yield f"**Eight steps instead of one change the NLL by {'; and by '.join(told)}.**"
    yield (
        f"They cost {spread(prices['argmin'])} times the multiply-adds, with views {spread(prices[AUGMENTED])} "
        "times. As trained.\n"
    )
    yield from _say_defaults(found)
    for name, classes in STEPS.items():
        yield f"![NLL over steps, {classes}](results/{name}/steps.svg)\n"
    steps = sorted({n for by_steps in found.values() for n in by_steps})
    yield f"| NLL, steps | {' | '.join(map(str, steps))} | M multiply-adds |"
    yield "|---|" + "---:|" * (len(steps) + 1)
    for (classes, network, sampler), by_steps in found.items():
        if sampler in SAMPLERS:
            cells = [f"{by_steps[n][0]:.3f}" if n in by_steps else "" for n in steps]
            costs = spread([cost / 1e6 for _, cost in by_steps.values()])
            yield f"| {classes}, {network}: {sampler} | {' | '.join(cells)} | {costs} |"
    yield (
        "\nSo the default stays `argmin` with eight steps for the paper's recipes, and one call for `few` and "
        "`finetune`, whose networks predict the posterior. Studies: "
        f"{', '.join(link(name, text) for name, text in STEPS.items())}.\n"
    )


def _say_defaults(found: Mapping[tuple[str, str, str], Mapping[int, tuple[float, float]]]) -> Iterator[str]:
    """How many steps are enough, and what the other choices give at which price, a line per network."""
    for classes, network in dict.fromkeys(key[:2] for key in found):
        argmin, kinds = found[classes, network, "argmin"], []
        lowest = min(nll for nll, _ in argmin.values())
        steps = min(n for n, (nll, _) in argmin.items() if nll <= lowest + NEAR)
        for what, samplers in (("of the other choices", ("argmax", "sample")), ("of all CL", CHAINS)):
            (nll, cost), n, sampler = min(
                (value, n, s) for s in samplers for n, value in found[classes, network, s].items()
            )
            told = f"{sampler}, {count(n, 'step')}"
            kinds.append(f"the best {what} is {told} ({nll:.3f}, {cost / 1e6:.1f} M multiply-adds)")
        nll, cost = argmin[steps]
        yield (
            f"- **{classes}, {network}**: argmin needs {count(steps, 'step')} to be within {NEAR} of its lowest "
            f"NLL ({nll:.3f}, {cost / 1e6:.1f} M multiply-adds); {'; '.join(kinds)}."
        )
    yield ""


def on_training(files: Files) -> Iterator[str]:
    """What trains fastest and ends best, at equal multiply-adds."""
    found: dict[str, dict[str, Rows]] = {}  # the better of one call and eight steps, by length and method
    for name, title in LENGTHS.items():
        if stored := read_study(name):
            rows = [*stored[1], *read_stratified(name)]
            for method in dict.fromkeys(str(row.method) for row in rows):
                own = [row for row in rows if str(row.method) == method]
                calls = [Rows(row for row in own if row.entry == entry) for entry in {row.entry for row in own}]
                best = min(calls, key=lambda rows: rows.estimate(SCALED_NLL).mean)
                found.setdefault(title, {})[method] = best
    told = []
    for title, methods in found.items():
        means = {name: rows.estimate(SCALED_NLL).mean for name, rows in methods.items()}
        first = sorted(means, key=means.__getitem__)[:3]
        other = first[1] if first[0] == CROSS_ENTROPY else CROSS_ENTROPY
        gap = methods[first[0]].minus(methods[other], SCALED_NLL)
        beside = f"; the first differs from *{other}* by {signed([gap.mean])} ± {gap.half:.3f}"
        told.append(f"with {title} {', '.join(f'*{name}* ({means[name]:.3f})' for name in first)}{beside}")
    yield f"**The lowest NLL, T at equal multiply-adds: {'; '.join(told)}.**\n"
    points = {t.capitalize(): {name: r.values(SCALED_NLL) for name, r in own.items()} for t, own in found.items()}
    yield draw_dots(
        files,
        "results/training.svg",
        "NLL, T at equal multiply-adds of training",
        points,
        "NLL, T",
        ours=r"(?!cross-entropy)",
    )
    yield f"| top-1 / NLL, T | {' | '.join(found)} |"
    yield "|---|" + "---:|" * len(found)
    for method in dict.fromkeys(name for methods in found.values() for name in methods):
        rows = [methods.get(method) for methods in found.values()]
        cells = [
            f"{_pair(r.estimate(TOP1).mean, r.estimate(SCALED_NLL).mean)} ({r[0].entry.sampler})" if r else ""
            for r in rows
        ]
        yield f"| {method} | {' | '.join(cells)} |"
    yield (
        "\nEach with the better of one call and eight steps; ± half of the 95 % interval over seeds. Other "
        f"times: {link('times-cpu', 'squared')}, {link('stratified', 'stratified')}. Draws per image, "
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
        f"**{'Yes' if near else 'No'}: {' and '.join(f'*{name}*' for name in near) or 'no student'} "
        f"{'have' if len(near) > 1 else 'has'} an NLL of at most {NEAR} above that of the teacher's eight "
        f"augmented steps ({means[TEACHER]:.3f}). But a standard classifier that learnt from the labels has "
        f"{means[PLAIN]:.3f} in one call and {means[VIEWS]:.3f} with eight views.**"
    )
    told = []
    for name in (name for name in means if name.startswith("student")):
        told.append(f"*{name}* {with_interval([seed[name][NLL.name] - seed[PLAIN][NLL.name] for seed in seeds])}")
    yield f"Beside that one call: {'; '.join(told)}.\n"
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
    lower, higher = (sum(sign * gap[k] > 0 for gap in gaps["cls/NLL"]) for sign, k in ((-1, 2), (1, 1)))
    yield (
        f"**At the highest severity, DiDiCM's NLL is lower than the standard classifier's beyond noise in {lower} "
        f"of {len(gaps['cls/NLL'])} cases and higher in {higher}; strong augmentation changes that of the "
        f"standard classifier by {signed(changes)}.** Fashion-MNIST at 14 px.\n"
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

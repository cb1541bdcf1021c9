"""What follows from the studies for somebody who trains: which method, which defaults, what else was learnt."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import reduce
from itertools import product
from statistics import fmean

from compared import (
    ADVISED,
    BLACK,
    BRIER,
    CROPS,
    FEW,
    FOLDER,
    MANY,
    STRONG,
    TUNED,
    Compared,
    choose_variant,
    chosen_trials,
    link,
    pooled,
    read_study,
    signed,
    spread,
)
from questions import compare_stratified, read_places

from didicm.experiments.results import read_trials
from didicm.experiments.spec import ONE_CALL, Condition
from didicm.experiments.tune import combine, cost_of_one_draw, lengths_alike
from didicm.report.records import NLL, SCALED_NLL, TOP1, Entry, Estimate, Metric, Rows
from didicm.report.tables import NORMALIZED_AURC
from didicm.report.verdict import ALIKE
from didicm.settings import load_recipe
from didicm.text import count

GROUPS = {  # of conditions, by what somebody knows of their own images
    f"up to {FEW} images per class": lambda x: x.condition.fraction <= FEW and not x.wrong_labels,
    "100 to 250 images per class": lambda x: FEW < x.condition.fraction < MANY and not x.wrong_labels,
    "2,000 images per class": lambda x: x.condition.fraction >= MANY and not x.wrong_labels,
    "wrong labels": lambda x: x.wrong_labels,
}
MORE_CALLS = {
    "8 views": "eight augmented views",
    "4 snapshots": "four snapshots of one training",
    "ensemble of 4": "an ensemble of four",
}
SEVERAL = "guides/predict.md#several-views-several-models"
COMMANDS = """```sh
# a standard classifier and DiDiCM, with strong augmentation
didicm train --recipe few --method standard --data photos --out runs/standard
didicm train --recipe few --data photos --out runs/didicm
# thousands of images per class
didicm train --recipe small --method standard --data photos --out runs/many
# which is better on your images
didicm compare --recipe few --tune 8 --data photos --out runs/compare
```

With crops and flips alone, add `--augment.auto-augment none --augment.mixup 0 --augment.cutmix 0 --epochs 50` to
recipe `few`, for DiDiCM also `--mask 0.5`; `didicm compare` without `--recipe few` has them. For photographs start
from [a pretrained backbone](guides/few-images.md). Terms are explained in [the mathematics](maths.md) and in
[reading the report](guides/compare.md#reading-the-report).
"""
EQUAL = "equal-strong-cpu"  # with strong augmentation and 200 images per class
DEFAULTS = (  # recipe, setting, what the study showed, the study
    ("few", "model_args.layout", "better than the paper's blocks", "fair-cpu"),
    ("few", "model_args.parameterization", "its steps work in every training", "parameterization-cpu"),
    ("few", "model_args.noise_embedding", "no worse than the linear one", "training-cpu"),
    ("few", "mask", "with strong augmentation no worse than fewer masked", "mask-strong-cpu"),
    ("few", "sampler.method", "one call is no worse than eight steps", "borders-strong-cpu"),
    ("few", "augment.pad_mode", "with strong augmentation too, mostly better than black", "borders-strong-cpu"),
    (
        "few",
        "augment.auto_augment",
        "with Mixup and CutMix, better than crops and flips where images are few (section 1)",
        "borders-strong-cpu",
    ),
    ("small", "model_args.parameterization", "best in short trainings", "recipe-cpu"),
    ("small", "mask", "level with more draws, at the training cost of a standard classifier", "recipe-cpu"),
    ("small", "label_proposal", "importance-sampled labels end better than the paper's", "training-cpu"),
    ("small", "augment.pad_mode", "mostly better than black", "borders-cpu"),
    ("finetune", "mask", "with none masked, far behind a linear layer", "finetune-cpu"),
    ("finetune", "model_args.standardize", "better for both methods", "finetune-cpu"),
    ("weak", "sampler.solver", "best on trained networks", "solvers-cpu"),
    ("weak", "sampler.select", "best where networks predict scores, else level", "steps-cpu"),
    ("weak", "sampler.steps", "the paper's; networks that predict scores gain little beyond", "steps-cpu"),
)


def write_choice(asked: list[Compared]) -> Iterator[str]:
    """What to use by the images one has, as a table, and what it follows from."""
    yield (
        "| your images | use | NLL, T by strong augmentation | its training, relative | "
        f"{' | '.join(f'DiDiCM ahead / level / behind, {a}' for a in TUNED)} |"
    )
    yield "|---|---|---:|---:|" + "---:|" * len(TUNED)
    for group, belongs in GROUPS.items():
        here = {a: [x for x in asked if x.augmentation == a and belongs(x)] for a in TUNED}
        pairs, shorter = _same_border(here)
        changes = [strong.gaps[SCALED_NLL].theirs - crops.gaps[SCALED_NLL].theirs for crops, strong in pairs]
        prices = [strong.costs[1] / crops.costs[1] for crops, strong in pairs if crops.costs and strong.costs]
        better = [a for a, first in zip(TUNED, (min(changes) > 0, max(changes) < 0), strict=True) if first]
        which = better[0] if better else "try both augmentations"
        if shorter:
            which += " (strong augmentation had shorter training)"
        data = ", ".join(dict.fromkeys(crops.data for crops, _ in pairs))
        cells = [
            f"**{_choose_method(here, better or list(TUNED))}, {which}**",
            f"{signed(changes)} ({len(changes)})",
            spread(prices),
            *map(_count_signs, here.values()),
        ]
        yield f"| {group} ({data}) | {' | '.join(cells)} |"
    yield (
        "\n*Strong augmentation* is RandAugment, Mixup and CutMix, for images that stay in their class when they "
        "are distorted and mixed. The third column is what it changes for a standard classifier, with the "
        "number of conditions where it was trained for as long as crops and flips; the fourth its multiply-adds "
        "of training, beside theirs. Where images "
        "[get worse](#7-what-if-images-get-worse-than-those-of-training) than those of training, it helps by far "
        "more than here. The last columns count where one call of DiDiCM, which costs "
        f"{spread([x.inference for x in asked])} times the multiply-adds, is ahead of, level with and behind the "
        f"standard classifier; of {len(asked)}, one or two would be ahead by chance alone, and as many behind. "
        "Where neither method is better, the table says to use the standard classifier, which is simpler.\n"
    )
    yield _on_price(asked)
    yield from _on_equal_lengths()
    yield _on_all(asked)
    yield from _on_lengths()
    yield _on_more_calls()
    yield f"\n{COMMANDS}"


def _same_border(here: Mapping[str, list[Compared]]) -> tuple[list[tuple[Compared, Compared]], bool]:
    """Conditions with both augmentations and the same border, where strong augmentation was trained for as long.

    Where it never was, those where it was not, which is told.
    """
    strong = {x.place: x for x in here[STRONG]}
    pairs = [(x, strong[x.place]) for x in here[CROPS] if x.place in strong]
    pairs = [(crops, found) for crops, found in pairs if crops.shows_black == found.shows_black]
    as_long = [(c, s) for c, s in pairs if c.costs is None or s.costs is None or s.costs[1] >= c.costs[1]]
    return as_long or pairs, not as_long


def _count_signs(found: list[Compared]) -> str:
    ahead = [x.ahead for x in found]
    return f"{ahead.count(1)} / {ahead.count(0)} / {ahead.count(-1)}"


def _choose_method(here: Mapping[str, list[Compared]], augmentations: list[str]) -> str:
    """In words; the standard classifier where neither is better."""
    chosen = {_choose(here[augmentation]) for augmentation in augmentations}
    if chosen <= {"standard", "either"}:
        return "a standard classifier"
    return "DiDiCM" if chosen == {"DiDiCM"} else "the better of both, compared"


def _on_all(asked: list[Compared]) -> str:
    """What is left over all conditions."""
    told = []
    for a in TUNED:
        here = [x for x in asked if x.augmentation == a]
        gap, higher = pooled(here), sum(x.gaps[SCALED_NLL].difference.mean > 0 for x in here)
        told.append(
            f"with {a} DiDiCM's NLL, T is higher in {higher} of {len(here)}, by {signed([gap.mean])} in the mean "
            f"({signed([gap.mean - gap.half])} to {signed([gap.mean + gap.half])} over conditions, as if they "
            "were independent)"
        )
    return f"- **Over all conditions**, noise or not: {'; '.join(told)}."


def _on_price(asked: list[Compared]) -> str:
    """What the training of DiDiCM cost where it is ahead, and how often it is where it cost the same."""
    alike = [x.ahead for x in asked if x.training and x.training <= ALIKE]
    longer = [x for x in asked if x.training and x.training > ALIKE]
    signs, ahead = [x.ahead for x in longer], [x for x in asked if x.ahead > 0]
    by_nll = sum(x.gaps[SCALED_NLL].sign > 0 for x in ahead)
    by_chance = [told for x in longer if (told := _by_chance(x)) is not None]
    return (
        "- **By the cost of training**: where DiDiCM's, at the lengths that were chosen, takes at most "
        f"{ALIKE} times the multiply-adds, it is ahead in {alike.count(1)} and behind in {alike.count(-1)} of "
        f"{len(alike)} conditions; where it takes {spread([x.training for x in longer])} times as many, ahead in "
        f"{signs.count(1)} and behind in {signs.count(-1)} of {len(longer)}; two standard errors of the "
        f"held-out NLL do not tell the lengths of both apart in {sum(by_chance)} of these"
        f"{'' if len(by_chance) == len(longer) else f', of {len(by_chance)} whose trials can say'}. Of the "
        f"{len(ahead)} where it is ahead, {by_nll} are by NLL, T and the others by top-1 alone."
    )


def _by_chance(x: Compared) -> bool | None:
    """Whether held-out images do not tell the lengths of both sides apart; None where trials cannot say."""
    alike = lengths_alike(read_trials(FOLDER / x.study))
    kinds = [(str(entry.method), x.condition) for entry in (x.entry, x.best)]
    if not all(kind in alike for kind in kinds):
        return None
    ours, theirs = (alike[kind] for kind in kinds)
    return ours[0] in theirs or theirs[0] in ours


def _on_equal_lengths() -> Iterator[str]:
    """Who is ahead where lengths are not chosen, but given, and the same."""
    found = compare_lengths()
    told = [f"{gap} with {ours} epochs beside {theirs}" for (ours, theirs), gap in found.items()]
    yield (
        "- **At equal lengths**, with strong augmentation and 200 images per class, the NLL, T and top-1 of one "
        f"call of DiDiCM minus the standard classifier's are {'; '.join(told)}, as held-out images choose "
        f"({link(EQUAL)})."
    )


def compare_lengths() -> dict[tuple[int, int], str]:
    """DiDiCM minus the standard classifier by the epochs of each: equal ones, then those of a search."""
    rows = read_study(EQUAL)[1]
    once = {(e.method.baseline, e.method.settings["epochs"]): e for e in rows.entries() if e.sampler == ONE_CALL}
    lengths = sorted({epochs for _, epochs in once})
    found = {}
    for pair in [(epochs, epochs) for epochs in lengths] + [(lengths[-1], lengths[0])]:
        ours, theirs = (rows.select(once[key]) for key in zip((False, True), pair, strict=True))
        gaps = [(metric, ours.minus(theirs, metric)) for metric in (SCALED_NLL, TOP1)]
        nll, top1 = (f"{metric.text(gap.mean, '+')} ± {metric.text(gap.half)}" for metric, gap in gaps)
        found[pair] = f"{nll} and {top1} points"
    return found


def _on_more_calls() -> str:
    """What a standard classifier gains by calls: views, snapshots, members."""
    changes: dict[str, list[float]] = {}
    prices: dict[str, list[float]] = {}
    for place in read_places("labels-cpu", "noise-cpu", "ensembles-cpu"):
        for name in MORE_CALLS.keys() & place.answers.keys():
            changes.setdefault(name, []).append(place.nll(name) - place.nll("standard"))
            prices.setdefault(name, []).append(place.price(name))
    told = [f"{signed(changes[name])} with {words}" for name, words in MORE_CALLS.items()]
    times = spread([price for each in prices.values() for price in each], 0)
    return (
        f"- **Where an answer may cost {times} times as much**, ask [several models or for several "
        f"views]({SEVERAL}): the NLL, T of the standard classifier changes by {'; '.join(told)} (right and wrong "
        "labels, crops and flips)."
    )


def _choose(found: list[Compared]) -> str:
    """What to use: where one method is ahead in half of the conditions, or over all of them together.

    Both, where half of the conditions show a difference, and neither is ahead in twice as many as the other.
    """
    ahead = [x.ahead for x in found]
    better, worse, together = ahead.count(1), ahead.count(-1), pooled(found).sign
    if max(better, worse) < 2 * min(better, worse) and 2 * (better + worse) >= len(ahead):
        return "both"
    if better >= worse and (2 * better >= len(ahead) or together < 0):
        return "DiDiCM"
    if worse >= better and (2 * worse >= len(ahead) or together > 0):
        return "standard"
    return "either"


def write_aim(found: list[Compared]) -> Iterator[str]:
    """Whether DiDiCM beats the standard classifier at nearly the same cost of an answer."""
    yield "## The aim\n"
    yield (
        f"At equal training compute and at most {ALIKE} times the cost of an answer, better NLL and Brier score "
        "than the tuned standard classifier under every condition, and better top-1 under most. Answers with "
        "several views are compared with as many views of the standard classifier:\n"
    )
    for augmentation, sampler in dict.fromkeys((x.augmentation, x.entry.sampler) for x in found):
        here = [x for x in found if (x.augmentation, x.entry.sampler) == (augmentation, sampler)]
        inference, training = [x.inference for x in here], [x.training for x in here if x.training]
        if fmean(inference) > ALIKE:  # steps
            continue
        signs = {m: [x.gaps[m].sign for x in here] for m in (TOP1, NLL, BRIER)}
        everywhere = all(sign == 1 for m in (NLL, BRIER) for sign in signs[m])
        cheap = max(inference) <= ALIKE and max(training) <= ALIKE
        met = everywhere and signs[TOP1].count(1) > len(here) / 2 and cheap
        counts = "; ".join(f"{m} {each.count(1)} better, {each.count(-1)} worse" for m, each in signs.items())
        yield (
            f"- {sampler}, {augmentation}: {'met' if met else 'missed'}. Of {count(len(here), 'condition')}, "
            f"beyond noise: {counts}. An answer took {spread(inference)} times the multiply-adds, a training "
            f"{spread(training)} times."
        )
    yield ""


def write_defaults() -> Iterator[str]:
    """Which defaults follow from which study."""
    yield "## Defaults, and what shows them\n"
    yield "| recipe | setting | value | why | |"
    yield "|---|---|---|---|---|"
    for recipe, name, why, study in DEFAULTS:
        value = reduce(lambda found, part: found[part], name.split("."), asdict(load_recipe(recipe)))
        yield f"| `{recipe}` | `{name}` | `{value}` | {why} | {link(study)} |"
    changes, even = _of_squared_times(), _of_stratified_times()
    yield (
        f"\nWhat did not pay is gone. Squared times (`time_sampling`) changed NLL, T by {signed(changes)} in "
        f"{count(len(changes), 'comparison')} ({link('times-cpu')}); times spread evenly over a batch by "
        f"{signed([gap.mean for gap in even])}, beyond noise in {sum(x.sign != 0 for x in even)} of {len(even)} "
        f"({link('stratified', 'measured')}). Models that were trained with either load as before.\n"
    )


def _of_stratified_times() -> list[Estimate]:
    """The same of stratified times, by length and sampler."""
    return [
        Rows(row for row in even if row.entry.sampler == sampler).minus(
            Rows(row for row in uniform if row.entry.sampler == sampler), SCALED_NLL
        )
        for (uniform, even), sampler in product(compare_stratified().values(), ("8 steps", ONE_CALL))
    ]


def _of_squared_times() -> list[float]:
    """Temperature-scaled NLL of squared times minus that of uniform ones, by condition and sampler."""
    rows = read_study("times-cpu")[1]
    changes = []
    for condition, sampler in product(rows.conditions(), dict.fromkeys(row.entry.sampler for row in rows)):
        here = [row for row in rows.select(condition=condition) if row.entry.sampler == sampler]
        squared, uniform = (Rows(r for r in here if ("squared" in str(r.method)) == x) for x in (True, False))
        if squared and uniform:
            changes.append(squared.minus(uniform, SCALED_NLL).mean)
    return changes


def write_findings(asked: list[Compared]) -> Iterator[str]:
    """What else was learnt, a line each."""
    yield "## What else was learnt\n"
    yield from _on_borders()
    yield from _on_mask()
    yield from _on_parameterization()
    yield from _on_backbones()
    yield from _on_temperature(asked)
    yield from _on_confidence()
    yield from _on_rates()
    yield from _on_holdouts()
    yield from _on_batches()
    yield ""


def _on_borders() -> Iterator[str]:
    """What it is worth to repeat the border of images that are shifted."""
    gains: dict[tuple[bool, Metric], list[float]] = {}
    clear, cases, links = 0, 0, []
    for name in ("borders-cpu", "borders-strong-cpu"):
        if (stored := read_study(name)) is None:
            continue
        links.append(link(name, stored[0].study.title.lower()))
        for condition, baseline in product(stored[1].conditions(), (True, False)):
            here = Rows(
                row
                for row in stored[1].select(condition=condition)
                if row.method.baseline == baseline and row.entry.sampler == ONE_CALL
            )
            black, border = (Rows(r for r in here if r.method.variant.endswith(BLACK) == x) for x in (True, False))
            for metric in (TOP1, SCALED_NLL):
                gap = border.minus(black, metric)
                gains.setdefault((baseline, metric), []).append(gap.mean)
            clear += gap.sign * SCALED_NLL.sign > 0
            cases += 1
    if not gains:
        return
    told = [
        f"{name} {TOP1.text(min(gains[side, TOP1]), '+')} to {TOP1.text(max(gains[side, TOP1]), '+')} points, "
        f"NLL, T {SCALED_NLL.text(min(gains[side, SCALED_NLL]), '+')} to "
        f"{SCALED_NLL.text(max(gains[side, SCALED_NLL]), '+')}"
        for name, side in (("standard classifier", True), ("one call of DiDiCM", False))
    ]
    yield (
        "- **Repeat the border of small images that are shifted in training** instead of showing black "
        f"(`augment.pad_mode: edge`): {'; '.join(told)}; the NLL is lower beyond noise in {clear} of {cases} "
        f"cases ({', '.join(links)})."
    )


def _on_mask() -> Iterator[str]:
    """How many labels to mask."""
    if (stored := read_study("mask-cpu")) is None:
        return
    rows, best = stored[1], []
    for condition in rows.conditions():
        here = rows.select(condition=condition)
        entry = min(here.entries(), key=lambda e, here=here: here.select(e).estimate(SCALED_NLL).mean)
        best.append(f"{entry.method.variant} with {condition}")
    text = (
        "- **Seeing labels regularises, and teaches little about an answer without one.** At one length for all, "
        f"not tuned, the lowest NLL, T is that of {'; '.join(best)} ({link('mask-cpu', 'all masked')} is a "
        "standard classifier)."
    )
    if stored := read_study("mask-strong-cpu"):
        rows, told = stored[1], []
        for condition in rows.conditions():
            here = rows.select(condition=condition)
            values = [
                f"{here.select(e).estimate(SCALED_NLL).mean:.3f} ({e.method.variant or e.method.name})"
                for e in here.entries()
                if e.sampler == ONE_CALL
            ]
            told.append(f"{', '.join(values)} with {condition}")
        text += f" Strong augmentation regularises by itself: {'; '.join(told)} ({link('mask-strong-cpu')})."
    yield text


def _on_parameterization() -> Iterator[str]:
    """What a network with ResNet blocks should predict: whether its steps work, and how good one call is."""
    if (stored := read_study("parameterization-cpu")) is None:
        return
    told = []
    for name in ("score", "posterior"):
        rows = Rows(row for row in stored[1] if row.method.variant == name)
        single, steps = ({r.place: r for r in rows if (r.entry.sampler == ONE_CALL) == x} for x in (True, False))
        failed = sum(steps[place].value(TOP1) < single[place].value(TOP1) / 2 for place in steps)
        nll = Rows(single.values()).estimate(SCALED_NLL).mean
        told.append(f"with `{name}` in {failed} of {len(steps)} trainings (NLL, T of one call {nll:.3f})")
    yield (
        "- **Predict the posterior with ResNet blocks.** Eight steps are right less than half as often as one "
        f"call {'; '.join(told)} ({link('parameterization-cpu')})."
    )


def _on_backbones() -> Iterator[str]:
    """Which head to put on a pretrained backbone, and whether to fine-tune it."""
    if (stored := read_study("finetune-cpu")) is None:
        return
    told, heads, frozen = [], dict[int, list[Condition]](), dict[bool, list[Condition]]()
    for condition in stored[1].conditions():
        here = stored[1].select(condition=condition)
        best = []
        for baseline in (True, False):
            entries = [e for e in here.entries() if e.method.baseline == baseline]
            best.append(min(entries, key=lambda e: here.select(e).estimate(SCALED_NLL).mean))
        gap = here.select(best[1]).minus(here.select(best[0]), SCALED_NLL)
        heads.setdefault(gap.sign if gap else 0, []).append(condition)
        means = [
            f"{TOP1.text(here.select(e).estimate(TOP1).mean)} % / {here.select(e).estimate(SCALED_NLL).mean:.3f}"
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
        f"- **With a pretrained backbone**, {'; '.join(advice)} (`--recipe finetune`, `--model-args.frozen true` "
        f"to freeze it, `--method standard` for a linear layer). Top-1 and NLL, T: {'; '.join(told)} "
        f"({link('finetune-cpu')})."
    )


def _per_class(conditions: list[Condition]) -> str:
    """Conditions that differ in the number of images alone."""
    *others, last = (f"{condition.fraction:g}" for condition in conditions)
    return f"{', '.join(others)}{' and ' if others else ''}{last} images per class"


def _on_temperature(asked: list[Compared]) -> Iterator[str]:
    wrong, right = ([x.by_temperature for x in asked if x.wrong_labels == side] for side in (True, False))
    text = (
        "- **Fit a temperature** (`didicm calibrate`) on images whose labels are right: it changed the NLL of "
        f"the best standard classifier by {signed(right)}, {signed([fmean(right)])} in the mean"
    )
    yield text + (f", and by {signed(wrong)} with wrong ones." if wrong else ".")


def _on_confidence() -> Iterator[str]:
    """Whether confidence by normalised logits ranks answers better than their probability."""
    pairs = [
        (row.value(NORMALIZED_AURC), row.value(Metric("sc/AURC")))
        for name in dict.fromkeys(name for names in TUNED.values() for name in names)
        if (stored := read_study(name))
        for row in stored[1]
        if row.method.baseline and row.entry.sampler == ONE_CALL and row.value(NORMALIZED_AURC) is not None
    ]
    lower = sum(normalised < plain for normalised, plain in pairs)
    advice = "their probability" if 2 * lower < len(pairs) else "normalised logits"
    yield (
        f"- **Rank answers by {advice}**: confidence by normalised logits, which was made for networks with "
        f"smoothed labels, ranks those of standard classifiers better in {lower} of {len(pairs)} measurements."
    )


def _on_lengths() -> Iterator[str]:
    """What it is worth to train for as long as that helps, with strong augmentation."""
    if (stored := read_study("lengths-strong-cpu")) is None:
        return
    before, now, told, changes = read_study("borders-strong-cpu")[1], stored[1], [], []
    for condition in now.conditions():
        entries = [e for e in now.select(condition=condition).entries() if e.sampler == ONE_CALL]
        chosen = chosen_trials("lengths-strong-cpu")
        lengths = [f"{chosen[str(e.method), condition].settings['epochs']} ({e.method.name})" for e in entries]
        told.append(f"{' and '.join(lengths)} with {_per_class([condition])}")
        same = [next(b for b in before.entries() if str(b) == str(e)) for e in entries]
        gaps = [
            now.select(e, condition).minus(before.select(b, condition), SCALED_NLL)
            for e, b in zip(entries, same, strict=True)
        ]
        changes.append((condition, gaps))
    *more, few = sorted(changes, key=lambda found: -found[0].fraction)
    yield (
        "- **With strong augmentation, train long if there are 50 images per class or more** (`--epochs`): "
        f"held-out images choose, in epochs, {'; '.join(told)}, where recipe `few` has "
        f"{load_recipe('few').epochs}. Beside a search that ends at twice the usual length, the NLL, T of both "
        "methods changes by "
        f"{signed([gap.mean for _, gaps in more for gap in gaps])} there, and by "
        f"{signed([gap.mean for gap in few[1]])} with {_per_class([few[0]])} ({link('lengths-strong-cpu')})."
    )


def _on_rates() -> Iterator[str]:
    """What a length of its own is worth to a method, and what learning rate and weight decay add to that."""
    by_length, by_rates, kept = [], [], 0
    for name in sorted(path.name for path in FOLDER.iterdir() if (path / "trials.jsonl").exists()):
        trials = combine(read_trials(FOLDER / name))
        for kind in dict.fromkeys((t.method, t.condition) for t in trials):
            own = [t for t in trials if (t.method, t.condition) == kind and t.metrics]
            start = next(t for t in own if t.number == 0)
            rates = {name: start.settings[name] for name in start.settings if name != "epochs"}
            lengths = [t.nll for t in own if rates.items() <= t.settings.items()]
            if len(lengths) < len(own):
                by_length.append(start.nll - min(lengths))
                by_rates.append(min(lengths) - min(t.nll for t in own))
                kept += rates.items() <= chosen_trials(name)[kind].settings.items()
    if by_rates:
        more = "less" if fmean(by_rates) < fmean(by_length) else "no less"
        yield (
            f"- **Learning rate and weight decay matter {more} than length**: on held-out images the best of four "
            f"lengths lowered the NLL by {fmean(by_length):.3f} in the mean, learning rate and weight decay by "
            f"another {fmean(by_rates):.3f} ({len(by_rates)} searches, judged by the images that chose). `--tune` "
            "keeps them unless others are better by more than two standard errors, as few held-out images choose "
            f"by chance: so it did in {kept} of these searches."
        )


def _on_holdouts() -> Iterator[str]:
    """What it is worth to judge the trials of a search by several draws of held-out images."""
    told = []
    for name in ("holdouts-cpu", "batches-cpu"):
        cost = cost_of_one_draw(read_trials(FOLDER / name), lengths=4)  # which these searches did not choose
        plan, rows = read_study(name)
        images = " or ".join(map(str, sorted({row.run.num_held_out for row in rows}))) + " images each"
        told.append(f"{signed([cost])} with {plan.study.holdouts} draws of {images} ({link(name)})")
    yield (
        "- **Few held-out images choose in part by chance** (`--tune 8 --holdouts 5` draws them five times). "
        "Where one draw chose one of four lengths, the NLL of another differs from where all others chose "
        f"by {'; '.join(told)}."
    )


def _on_batches() -> Iterator[str]:
    """What the size of the batch, which no search varies, has to do with who is ahead."""
    plan, rows = read_study("batches-cpu")
    yield (
        "- **The batch matters where images are few**, and no search varies it. NLL, T of DiDiCM minus the "
        f"standard classifier's by the batch of each, with crops and flips ({link('batches-cpu')}):\n"
    )
    heads, lines, close = [], [], []
    for condition in rows.conditions():
        here = rows.select(condition=condition)
        once = [e for e in here.entries() if e.sampler == ONE_CALL]
        ours, theirs = ([e for e in once if e.method.baseline == side] for side in (False, True))
        chosen = [choose_variant(plan, here, condition, side) for side in (ours, theirs)]
        heads = [f"standard, {_batch(e)}" for e in theirs]
        for a in ours:
            cells = []
            for b in theirs:
                gap = here.select(a).minus(here.select(b), SCALED_NLL)
                costs = [here.select(e).training_cost() for e in (a, b)]
                stars = "**" if [a, b] == chosen else ""
                cells.append(f"{stars}{signed([gap.mean])} ± {gap.half:.3f}{stars} ({costs[0] / costs[1]:.1f})")
            lines.append(f"| {condition}, DiDiCM, {_batch(a)} | {' | '.join(cells)} |")
        nll = {e: chosen_trials("batches-cpu")[str(e.method), condition].nll for e in theirs}
        told = ", ".join(f"{x:.3f}" for x in nll.values())
        close.append(f"{told} with {_per_class([condition])}")
    yield f"| | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(heads)
    yield from lines
    yield (
        "\nIn bold what held-out images choose, which can be a matter of chance: the held-out NLL of the standard "
        f"classifier's batches is {'; '.join(close)}. In brackets: multiply-adds of DiDiCM's training relative to "
        "the other's. Where half of a batch is masked, half as many examples train the unconditioned prediction "
        f"in a step, as in a standard classifier with half of the batch.{_on_strong_batches()}"
    )


def _batch(entry: Entry) -> str:
    return f"batch {entry.method.settings['batch_size']}"


def _on_strong_batches() -> str:
    """What half of the batch changes in recipe few."""
    if (stored := read_study("batches-strong-cpu")) is None:
        return ""
    rows, told = stored[1], []
    for condition, side in product(rows.conditions(), (True, False)):
        entries = rows.select(condition=condition).entries()
        here = [e for e in entries if e.method.baseline == side and e.sampler == ONE_CALL]
        full, half = sorted(here, key=lambda e: -e.method.settings["batch_size"])
        gap = rows.select(half, condition).minus(rows.select(full, condition), SCALED_NLL)
        who = "the standard classifier" if side else "DiDiCM"
        told.append(f"{signed([gap.mean])} ± {gap.half:.3f} ({who}, {_per_class([condition])})")
    sizes = sorted({e.method.settings["batch_size"] for e in rows.entries()})
    return (
        f" With the strong augmentation of recipe `few`, a batch of {sizes[0]} instead of {sizes[1]} changes the "
        f"NLL, T by {'; '.join(told)} ({link('batches-strong-cpu')})."
    )


def write_conditions(once: list[Compared], often: list[Compared]) -> str:
    """A page with every comparison that the results page counts."""
    parts = [
        "# Condition by condition\n",
        "Every comparison that [Results](../results.md) counts. Of the variants of the standard "
        "classifier that cost about as much to ask, the one that held-out images prefer is compared; so it is of "
        "DiDiCM where it was trained with several batch sizes. **+** and **-** mark where DiDiCM is better or "
        "worse beyond the 95 % interval of the difference over seeds, paired; some of so many are marked by "
        "chance. T: temperature-scaled. Inference and training: multiply-adds relative to the "
        "standard classifier's.\n",
    ]
    titles = {f"One view of each image, {a}": [x for x in once if x.augmentation == a] for a in TUNED}
    titles["Several augmented views of each image"] = often
    for title, found in titles.items():
        parts += [f"## {title}\n"]
        parts += [f"| condition | | {' | '.join(m.heading for m in ADVISED)} | inference | training | |"]
        parts += ["|---|---|" + "---:|" * (len(ADVISED) + 2) + "---|"]
        for place, study in dict.fromkeys((x.place, x.study) for x in found):
            here = [x for x in found if (x.place, x.study) == (place, study)]
            cells = [metric.text(here[0].gaps[metric].theirs) for metric in ADVISED]
            parts += [f"| {place} | {here[0].best} | {' | '.join(cells)} | 1 | 1 | [study]({study}/README.md) |"]
            for x in here:
                marks = {1: " +", 0: "", -1: " -"}
                cells = [m.text(x.gaps[m].ours) + marks[x.gaps[m].sign] for m in ADVISED]
                cells += [f"{x.inference:.1f}", "" if x.training is None else f"{x.training:.1f}"]
                parts += [f"| | {x.entry} | {' | '.join(cells)} | |"]
        parts += [""]
    return "\n".join(parts)

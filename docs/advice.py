"""What follows from the studies for somebody who trains: which method, which defaults, what else was learnt."""

from collections.abc import Iterator
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
    link,
    pooled,
    read_study,
    signed,
    spread,
)
from questions import compare_stratified

from didicm.experiments.results import read_trials
from didicm.experiments.spec import ONE_CALL, Condition
from didicm.experiments.tune import combine, cost_of_one_draw
from didicm.report.records import NLL, SCALED_NLL, TOP1, Estimate, Metric, Rows
from didicm.report.tables import NORMALIZED_AURC
from didicm.report.verdict import ALIKE
from didicm.settings import load_recipe
from didicm.text import count

COLUMNS = {
    f"up to {FEW} images per class": lambda x: x.condition.fraction <= FEW and not x.wrong_labels,
    "100 to 250 images per class": lambda x: FEW < x.condition.fraction < MANY and not x.wrong_labels,
    "2,000 images per class": lambda x: x.condition.fraction >= MANY and not x.wrong_labels,
    "wrong labels": lambda x: x.wrong_labels,
}
USES = {
    "DiDiCM": "Use DiDiCM",
    "standard": "Use a standard classifier",
    "either": "Use either (the standard classifier is the simpler one)",
    "both": "Compare both, for it differs from case to case,",
}
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
recipe `few`, for DiDiCM also `--mask 0.5`; a comparison has them without `--recipe few`. For photographs start
from [a pretrained backbone](guides/few-images.md). Terms are explained in [the mathematics](maths.md) and in
[reading the report](guides/compare.md#reading-the-report).
"""
SEEN_BRIEFLY = 20_000  # images in all
DEFAULTS = (  # recipe, setting, what the study showed, the study
    ("few", "model_args.layout", "better than the paper's blocks", "fair-cpu"),
    ("few", "model_args.parameterization", "its steps work in every training", "parameterization-cpu"),
    ("few", "model_args.noise_embedding", "no training stays at the uniform answer", "training-cpu"),
    (
        "few",
        "mask",
        "with strong augmentation no worse than fewer masked",
        "mask-strong-cpu",
    ),
    ("few", "sampler.method", "one call is no worse than eight steps", "borders-strong-cpu"),
    ("few", "augment.pad_mode", "with strong augmentation too, mostly better than black", "borders-strong-cpu"),
    (
        "few",
        "augment.auto_augment",
        "with Mixup and CutMix, better than crops and flips",
        "borders-strong-cpu",
    ),
    ("small", "model_args.parameterization", "best in short trainings", "recipe-cpu"),
    ("small", "mask", "level with more draws, at the training cost of a standard classifier", "recipe-cpu"),
    ("small", "label_proposal", "importance-sampled labels end better than the paper's", "training-cpu"),
    ("small", "augment.pad_mode", "mostly better than black", "borders-cpu"),
    ("finetune", "mask", "with none masked, far behind a linear layer", "finetune-cpu"),
    ("finetune", "model_args.standardize", "better for both methods", "finetune-cpu"),
    ("weak", "sampler.solver", "best on trained networks", "solvers-cpu"),
    (
        "weak",
        "sampler.select",
        "best where networks predict scores, else level",
        "steps-cpu",
    ),
    ("weak", "sampler.steps", "the paper's; networks that predict scores gain little beyond", "steps-cpu"),
)


def write_choice(asked: list[Compared]) -> Iterator[str]:
    """What to use, as sentences, and how often DiDiCM is ahead with one call, as a table of four columns."""
    cells = {
        (augmentation, column): [x for x in asked if x.augmentation == augmentation and belongs(x)]
        for augmentation, (column, belongs) in product(TUNED, COLUMNS.items())
    }
    yield _on_augmentation(asked)
    chosen = {cell: _choose(found) for cell, found in cells.items() if found}
    for use, text in USES.items():
        mine = {
            aug: [column for (a, column), found in chosen.items() if (a, found) == (aug, use)] for aug in TUNED
        }
        told = [f"with {aug}: {', '.join(columns)}" for aug, columns in mine.items() if columns]
        if told:
            yield f"- **{text}** {'; '.join(told)}."
    yield f"\n{COMMANDS}"
    yield (
        "Under how many conditions DiDiCM is ahead of, level with, or behind the best standard classifier (one "
        f"call; an answer costs {spread([x.inference for x in asked])} times the multiply-adds, a training "
        f"{spread([x.training for x in asked if x.training])} times):\n"
    )
    yield f"| | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * len(COLUMNS)
    for augmentation in TUNED:
        signs = ([x.ahead for x in cells[augmentation, column]] for column in COLUMNS)
        counts = ([ahead.count(k) for k in (1, 0, -1)] for ahead in signs)
        told = [f"{a} ahead, {b} level, {c} behind" if a + b + c else "not measured" for a, b, c in counts]
        yield f"| {augmentation} | {' | '.join(told)} |"
    yield ""


def _on_augmentation(asked: list[Compared]) -> str:
    """What strong augmentation changes, with few images and with many, beside what the methods differ by."""
    places: dict[str, dict[str, Compared]] = {}
    for x in asked:
        places.setdefault(x.place, {})[x.augmentation] = x
    changes: dict[str, list[float]] = {}
    briefly_seen = f" from {SEEN_BRIEFLY:,} images on"
    for briefly, suffix in ((False, ""), (True, briefly_seen)):
        for found in places.values():
            same = len(found) == len(TUNED) and (briefly or found[CROPS].shows_black == found[STRONG].shows_black)
            if same and (found[CROPS].images >= SEEN_BRIEFLY) == briefly:
                strong, crops = (found[augmentation].gaps[SCALED_NLL].theirs for augmentation in (STRONG, CROPS))
                changes.setdefault(found[CROPS].data + suffix, []).append(strong - crops)
    told = [f"{signed(x)} with {data} ({count(len(x), 'condition')})" for data, x in changes.items()]
    return (
        "- **First decide on the augmentation**: it matters more than the method. Where an image stays in its "
        "class when it is distorted and mixed (RandAugment, Mixup, CutMix), augment strongly and train long. It "
        f"changes the NLL, T of the standard classifier by {'; '.join(told)}; so many images were seen some ten "
        "times each, too few to judge it. It also helps, and by far more, where images [get "
        "worse](#7-what-if-images-get-worse-than-those-of-training) than those of training."
    )


def _choose(found: list[Compared]) -> str:
    """What to use: where one method is ahead under half of the conditions, or over all of them together."""
    ahead = [x.ahead for x in found]
    better, worse, together = ahead.count(1), ahead.count(-1), pooled(found).sign
    if better and worse and 2 * (better + worse) >= len(ahead):
        return "both"
    if not worse and (2 * better >= len(ahead) or together < 0):
        return "DiDiCM"
    if not better and (2 * worse >= len(ahead) or together > 0):
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
        "- **A likely reason why DiDiCM is ahead with few images and behind with many**: seeing labels "
        "regularises it, and teaches it little about an answer without one. At one length for all, the lowest "
        f"NLL, T is that of {'; '.join(best)} ({link('mask-cpu', 'all masked')} is a standard classifier)."
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


def _on_rates() -> Iterator[str]:
    """What a length of its own is worth to a method, and what learning rate and weight decay add to that."""
    by_length, by_rates = [], []
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
    if by_rates:
        more = "less" if fmean(by_rates) < fmean(by_length) else "no less"
        yield (
            f"- **Learning rate and weight decay matter {more} than length**: on held-out images the best of four "
            f"lengths lowered the NLL by {fmean(by_length):.3f} in the mean, the other two by another "
            f"{fmean(by_rates):.3f} ({len(by_rates)} searches). `--tune` keeps them unless others are better by "
            "more than two standard errors, as few held-out images choose by chance."
        )


def _on_holdouts() -> Iterator[str]:
    """What it is worth to judge the trials of a search by several draws of held-out images."""
    if stored := read_study("holdouts-cpu"):
        cost, study = cost_of_one_draw(read_trials(FOLDER / "holdouts-cpu")), stored[0].study
        images = " or ".join(map(str, sorted({row.run.num_held_out for row in stored[1]})))
        yield (
            f"- **Draw few held-out images several times** (`--tune 4 --holdouts {study.holdouts}`): with "
            f"{images} of them, lengths that a single draw chose have an NLL {abs(cost):.3f} "
            f"{'higher' if cost > 0 else 'lower'} on another draw than those of {study.holdouts - 1} draws "
            f"({link('holdouts-cpu')})."
        )


def _on_batches() -> Iterator[str]:
    """What the size of the batch, which no search varies, has to do with who is ahead."""
    if (stored := read_study("batches-cpu")) is None:
        return
    told = []
    for condition in stored[1].conditions():
        here = stored[1].select(condition=condition)
        once = [e for e in here.entries() if e.sampler == ONE_CALL]
        ours, theirs = (
            {e.method.settings["batch_size"]: e for e in once if e.method.baseline == x} for x in (0, 1)
        )
        full, half = max(theirs), max(theirs) // 2
        best = [
            min(side, key=lambda size, side=side: here.select(side[size]).estimate(SCALED_NLL).mean)
            for side in (ours, theirs)
        ]
        pairs = (ours[full], theirs[full]), (ours[full], theirs[half]), (ours[best[0]], theirs[best[1]])
        gaps = [here.select(a).minus(here.select(b), SCALED_NLL) for a, b in pairs]
        same, to_half, at_best = (f"{signed([gap.mean])} ± {gap.half:.3f}" for gap in gaps)
        cost = here.select(ours[full]).training_cost() / here.select(theirs[half]).training_cost()
        told.append(
            f"with {_per_class([condition])} {same} where both have {full}, {to_half} where the standard "
            f"classifier has {half} (and DiDiCM's training {cost:.1f} times its multiply-adds), {at_best} where "
            f"DiDiCM has {best[0]} and the standard classifier {best[1]}, their best"
        )
    yield (
        "- **Try small batches with few images**; no search varies them. Where half of a batch is masked, DiDiCM "
        "asks half as many questions without a label in a step, so that it learns in smaller steps, as a standard "
        "classifier does with half of the batch. NLL, T of DiDiCM minus that of the standard classifier: "
        f"{'; '.join(told)} by the test images ({link('batches-cpu')}). Other studies keep to {full}."
    )


def write_conditions(once: list[Compared], often: list[Compared]) -> str:
    """A page with every comparison that the results page counts."""
    parts = [
        "# Condition by condition\n",
        "Every comparison that [Results](../results.md) counts. The standard classifier is the best of its "
        "variants that cost about as much to ask, chosen on the test images for each condition and metric, in "
        "its favour; so is DiDiCM where it was trained with several batch sizes. **+** and **-** mark where "
        "DiDiCM is better or worse beyond the 95 % interval of the difference over seeds, paired; some of so many "
        "are marked by chance. T: temperature-scaled. Inference and training: multiply-adds relative to the "
        "standard classifier's.\n",
    ]
    titles = {f"One view of each image, {a}": [x for x in once if x.augmentation == a] for a in TUNED}
    titles["Several augmented views of each image"] = often
    for title, found in titles.items():
        parts += [f"## {title}\n"]
        parts += [f"| condition | | {' | '.join(m.heading for m in ADVISED)} | inference | training | |"]
        parts += ["|---|---|" + "---:|" * (len(ADVISED) + 2) + "---|"]
        for place in dict.fromkeys(x.place for x in found):
            here = [x for x in found if x.place == place]
            cells = [metric.text(here[0].gaps[metric].theirs) for metric in ADVISED]
            study = f"[study]({here[0].study}/README.md)"
            parts += [f"| {place} | standard, the best | {' | '.join(cells)} | 1 | 1 | {study} |"]
            for x in here:
                marks = {1: " +", 0: "", -1: " -"}
                cells = [m.text(x.gaps[m].ours) + marks[x.gaps[m].sign] for m in ADVISED]
                cells += [f"{x.inference:.1f}", "" if x.training is None else f"{x.training:.1f}"]
                parts += [f"| | {x.entry} | {' | '.join(cells)} | |"]
        parts += [""]
    return "\n".join(parts)

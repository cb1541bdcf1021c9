"""Plain sentences on what a comparison or a study shows, whichever way it went."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from didicm.experiments.results import Trial
from didicm.experiments.spec import Condition, Study
from didicm.report.ensembles import on_ensembles
from didicm.report.panels import Line, Panel, column_name, panels_of
from didicm.report.records import ENTROPY, NLL, SCALED_NLL, TOP1, TOP5, Entry, Estimate, Metric, Rows
from didicm.report.search import on_search

ENOUGH_SEEDS = 3
PUBLISHED_STEMS = "3x3 stem", "7x7 stem"  # of DiDiCM and of the standard classifier beside it
UNIFORM = 0.99  # of the largest entropy: such posteriors say nothing
STILL_LEARNING = 0.05  # relative fall of the training loss over the last two tenths of the epochs


def verdict(study: Study, rows: Rows, trials: Sequence[Trial] = ()) -> list[str]:
    """What the results show, and what to be careful about; with the trials of a search, what that says."""
    says = _on_comparison(rows) if study.layout == "comparison" else _on_study(study, *panels_of(study, rows))
    says += on_ensembles(rows)
    cautions = [*_on_seeds(rows), *_on_failures(rows)]
    return [*says, *cautions, *(on_search(study, trials) if trials else _on_length(rows))]


def compared(rows: Rows) -> tuple[Entry | None, list[Entry]]:
    """The entry that stands for DiDiCM, the first of the study, and all baselines.

    Ensembles are trained several times over: what they show is told by itself, unless there is no other baseline.
    """
    entries = rows.entries()
    ours = [entry for entry in rows.entries(main=True) or entries if not entry.method.baseline]
    baselines = [entry for entry in entries if entry.method.baseline]
    return next(iter(ours), None), [entry for entry in baselines if entry.method.members == 1] or baselines


def _on_comparison(rows: Rows) -> list[str]:
    """DiDiCM against a standard classifier; then other variants of it, and several views of an image."""
    once, often = (Rows(row for row in rows if (row.views > 1) == several) for several in (False, True))
    says = _on_pair(once)
    if not says:
        return ["There is nothing to compare yet: run DiDiCM and a standard classifier under the same condition."]
    for title, part in _variants(once, often):
        says += [f"{title}: {' '.join(told)}"] if (told := _on_pair(part)) else []
    return says


def _variants(once: Rows, often: Rows) -> Iterator[tuple[str, Rows]]:
    """Further comparisons: the other variants of DiDiCM, then answers from several views of an image."""
    ours = list(dict.fromkeys(str(row.method) for row in once if not row.method.baseline))
    for part, views in ((once, ""), (often, "With several augmented views of each image, ")):
        for name in ours if views else ours[1:]:
            chosen = Rows(row for row in part if row.method.baseline or str(row.method) == name)
            yield f"{views}{name}", chosen


def _on_pair(rows: Rows) -> list[str]:
    """One sentence on accuracy, one on the posterior, one on cost.

    DiDiCM with its main sampler against whichever baseline does better on the metric in question, over the
    conditions and seeds that all of them have.
    """
    ours, baselines = compared(rows)
    common, baselines = _in_common(rows, ours, baselines) if ours else (rows, [])
    if ours is None or not baselines:
        return []
    by_nll, by_scaled = (_measure(common, ours, baselines, metric) for metric in (NLL, SCALED_NLL))
    scaled = f" With a temperature for both, they are {_on_nll(by_scaled)}." if by_scaled else ""
    return [
        _on_accuracy(ours, _measure(common, ours, baselines, TOP1)),
        f"As trained, DiDiCM's probabilities are {_on_nll(by_nll)}.{scaled}" if by_nll else "No NLL was measured.",
        _on_cost(common, ours, best.baseline if (best := by_scaled or by_nll) else baselines[0]),
    ]


def _in_common(rows: Rows, ours: Entry, baselines: Sequence[Entry]) -> tuple[Rows, list[Entry]]:
    """Rows of the conditions and seeds that DiDiCM shares with the baselines that share most of them."""
    places = {e: {(r.run.condition, r.run.seed) for r in rows.select(e)} for e in (ours, *baselines)}
    shared = {e: len(places[e] & places[ours]) for e in baselines}
    kept = [e for e in baselines if shared[e] and shared[e] == max(shared.values())]
    common = set.intersection(places[ours], *(places[e] for e in kept))
    return Rows(row for row in rows if (row.run.condition, row.run.seed) in common), kept


class _Measured(NamedTuple):
    """DiDiCM and the best baseline by one metric: the choice favours the other side."""

    baseline: Entry
    ours: Estimate
    theirs: Estimate
    gap: Estimate  # ours minus theirs, paired


def _measure(rows: Rows, ours: Entry, baselines: Sequence[Entry], metric: Metric) -> _Measured | None:
    x = rows.select(ours).estimate(metric)
    known = [(e, y) for e in baselines if (y := rows.select(e).estimate(metric))]
    if x is None or not known:
        return None
    baseline, y = max(known, key=lambda pair: metric.sign * pair[1].mean)
    gap = rows.select(ours).minus(rows.select(baseline), metric)
    return None if gap is None else _Measured(baseline, x, y, gap)


def _on_accuracy(ours: Entry, found: _Measured | None) -> str:
    if found is None:
        return "No accuracy was measured."
    baseline, x, y, gap = found
    names = f"({ours}; {baseline})"
    if gap.sign < 0:  # numbers in the order of the sentence
        gap, x, y, names = -gap, y, x, f"({baseline}; {ours})"
        says = "The standard classifier is more accurate than DiDiCM"
    elif gap.sign > 0:
        says = "DiDiCM is more accurate than the standard classifier"
    else:
        says = "In accuracy, DiDiCM and the standard classifier cannot be told apart"
    return f"{says}: {TOP1.text(x.mean)} % against {TOP1.text(y.mean)} % {names}, {_interval(gap, TOP1)}."


def _on_nll(found: _Measured) -> str:
    """How DiDiCM's probabilities compare."""
    word = {-1: "better", 1: "worse", 0: "as good within noise"}[found.gap.sign]
    numbers = f"NLL {found.ours.mean:.3f} against {found.theirs.mean:.3f} ({found.baseline})"
    return f"{word}: {numbers}, {_interval(found.gap, NLL)}"


def _on_cost(rows: Rows, ours: Entry, baseline: Entry) -> str:
    """Multiply-adds of DiDiCM relative to a baseline: of an answer, of a single call, of the training."""
    calls = rows.select(ours)[0].measured.calls
    what = (
        f"The {calls:g} network calls of DiDiCM cost" if calls > 1 else "The single network call of DiDiCM costs"
    )
    text = f"{what} {rows.cost_ratio(ours, baseline):.1f} times the multiply-adds of {baseline}"
    mine, theirs = (rows.select(entry).training_cost() for entry in (ours, baseline))
    if mine and theirs:
        text += f", its training {mine / theirs:.1f} times"
    single = Rows(r for r in rows if r.method == ours.method and r.measured.settings.get("method") == "readout")
    there = single.estimate(NLL)
    if calls == 1 or there is None:
        return f"{text}."
    ratio = rows.cost_ratio(single[0].entry, baseline)
    return f"{text}; a single call, at {ratio:.1f} times, has NLL {there.mean:.3f}."


def _on_seeds(rows: Rows) -> list[str]:
    """Whether they are too few."""
    seeds = len({row.run.seed for row in rows})
    few = {1: "A single seed: there are no intervals, so any difference may be noise; run at least 3 seeds."}
    return [few.get(seeds, f"Few seeds: with {seeds}, the intervals are wide.")] if seeds < ENOUGH_SEEDS else []


def _on_failures(rows: Rows) -> list[str]:
    """Which trainings learnt nothing: a mean over seeds would hide that they are of another kind."""
    failed: dict[str, list[bool]] = {}
    for row in rows:
        accuracy, entropy = row.value(TOP1), row.value(ENTROPY)
        if row.main and accuracy is not None and entropy is not None:
            K = row.run.num_classes  # smoothed labels can leave an accurate classifier nearly as flat
            failed.setdefault(str(row.method), []).append(entropy > UNIFORM * math.log(K) and accuracy < 2 / K)
    told = [f"{name} ({sum(found)} of {len(found)} trainings)" for name, found in failed.items() if any(found)]
    return [f"Never left the uniform answer: {', '.join(told)}."] if told else []


def _on_length(rows: Rows) -> list[str]:
    """Which methods were still learning when a training of fixed length ended."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        if row.main and row.run.final_epochs_gain is not None:
            gains.setdefault(str(row.method), []).append(row.run.final_epochs_gain)
    means = {name: sum(found) / len(found) for name, found in gains.items()}
    unfinished = [f"{name} ({100 * mean:.0f} %)" for name, mean in means.items() if mean > STILL_LEARNING]
    if not unfinished:
        return []
    return [
        f"Still learning when training ended: {', '.join(unfinished)}, by the fall of the training loss from the "
        "last but one tenth of the epochs to the last. Another length may change the comparison: --tune lets "
        "every method choose its own."
    ]


def _on_study(study: Study, panel: Panel, published: Panel | None) -> list[str]:
    """What a study shows beside what was published: gains over the baselines, or else who comes first."""
    if study.layout == "steps":
        return [_winners(panel, metric) for metric in (TOP1, NLL)]
    if study.layout == "metrics" or not panel.gains:
        return [_ranking(panel, metric, published) for metric in (TOP1, NLL)]
    sentences = [*(_on_gain(panel, gain) for gain in panel.gains), *_on_stems(panel)]
    if published is not None and published.gains:
        gains = [
            f"{gain} {_mean_of(gain, TOP1)} and {_mean_of(gain, TOP5)} (top-1 with {_by_group(published, gain)})"
            for gain in published.gains
        ]
        sentences.append(f"Published, on ImageNet, in points of top-1 and top-5: {'; '.join(gains)}.")
    return sentences


def _on_gain(panel: Panel, gain: Line) -> str:
    found = [x for x in gain.values[TOP1] if x is not None]
    if not found:
        return f"{gain.name} and {gain.over} have no condition and seed in common yet."
    shown = [f"{_mean_of(gain, m)} points of {m}" for m in (TOP1, TOP5) if m in gain.values]
    shown += [f"{_mean_of(gain, m)} of {m}" for m in (NLL, SCALED_NLL) if any(gain.values.get(m, []))]
    columns = f"{len(found)} column{'s' * (len(found) > 1)} of the table"
    text = f"{gain.name} against {gain.over}, mean over {columns}: {', '.join(shown)}; "
    text += f"top-1 with {_by_group(panel, gain)}; at {_cost_ratio(panel, gain)} the multiply-adds per image"
    if all(x.half is None for x in found):
        return f"{text}; a single seed, so noise may explain it."
    ahead, behind = (sum(x.sign == sign for x in found) for sign in (1, -1))
    return f"{text}; in top-1 it is ahead beyond noise in {ahead} of them and behind in {behind}."


def _cost_ratio(panel: Panel, gain: Line) -> str:
    """Multiply-adds of a line relative to its baseline's, over the columns."""
    costs = {line.name: line.multiply_adds for line in panel.lines}
    pairs = zip(costs[gain.name], costs[gain.over], strict=True)
    ratios = [f"{x / max(y, 1):.1f}" for x, y in pairs if x is not None and y is not None]
    low, high = (pick(ratios, key=float) for pick in (min, max))
    return f"{low} times" if low == high else f"{low} to {high} times"


def _on_stems(panel: Panel) -> list[str]:
    """What part of the published comparison, of different stems, is the stem: where both methods have both."""
    lines = {(line.method.name, line.method.variant): line for line in panel.lines}
    baseline = next((line.method.name for line in panel.lines if line.method.baseline), "")
    ours, theirs = PUBLISHED_STEMS
    told = []
    for name in dict.fromkeys(line.method.name for line in panel.lines if not line.method.baseline):
        crossed = [lines.get(key) for key in product((name, baseline), PUBLISHED_STEMS)]
        if None in crossed:
            continue
        columns = zip(*(line.values[TOP1] for line in crossed if line), strict=True)
        whole = [[x.mean for x in column if x] for column in columns if None not in column]
        if not whole:
            continue
        small, large, other_small, other_large = (sum(means) / len(whole) for means in zip(*whole, strict=True))
        published, both_large, both_small = small - other_large, large - other_large, small - other_small
        gains = published, both_large, both_small, small - large, other_small - other_large
        x, y, z, own, other = (TOP1.text(gain, "+") for gain in gains)
        told.append(
            f"With stems as published, {name} with the {ours} against {baseline} with the {theirs}, the "
            f"difference in top-1 is {x} points; with the {theirs} on both sides it is {y}, with the {ours} {z}. "
            f"So the {ours} by itself is worth {own} points to {name} and {other} to {baseline}."
        )
    return told


def _by_group(panel: Panel, gain: Line) -> str:
    """Gains in top-1 by fraction of the images, or by model size."""
    groups: dict[str, list[Estimate | None]] = {}
    for column, x in zip(panel.columns, gain.values[TOP1], strict=True):
        name = column_name(Condition(fraction=column.fraction) if isinstance(column, Condition) else column)
        groups.setdefault(name, []).append(x)
    return ", ".join(f"{name} {TOP1.text(_mean(x), '+')}" for name, x in groups.items() if any(x))


def _ranking(panel: Panel, metric: Metric, published: Panel | None) -> str:
    text = f"By mean {metric}, best first: {_ranked(panel, metric)}; the table shows how far seeds differ."
    if published is not None and metric in published.metrics:
        text += f" Published: {_ranked(published, metric)}."
    return text


def _winners(panel: Panel, metric: Metric) -> str:
    """Who comes first with how many steps."""
    found = []
    for i, column in enumerate(panel.columns):
        means = {line.name: x.mean for line in panel.lines if (x := line.values[metric][i]) is not None}
        best = max(means, key=lambda name: metric.sign * means[name])
        found.append(f"{column}: {best} ({metric.text(means[best])})")
    return f"Best {metric} by number of steps: {'; '.join(found)}."


def _ranked(panel: Panel, metric: Metric) -> str:
    """Lines with their means over the columns that all of them have."""
    columns = zip(*(line.values[metric] for line in panel.lines), strict=True)
    whole = [i for i, column in enumerate(columns) if None not in column]
    if not whole:
        return "no column is complete yet"
    means = {line.name: _mean(line.values[metric][i] for i in whole) for line in panel.lines}
    order = sorted(means, key=lambda name: -metric.sign * means[name])
    return ", ".join(f"{name} {metric.text(means[name])}" for name in order)


def _interval(gap: Estimate, metric: Metric) -> str:
    text = f"a difference of {metric.text(gap.mean, '+')}{' points' * metric.percent}"
    if gap.half is None:
        return f"{text} from a single run each, which says little"
    low, high = (metric.text(gap.mean + end, "+") for end in (-gap.half, gap.half))
    return f"{text} (95 % interval {low} to {high}, {gap.n} seeds)"


def _mean_of(line: Line, metric: Metric) -> str:
    return metric.text(_mean(line.values[metric]), "+")


def _mean(values: Iterable[Estimate | None]) -> float:
    found = [x.mean for x in values if x is not None]
    return sum(found) / len(found)

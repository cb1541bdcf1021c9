"""Plain sentences on what a comparison or a study shows, whichever way it went."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from didicm.experiments.results import Trial
from didicm.experiments.spec import ONE_CALL, Condition, Study
from didicm.experiments.tune import SEARCHED, choose, combine, cost_of_one_draw, lengths_alike
from didicm.report.panels import on_study
from didicm.report.records import ENTROPY, NLL, SCALED_NLL, TOP1, Entry, Estimate, Metric, Rows, complete
from didicm.text import count

ENOUGH_SEEDS = 3
ALIKE = 1.3  # times the multiply-adds of DiDiCM's answer, at most, are the same price
UNIFORM = 0.99  # of the largest entropy: such posteriors say nothing
NO_BETTER = 0.999  # of log K, the NLL of the uniform answer
BY_CHANCE = 4  # standard errors of the accuracy above 1/K, at most
KEPT_UNLESS = (
    "Learning rate and weight decay are as given unless others are better by more than two standard errors of "
    "the difference: a few held-out images choose by chance."
)
FEW_TEST_IMAGES = 200  # whose accuracy is known to some seven points
FEW_HELD_OUT = 200  # with 40 and 100 a single draw chose poorer lengths than several (study holdouts-cpu)
HARDLY = 0.9  # of log K: an NLL above says little more than the uniform answer
STILL_LEARNING = 0.05  # relative fall of the training loss over the last two tenths of the epochs


def verdict(study: Study, rows: Rows, trials: Sequence[Trial] = ()) -> list[str]:
    """What the results show, and what to be careful about; with the trials of a search, what that says."""
    says = _on_comparison(rows) if study.layout == "comparison" else on_study(study, rows)
    says += _on_ensembles(rows)
    seeds = len({row.run.seed for row in rows})
    if seeds == 1:
        says.append("A single seed: there are no intervals, so any difference may be noise; run at least 3 seeds.")
    elif seeds < ENOUGH_SEEDS:
        says.append(f"Few seeds: with {seeds}, the intervals are wide.")
    if (tested := min((row.run.num_test for row in rows), default=0)) < FEW_TEST_IMAGES and seeds > 1:
        says.append(
            f"Few test images: the intervals are over seeds, and say nothing of others than these {tested}."
        )
    if left_out := max((row.run.unreadable for row in rows), default=0):
        says.append(
            f"Left out, because they cannot be read: {count(left_out, 'image')}; didicm doctor names them."
        )
    return [*says, *_on_failures(rows), *(on_search(study, trials) if trials else _on_length(rows))]


def compared(rows: Rows) -> tuple[Entry | None, list[Entry]]:
    """The entry that stands for DiDiCM, the first of the study, and all baselines that cost no more to ask.

    Ensembles are trained several times over: what they show is told by itself, unless there is no other baseline.
    """
    entries = rows.entries()
    ours = next((e for e in (*rows.entries(main=True), *entries) if not e.method.baseline), None)
    baselines = [entry for entry in entries if entry.method.baseline]
    baselines = [entry for entry in baselines if entry.method.members == 1] or baselines
    affordable = [e for e in baselines if ours and rows.cost_ratio(e, ours) <= ALIKE]
    return ours, affordable or baselines


def _on_comparison(rows: Rows) -> list[str]:
    """DiDiCM against a standard classifier; then other variants of it, and several views of an image."""
    once, often = (Rows(row for row in rows if (row.views > 1) == several) for several in (False, True))
    ours = dict.fromkeys(str(row.method) for row in rows if not row.method.baseline)
    says: list[str] = []
    for title, part in (("", once), ("With several augmented views of each image, ", often)):
        for i, name in enumerate(ours):
            told = _on_pair(Rows(row for row in part if row.method.baseline or str(row.method) == name))
            if i == 0 and part is once:  # it stands for DiDiCM
                says += told
            elif told:
                says.append(f"{title}{name}: {' '.join(told)}")
    nothing = "There is nothing to compare yet: run DiDiCM and a standard classifier under the same condition."
    return says or [nothing]


def _on_pair(rows: Rows) -> list[str]:
    """One sentence on accuracy, one on the posterior, one on cost.

    DiDiCM with its main sampler against whichever baseline does better on the metric in question, over the
    conditions and seeds that all of them have.
    """
    ours, baselines = compared(rows)
    common, baselines = _in_common(rows, ours, baselines) if ours else (rows, [])
    if ours is None or not baselines:
        return []
    by_top1, by_nll, by_scaled = (_measure(common, ours, baselines, m) for m in (TOP1, NLL, SCALED_NLL))
    scaled = f" With a temperature for both, they are {_on_nll(by_scaled)}." if by_scaled else ""
    conditions = len(common.conditions())
    where = f" on average over {conditions} conditions" if conditions > 1 else ""
    return [
        _on_accuracy(ours, by_top1, where) if by_top1 else "No accuracy was measured.",
        f"As trained, DiDiCM's probabilities are {_on_nll(by_nll)}.{scaled}" if by_nll else "No NLL was measured.",
        _on_cost(common, ours, best.baseline if (best := by_scaled or by_nll) else baselines[0]),
    ]


def _in_common(rows: Rows, ours: Entry, baselines: Sequence[Entry]) -> tuple[Rows, list[Entry]]:
    """Rows of the `complete` places that DiDiCM shares with the baselines that share most of them."""
    places = {e: {r.place for r in rows.select(e)} for e in (ours, *baselines)}
    shared = {e: len(places[e] & places[ours]) for e in baselines}
    kept = [e for e in baselines if shared[e] and shared[e] == max(shared.values())]
    common = complete(set.intersection(places[ours], *(places[e] for e in kept)))
    return Rows(row for row in rows if row.place in common), kept


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


def _on_accuracy(ours: Entry, found: _Measured, where: str) -> str:
    baseline, x, y, gap = found
    names = f"({ours}; {baseline})"
    if gap.sign < 0:  # numbers in the order of the sentence
        gap, x, y, names = -gap, y, x, f"({baseline}; {ours})"
        says = "The standard classifier is more accurate than DiDiCM"
    elif gap.sign > 0:
        says = "DiDiCM is more accurate than the standard classifier"
    else:
        says = "In accuracy, DiDiCM and the standard classifier cannot be told apart"
    numbers = f"{TOP1.text(x.mean)} % against {TOP1.text(y.mean)} %{where}"
    return f"{says}: {numbers} {names}, {_interval(gap, TOP1)}."


def _on_nll(found: _Measured) -> str:
    shown = NLL.text(abs(found.gap.mean)) != NLL.text(0)  # what no digit shows is no difference
    sign = found.gap.sign if shown else 0
    word = {-1: "better", 1: "worse", 0: "neither better nor worse beyond noise"}[sign]
    numbers = f"NLL {found.ours.mean:.3f} against {found.theirs.mean:.3f} ({found.baseline})"
    return f"{word}: {numbers}, {_interval(found.gap, NLL)}"


def _on_cost(rows: Rows, ours: Entry, baseline: Entry) -> str:
    """Multiply-adds of DiDiCM relative to a baseline: of an answer, of a single call, of the training."""
    calls = rows.select(ours)[0].measured.calls
    several = f"{round(calls, 2):g} network calls of DiDiCM cost"
    what = several if calls > 1 else "single network call of DiDiCM costs"
    text = f"The {what} {rows.cost_ratio(ours, baseline):.1f} times the multiply-adds of {baseline}"
    mine, theirs = (rows.select(entry).training_cost() for entry in (ours, baseline))
    if mine and theirs:
        text += f", its training {mine / theirs:.1f} times"
    single = Rows(r for r in rows if r.method == ours.method and r.entry.sampler == ONE_CALL)
    there = single.estimate(NLL)
    if calls == 1 or there is None:
        return f"{text}."
    ratio = rows.cost_ratio(single[0].entry, baseline)
    scaled = single.estimate(SCALED_NLL)
    with_temperature = f", {scaled.mean:.3f} with a temperature" if scaled else ""
    return f"{text}; a single call, at {ratio:.1f} times, has NLL {there.mean:.3f} as trained{with_temperature}."


def _on_failures(rows: Rows) -> list[str]:
    """Which trainings learnt nothing: a mean over seeds would hide that they are of another kind."""
    failed: dict[str, list[bool]] = {}
    entries = set(rows.entries())  # one call may know what steps do not
    for row in (row for row in rows if row.entry in entries):
        accuracy, entropy, nll = row.value(TOP1), row.value(ENTROPY), row.value(NLL)
        if accuracy is not None and entropy is not None and nll is not None:
            K = row.run.num_classes
            flat = entropy > UNIFORM * math.log(K) and nll > NO_BETTER * math.log(K)
            # Smoothed labels can leave an accurate classifier nearly as flat.
            by_chance = accuracy <= 1 / K + BY_CHANCE * math.sqrt((K - 1) / row.run.num_test) / K
            failed.setdefault(str(row.entry), []).append(flat and by_chance)
    told = [f"{name} ({sum(found)} of {len(found)} trainings)" for name, found in failed.items() if any(found)]
    return [f"Never left the uniform answer: {', '.join(told)}."] if told else []


def _on_length(rows: Rows) -> list[str]:
    """Which methods have hardly learnt anything, and which were still learning when a fixed length ended."""
    gains, shares = dict[str, list[float]](), dict[str, list[float]]()
    for row in (row for row in rows if row.main):
        if row.run.final_epochs_gain is not None:
            gains.setdefault(str(row.method), []).append(row.run.final_epochs_gain)
        nll = row.value(SCALED_NLL) or row.value(NLL)  # else an overconfident answer would count as well
        if nll is not None:
            shares.setdefault(str(row.method), []).append(nll / math.log(row.run.num_classes))
    hardly = {name: share for name, found in shares.items() if (share := sum(found) / len(found)) > HARDLY}
    says = []
    if hardly:
        told = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in hardly.items())
        says.append(
            f"Hardly learnt anything yet, by the NLL relative to that of the uniform answer: {told}. Such "
            "trainings are too short to compare: give them more epochs, or let --tune choose the length."
        )
    means = {name: sum(found) / len(found) for name, found in gains.items()}
    unfinished = [f"{name} ({100 * mean:.0f} %)" for name, mean in means.items() if mean > STILL_LEARNING]
    if unfinished:
        says.append(
            f"Still learning when training ended: {', '.join(unfinished)}, by the fall of the training loss from "
            "the last but one tenth of the epochs to the last. Another length may change the comparison: --tune "
            "lets every method choose its own."
        )
    return says


def _interval(gap: Estimate, metric: Metric) -> str:
    text = f"a difference of {metric.text(gap.mean, '+')}{' points' * metric.percent}"
    if gap.half is None:
        return f"{text} from a single run each, which says little"
    if gap.n == 2 and not gap.half:
        return f"{text} in both seeds, too few to tell an interval"
    most = 1.0 if metric.percent else math.inf  # two seeds may leave more open than is possible
    low, high = (metric.text(min(max(gap.mean + end, -most), most), "+") for end in (-gap.half, gap.half))
    return f"{text} (95 % interval {low} to {high}, {gap.n} seeds)"


def on_search(study: Study, trials: Sequence[Trial]) -> list[str]:
    """How settings were chosen, and whose best lay at the end of what was tried."""
    cost, trials = cost_of_one_draw(trials), combine(trials)
    first: dict[tuple[str, Condition], Mapping[str, float]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        first.setdefault((trial.method, trial.condition), trial.settings)
    spans = {}
    for name, words in SEARCHED.items():
        pairs = [(trial.settings[name], first[trial.method, trial.condition][name]) for trial in trials]
        factors = [value / start for value, start in pairs if start]  # weight decay may be none
        if factors and min(factors) < max(factors):
            spans[name] = f"{min(factors):.2g} to {max(factors):.2g} times its {words}"
    drawn = f", drawn {study.holdouts} times" if study.holdouts > 1 else ""
    ranges = f" ({', '.join(spans.values())})" if spans else ""
    says = [
        f"Every method has the best of up to {count(study.tune, 'trial')} under each condition{ranges}, by the "
        f"NLL of held-out training images{drawn}."
    ]
    if len(spans) > ("epochs" in spans) and any(trial.losses for trial in trials):
        says[0] += f" {KEPT_UNLESS}"
    held_out = min(trial.num_held_out for trial in trials)
    if study.tune > 1 and study.holdouts == 1 and held_out < FEW_HELD_OUT:
        says.append(
            f"Trials were judged by as few as {count(held_out, 'held-out image')}, so which is best is in part "
            "chance: --holdouts 5 judges each by five draws."
        )
    if cost is not None:
        says.append(
            f"Had a single draw chosen between the first two lengths, the NLL of another would have been "
            f"{abs(cost):.3f} {'higher' if cost > 0 else 'lower'} on average than with all others choosing."
        )
    says += _on_lengths_alike(trials)
    ends = (("longest", "shortest"), ("highest", "lowest"), ("highest", "lowest"))
    for (name, words), names in zip(SEARCHED.items(), ends, strict=True):
        what = "training" if name == "epochs" else words
        for end, extreme, further in zip((max, min), names, ("more", "less"), strict=True):
            found = []
            for (method, condition), best in choose(trials).items():
                value, start = best.settings[name], first[method, condition][name]
                tried = {t.settings[name] for t in trials if (t.method, t.condition) == (method, condition)}
                # A usual rate is at an end only where one side of it was not searched.
                if len(tried) > 1 and value == end(tried) and (name == "epochs" or value != start):
                    found.append(f"{method} ({condition}, {value:g})")
            if found:
                says.append(
                    f"Best at the {extreme} {what} that was tried, so {further} may be better: {'; '.join(found)}."
                )
    return says


def _on_lengths_alike(trials: Sequence[Trial]) -> list[str]:
    """Where methods got other lengths, though one of them could as well have that of the other."""
    alike, found = lengths_alike(trials), []
    for (method, condition), (kept, *others) in alike.items():
        theirs = {lengths[0] for (_, where), lengths in alike.items() if where == condition}
        if same := sorted(theirs & set(others)):
            found.append(f"{method} ({condition}, {kept} not told from {', '.join(map(str, same))})")
    if not found:
        return []
    return [
        "Methods differ in length where held-out images, by two standard errors, do not tell what one kept from "
        f"what another did, so that their differences may be those of length: {'; '.join(found)}."
    ]


# What answers are worth, counted in members of a deep ensemble of standard classifiers


def _on_ensembles(rows: Rows) -> list[str]:
    """A sentence per deep ensemble and condition on what DiDiCM, and several views, are worth there."""
    ensembles = {str(row.method): row.method for row in rows if row.method.baseline and row.method.members > 1}
    says = []
    for ensemble, condition in [(e, c) for e in ensembles.values() for c in rows.conditions()]:
        there = rows.select(condition=condition)
        members = Rows(row for row in there if str(row.method) == str(ensemble))
        told, metric = [], SCALED_NLL if len(there.values(SCALED_NLL)) == len(there) else NLL
        for entry in there.entries():
            if entry.method.members == 1 and not (entry.method.baseline and entry.sampler == ONE_CALL):
                value = _worth_of(there.select(entry), members, metric)
                told += [f"{entry} is worth {value}"] if value else []
        if told:
            scaled = "temperature-scaled " if metric.scaled else ""
            where = f"Under {condition}, by {scaled}NLL, where an ensemble has up to {ensemble.members} members"
            says.append(f"{where} ({ensemble}): {'; '.join(told)}.")
    return says


def worth(nll: float, curve: Mapping[int, float]) -> float:
    """How many members reach an NLL, given that of 1 to N: 0 if one is better already, infinite if all are worse.

    Linear between the last number of members that is worse and the first that is not: however noisy the curve, a
    lower NLL is never worth less.
    """
    if nll > curve[1]:
        return 0.0
    enough = next((n for n in sorted(curve) if curve[n] <= nll), None)
    if enough is None:
        return math.inf
    if enough == 1:
        return 1.0
    before = max(n for n in curve if n < enough)
    return before + (enough - before) * (curve[before] - nll) / (curve[before] - curve[enough])


def _worth_of(answers: Rows, members: Rows, metric: Metric) -> str:
    """In words, over the seeds in common; empty without such seeds."""
    seeds = {row.run.seed for row in answers} & {row.run.seed for row in members}
    answers, members = (Rows(row for row in side if row.run.seed in seeds) for side in (answers, members))
    by_count: dict[int, Rows] = {}
    for row in members:  # each is called once
        by_count.setdefault(int(row.measured.calls), Rows()).append(row)
    curve = {n: x.mean for n, counted in by_count.items() if (x := counted.estimate(metric))}
    nll = answers.estimate(metric)
    if nll is None or 1 not in curve:
        return ""
    found = worth(nll.mean, curve)
    if found < 1:
        return "less than one standard classifier"
    return "more than all of them" if math.isinf(found) else f"an ensemble of {found:.1f}"

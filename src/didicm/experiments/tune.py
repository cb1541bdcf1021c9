"""The search of a tuned study: as many trials for every method under every condition, in rounds.

First the length alone, which is doubled or halved for as long as that helps; then the learning rate at the best
length, then weight decay at the best of both; further trials vary these two at once around the best so far.
Trials are judged by the NLL of held-out training images, as trained, and by nothing else: no trial meets a test
image, and none has the seed of a run whose result counts.

The length is that of the lowest NLL: it decides most, and no recipe can know it. Learning rate and weight decay
stay as they are given unless others are better by more than two standard errors of the difference, image by image:
they matter less, and few held-out images would choose them by chance. A study may draw the held-out images of each
trial several times: few of them choose the length by chance, too.
"""

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch.quasirandom import SobolEngine

from didicm.errors import UserError
from didicm.experiments.results import Trial
from didicm.experiments.spec import Condition, Run
from didicm.values import override

VERSION = 2  # raised when trials become others; folders keep to one
SEED = 1_000_000  # of the search; seeds of runs count from 0, and are few
LENGTHS = (2, 1, 1)  # trials that look for the best length, in rounds
SPREADS = {"optimizer.lr": 2.5, "optimizer.weight_decay": 5.0}  # the largest factor, up and down
# Standard errors that a learning rate or weight decay must be better by. One is too few (study strong-cpu): rounds
# have several trials, trainings differ by their seeds too, and 40 held-out images chose a rate that is worse.
ERRORS = 2.0
SEARCHED = {"epochs": "epochs", "optimizer.lr": "learning rate", "optimizer.weight_decay": "weight decay"}


def search_rounds(count: int) -> list[list[dict[str, float]]]:
    """What each trial multiplies of the best of the rounds before; more trials only add.

    Those that look for the best length multiply nothing: `next_length` follows from what was tried.
    """
    points = SobolEngine(len(SPREADS), scramble=True, seed=SEED)  # type: ignore[no-untyped-call]
    drawn = points.draw(max(1, count), dtype=torch.float64).tolist()
    rounds: list[list[dict[str, float]]] = [
        *([dict[str, float]()] * trials for trials in LENGTHS),
        *([{name: 1 / most}, {name: most}] for name, most in SPREADS.items()),
        [{name: most ** (2 * v - 1) for (name, most), v in zip(SPREADS.items(), u, strict=True)} for u in drawn],
    ]
    kept = [factors[: max(0, count - sum(map(len, rounds[:i])))] for i, factors in enumerate(rounds)]
    return [factors for factors in kept if factors]


def next_length(tried: Mapping[int, float], start: int, cycles: int = 1) -> int:
    """The next length to try, by the NLL of those before: further if the best is at an end, else beside it.

    Lengths are multiples of `cycles`. Where that leaves none to try, the best again, which is not trained again.
    """
    if not tried:
        return start
    best = min(tried, key=tried.__getitem__)
    longer, shorter = [x for x in tried if x > best], [x for x in tried if x < best]
    if math.isinf(tried[best]):  # all have diverged
        wanted = [min(tried) / 2]
    elif not longer:
        wanted = [2.0 * best]
    else:
        beside = sorted([min(longer), *([max(shorter)] if shorter else [])], key=tried.__getitem__)
        wanted = [*([] if shorter else [best / 2]), *(math.sqrt(best * other) for other in beside)]
    lengths = [max(1, round(length / cycles)) * cycles for length in wanted]
    return next((length for length in lengths if length not in tried), best)


def trials_of(
    runs: Mapping[str, Run], count: int, done: Iterable[Trial] | None = None, *, holdouts: int = 1
) -> dict[str, Run]:
    """The trials of a search by key, up to the first round that is not done.

    Without `done` all rounds, as if every method were best as it is: a forecast of what they take.
    """
    found = None if done is None else {trial.key: trial for trial in done}
    return _by_key(_search(runs, count, found, holdouts))


def at_most(runs: Mapping[str, Run], count: int, *, holdouts: int = 1) -> dict[str, Run]:
    """The trials and runs of a search in which the longest training is always the best: the most it can take."""
    trials = list(_search(runs, count, None, holdouts, longest=True))
    epochs: dict[tuple[str, Condition], int] = {}
    for trial in trials:
        epochs[trial.kind] = max(epochs.get(trial.kind, 0), trial.config.epochs)
    longest = (_changed(run, {"epochs": epochs[run.kind]}) for run in runs.values())
    return _by_key([*trials, *longest])


def _by_key(runs: Iterable[Run]) -> dict[str, Run]:
    """Each once: methods share what is the same training, such as an ensemble's first."""
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(run.key, run)
    return found


def later_rounds(
    runs: Mapping[str, Run], count: int, stage: Mapping[str, Run], *, holdouts: int = 1
) -> dict[str, Run]:
    """Roughly the trials of the rounds after those of a stage; none after the last, nor after a search."""
    begun = [run.trial for run in stage.values() if run.trial is not None]
    forecast = trials_of(runs, count, holdouts=holdouts) if begun else {}
    return {key: trial for key, trial in forecast.items() if (trial.trial or 0) > max(begun)}


def choose(trials: Iterable[Trial]) -> dict[tuple[str, Condition], Trial]:
    """What a search keeps, by method and condition; none where all trials diverged."""
    kinds: dict[tuple[str, Condition], list[Trial]] = {}
    for trial in sorted(combine(trials), key=lambda trial: trial.number):
        kinds.setdefault((trial.method, trial.condition), []).append(trial)
    kept = {kind: _keep(own) for kind, own in kinds.items()}
    return {kind: trial for kind, trial in kept.items() if trial.metrics is not None}


def lengths_alike(trials: Iterable[Trial]) -> dict[tuple[str, Condition], list[int]]:
    """By method and condition, lengths that held-out images do not tell from the one that the search kept.

    The kept one is first; two standard errors of the difference would tell them apart. Trials of an earlier
    version, which have no losses, cannot say, and are left out.
    """
    combined = [trial for trial in combine(trials) if trial.losses or trial.metrics is None]
    tried: dict[tuple[str, Condition], dict[int, Trial]] = {}
    for trial in sorted(combined, key=lambda trial: trial.number):
        if trial.number < sum(LENGTHS):  # which differ in nothing else
            own = tried.setdefault((trial.method, trial.condition), {})
            own.setdefault(int(trial.settings["epochs"]), trial)
    found = {}
    for kind, best in choose(combined).items():
        kept = tried[kind].pop(epochs := int(best.settings["epochs"]))
        found[kind] = [epochs, *(x for x, other in tried[kind].items() if not _clearly_better(kept, other))]
    return found


def combine(trials: Iterable[Trial]) -> list[Trial]:
    """Each trial once, judged by all draws of its held-out images; one without all of them is left out."""
    repeats: dict[tuple[str, Condition, int], list[Trial]] = {}
    for trial in trials:
        repeats.setdefault((trial.method, trial.condition, trial.number), []).append(trial)
    draws = max(map(len, repeats.values()), default=0)
    return [_as_one(own) for own in repeats.values() if len(own) == draws]


def _as_one(repeats: Sequence[Trial]) -> Trial:
    first, *others = sorted(repeats, key=lambda trial: trial.repeat)
    if not others:
        return first
    images = sum(trial.num_held_out for trial in repeats)
    measured = [trial.metrics for trial in repeats if trial.metrics is not None]
    if len(measured) < len(repeats):  # it diverged once
        return replace(first, num_held_out=images, metrics=None, losses=None)
    metrics = {name: float(np.mean([own[name] for own in measured])) for name in measured[0]}
    losses = [loss for trial in (first, *others) for loss in trial.losses or ()]
    return replace(first, num_held_out=images, metrics=metrics, losses=tuple(losses) or None)


def cost_of_one_draw(trials: Iterable[Trial], lengths: int = LENGTHS[0]) -> float | None:
    """By how much the NLL of a draw of held-out images is higher if another one chose the length, not all others.

    The length is one of the first `lengths`, which follow from no draw; others follow from all. The mean over
    draws, methods and conditions; None without at least three draws.
    """
    first = [trial for trial in trials if trial.number < lengths]
    whole = {(t.method, t.condition, t.number) for t in combine(first) if t.metrics is not None}
    judged = [t for t in first if (t.method, t.condition, t.number) in whole]
    draws = {trial.repeat for trial in judged}
    if len(draws) < 3:
        return None
    single = [_judged(judged, {draw}, judge) for judge in draws for draw in draws - {judge}]
    together = [_judged(judged, draws - {judge}, judge) for judge in draws]
    return float(np.mean(single) - np.mean(together))


def _judged(trials: Sequence[Trial], chosen_by: Set[int], judge: int) -> float:
    """Mean NLL that one draw of held-out images gives to what other draws choose."""
    nll = {((t.method, t.condition), t.number): t.nll for t in trials if t.repeat == judge}
    chosen = choose(trial for trial in trials if trial.repeat in chosen_by)
    return float(np.mean([nll[kind, trial.number] for kind, trial in chosen.items()]))


def _keep(trials: Sequence[Trial]) -> Trial:
    """Of trials in their order: the best length, then the best of a round if it is clearly better."""
    kept, ends = trials[0], list(accumulate(map(len, search_rounds(trials[-1].number + 1))))
    for number, of_round in groupby(trials, key=lambda trial: bisect(ends, trial.number)):
        best = min(of_round, key=lambda trial: trial.nll)
        better = best.nll < kept.nll if number < len(LENGTHS) else _clearly_better(best, kept)
        kept = best if better else kept
    return kept


def _clearly_better(new: Trial, old: Trial) -> bool:
    if new.losses is None or old.losses is None:  # of an earlier version, which had no such rule; or it diverged
        return new.nll < old.nll
    gain = np.subtract(old.losses, new.losses)
    return len(gain) > 1 and bool(gain.mean() > ERRORS * gain.std(ddof=1) / math.sqrt(len(gain)))


def next_stage(runs: Mapping[str, Run], count: int, done: Iterable[Trial], *, holdouts: int = 1) -> dict[str, Run]:
    """What can be run: the trials until all are done, then the runs with the settings that these chose."""
    found = {trial.key: trial for trial in done}
    search = trials_of(runs, count, found.values(), holdouts=holdouts)
    if search.keys() - found.keys():
        return search
    if not search:
        return dict(runs)
    best = choose(_result_of(trial, found) for trial in _search(runs, count, found, holdouts))
    chosen: dict[str, Run] = {}
    for run in runs.values():
        if run.kind not in best:
            raise UserError(
                f"all trials of {run.method}, {run.condition}, have diverged: start from a lower optimizer.lr"
            )
        tuned = _changed(run, best[run.kind].settings)
        same = chosen.setdefault(tuned.key, tuned)
        if same is not tuned:
            raise UserError(f"the search made {same.method} and {run.method} the same: leave one of them out")
    return chosen


def _search(
    runs: Mapping[str, Run],
    count: int,
    found: Mapping[str, Trial] | None,
    holdouts: int,
    *,
    longest: bool = False,  # of a search that is foreseen, whether its longest training is the best, or its first
) -> Iterator[Run]:
    """Trials as in `trials_of`, one after the other for all methods; an ensemble tries its first member alone."""
    assert all(run.seed < SEED for run in runs.values())
    kinds, number = {run.kind: run for run in runs.values()}, 0
    best = {kind: {name: run.settings[name] for name in SEARCHED} for kind, run in kinds.items()}
    tried: dict[tuple[str, Condition], list[Trial]] = {kind: [] for kind in kinds}
    lengths: dict[tuple[str, Condition], dict[int, float]] = {kind: {} for kind in kinds}  # NLL by epochs
    for factors in search_rounds(count):
        trials = []
        for factor in factors:
            for kind, run in kinds.items():
                settings = {name: value * factor.get(name, 1) for name, value in best[kind].items()}
                settings = {name: float(f"{value:.3g}") for name, value in settings.items()}
                epochs = best[kind]["epochs"]
                if number < sum(LENGTHS):
                    tries = lengths[kind]
                    epochs = next_length(tries, run.config.epochs, run.config.optimizer.snapshots or 1)
                    tries.setdefault(epochs, -len(tries) if longest else math.inf if tries else 0)  # foreseen
                settings["epochs"] = epochs
                for draw in range(holdouts):
                    changed = _changed(run, {**settings, "seed": SEED + draw})
                    repeat = draw + 1 if holdouts > 1 else 0
                    trials.append(replace(changed, seed=SEED + draw, trial=number, repeat=repeat))
            number += 1
        yield from trials
        if found is None:
            for kind, tries in lengths.items():
                best[kind]["epochs"] = min(tries, key=tries.__getitem__)
            continue
        if not all(trial.key in found for trial in trials):
            return
        for trial in trials:
            tried[trial.kind].append(_result_of(trial, found))
        best = {kind: _keep(combine(own)).settings for kind, own in tried.items()}
        lengths = {k: {int(t.settings["epochs"]): t.nll for t in combine(own)} for k, own in tried.items()}


def _result_of(trial: Run, found: Mapping[str, Trial]) -> Trial:
    """What a trial gave, which may be stored as that of another method, under another number."""
    settings = {name: trial.settings[name] for name in SEARCHED}
    return replace(found[trial.key], method=str(trial.method), number=trial.trial or 0, settings=settings)


def _changed(run: Run, settings: Mapping[str, Any]) -> Run:
    """The run with other settings; only its end is validated, see `Study`."""
    return replace(run, config=override(run.config, {**settings, "run.validate_epochs": settings["epochs"]}))

"""The search of a tuned study: the same few trials for every method under every condition.

Trials are judged by the NLL of held-out training images, as trained, and by nothing else: no trial meets a test
image, and none has the seed of a run whose result counts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.quasirandom import SobolEngine

from didicm.errors import UserError
from didicm.experiments.results import Trial
from didicm.experiments.spec import Condition, Run
from didicm.values import override

SEED = 1_000_000  # of the search; seeds of runs count from 0, and are few
LENGTHS = (1.0, 0.5, 2.0, 0.25)  # as a factor of the epochs
SPREADS = {"optimizer.lr": 4.0, "optimizer.weight_decay": 10.0}  # the largest factor, up and down
SEARCHED = ("epochs", *SPREADS)


def search_factors(count: int) -> list[dict[str, float]]:
    """What each trial multiplies: first the length alone, then all three, quasi-random; more trials only add."""
    lengths = [{"epochs": length, **dict.fromkeys(SPREADS, 1.0)} for length in LENGTHS]
    points = SobolEngine(len(SEARCHED), scramble=True, seed=SEED)  # type: ignore[no-untyped-call]
    drawn = [
        {
            "epochs": LENGTHS[int(u * len(LENGTHS))],
            **{name: most ** (2 * v - 1) for (name, most), v in zip(SPREADS.items(), rest, strict=True)},
        }
        for u, *rest in points.draw(max(1, count), dtype=torch.float64).tolist()
    ]
    return [*lengths, *drawn][:count]


def trials_of(runs: Mapping[str, Run], count: int) -> dict[str, Run]:
    """The trials of a search by key: so many for every method under every condition of these runs."""
    trials: dict[str, Run] = {}
    for trial in _search(runs, count):
        same = trials.setdefault(trial.key, trial)  # an ensemble shares the trials of its single classifier
        if same.method.members == trial.method.members and str(same.method) != str(trial.method):
            raise UserError(f"{same} and {trial} are the same training: leave one of these methods out")
    return trials


def choose(trials: Iterable[Trial]) -> dict[tuple[str, Condition], Trial]:
    """The best trial by method and condition; of equals the first."""
    best: dict[tuple[str, Condition], Trial] = {}
    for trial in sorted(trials, key=lambda trial: (trial.nll, trial.number)):
        best.setdefault((trial.method, trial.condition), trial)
    for trial in best.values():
        if trial.metrics is None:
            raise UserError(
                f"every trial of {trial.method}, {trial.condition} diverged: start from a lower optimizer.lr"
            )
    return best


def next_stage(runs: Mapping[str, Run], count: int, done: Iterable[Trial]) -> dict[str, Run]:
    """What can be run: the trials until all are done, then the runs with the settings that these chose."""
    search, found = trials_of(runs, count), {trial.key: trial for trial in done}
    if search.keys() - found.keys():
        return search
    if not search:
        return dict(runs)
    best = choose(replace(found[trial.key], method=str(trial.method)) for trial in _search(runs, count))
    chosen = (_changed(run, best[run.kind].settings) for run in runs.values())
    return {run.key: run for run in chosen}


def _search(runs: Mapping[str, Run], count: int) -> Iterator[Run]:
    """Trial by trial, one of each method under each condition; those of an ensemble train its first member alone."""
    assert all(run.seed != SEED for run in runs.values())
    kinds = {run.kind: run for run in runs.values()}
    for number, factors in enumerate(search_factors(count)):
        for run in kinds.values():
            settings = {name: run.settings[name] * factor for name, factor in factors.items()}
            settings = {name: float(f"{value:.3g}") for name, value in settings.items()}
            settings["epochs"] = max(1, round(run.config.epochs * factors["epochs"]))
            yield replace(_changed(run, {**settings, "seed": SEED}), seed=SEED, trial=number)


def _changed(run: Run, settings: Mapping[str, Any]) -> Run:
    """The run with other settings; only its end is validated, see `Study`."""
    return replace(run, config=override(run.config, {**settings, "run.validate_epochs": settings["epochs"]}))

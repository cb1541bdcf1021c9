"""What answers are worth, counted in members of a deep ensemble of standard classifiers."""

import math
from collections.abc import Mapping

from didicm.experiments.spec import ONE_CALL, Condition, Method
from didicm.report.records import NLL, SCALED_NLL, Rows


def on_ensembles(rows: Rows) -> list[str]:
    """A sentence per deep ensemble and condition on what DiDiCM, and several views, are worth there."""
    ensembles = {str(row.method): row.method for row in rows if row.method.baseline and row.method.members > 1}
    found = (_on_ensemble(rows, method, c) for method in ensembles.values() for c in rows.conditions())
    return [sentence for sentence in found if sentence]


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


def _on_ensemble(rows: Rows, ensemble: Method, condition: Condition) -> str:
    there = rows.select(condition=condition)
    members = Rows(row for row in there if str(row.method) == str(ensemble))
    told = []
    for entry in there.entries():
        if entry.method.members == 1 and not (entry.method.baseline and entry.sampler == ONE_CALL):
            told += [f"{entry} is {value}" for value in _worth_of(there.select(entry), members)]
    where = f"Under {condition}, by NLL, where an ensemble has up to {ensemble.members} members ({ensemble})"
    return f"{where}: {'; '.join(told)}." if told else ""


def _worth_of(answers: Rows, members: Rows) -> list[str]:
    """In words, over the seeds in common, with a temperature where all have one; nothing without such seeds."""
    seeds = {row.run.seed for row in answers} & {row.run.seed for row in members}
    answers, members = (Rows(row for row in side if row.run.seed in seeds) for side in (answers, members))
    metric = SCALED_NLL if all(row.value(SCALED_NLL) is not None for row in (*answers, *members)) else NLL
    by_count: dict[int, Rows] = {}
    for row in members:  # each is called once
        by_count.setdefault(int(row.measured.calls), Rows()).append(row)
    curve = {n: x.mean for n, counted in by_count.items() if (x := counted.estimate(metric))}
    nll = answers.estimate(metric)
    if nll is None or 1 not in curve:
        return []
    found = worth(nll.mean, curve)
    if found < 1:
        return ["worth less than one standard classifier"]
    return ["worth more than all of them" if math.isinf(found) else f"worth an ensemble of {found:.1f}"]

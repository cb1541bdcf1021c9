"""Two plain sentences on what a comparison shows, from its paired differences, whichever way they went."""

from collections.abc import Sequence
from dataclasses import replace

from didicm.study.measure import ONE_CALL
from didicm.study.tables import MINUS, Estimate, Row, Variant, difference, estimate, select, variants_of


def verdict(rows: Sequence[Row]) -> list[str]:
    """One sentence on accuracy, one on the posterior and its cost.

    The contestants: DiDiCM as the recipe samples it, with posterior prediction if it was run, against whichever
    standard classifier did better on the metric in question; all with a temperature.
    """
    ours, standard = contestants(rows)
    if ours is None or not standard:
        return ["There is nothing to compare yet: a standard classifier and DiDiCM are needed."]
    a = select(rows, ours)
    return [_on_accuracy(rows, a, standard), _on_posterior(rows, a, standard)]


def contestants(rows: Sequence[Row]) -> tuple[Variant | None, list[Variant]]:
    """DiDiCM's variant that stands for it, and the standard ones."""
    variants = variants_of(rows)
    main = {row.variant for row in rows if row.main}
    diffusion = [v for v in variants if not v.standard and v in main]
    ours = next((v for v in diffusion if v.method == "didicm-posterior"), diffusion[0] if diffusion else None)
    return ours, [v for v in variants if v.standard]


def best_opponent(rows: Sequence[Row], standard: Sequence[Variant], metric: str) -> list[Row]:
    """Rows of the standard classifier that did best: the choice favours the opponent."""

    def score(variant: Variant) -> float:
        found = estimate(select(rows, variant), metric)
        return float("-inf") if found is None else found.mean if metric == "cls/Acc" else -found.mean

    return select(rows, max(standard, key=score))


def _on_accuracy(rows: Sequence[Row], a: Sequence[Row], standard: Sequence[Variant]) -> str:
    b = best_opponent(rows, standard, "cls/Acc")
    gap, x, y = difference(a, b, "cls/Acc"), estimate(a, "cls/Acc"), estimate(b, "cls/Acc")
    shown = f"{100 * x.mean:.1f} % against {100 * y.mean:.1f} %, {_interval(gap, 100, 1, ' points')}"
    if gap.sign > 0:
        return f"DiDiCM is more accurate than the standard classifier: {shown}."
    if gap.sign < 0:
        return f"The standard classifier is more accurate than DiDiCM: {shown}."
    return f"In accuracy, DiDiCM and the standard classifier cannot be told apart: {shown}."


def _on_posterior(rows: Sequence[Row], a: Sequence[Row], standard: Sequence[Variant]) -> str:
    metric = "cls/NLL, T"
    b = best_opponent(rows, standard, metric)
    gap, x, y = difference(a, b, metric), estimate(a, metric), estimate(b, metric)
    shown = f"NLL {x.mean:.3f} against {y.mean:.3f} (lower is better), {_interval(gap, 1, 3)}"
    if gap.sign < 0:
        found = f"Its probabilities are better, also after both got a temperature: {shown}"
    elif gap.sign > 0:
        found = f"The standard classifier's probabilities are better once both have a temperature: {shown}"
    else:
        found = f"Once both have a temperature, their probabilities are equally good within noise: {shown}"
    return f"{found}; {_cost(rows, a, b)}."


def _cost(rows: Sequence[Row], a: Sequence[Row], b: Sequence[Row]) -> str:
    ratio = a[0].multiply_adds / max(b[0].multiply_adds, 1)
    text = f"DiDiCM's {a[0].calls} network calls cost {ratio:.1f} times the multiply-adds"
    single = select(rows, replace(a[0].variant, reading=ONE_CALL))
    if a[0].calls == 1 or not single:
        return text
    there = estimate(single, "cls/NLL, T")
    once = single[0].multiply_adds / max(b[0].multiply_adds, 1)
    return f"{text}, and a single call, at {once:.1f} times, has NLL {there.mean:.3f}"


def _interval(gap: Estimate, scale: float, digits: int, unit: str = "") -> str:
    mean = _number(scale * gap.mean, digits)
    if gap.low is None or gap.high is None:
        return f"a difference of {mean}{unit} from a single run each, which says little"
    low, high = _number(scale * gap.low, digits), _number(scale * gap.high, digits)
    return f"a difference of {mean}{unit} (95 % interval {low} to {high}, {gap.n} pairs of runs)"


def _number(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", MINUS)

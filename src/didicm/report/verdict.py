"""Plain sentences on what a comparison or a study shows, whichever way it went."""

from collections.abc import Sequence
from dataclasses import replace

from didicm.experiments.definition import Study
from didicm.experiments.measure import ONE_CALL
from didicm.report.panel import Panel
from didicm.report.records import Estimate, Row, Variant, difference, estimate, main_variants, select, variants_of
from didicm.report.tables import MINUS


def verdict(rows: Sequence[Row]) -> list[str]:
    """One sentence on accuracy, one on the posterior and its cost.

    The contestants: DiDiCM as the recipe samples it, with posterior parameterization if it was run, against whichever
    standard classifier did better on the metric in question, over the settings and seeds that all of them have.
    """
    ours, standard = contestants(rows)
    rows, standard = _common(rows, ours, standard)
    if ours is None or not rows:
        return [
            "There is nothing to compare yet: a standard classifier and DiDiCM are needed in the same setting."
        ]
    a = select(rows, ours)
    return [_on_accuracy(rows, a, standard), _on_posterior(rows, a, standard)]


def contestants(rows: Sequence[Row]) -> tuple[Variant | None, list[Variant]]:
    """DiDiCM's variant that stands for it, and the standard ones."""
    diffusion = [v for v in main_variants(rows) if not v.standard]
    ours = next((v for v in diffusion if v.method == "didicm-posterior"), diffusion[0] if diffusion else None)
    return ours, [v for v in variants_of(rows) if v.standard]


def _common(
    rows: Sequence[Row], ours: Variant | None, standard: Sequence[Variant]
) -> tuple[list[Row], list[Variant]]:
    """Rows of the settings and seeds that DiDiCM shares with the standard classifiers that were run in most."""
    places = {v: {(row.setting, row.seed) for row in rows if row.variant == v} for v in (ours, *standard)}
    shared = {v: len(places[v] & places[ours]) for v in standard}
    standard = [v for v in standard if shared[v] and shared[v] == max(shared.values())]
    if not standard:
        return [], []
    kept = set.intersection(places[ours], *(places[v] for v in standard))
    return [row for row in rows if (row.setting, row.seed) in kept], standard


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
    raw, tempered = (_on_nll(rows, a, standard, metric) for metric in ("cls/NLL", "cls/NLL, T"))
    with_temperature = f"; with a temperature for both they are {tempered}" if tempered else ""
    cost = _cost(rows, a, best_opponent(rows, standard, "cls/NLL"))
    return f"As trained, DiDiCM's probabilities are {raw}{with_temperature}; {cost}."


def _on_nll(rows: Sequence[Row], a: Sequence[Row], standard: Sequence[Variant], metric: str) -> str | None:
    """How DiDiCM's probabilities compare with those of the standard classifier whose NLL is best."""
    b = best_opponent(rows, standard, metric)
    gap, x, y = difference(a, b, metric), estimate(a, metric), estimate(b, metric)
    if gap is None:
        return None
    word = {-1: "better", 1: "worse", 0: "as good within noise"}[gap.sign]
    return f"{word}: NLL {x.mean:.3f} against {y.mean:.3f}, {_interval(gap, 1, 3)}"


def _cost(rows: Sequence[Row], a: Sequence[Row], b: Sequence[Row]) -> str:
    ratio = a[0].multiply_adds / max(b[0].multiply_adds, 1)
    text = f"DiDiCM's {a[0].calls} network calls cost {ratio:.1f} times the multiply-adds"
    single = select(rows, replace(a[0].variant, reading=ONE_CALL))
    if a[0].calls == 1 or not single:
        return text
    there = estimate(single, "cls/NLL")
    once = single[0].multiply_adds / max(b[0].multiply_adds, 1)
    return f"{text}, and a single call, at {once:.1f} times, has NLL {there.mean:.3f}"


def _interval(gap: Estimate, scale: float, digits: int, unit: str = "") -> str:
    mean = _number(scale * gap.mean, digits)
    if gap.low is None or gap.high is None:
        return f"a difference of {mean}{unit} from a single run each, which says little"
    low, high = _number(scale * gap.low, digits), _number(scale * gap.high, digits)
    return f"a difference of {mean}{unit} (95 % interval {low} to {high}, {gap.n} seeds)"


def _number(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", MINUS)


def study_verdict(study: Study, panel: Panel, published: Panel | None) -> list[str]:
    """What a study shows beside what was published: gains over standard classifiers, or else who comes first."""
    metrics = [metric for metric in ("top-1", "NLL") if metric in panel.lines[0].values]
    if study.layout == "steps":
        return [_winners(panel, metric) for metric in metrics]
    if study.layout == "metrics" or not panel.gains:
        return [_ranking(panel, metric, published) for metric in metrics]
    sentences = [_on_gain(panel, pair) for pair in panel.gains]
    if published is not None and published.gains:
        gains = "; ".join(
            f"{a} over {b} {_number(_mean(by_metric['top-1']), 1)} and {_number(_mean(by_metric['top-5']), 1)} "
            f"(top-1 with {_by_group(published, (a, b))})"
            for (a, b), by_metric in published.gains.items()
        )
        sentences.append(f"Published, on ImageNet, in points of top-1 and top-5: {gains}.")
    return sentences


def _on_gain(panel: Panel, pair: tuple[str, str]) -> str:
    by_metric = {metric: [x for x in values if x is not None] for metric, values in panel.gains[pair].items()}
    if not by_metric["top-1"]:
        return f"{pair[0]} and {pair[1]} have no setting and seed in common yet."
    ahead, behind = (sum(x.sign == sign for x in by_metric["top-1"]) for sign in (1, -1))
    shown = [f"{_number(_mean(by_metric[m]), 1)} points of {m}" for m in ("top-1", "top-5") if m in by_metric]
    shown += [f"{_number(_mean(by_metric[m]), 3)} of {m}" for m in ("NLL", "NLL, T") if by_metric.get(m)]
    count = len(by_metric["top-1"])
    columns = f"{count} column{'s' if count > 1 else ''} of the table"
    shown = f"{', '.join(shown)}; top-1 with {_by_group(panel, pair)}"
    text = f"{pair[0]} against {pair[1]}, mean over {columns}: {shown}"
    if all(x.low is None for x in by_metric["top-1"]):
        return f"{text}; a single seed, so noise may explain it."
    return f"{text}; in top-1 it is ahead beyond noise in {ahead} of them and behind in {behind}."


def _by_group(panel: Panel, pair: tuple[str, str]) -> str:
    """Gains in top-1 by what comes first in the names of the columns: the share of the images, or the size."""
    groups: dict[str, list[Estimate]] = {}
    for column, gain in zip(panel.columns, panel.gains[pair]["top-1"], strict=True):
        if gain is not None:
            groups.setdefault(column.partition(", ")[0], []).append(gain)
    return ", ".join(f"{name} {_number(_mean(found), 1)}" for name, found in groups.items())


def _ranking(panel: Panel, metric: str, published: Panel | None) -> str:
    text = f"By mean {metric}, best first: {_ranked(panel, metric)}; the table shows how far seeds differ."
    if published is not None and metric in published.lines[0].values:
        text += f" Published: {_ranked(published, metric)}."
    return text


def _winners(panel: Panel, metric: str) -> str:
    """Who comes first with how many steps."""
    lower, found = metric.startswith("NLL"), []
    for i, column in enumerate(panel.columns):
        values = {line.name: x.mean for line in panel.lines if (x := line.values[metric][i]) is not None}
        best = min(values, key=lambda name: values[name] if lower else -values[name])
        found.append(f"{column}: {best} ({values[best]:.{3 if lower else 1}f})")
    return f"Best {metric} by number of steps: {'; '.join(found)}."


def _ranked(panel: Panel, metric: str) -> str:
    """Lines with their means over the columns that all of them have."""
    lower = metric.startswith("NLL")
    columns = zip(*(line.values[metric] for line in panel.lines), strict=True)
    whole = [i for i, column in enumerate(columns) if None not in column]
    if not whole:
        return "no column is complete yet"
    scores = {line.name: _mean([line.values[metric][i] for i in whole]) for line in panel.lines}
    order = sorted(scores, key=lambda name: scores[name] if lower else -scores[name])
    return ", ".join(f"{name} {scores[name]:.{3 if lower else 1}f}" for name in order)


def _mean(values: Sequence[Estimate | None]) -> float:
    found = [x.mean for x in values if x is not None]
    return sum(found) / len(found)

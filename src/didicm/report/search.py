"""What the search of a tuned study tried and chose: a table, the curve over training length, and sentences."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from didicm.experiments.results import Plan, Trial, read_trials
from didicm.experiments.spec import Condition, Study
from didicm.experiments.tune import choose, search_factors
from didicm.report.records import NLL, TOP1
from didicm.report.style import legend_below, looks, make_axes
from didicm.report.tables import Table

ACROSS = 3  # plots side by side


def read_search(plan: Plan, folder: Path) -> list[Trial]:
    """Its trials, method by method, each under the label that it has now; none if there was no search."""
    order = [str(method) for method in plan.study.methods]
    found = [replace(t, method=plan.runs[t.key]) for t in read_trials(folder) if t.key in plan.runs]
    return sorted(
        (trial for trial in found if trial.method in order), key=lambda t: (order.index(t.method), t.number)
    )


def search_table(trials: Sequence[Trial], conditions: Sequence[Condition]) -> Table:
    """Every trial, and which was chosen."""
    best, body = choose(trials), []
    for condition in conditions:
        body.append([str(condition), *[""] * 6])
        for trial in _under(condition, trials):
            found = ["diverged", ""]
            if trial.metrics is not None:
                found = [NLL.text(trial.nll), TOP1.text(trial.metrics[TOP1.name])]
            chosen = "chosen" if best[trial.method, condition] is trial else ""
            searched = [f"{value:g}" for value in trial.settings.values()]
            body.append([f"  {trial.method}, trial {trial.number}", *searched, *found, chosen])
    header = ["", "epochs", "learning rate", "weight decay", "held-out NLL", "top-1 %", " "]
    held_out = ", ".join(map(str, sorted({trial.num_held_out for trial in trials})))
    note = (
        "the same trials for every method, relative to its settings, which trial 0 has as they are; judged by the "
        f"NLL of held-out training images as trained ({held_out} images); no trial has met a test image"
    )
    return Table("Search", header, body, note, ("top-1 %",))


def length_curves(study: Study, trials: Sequence[Trial], conditions: Sequence[Condition]) -> Figure:
    """Held-out NLL over the epochs, by the best trial of each length; the peak, which is chosen, in a ring."""
    best = choose(trials)
    palette = looks((str(method), method.baseline) for method in study.methods)
    figure, axes = make_axes(len(conditions), ACROSS, size=(4.2, 3.6), ylabel="held-out NLL (lower is better)")
    for plot, condition in zip(axes, conditions, strict=True):
        for name, look in palette.items():
            if curve := _best_by_length(_under(condition, trials, name)):
                plot.plot(list(curve), list(curve.values()), **look._asdict(), label=name)
                peak = best[name, condition]
                at = [peak.settings["epochs"]], [peak.nll]
                plot.plot(*at, "o", color=look.color, markersize=13, markerfacecolor="none", markeredgewidth=1.5)
        plot.set_xscale("log", base=2)
        epochs = sorted({trial.settings["epochs"] for trial in _under(condition, trials)})
        plot.set_xticks(epochs, [f"{x:g}" for x in epochs])
        plot.minorticks_off()
        plot.set(title=str(condition), xlabel="epochs")
    legend_below(figure, axes)
    return figure


def on_search(study: Study, trials: Sequence[Trial]) -> list[str]:
    """How settings were chosen, and whose best lay at the end of what was tried."""
    factors = search_factors(study.tune)
    alone = sum(factor["optimizer.lr"] == 1 for factor in factors)
    further = f", {len(factors) - alone} in learning rate and weight decay too" if alone < len(factors) else ""
    says = [
        f"Every method has the best of the same {study.tune} trials under each condition, by the NLL of held-out "
        f"training images: {alone} differ in length alone{further}."
    ]
    for name, what in (("epochs", "longest training"), ("optimizer.lr", "highest learning rate")):
        if len({factor[name] for factor in factors}) == 1:
            continue
        ends = [
            f"{method} ({condition}, {best.settings[name]:g})"
            for (method, condition), best in choose(trials).items()
            if best.settings[name] == max(t.settings[name] for t in _under(condition, trials, method))
        ]
        if ends:
            says.append(f"Best at the {what} that was tried, so more may be better: {'; '.join(ends)}.")
    return says


def _under(condition: Condition, trials: Sequence[Trial], method: str = "") -> list[Trial]:
    """Trials under one condition, of one method or all."""
    return [trial for trial in trials if trial.condition == condition and method in ("", trial.method)]


def _best_by_length(trials: Sequence[Trial]) -> dict[float, float]:
    """The lowest NLL at each number of epochs, shortest first."""
    own = [trial for trial in trials if trial.metrics is not None]
    lengths = sorted({trial.settings["epochs"] for trial in own})
    return {n: min(trial.nll for trial in own if trial.settings["epochs"] == n) for n in lengths}

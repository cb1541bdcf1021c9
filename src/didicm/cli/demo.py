"""`didicm demo`: a standard classifier against DiDiCM on less and less informative images, in minutes.

With `--solvers`, without training: every solver should recover a known posterior. First it gets the exact score,
then a noisy one, as a trained network would give it.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from didicm.cli.compare import show_report
from didicm.cli.flags import parse, read_flags
from didicm.diffusion import Sampler, Step, UniformProcess
from didicm.diffusion.solver import ExactScore
from didicm.experiments.run import run_study
from didicm.experiments.spec import Condition
from didicm.experiments.study_file import compare_study
from didicm.files import SOFTWARE, check_replaceable, is_our_picture, write_files
from didicm.processes import usable_cores
from didicm.progress import ProgressDisplay
from didicm.report.html import write_report
from didicm.report.images import Traced, draw_trajectory
from didicm.report.style import looks
from didicm.text import SafeConsole, count, quoted
from didicm.values import Few, Natural, Range, field_types

# Chosen by measurement on 2 cores. The epochs are many, as in the paper: few images are seen over and over.
LEVELS = {Condition(14, 0.25): 60, Condition(10, 0.125): 120, Condition(7, 0.05): 300}  # and their epochs
METHODS = ("standard", "standard-smooth", "didicm-few")  # DiDiCM as recipe few has it, with crops and flips
# On a CPU: as many trainings at a time as it has cores, of images too small to keep a GPU busy.
SETTINGS = {"batch_size": 50, "image.channels": 1, "run.accelerator": "cpu"}
NOTE = (
    "Where there are fewer images there are more epochs. DiDiCM is on the blocks of the standard classifier, half "
    "of its labels masked in training, and asked once; the trajectories are of eight steps."
)
NEXT = """
Next, on your own images (a folder with one subfolder per class):
  didicm doctor DIR
  didicm train --recipe small --data DIR --out runs/mine
  didicm compare --data DIR --out runs/compare"""
SAMPLERS = {
    "exact, midpoint": Sampler(),
    "exact, start": Sampler(score_time="start"),
    "Euler (the paper)": Sampler(solver="euler"),
    "Euler, as released": Sampler(solver="official"),
    "labels, 16 chains": Sampler("cl"),
}
STEPS = [1, 2, 4, 8, 16, 32]
SCORES = {"exact score: all error is the solver's": 0.0, "noisy score: as a network gives it": 0.3}


@dataclass(frozen=True)
class DemoOptions:
    """Compare a standard classifier with DiDiCM on less and less informative images, in under five minutes.

    Args:
        out: folder for results and report
        seeds: trainings per method and condition
        solvers: instead, show how each solver recovers a known posterior
    """

    out: Path = Path("demo")
    seeds: Few = 3
    solvers: bool = False


def main(argv: list[str]) -> int:
    """Run the comparison, or with --solvers the demonstration of the solvers without training."""
    known = {**field_types(SolverOptions), **field_types(DemoOptions)}
    if read_flags([x for x in argv if x not in ("-h", "--help")], known, "demo")[0].get("solvers"):
        return show_solvers(argv)
    options = parse(argv, DemoOptions, command="demo")
    console = SafeConsole(soft_wrap=True)
    study = replace(
        compare_study(methods=METHODS, seeds=options.seeds, settings=SETTINGS),
        title="DiDiCM against a standard classifier: the demo",
        conditions=tuple(LEVELS),
        by_fraction={condition.fraction: {"epochs": epochs} for condition, epochs in LEVELS.items()},
        note=NOTE,
    )
    trainings = len(LEVELS) * len(METHODS) * options.seeds
    console.print(
        f"Small images of clothes, at {len(LEVELS)} levels of uncertainty: fewer pixels, fewer training images.\n"
        f"{trainings} trainings, on {count(usable_cores(), 'core')}; Ctrl-C stops; run the same command again to "
        "resume.\n"
    )
    command = f"didicm demo --out {quoted(options.out)} --seeds {options.seeds}"
    jobs = min(usable_cores(), 4)
    run_study(study, options.out, data="fashion-mini", jobs=jobs, command=command, console=console)
    show_report(write_report(options.out), console, tables=1)
    console.print(NEXT)
    return 0


@dataclass(frozen=True)
class SolverOptions:
    """Show how each solver recovers a known posterior from exact and from noisy scores.

    Args:
        out: where to save the picture
        classes: number of classes
        images: number of posteriors to recover
        force: replace a file there that this command did not make
        solvers: this demonstration
    """

    solvers: bool = True
    out: Path = Path("demo/solvers.png")
    classes: Annotated[int, Range(10)] = 1000
    images: Natural = 64
    force: bool = False


def show_solvers(argv: list[str]) -> int:
    """Measure, draw, and say where the picture is."""
    options = parse(argv, SolverOptions, command="demo")
    check_replaceable(options.out, is_our_picture, "--out", force=options.force)
    console = SafeConsole()
    torch.manual_seed(0)
    process, truth = UniformProcess(options.classes), true_posteriors(options.images, options.classes)
    console.print(f"Recovering {options.images} known posteriors over {options.classes} classes.")
    runs = [(score, name, steps) for score in SCORES for name in SAMPLERS for steps in STEPS]
    distance = {}
    with ProgressDisplay(console, len(runs)) as display:
        for done, (score, name, steps) in enumerate(runs, 1):
            probs = SAMPLERS[name].changed(steps=steps)(ExactScore(error=SCORES[score]), truth, process).probs
            distance[score, name, steps] = ((probs - truth).abs().sum(-1) / 2).mean().item()
            display.update(done, f"{done}/{len(runs)} samplers and steps")
    for score in SCORES:
        title = f"Distance to the true posterior (total variation), {score.partition(':')[0]}"
        table = Table("steps:", *map(str, STEPS), title=title)
        for name in SAMPLERS:
            table.add_row(name, *(f"{distance[score, name, steps]:.2g}" for steps in STEPS))
        console.print(table)
    draw_solvers(distance, process, truth[:1], options.out)
    console.print(f"Picture: {options.out.resolve()}")
    return 0


def true_posteriors(count: int, num_classes: int) -> Tensor:
    """A few classes share nearly all the mass, unevenly: what an ambiguous image looks like, (count, K)."""
    p = torch.full((count, num_classes), 0.02 / num_classes, dtype=torch.float64)
    shares = torch.tensor([0.55, 0.25, 0.12, 0.06], dtype=torch.float64)
    for row in p:
        row[torch.randperm(num_classes)[: len(shares)]] += shares
    return p


def draw_solvers(
    distance: dict[tuple[str, str, int], float], process: UniformProcess, truth: Tensor, path: Path
) -> None:
    """Top: distance over steps. Bottom: one posterior on its way, by each sampler."""
    figure = Figure(figsize=(16, 8), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[1.25, 1])
    top, bottom = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    for axes, score in zip(top.subplots(1, 2), SCORES, strict=True):
        for name, look in looks((name, False) for name in SAMPLERS).items():
            values = [max(distance[score, name, steps], 1e-9) for steps in STEPS]
            axes.plot(STEPS, values, label=name, **look._asdict())
        axes.set(xscale="log", yscale="log", xlabel="steps", title=score)
        axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
        axes.grid(alpha=0.3)
    top.axes[0].set_ylabel("distance to the truth (total variation)")
    top.axes[1].legend(frameon=False)

    best = truth[0].topk(4).indices
    names = [f"class {k}" for k in range(1, 5)]
    for axes, name in zip(bottom.subplots(1, len(SAMPLERS), sharey=True), SAMPLERS, strict=True):
        trajectory: list[Step] = []
        SAMPLERS[name](ExactScore(), truth, process, trajectory.append)
        times = [1.0, *(step.time for step in trajectory)]
        states = np.stack([np.full(4, 1 / process.num_classes), *(step.probs[0, best] for step in trajectory)])
        draw_trajectory(axes, Traced(name, None, times, states, names), limit=0.75)
        for target in truth[0, best].tolist():
            axes.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
        axes.set(title=name, xlabel="time", ylabel="")
    bottom.axes[0].set_ylabel("probability; dotted: the truth")
    write_files(path.parent, {path.name: partial(figure.savefig, dpi=120, format="png", metadata=SOFTWARE)})

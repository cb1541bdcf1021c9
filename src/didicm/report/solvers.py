"""A demonstration without training: every solver gets the exact score, and should recover the true posterior.

Then it gets a noisy score, as a trained network would give it.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from didicm.diffusion import Sampler, Step, UniformProcess
from didicm.diffusion.solver import ExactScore

SAMPLERS = {
    "exact, score at midpoint": Sampler(),
    "exact, score at start": Sampler(score_time="start"),
    "Euler (the paper)": Sampler(solver="euler"),
    "Euler, as released": Sampler(solver="official"),
    "labels, 16 chains": Sampler("cl"),
}
STYLES = [("#000000", "o-"), ("#0072B2", "s--"), ("#E69F00", "^-"), ("#D55E00", "v:"), ("#009E73", "D-.")]
STEPS = [1, 2, 4, 8, 16, 32]
SCORES = {"exact score: all error is the solver's": 0.0, "noisy score: as a network gives it": 0.3}


def main(argv: list[str]) -> None:
    """Measure, draw, and say where the picture is."""
    parser = argparse.ArgumentParser(prog="didicm demo --solvers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("demo/solvers.png"), help="where to save the picture")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes (default 1000)")
    parser.add_argument("--images", type=int, default=64, help="number of posteriors to recover (default 64)")
    arguments = parser.parse_args(argv)
    if arguments.classes < 10 or arguments.images < 1:
        parser.error("--classes must be at least 10 and --images at least 1")

    console = Console()
    torch.manual_seed(0)
    process, truth = UniformProcess(arguments.classes), true_posteriors(arguments.images, arguments.classes)
    console.print(f"Recovering {arguments.images} known posteriors over {arguments.classes} classes.")
    runs = [(score, name, steps) for score in SCORES for name in SAMPLERS for steps in STEPS]
    distance = {}
    for score, name, steps in track(runs, "measuring", console=console):
        probs = SAMPLERS[name].changed(steps=steps)(ExactScore(error=SCORES[score]), truth, process).probs
        distance[score, name, steps] = ((probs - truth).abs().sum(-1) / 2).mean().item()

    for score in SCORES:
        table = Table("steps:", *map(str, STEPS))
        table.title = f"Distance to the true posterior (total variation), {score.partition(':')[0]}"
        for name in SAMPLERS:
            table.add_row(name, *(f"{distance[score, name, steps]:.2g}" for steps in STEPS))
        console.print(table)
    draw(distance, process, truth[:1], arguments.out)
    console.print(f"Picture: {arguments.out.resolve()}")


def true_posteriors(count: int, num_classes: int) -> Tensor:
    """A few classes share nearly all the mass, unevenly: what an ambiguous image looks like, (count, K)."""
    p = torch.full((count, num_classes), 0.02 / num_classes, dtype=torch.float64)
    shares = torch.tensor([0.55, 0.25, 0.12, 0.06], dtype=torch.float64)
    for row in p:
        row[torch.randperm(num_classes)[: len(shares)]] += shares
    return p


def draw(distance: dict[tuple[str, str, int], float], process: UniformProcess, truth: Tensor, path: Path) -> None:
    """Top: distance over steps. Bottom: one posterior on its way, by each sampler."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[1.25, 1])
    top, bottom = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    for axes, score in zip(top.subplots(1, 2), SCORES, strict=True):
        for name, (colour, style) in zip(SAMPLERS, STYLES, strict=True):
            values = [max(distance[score, name, steps], 1e-9) for steps in STEPS]
            axes.plot(STEPS, values, style, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlabel="steps", title=score)
        axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
        axes.grid(alpha=0.3)
    top.axes[0].set_ylabel("distance to the truth (total variation)")
    top.axes[1].legend(frameon=False)

    best = truth[0].topk(4).indices
    for axes, (name, sampler) in zip(
        bottom.subplots(1, len(SAMPLERS), sharey=True), SAMPLERS.items(), strict=True
    ):
        trajectory: list[Step] = []
        sampler(ExactScore(), truth, process, trajectory.append)
        times = [1.0, *(step.time for step in trajectory)]
        states = np.stack([np.full(4, 1 / process.num_classes), *(step.probs[0, best] for step in trajectory)])
        for state, target, shade in zip(states.T, truth[0, best].tolist(), (0.0, 0.3, 0.5, 0.7), strict=True):
            axes.plot(times, state, "o-", color=str(shade), markersize=3)
            axes.axhline(target, color=str(shade), linewidth=0.8, linestyle=":")
        axes.set(xlim=(1, 0), ylim=(0, 0.7), title=name, xlabel="time")
    bottom.axes[0].set_ylabel("probability; dotted: the truth")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)

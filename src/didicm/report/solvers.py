"""A demonstration without training: give every solver the true score and see how well it recovers the truth.

Then disturb the score, as a trained network would, and see how the solvers bear it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from didicm.diffusion import Posterior, Step, UniformProcess, sample_cl, sample_cp
from didicm.report.style import plt

Sample = Callable[..., Posterior]
SOLVERS: dict[str, Sample] = {
    "exact, asked mid-step": lambda *a, **k: sample_cp(*a, solver="exact", score_time="midpoint", **k),
    "exact, asked at the start": lambda *a, **k: sample_cp(*a, solver="exact", score_time="start", **k),
    "Euler (the paper)": lambda *a, **k: sample_cp(*a, solver="euler", **k),
    "Euler, as released": lambda *a, **k: sample_cp(*a, solver="official", **k),
    "labels, 16 chains": lambda *a, **k: sample_cl(*a, solver="exact", **k),
}
STYLES = dict(
    zip(
        SOLVERS,
        [("#000000", "o-"), ("#0072B2", "s--"), ("#E69F00", "^-"), ("#D55E00", "v:"), ("#009E73", "D-.")],
        strict=True,
    )
)
STEPS = [1, 2, 4, 8, 16, 32]


class TrueScore:
    """Score model of images that are their own posteriors (B, K), with an error on the log-ratios."""

    def __init__(self, error: float) -> None:
        self.error = error

    def encode(self, image: Tensor) -> Tensor:
        """Nothing to encode."""
        return image

    def score(self, features: Tensor, label: Tensor, total: Tensor) -> Tensor:
        """Ratios of the noisy posterior, each off by a random factor that differs from call to call."""
        keep = torch.exp(-total.double()).unsqueeze(-1)
        log_q = (keep * features + (1 - keep) / features.shape[-1]).log()
        log_q = log_q + self.error * torch.randn_like(log_q)
        return log_q - log_q.gather(-1, label.unsqueeze(-1))


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
    cells = [(error, name, steps) for error in (0.0, 0.3) for name in SOLVERS for steps in STEPS]
    distance = {}
    for error, name, steps in track(cells, "measuring", console=console):
        probs = SOLVERS[name](TrueScore(error), truth, process, steps=steps).probs
        distance[error, name, steps] = ((probs - truth).abs().sum(-1) / 2).mean().item()

    for error, score in ((0.0, "true score"), (0.3, "disturbed score")):
        table = Table("steps:", *map(str, STEPS))
        table.title = f"Distance to the true posterior (total variation), {score}"
        for name in SOLVERS:
            table.add_row(name, *(f"{distance[error, name, steps]:.2g}" for steps in STEPS))
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


def draw(
    distance: dict[tuple[float, str, int], float], process: UniformProcess, truth: Tensor, path: Path
) -> None:
    """Top: distance over steps. Bottom: one posterior on its way, by each solver."""
    figure = plt.figure(figsize=(13, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    for axes, error, title in zip(
        top.subplots(1, 2),
        (0.0, 0.3),
        ("the true score: all error is the solver's", "a disturbed score: as a network gives it"),
        strict=True,
    ):
        for name, (colour, style) in STYLES.items():
            values = [max(distance[error, name, steps], 1e-9) for steps in STEPS]
            axes.plot(STEPS, values, style, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlabel="steps", title=title)
        axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
        axes.grid(alpha=0.3)
    top.axes[0].set_ylabel("distance to the truth (total variation)")
    top.axes[1].legend(frameon=False)

    best = truth[0].topk(4).indices
    for axes, name in zip(bottom.subplots(1, len(SOLVERS), sharey=True), SOLVERS, strict=True):
        path_of: list[Step] = []
        SOLVERS[name](TrueScore(0.0), truth, process, steps=8, callback=path_of.append)
        times = [1.0, *(step.time for step in path_of)]
        states = np.stack([np.full(4, 1 / process.num_classes), *(step.probs[0, best] for step in path_of)])
        for state, target, shade in zip(states.T, truth[0, best].tolist(), (0.0, 0.3, 0.5, 0.7), strict=True):
            axes.plot(times, state, "o-", color=str(shade), markersize=3)
            axes.axhline(target, color=str(shade), linewidth=0.8, linestyle=":")
        axes.set(xlim=(1, 0), ylim=(0, 0.7), title=name, xlabel="time")
    bottom.axes[0].set_ylabel("probability; dotted: the truth")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)

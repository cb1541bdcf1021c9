"""DiDiCM-CP that asks no further about an image whose posterior has stopped moving.

It looks at the answer of every step, so unlike a sampler of a fixed number of steps it waits for the device each
time and cannot be one compiled graph.
"""

import torch
from torch import Tensor

from didicm.diffusion.process import UniformProcess
from didicm.diffusion.random import ImageRandom
from didicm.diffusion.sampling import SELECT, Callback, Posterior, Select, Step, uniform_state
from didicm.diffusion.solver import (
    Interval,
    ScoreFunction,
    Scores,
    ScoreTime,
    Solver,
    SolverStep,
    intervals,
    solver_step,
)
from didicm.values import Positive, coerce


def sample_until_settled(
    model: ScoreFunction,
    image: Tensor,
    process: UniformProcess,
    *,
    tolerance: float,
    steps: int = 8,
    select: Select = "argmin",
    solver: Solver = "exact",
    score_time: ScoreTime = "midpoint",
    floor: bool = False,
    callback: Callback | None = None,
    seed: int = 0,
) -> Posterior:
    """`sample_cp` in which an image that has settled takes one last step, straight to time 0.

    Each score implies the posterior at which the process would end if nothing changed any more; an image has
    settled when the total variation between two of those in a row is below `tolerance`. The state itself would not
    tell: it moves as noise is removed, whatever the network says. The last step is exact and asks at its midpoint,
    where there is less noise than at any score before.

    The other arguments are those of `sample_cp`. No image depends on its batch.
    """
    coerce(tolerance, Positive, "tolerance")
    times = intervals(process.schedule, steps, None, solver, score_time)
    step, to_end = solver_step(solver, floor), solver_step("exact")
    choose = SELECT[coerce(select, Select, "select")]
    score, random, p = Scores(model, image, process), ImageRandom(image, seed), uniform_state(image, process)
    end, calls = process.schedule.at(0.0), torch.zeros(len(p), dtype=torch.long, device=p.device)

    def advance(rows: Tensor, step: SolverStep, at: Interval) -> tuple[Tensor, Tensor]:
        """The states after a step of some images, and where those would end."""
        log_score = score(label[rows], at.score, rows)
        calls[rows] += 1
        state = p[rows].to(log_score.dtype)
        ends = to_end(process, state, log_score, Interval(at.t, at.score, end))
        return p.to(log_score.dtype).index_copy(0, rows, step(process, state, log_score, at)), ends

    moving, settled = torch.arange(len(p), device=p.device), torch.arange(0, device=p.device)  # rows of images
    before: Tensor | None = None  # where the moving ones would have ended a step ago
    for interval in times:
        label = choose(p, random)  # of all images, so that each draws as often, whatever the others do
        if len(settled):
            p, _ = advance(settled, to_end, Interval(interval.t, process.schedule.at(interval.t.time / 2), end))
            settled = settled[:0]
        if len(moving):
            p, ends = advance(moving, step, interval)
            still = torch.zeros_like(moving, dtype=torch.bool)
            if before is not None:
                still = (ends - before).abs().sum(-1) / 2 < tolerance
            settled, moving, before = moving[still], moving[~still], ends[~still]
        if callback:
            callback(Step(interval.s.time, p, label.unsqueeze(-1)))
        if not len(moving) and not len(settled):
            break
    return Posterior(score.checked(p), nfe=int(calls.max()), calls=calls)

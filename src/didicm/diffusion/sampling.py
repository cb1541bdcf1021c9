"""Samplers: from a network's scores to P(class | image).

Three ways to run the reverse process, which differ in what they carry from step to step:

- `sample_cp` carries class probabilities: one network call per step (Algorithm 2).
- `sample_cl` carries labels, `chains` of them: one call per chain and step (Algorithm 3).
- `sample_naive` carries probabilities and asks about every label: K calls per step (Eq. 6), the reference.

`readout` needs a single call. All take any model that answers `encode` and `score`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from didicm.diffusion.process import UniformProcess, normalise
from didicm.diffusion.random import ImageRandom, sample_categorical
from didicm.diffusion.solver import (
    NO_LABEL,
    Interval,
    ScoreFunction,
    Scores,
    ScoreTime,
    Solver,
    SolverStep,
    intervals,
    solver_step,
)
from didicm.values import Fraction, Natural, Positive, coerce

Select: TypeAlias = Literal["argmin", "argmax", "sample"]
Average: TypeAlias = Literal["probs", "one-hot"]

# Features and probabilities of the chains that go through the network at once; its layers take a few times that.
CHUNK_BYTES = 2**28
NEGLIGIBLE = 1e-6  # difference of two probabilities, in units of the uniform one


@dataclass(frozen=True)
class Posterior:
    """What a sampler returns."""

    probs: Tensor  # (B, K), float32 or better, each row sums to one
    nfe: int  # network calls per image; with an early stop, the most that an image took
    calls: Tensor | None = None  # (B,), network calls of each image; None where all took `nfe`
    features: Tensor | None = None  # (B, D), what a classifier's network found in each image; None from a sampler


@dataclass(frozen=True)
class Step:
    """One step of the reverse process; `callback=trajectory.append` records them in a list."""

    time: float  # where the step arrived
    probs: Tensor  # (B, K), the state there
    label: Tensor  # (B, N), the labels the network was asked about


Callback: TypeAlias = Callable[[Step], object]


def readout(
    model: ScoreFunction,
    image: Tensor,
    process: UniformProcess,
    *,
    time: float = 0.5,
    masked: bool = False,
    views: Sequence[Tensor] = (),
    callback: Callback | None = None,
) -> Posterior:
    """Read the clean posterior from one network call at `time`, or the mean of several from one call per view.

    A network that was trained with `masked` labels is asked without one: its answer has no noise to undo.
    """
    t = process.schedule.at(coerce(time, Fraction, "time"))
    score, calls = Scores(model, image, process, views), max(1, len(views))
    label = torch.full((image.shape[0],), NO_LABEL if masked else 0, device=image.device)
    found = []
    for view in range(calls):
        score.look(view)
        log_score = score(label, t)
        found.append(log_score.softmax(-1) if masked else process.clean_posterior(log_score, t))
    p = found[0] if calls == 1 else torch.stack(found).mean(0)
    if callback:
        callback(Step(0.0, p, label.unsqueeze(-1)))
    return Posterior(score.checked(p), nfe=calls)


def sample_cp(
    model: ScoreFunction,
    image: Tensor,
    process: UniformProcess,
    *,
    steps: int = 8,
    grid: Tensor | None = None,
    select: Select = "argmin",
    solver: Solver = "exact",
    score_time: ScoreTime = "midpoint",
    floor: bool = False,
    views: Sequence[Tensor] = (),
    callback: Callback | None = None,
    seed: int = 0,
) -> Posterior:
    """DiDiCM-CP: diffuse the class probabilities, one network call per step (Algorithm 2).

    Args:
        model: answers `encode` and `score`.
        image: (B, ...); randomness belongs to the image's content, so a result never depends on the batch.
        process: the process the model was trained with.
        steps: number of steps, evenly spaced in time.
        grid: times from 1 down to 0, instead of `steps`.
        select: the label to ask about: the least likely, the most likely, or one drawn from the state.
        solver: how to step.
        score_time: where the exact solver asks for the score: at the start or at the midpoint of a step.
        floor: whether `euler` and `official` hold the network's noisy posteriors to at least (1 - keep) / K, below
            which no true one falls; they are then tamer than Algorithm 2 and the released code. `exact` always is.
        views: of the images, (B, ...) each: the steps take turns with them; by default all see `image`.
        callback: called with every `Step`.
        seed: for `select="sample"`.
    """
    times = intervals(process.schedule, steps, grid, solver, score_time)
    step, choose = solver_step(solver, floor), _SELECT[coerce(select, Select, "select")]
    score, random = Scores(model, image, process, views), ImageRandom(image, seed)
    p = _uniform(image, process)
    for i, interval in enumerate(times):
        score.look(i)
        label = choose(p, random)
        log_score = score(label, interval.score)
        p = step(process, p.to(log_score.dtype), log_score, interval)
        if callback:
            callback(Step(interval.s.time, p, label.unsqueeze(-1)))
    return Posterior(score.checked(p), nfe=len(times))


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
    where there is less noise than at any score before. Looking at every answer waits for the device each time, so
    unlike a sampler of a fixed number of steps this cannot be one compiled graph.

    The other arguments are those of `sample_cp`. No image depends on its batch.
    """
    coerce(tolerance, Positive, "tolerance")
    times = intervals(process.schedule, steps, None, solver, score_time)
    step, to_end = solver_step(solver, floor), solver_step("exact")
    choose = _SELECT[coerce(select, Select, "select")]
    score, random, p = Scores(model, image, process), ImageRandom(image, seed), _uniform(image, process)
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
        if len(moving) or before is None:
            p, ends = advance(moving, step, interval)
            still = torch.zeros_like(moving, dtype=torch.bool)
            if before is not None:
                still = (ends - before).abs().sum(-1) / 2 < tolerance
            settled, moving, before = moving[still], moving[~still], ends[~still]
        if callback:
            callback(Step(interval.s.time, p, label.unsqueeze(-1)))
        if not len(moving) and not len(settled):
            break
    return Posterior(score.checked(p), nfe=max(calls.tolist(), default=0), calls=calls)


def sample_cl(
    model: ScoreFunction,
    image: Tensor,
    process: UniformProcess,
    *,
    steps: int = 2,
    chains: int = 16,
    grid: Tensor | None = None,
    solver: Solver = "exact",
    score_time: ScoreTime = "midpoint",
    floor: bool = False,
    average: Average = "probs",
    chunk: int | None = None,
    views: Sequence[Tensor] = (),
    callback: Callback | None = None,
    seed: int = 0,
) -> Posterior:
    """DiDiCM-CL: diffuse `chains` labels per image and average where they end (Algorithm 3).

    Arguments that are not listed are those of `sample_cp`.

    Args:
        chains: labels per image, N in the paper.
        average: the chains' last transition probabilities, or their one-hot ends as in the paper.
        chunk: at most this many chains go through the network together; by default as many as `CHUNK_BYTES` allow.
    """
    times, step = intervals(process.schedule, steps, grid, solver, score_time), solver_step(solver, floor)
    coerce(average, Average, "average")
    coerce(chains, Natural, "chains")
    score, random = Scores(model, image, process, views), ImageRandom(image, seed)
    p = _uniform(image, process)
    label = random.label(process.num_classes, chains).flatten()  # (B * N,), an image's chains side by side
    owner = torch.arange(image.shape[0], device=image.device).repeat_interleave(chains)
    for i, interval in enumerate(times):
        score.look(i)
        asked, u = label.view(-1, chains).clone(), random.uniform(chains).flatten()
        p = torch.zeros_like(p)
        for rows, probs in _label_steps(score, step, owner, label, interval, chunk):
            drawn = label[rows] = sample_categorical(probs, u[rows])
            ends = probs if average == "probs" else torch.zeros_like(probs).scatter(-1, drawn.unsqueeze(-1), 1)
            p = p.to(probs.dtype).index_add(0, owner[rows], ends)
        p = normalise(p)
        if callback:
            callback(Step(interval.s.time, p, asked))
    return Posterior(score.checked(p), nfe=len(times) * chains)


def sample_naive(
    model: ScoreFunction,
    image: Tensor,
    process: UniformProcess,
    *,
    steps: int = 8,
    grid: Tensor | None = None,
    solver: Solver = "exact",
    score_time: ScoreTime = "midpoint",
    chunk: int | None = None,
    callback: Callback | None = None,
) -> Posterior:
    """Diffuse the class probabilities by asking about every label at every step (Eq. 6): the slow reference.

    At most `chunk` pairs of an image and a label go through the network together, as in `sample_cl`.
    """
    times, step = intervals(process.schedule, steps, grid, solver, score_time), solver_step(solver)
    score, p = Scores(model, image, process), _uniform(image, process)
    owner, label = torch.ones_like(p).nonzero().unbind(-1)  # (B * K,), every pair of an image and a label
    for interval in times:
        next_p = torch.zeros_like(p)
        for rows, probs in _label_steps(score, step, owner, label, interval, chunk):
            weight = p.flatten()[rows].to(probs.dtype).unsqueeze(-1)
            next_p = next_p.to(probs.dtype).index_add(0, owner[rows], weight * probs)
        p = normalise(next_p)
        if callback:
            callback(Step(interval.s.time, p, label.view_as(p)))
    return Posterior(score.checked(p), nfe=len(times) * process.num_classes)


def _label_steps(
    score: Scores, step: SolverStep, owner: Tensor, label: Tensor, interval: Interval, chunk: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows, and distributions (chunk, K) of the next label there, of labels (N,) that belong to images (N,)."""
    coerce(chunk, Natural | None, "chunk")
    most = chunk or max(1, CHUNK_BYTES // score.bytes_per_image)
    for rows in torch.split(torch.arange(label.shape[0], device=label.device), most):
        log_score = score(label[rows], interval.score, owner[rows])
        yield rows, step(score.process, label[rows], log_score, interval)


def _least_likely(p: Tensor) -> Tensor:
    # Hundreds of classes can share the least probability up to rounding: take the first of them, so that the
    # choice does not hang on the last bit.
    least = p <= p.amin(-1, keepdim=True) + NEGLIGIBLE / p.shape[-1]
    return least.byte().argmax(-1)


_SELECT: dict[Select, Callable[[Tensor, ImageRandom], Tensor]] = {
    "argmin": lambda p, random: _least_likely(p),
    "argmax": lambda p, random: p.argmax(-1),
    "sample": lambda p, random: sample_categorical(p, random.uniform().squeeze(-1)),
}


def _uniform(image: Tensor, process: UniformProcess) -> Tensor:
    """Where the reverse process starts, (B, K)."""
    return torch.full((image.shape[0], process.num_classes), 1 / process.num_classes, device=image.device)

"""Samplers: from a network's scores to P(class | image).

Three ways to run the reverse process, which differ in what they carry from step to step:

- `sample_cp` carries class probabilities: one network call a step (Algorithm 2).
- `sample_cl` carries labels, `chains` of them: one call a chain and step (Algorithm 3).
- `sample_naive` carries probabilities and asks about every label: K calls a step (Eq. 6), the reference.

`readout` needs a single call. All take any model that answers `encode` and `score`.

The solvers: `exact` uses the known kernels of the process and has no error of its own; its first step starts
from infinite noise, where the uniform start is true rather than nearly true. `euler` is the paper's step;
`official` is the released code's time grid, which overshoots, and is there for comparison only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from didicm.diffusion.process import UniformProcess, at_time
from didicm.diffusion.random import ImageRandom, sample_categorical

Features: TypeAlias = Tensor | tuple[Tensor, ...]
Select: TypeAlias = Literal["argmin", "argmax", "sample"]
Solver: TypeAlias = Literal["exact", "euler", "official"]
ScoreTime: TypeAlias = Literal["start", "midpoint"]
Average: TypeAlias = Literal["probs", "one-hot"]

OFFICIAL_EPS = 1e-5
NEGLIGIBLE = 1e-6  # difference of two probabilities, in units of the uniform one


class ScoreFunction(Protocol):
    """What a sampler needs of a network."""

    def encode(self, image: Tensor) -> Features:
        """Compute all that depends on the image alone; every tensor has the batch first."""

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Log-scores (B, K) at labels (B,) and total noise (B,), 0 at the label."""


@dataclass(frozen=True)
class Posterior:
    """What a sampler returns."""

    probs: Tensor  # (B, K), float32 or better, each row sums to one
    nfe: int  # network calls per image


@dataclass(frozen=True)
class Step:
    """One step of the reverse process; `callback=trajectory.append` records them in a list."""

    time: float  # where the step arrived
    probs: Tensor  # (B, K), the state there
    label: Tensor  # (B, N), the labels the network was asked about


Callback: TypeAlias = Callable[[Step], object]


def time_grid(steps: int) -> Tensor:
    """Evenly spaced times from 1 down to 0, (steps + 1,) in float64."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def index_features(features: Features, rows: Tensor) -> Features:
    """Pick or repeat the features of some images of a batch."""
    return features[rows] if isinstance(features, Tensor) else tuple(x[rows] for x in features)


def readout(model: ScoreFunction, image: Tensor, process: UniformProcess, *, time: float = 0.5) -> Posterior:
    """Read the clean posterior from one network call at `time`."""
    if not 0 < time <= 1:
        raise ValueError(f"time must lie in (0, 1], got {time}")
    label = torch.zeros(image.shape[0], dtype=torch.long, device=image.device)
    t = torch.tensor(time, dtype=torch.float64)
    log_score = _ask(model, model.encode(image), label, t, process)
    return Posterior(process.clean_posterior(log_score, t), nfe=1)


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
    callback: Callback | None = None,
    seed: int = 0,
) -> Posterior:
    """DiDiCM-CP: diffuse the class probabilities, one network call a step (Algorithm 2).

    Args:
        model: answers `encode` and `score`.
        image: (B, ...); randomness belongs to the image's content, so a result never depends on the batch.
        process: the process the model was trained with.
        steps: number of steps, evenly spaced in time.
        grid: times from 1 down to 0, instead of `steps`.
        select: the label to ask about: the least likely, the most likely, or one drawn from the state.
        solver: how to step.
        score_time: where the exact solver asks for the score: at the start or in the middle of a step.
        callback: called with every `Step`.
        seed: for `select="sample"`.
    """
    _check_choice("select", select, Select)
    features, random = model.encode(image), ImageRandom(image, seed)
    p = _uniform(image, process)
    intervals = _intervals(steps, grid, solver)
    for t, s in intervals:
        label = _select(p, select, random)
        at = _score_time(t, s, solver, score_time)
        log_score = _ask(model, features, label, at, process)
        p = p.to(log_score.dtype)
        if solver == "exact":
            clean = process.clean_posterior(log_score, at)
            p = process.marginal(clean, s) if t == 1 else process.exact_step(p, clean, t, s)
        else:
            p = _normalise(process.euler_step(p, log_score, t, t - s).clamp(0, 1))
        if callback:
            callback(Step(s.item(), p, label.unsqueeze(-1)))
    return Posterior(p, nfe=len(intervals))


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
    average: Average = "probs",
    chunk: int = 1024,
    callback: Callback | None = None,
    seed: int = 0,
) -> Posterior:
    """DiDiCM-CL: diffuse `chains` labels per image and average where they end (Algorithm 3).

    Arguments that are not listed are those of `sample_cp`.

    Args:
        steps: number of steps of each chain.
        chains: labels per image, N in the paper.
        average: the chains' last transition probabilities, or their one-hot ends as in the paper.
        chunk: at most this many chains go through the network together.
        seed: for the labels.
    """
    _check_choice("average", average, Average)
    if chains < 1 or chunk < 1:
        raise ValueError(f"chains and chunk must be at least 1, got {chains} and {chunk}")
    features, random = model.encode(image), ImageRandom(image, seed)
    p = _uniform(image, process)
    label = random.label(process.num_classes, chains).flatten()  # (B * N,), an image's chains side by side
    owner = torch.arange(image.shape[0], device=image.device).repeat_interleave(chains)
    intervals = _intervals(steps, grid, solver)
    for t, s in intervals:
        asked, u = label.view(-1, chains).clone(), random.uniform(chains).flatten()
        p = torch.zeros_like(p)
        for rows in torch.split(torch.arange(len(label), device=image.device), chunk):
            probs = _label_step(
                model, index_features(features, owner[rows]), label[rows], t, s, process, solver, score_time
            )
            label[rows] = sample_categorical(probs, u[rows])
            ends = probs if average == "probs" else process.distribution(label[rows]).to(probs.dtype)
            p = p.to(probs.dtype).index_add(0, owner[rows], ends)
        p = _normalise(p)
        if callback:
            callback(Step(s.item(), p, asked))
    return Posterior(p, nfe=len(intervals) * chains)


def sample_naive(
    model: ScoreFunction,
    image: Tensor,
    process: UniformProcess,
    *,
    steps: int = 8,
    grid: Tensor | None = None,
    solver: Solver = "exact",
    score_time: ScoreTime = "midpoint",
    chunk: int = 1024,
    callback: Callback | None = None,
) -> Posterior:
    """Diffuse the class probabilities by asking about every label at every step (Eq. 6): the slow reference.

    Arguments that are not listed are those of `sample_cp`.

    Args:
        chunk: at most this many (image, label) pairs go through the network together.
    """
    features, p = model.encode(image), _uniform(image, process)
    every = torch.arange(p.numel(), device=image.device)  # (image, label) pairs
    intervals = _intervals(steps, grid, solver)
    for t, s in intervals:
        next_p = torch.zeros_like(p)
        for rows in torch.split(every, chunk):
            owner, label = rows // process.num_classes, rows % process.num_classes
            probs = _label_step(model, index_features(features, owner), label, t, s, process, solver, score_time)
            weight = p.flatten()[rows].to(probs.dtype).unsqueeze(-1)
            next_p = next_p.to(probs.dtype).index_add(0, owner, weight * probs)
        p = _normalise(next_p)
        if callback:
            callback(Step(s.item(), p, every.view_as(p) % process.num_classes))
    return Posterior(p, nfe=len(intervals) * process.num_classes)


def _intervals(steps: int, grid: Tensor | None, solver: Solver) -> list[tuple[Tensor, Tensor]]:
    """Start and end of every step, as float64 scalars."""
    _check_choice("solver", solver, Solver)
    even = time_grid(steps)
    if solver == "official":
        if grid is not None:
            raise ValueError("solver='official' brings its own grid: leave out `grid`")
        # Spaced as if for steps - 1 steps, but each is 1 / steps long: the last one ends below 0.
        start = torch.linspace(1, OFFICIAL_EPS, steps, dtype=torch.float64)
        return list(zip(start, start - (1 - OFFICIAL_EPS) / steps, strict=True))
    grid = even if grid is None else grid.double().cpu()
    if grid.dim() != 1 or len(grid) < 2 or grid[0] != 1 or grid[-1] != 0 or not (grid.diff() < 0).all():
        raise ValueError(f"grid must fall from 1 to 0 in at least one step, got {grid.tolist()}")
    return list(pairwise(grid))


def _score_time(t: Tensor, s: Tensor, solver: Solver, score_time: ScoreTime) -> Tensor:
    _check_choice("score_time", score_time, ScoreTime)
    return (t + s) / 2 if solver == "exact" and score_time == "midpoint" else t


def _ask(model: ScoreFunction, features: Features, label: Tensor, t: Tensor, process: UniformProcess) -> Tensor:
    """Call the network, and go on in float32 or better whatever it returns."""
    total = torch.full(label.shape, at_time(process.schedule.total, t.item()), device=label.device)
    log_score = model.score(features, label, total)
    if log_score.shape != (len(label), process.num_classes):
        raise ValueError(
            f"the network returned log-scores of shape {tuple(log_score.shape)} for {len(label)} images "
            f"and {process.num_classes} classes: model and process must agree on the number of classes"
        )
    log_score = log_score.to(torch.promote_types(log_score.dtype, torch.float32))
    if not math.isfinite(log_score.sum().item()):
        raise FloatingPointError(
            f"the network returned non-finite log-scores at t = {t.item():.4g}: its weights or the image are "
            "broken, or half precision overflowed; check them, or run the network in float32"
        )
    return log_score


def _label_step(
    model: ScoreFunction,
    features: Features,
    label: Tensor,
    t: Tensor,
    s: Tensor,
    process: UniformProcess,
    solver: Solver,
    score_time: ScoreTime,
) -> Tensor:
    """Distribution (B, K) of the label at s given the label (B,) at t."""
    at = _score_time(t, s, solver, score_time)
    log_score = _ask(model, features, label, at, process)
    if solver != "exact":
        return process.euler_label_step(label, log_score, t, t - s)
    clean = process.clean_posterior(log_score, at)
    return process.marginal(clean, s) if t == 1 else process.exact_label_step(label, clean, t, s)


def _select(p: Tensor, select: Select, random: ImageRandom) -> Tensor:
    if select == "sample":
        return sample_categorical(p, random.uniform().squeeze(-1))
    if select == "argmax":
        return p.argmax(-1)
    # Hundreds of classes can share the least probability up to rounding: take the first of them, so that the
    # choice does not hang on the last bit.
    least = p <= p.amin(-1, keepdim=True) + NEGLIGIBLE / p.shape[-1]
    return least.byte().argmax(-1)


def _uniform(image: Tensor, process: UniformProcess) -> Tensor:
    shape = (image.shape[0], process.num_classes)
    return torch.full(shape, 1 / process.num_classes, device=image.device)


def _normalise(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True)


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")

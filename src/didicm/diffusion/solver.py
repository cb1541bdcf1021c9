"""One step of the reverse process: its times, the network call, and the solvers.

`exact` uses the known kernels of the process and has no error of its own; its first step starts from infinite
noise, where the uniform start is true rather than nearly true. `euler` is the paper's step, clamped to [0, 1]
where it overshoots; `official` is the same on the released code's time grid, which overshoots more, and is there
for comparison only. Neither keeps a network's noisy posteriors above the least that is possible, unless told to
(`floor`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from didicm.diffusion.process import UniformProcess, at_least_float32, normalise
from didicm.diffusion.schedule import Noise, Schedule
from didicm.errors import UserError
from didicm.values import Natural, coerce

Features: TypeAlias = Tensor | tuple[Tensor, ...]
Solver: TypeAlias = Literal["exact", "euler", "official"]
ScoreTime: TypeAlias = Literal["start", "midpoint"]

OFFICIAL_EPS = 1e-5
NO_LABEL = -1  # in the place of a label: asks for the clean posterior itself, of networks that can answer that


@runtime_checkable
class ScoreFunction(Protocol):
    """What a sampler needs of a network."""

    def encode(self, image: Tensor) -> Features:
        """Compute all that depends on the image alone; every tensor has the batch first."""

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        """Log-scores (B, K) at labels (B,) and total noise (B,), 0 at the label."""


class ExactScore:
    """Scores images that are their own posteriors (B, K): a solver's error without a network's.

    `error` is the spread of noise on its log-ratios, which differs from call to call.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, error: float = 0.0) -> None:
        self.dtype, self.error = dtype, error

    def encode(self, image: Tensor) -> Tensor:
        return image

    def score(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        assert isinstance(features, Tensor)
        keep = torch.exp(-total.double()).unsqueeze(-1)
        log_q = (keep * features.double() + (1 - keep) / features.shape[-1]).log()
        if self.error:
            log_q = log_q + self.error * torch.randn_like(log_q)
        return (log_q - log_q.gather(-1, label.unsqueeze(-1))).to(self.dtype)


@dataclass(frozen=True)
class Interval:
    """One step: where it starts, where the score is taken, where it ends."""

    t: Noise
    score: Noise
    s: Noise


# The state is probabilities (B, K) or labels (B,); either way the result is probabilities (B, K).
SolverStep: TypeAlias = Callable[[UniformProcess, Tensor, Tensor, Interval], Tensor]


def intervals(
    schedule: Schedule, steps: int, grid: Tensor | None, solver: Solver, score_time: ScoreTime
) -> list[Interval]:
    """The steps that a solver takes, from t = 1 to 0."""
    coerce(solver, Solver, "solver")
    coerce(score_time, ScoreTime, "score_time")
    coerce(steps, Natural, "steps")
    if grid is not None:
        if solver == "official":
            raise UserError("solver='official' brings its own grid: leave out `grid`")
        times = grid.tolist()
        pairs = list(pairwise(times))
        if not pairs or not all(t > s for t, s in pairs) or times[0] != 1 or times[-1] != 0:
            raise UserError(f"grid must fall from 1 to 0 in at least one step, got {times}")
    elif solver == "official":
        # Spaced as if for steps - 1 steps, but each is 1 / steps long: the last one ends below 0.
        span = 1 - OFFICIAL_EPS
        start = [1 - i * span / max(1, steps - 1) for i in range(steps)]
        pairs = [(t, t - span / steps) for t in start]
    else:
        pairs = [((steps - i) / steps, (steps - i - 1) / steps) for i in range(steps)]
    midpoint = solver == "exact" and score_time == "midpoint"
    return [Interval(*map(schedule.at, (t, (t + s) / 2 if midpoint else t, s))) for t, s in pairs]


class Scores:
    """A network's log-scores of a batch of images, each encoded once, or of views of them that take turns."""

    def __init__(
        self, model: ScoreFunction, image: Tensor, process: UniformProcess, views: Sequence[Tensor] = ()
    ) -> None:
        self.process, self._model, self._views = process, model, views or [image]
        self._encoded: dict[int, Features] = {}  # by view
        self.look(0)
        self._sums: list[tuple[float, Tensor]] = []  # of each call: its time, and sums of log-scores by image (B,)
        self._zero = torch.zeros(image.shape[0], device=image.device)

    def __call__(self, label: Tensor, t: Noise, rows: Tensor | None = None) -> Tensor:
        """Log-scores (B, K), in float32 or better, at labels (B,) of all images, or of those in `rows` (B,)."""
        features = self._features if rows is None else index_features(self._features, rows)
        log_score = self._model.score(features, label, torch.full(label.shape, t.total, device=label.device))
        if log_score.shape != (label.shape[0], self.process.num_classes):
            raise ValueError(
                f"the network returned log-scores of shape {tuple(log_score.shape)} for {len(label)} images and "
                f"{self.process.num_classes} classes: model and process must agree on the number of classes"
            )
        log_score = at_least_float32(log_score)
        sums = log_score.sum(-1)
        self._sums.append((t.time, sums if rows is None else self._zero.to(sums).index_add(0, rows, sums)))
        return log_score

    def look(self, step: int) -> None:
        """Turn to the view of this step; each is encoded at its first turn."""
        turn = step % len(self._views)
        if turn not in self._encoded:
            self._encoded[turn] = self._model.encode(self._views[turn])
        self._features = self._encoded[turn]

    @property
    def bytes_per_image(self) -> int:
        """Memory of the features and the probabilities of one image."""
        features = (self._features,) if isinstance(self._features, Tensor) else self._features
        return 4 * self.process.num_classes + sum(x.shape[1:].numel() * x.element_size() for x in features)

    def checked(self, probs: Tensor) -> Tensor:
        """Posteriors (B, K) if all their log-scores were finite, else an error that names the step.

        Once after the last step: looking at a number makes a GPU wait. A compiled or exported graph cannot raise;
        it returns NaN for the images whose log-scores were not finite.
        """
        finite = torch.stack([sums for _, sums in self._sums]).isfinite()  # (calls, B)
        if torch.compiler.is_compiling():
            return probs.masked_fill(~finite.all(0).unsqueeze(-1), math.nan)
        if not finite.all():
            time = self._sums[int(finite.all(1).int().argmin())][0]
            raise FloatingPointError(
                f"the network returned non-finite log-scores at t = {time:.4g}: its weights or the image are "
                "broken, or half precision overflowed; check them, or run the network in float32"
            )
        return probs


def index_features(features: Features, rows: Tensor) -> Features:
    """Pick or repeat the features of some images of a batch."""
    return features[rows] if isinstance(features, Tensor) else tuple(x[rows] for x in features)


def solver_step(solver: Solver, floor: bool = False) -> SolverStep:
    """The step of a solver; `exact` needs no floor: its noisy posteriors are made from a clean one."""
    return _exact_step if solver == "exact" else partial(_euler_step, floor=floor)


def _exact_step(process: UniformProcess, state: Tensor, log_score: Tensor, at: Interval) -> Tensor:
    clean = process.clean_posterior(log_score, at.score)
    if at.t.time == 1:
        return process.add_noise(clean, at.s)
    step = process.exact_step if state.is_floating_point() else process.exact_label_step
    return step(state, clean, at.t, at.s)


def _euler_step(process: UniformProcess, state: Tensor, log_score: Tensor, at: Interval, floor: bool) -> Tensor:
    dt = at.t.time - at.s.time
    if state.is_floating_point():
        return normalise(process.euler_step(state, log_score, at.t, dt, floor).clamp(0, 1))
    return process.euler_label_step(state, log_score, at.t, dt, floor)

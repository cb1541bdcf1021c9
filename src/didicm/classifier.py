"""Diffusion and standard classifiers behind one interface; nothing downstream asks which kind it has."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from didicm.diffusion import (
    Posterior,
    UniformProcess,
    marginal_score_entropy,
    readout,
    sample_cl,
    sample_cp,
    score_entropy,
)
from didicm.diffusion.sampling import Average, Callback, ScoreTime, Select, Solver, index_features
from didicm.models import ScoreModel

# Earliest time in training: closer to 0 the true ratios leave float32.
MIN_TIME = 1e-5

Objective: TypeAlias = Literal["cross-entropy", "binary-cross-entropy", "marginal"]


@dataclass(frozen=True)
class Sampler:
    """How a diffusion classifier turns scores into a posterior; the fields are those of the samplers."""

    method: Literal["cp", "cl", "readout"] = "cp"
    steps: int = 8
    solver: Solver = "exact"
    score_time: ScoreTime = "midpoint"
    select: Select = "argmin"  # cp
    chains: int = 16  # cl
    average: Average = "probs"  # cl
    time: float = 0.5  # readout
    seed: int = 0

    def __call__(
        self, model: ScoreModel, image: Tensor, process: UniformProcess, callback: Callback | None
    ) -> Posterior:
        """Sample the posterior of images (B, C, H, W)."""
        common = {"steps": self.steps, "solver": self.solver, "score_time": self.score_time, "seed": self.seed}
        if self.method == "cp":
            return sample_cp(model, image, process, select=self.select, callback=callback, **common)
        if self.method == "cl":
            chains = {"chains": self.chains, "average": self.average}
            return sample_cl(model, image, process, callback=callback, **chains, **common)
        if self.method == "readout":
            return readout(model, image, process, time=self.time)
        raise ValueError(f"method must be one of cp, cl, readout, got {self.method!r}")


class Classifier(nn.Module, ABC):
    """What training, evaluation, serving and export know of a classifier."""

    model: nn.Module
    num_classes: int

    draws_per_image: int
    numbers_per_draw: int  # uniform random numbers that one draw of the loss takes

    @abstractmethod
    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """Training loss of each image (B,), given its random numbers u (B, draws, numbers)."""

    def loss(self, image: Tensor, target: Tensor, u: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Mean training loss of images (B, C, H, W) and target distributions (B, K).

        Args:
            image: normalised images.
            target: target distributions.
            u: uniform numbers (B, draws, numbers) to draw noise with; by default fresh ones.
            weight: weight of each image (B,).
        """
        if u is None:
            u = torch.rand(len(image), self.draws_per_image, self.numbers_per_draw, device=image.device)
        losses = self.losses(image, target, u)
        return losses.mean() if weight is None else (losses * weight).mean()

    @abstractmethod
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        """P(class | image), without gradients; `settings` override the sampler's for this call."""

    def forward(self, image: Tensor) -> Tensor:
        """P(class | image) as (B, K) probabilities: a drop-in for any PyTorch code."""
        return self.posterior(image).probs


class DiffusionClassifier(Classifier):
    """DiDiCM: a score network, the process it was trained with, and how to sample from it."""

    numbers_per_draw = 4  # one for the time, three for the noisy label

    def __init__(
        self,
        model: ScoreModel,
        process: UniformProcess | None = None,
        sampler: Sampler | None = None,
        draws_per_image: int = 1,
        label_proposal: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.process = process or UniformProcess(model.num_classes)
        self.sampler = sampler or Sampler()
        self.draws_per_image = draws_per_image
        self.label_proposal = label_proposal
        self.num_classes = model.num_classes
        if self.process.num_classes != self.num_classes:
            raise ValueError(
                f"the model has {self.num_classes} classes and the process {self.process.num_classes}"
            )
        _at_least_one("draws_per_image", draws_per_image)
        if not 0 <= label_proposal < 1:
            raise ValueError(f"label_proposal must lie in [0, 1), got {label_proposal}")

    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """Score entropy (Algorithm 1); several draws of noise share one encoding of the image.

        A label that is not the image's own is rare at little noise, and its loss then large. Drawing at least
        `label_proposal` of the labels from all classes, with weights that keep the mean as it is, evens that out.
        """
        rows = torch.arange(len(image), device=image.device).repeat_interleave(self.draws_per_image)
        target, u = target[rows], u.flatten(0, 1)
        t = _time(u[:, 0])
        label_proposal = self.process.schedule.lost(t).clamp_min(self.label_proposal)
        label = self.process.sample_label(target, t, u[:, 1:], label_proposal)
        features = self.model.encode(image)
        if self.draws_per_image > 1:
            features = index_features(features, rows)
        log_score = self.model.score(features, label, self.process.schedule.total(t))
        losses = score_entropy(log_score, label, target, t, self.process)
        if self.label_proposal:
            losses = losses * self.process.label_weight(target, label, t, label_proposal)
        return losses.view(len(image), -1).mean(1)

    @torch.no_grad()
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        """Run the reverse process."""
        sampler = replace(self.sampler, **settings) if settings else self.sampler
        return sampler(self.model, image, self.process, callback)


class StandardClassifier(Classifier):
    """A plain network, trained on the label itself.

    Objectives: `cross-entropy`; `binary-cross-entropy`, one yes-or-no question a class; and `marginal`, the DiDiCM
    loss of a network that sees neither label nor noise: the control that separates the loss from the conditioning.
    """

    numbers_per_draw = 1

    def __init__(
        self,
        model: nn.Module,
        objective: Objective = "cross-entropy",
        process: UniformProcess | None = None,
        draws_per_image: int = 1,
    ) -> None:
        super().__init__()
        if objective not in get_args(Objective):
            raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, got {objective!r}")
        if process is not None and objective != "marginal":
            raise ValueError(f"a process is for objective 'marginal', not {objective!r}")
        self.model = model
        self.objective = objective
        self.num_classes = model.num_classes
        self.process = (process or UniformProcess(self.num_classes)) if objective == "marginal" else None
        self.draws_per_image = draws_per_image
        _at_least_one("draws_per_image", draws_per_image)

    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """The objective of each image."""
        logits = _float(self.model(image))
        if self.objective == "cross-entropy":
            return F.cross_entropy(logits, target, reduction="none")
        if self.objective == "binary-cross-entropy":
            return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)
        t = _time(u[..., 0].T)  # draws first: they share the images' targets
        log_q = self.process.log_marginal(logits.log_softmax(-1).expand(*t.shape, -1), t)
        return marginal_score_entropy(log_q, target, t, self.process).mean(0)

    @torch.no_grad()
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        """One network call."""
        if settings:
            raise ValueError(f"a standard classifier has no sampler, so no {', '.join(settings)} to set")
        logits = _float(self.model(image))
        if self.objective == "binary-cross-entropy":
            # Each sigmoid estimates the probability of its class; a softmax would sharpen them.
            log_probs = F.logsigmoid(logits)
            return Posterior((log_probs - log_probs.logsumexp(-1, keepdim=True)).exp(), nfe=1)
        return Posterior(logits.softmax(-1), nfe=1)


class Loss(nn.Module):
    """A module whose forward is the classifier's loss, for wrappers such as DDP that only know `forward`.

    Wrappers for mixed precision round what they are given, which is fine for images but not for targets and random
    numbers: `bits` carries those past them.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: Tensor, *rest: Tensor | None) -> Tensor:
        """Mean training loss; the arguments are those of `Classifier.loss`, all but the image perhaps as bits."""
        exact = (x.view(torch.float32) if x is not None and x.dtype == torch.int32 else x for x in rest)
        return self.classifier.loss(image, *exact)

    @staticmethod
    def bits(x: Tensor) -> Tensor:
        """A float32 tensor as the integers that it is made of."""
        return x.float().contiguous().view(torch.int32)


def _time(u: Tensor) -> Tensor:
    return MIN_TIME + (1 - MIN_TIME) * u


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")

"""Diffusion and standard classifiers and ensembles behind one interface; nothing downstream asks which it has."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from didicm.diffusion import (
    Features,
    Posterior,
    ScoreFunction,
    UniformProcess,
    marginal_score_entropy,
    score_entropy,
)
from didicm.diffusion import Sampler as Sampler
from didicm.diffusion.loss import sample_time
from didicm.diffusion.process import at_least_float32, log_marginal
from didicm.diffusion.sampler import Views, allowed
from didicm.diffusion.sampling import Callback
from didicm.diffusion.solver import NO_LABEL, index_features
from didicm.errors import UserError
from didicm.models import cost
from didicm.models.score import ScoreModel
from didicm.values import Few, Natural, Range, coerce

Objective: TypeAlias = Literal[
    "cross-entropy", "generalized-cross-entropy", "binary-cross-entropy", "multi-label", "marginal"
]

# A class with more of the target than this is wholly present to objective `multi-label`.
PRESENT_SHARE = 0.2

# Exponent of generalized cross-entropy, as in its paper: near 0 it is cross-entropy, at 1 the mean absolute error.
GENERALIZED_EXPONENT = 0.7


class Classifier(nn.Module, ABC):
    """What training, evaluation, serving and export know of a classifier."""

    sampler: Sampler | None = None  # how a posterior is sampled; None if there is nothing to set
    views: Views | None = None  # augmented views of an image that the network was trained with
    inference_only: bool = False  # an optimised copy, whose weights fit no network that a checkpoint could name
    numbers_per_draw: ClassVar[int]  # uniform random numbers that one draw of the loss takes

    def __init__(self, model: nn.Module, num_classes: int, draws_per_image: int = 1) -> None:
        super().__init__()
        self.model = model
        self.num_classes = num_classes
        self.draws_per_image: int = coerce(draws_per_image, Natural, "draws_per_image")

    @property
    def in_chans(self) -> int:
        """Channels of the images that the network takes."""
        return int(getattr(self.model, "in_chans", 3))

    def random_numbers(self, images: int, generator: torch.Generator | None = None) -> Tensor:
        """Uniform random numbers (images, draws, numbers) for the losses of a batch."""
        return torch.rand(images, self.draws_per_image, self.numbers_per_draw, generator=generator)

    @abstractmethod
    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """Training loss of each image (B,), given its random numbers u (B, draws, numbers)."""

    def loss(self, image: Tensor, target: Tensor, u: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Mean training loss of normalised images (B, C, H, W) and target distributions (B, K).

        `u` (B, draws, numbers) are the uniform numbers to draw noise with, by default fresh ones; `weight` (B,) is
        the weight of each image.
        """
        if target.shape != (len(image), self.num_classes) or not target.is_floating_point():
            raise UserError(
                f"targets must be distributions of shape {(len(image), self.num_classes)}, got {target.dtype} of "
                f"shape {tuple(target.shape)}: of labels make them by one_hot(labels, {self.num_classes}).float()"
            )
        if weight is not None and weight.shape != (len(image),):
            raise UserError(f"weight must be one number per image, ({len(image)},), got {tuple(weight.shape)}")
        if u is None:
            u = self.random_numbers(len(image)).to(image.device)
        losses = self.losses(image, target, u)
        return losses.mean() if weight is None else (losses * weight).mean()

    @abstractmethod
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        """P(class | image), without gradients; `settings` change the sampler for this call.

        Setting `views`, of any classifier, is how many augmented views of an image the network looks at: diffusion
        steps take turns with them, other answers are averaged over them.
        """

    @abstractmethod
    def resolve(self, **settings: Any) -> tuple[Sampler | None, dict[str, Any]]:
        """The sampler as these settings of a posterior change it, and all that decides its answer but the seed.

        A setting that there is not is refused.
        """

    @abstractmethod
    def multiply_adds(self, size: int, calls: float, **settings: Any) -> int:
        """Multiply-adds of a posterior of an image of size x size pixels that takes so many network calls."""

    def asked(self, settings: Mapping[str, Any]) -> tuple[tuple["Classifier", ...], dict[str, Any]]:
        """The classifiers that a posterior asks, and the settings that go to each."""
        return (self,), dict(settings)

    def forward(self, image: Tensor) -> Tensor:
        """P(class | image) as (B, K) probabilities: a drop-in for any PyTorch code."""
        return self.posterior(image).probs


class DiffusionClassifier(Classifier):
    """DiDiCM: a score network, the process it was trained with, and how to sample from it.

    `mask` is the share of the training in which the label is masked and the network asked without one. Method
    `readout` then is that question.
    """

    sampler: Sampler
    numbers_per_draw = 4  # one for the time, three for the noisy label

    def __init__(
        self,
        model: nn.Module,
        process: UniformProcess | None = None,
        sampler: Sampler | None = None,
        draws_per_image: int = 1,
        label_proposal: float = 0.0,
        mask: float = 0.0,
    ) -> None:
        if not isinstance(model, ScoreFunction):
            raise UserError(
                f"{type(model).__name__} does not answer encode and score: use StandardClassifier for logits, "
                "or write both methods as didicm.models.ScoreModel describes them"
            )
        super().__init__(model, num_classes_of(model), draws_per_image)
        self.process = process or UniformProcess(self.num_classes)
        self.sampler = sampler or Sampler()
        self.label_proposal = label_proposal
        self.mask: float = coerce(mask, Annotated[float, Range(0, 1)], "mask")
        if self.process.num_classes != self.num_classes:
            raise ValueError(f"the model has {self.num_classes} classes, the process {self.process.num_classes}")
        if not 0 <= label_proposal < 1:
            raise ValueError(f"label_proposal must lie in [0, 1), got {label_proposal}")
        if mask and not isinstance(model, ScoreModel):
            raise UserError(
                f"mask {mask:g} asks the network without a label, which {type(model).__name__} cannot answer: "
                "leave it out, or derive the network from didicm.models.ScoreModel"
            )
        self._sampler({})

    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """Score entropy (Algorithm 1); several draws of noise share one encoding of the image.

        A label that is not the image's own is rare at little noise, and its loss then large. Drawing at least
        `label_proposal` of the labels from all classes, with weights that keep the mean as it is, evens that out.

        A share `mask` of the draws follows the process that masks labels instead: its loss is the cross-entropy of
        the answer without a label.
        """
        rows = torch.arange(len(image), device=image.device).repeat_interleave(self.draws_per_image)
        target, u = target[rows], u.flatten(0, 1)
        masked, u_time = u[:, 0] < self.mask, u[:, 0]
        if self.mask:  # what is left of the number is uniform again
            u_time = ((u_time - self.mask) / max(1 - self.mask, 1e-9)).clamp(0, 1)
        t = sample_time(u_time)
        label_proposal = self.process.schedule.lost(t).clamp_min(self.label_proposal)
        label = self.process.sample_label(target, t, u[:, 1:], label_proposal)
        features = self._network.encode(image)
        if self.draws_per_image > 1:
            features = index_features(features, rows)
        asked = torch.where(masked, NO_LABEL, label) if self.mask else label
        log_score = self._network.score(features, asked, self.process.schedule.total(t))
        losses = score_entropy(log_score, label, target, t, self.process)
        if self.label_proposal:
            losses = losses * self.process.label_weight(target, label, t, label_proposal)
        if self.mask:
            losses = torch.where(masked, F.cross_entropy(log_score, target, reduction="none"), losses)
        return losses.view(len(image), self.draws_per_image).mean(1)

    @torch.no_grad()
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        sampler = self._sampler(settings)
        network = _Remembering(self._network)
        found = sampler(network, image, self.process, callback, self.views, masked=self.mask > 0)
        return Posterior(found.probs, found.nfe, found.calls, _pooled(network.features))

    def resolve(self, **settings: Any) -> tuple[Sampler, dict[str, Any]]:
        sampler = self._sampler(settings)
        if sampler.views > 1:
            allowed(self.views)
        return sampler, sampler.identity()

    def multiply_adds(self, size: int, calls: float, **settings: Any) -> int:
        return cost(self.model, size).total(calls, self.sampler.changed(**settings).encodings)

    def _sampler(self, settings: Mapping[str, Any]) -> Sampler:
        sampler = self.sampler.changed(**settings) if settings else self.sampler
        if self.mask == 1 and sampler.method != "readout":
            raise UserError(
                "with mask 1 a network has only learned to answer without a label: set sampler readout"
            )
        return sampler

    @property
    def _network(self) -> ScoreFunction:
        return cast(ScoreFunction, self.model)


class StandardClassifier(Classifier):
    """A network that maps images to logits (B, K), trained on the label itself.

    Objectives: `cross-entropy`; `generalized-cross-entropy` (Zhang & Sabuncu 2018), which gives up labels that it
    finds unlikely; `binary-cross-entropy`, one yes-or-no question per class; `multi-label`, the same with a yes
    for every class that is present, as in "ResNet strikes back"; and `marginal`, the DiDiCM loss of a network
    that sees neither label nor noise: the control that separates loss from conditioning.
    """

    numbers_per_draw = 1

    def __init__(
        self,
        model: nn.Module,
        objective: Objective = "cross-entropy",
        process: UniformProcess | None = None,
        draws_per_image: int = 1,
    ) -> None:
        super().__init__(model, num_classes_of(model), draws_per_image)
        self.objective = coerce(objective, Objective, "objective")
        if process is not None and objective != "marginal":
            raise ValueError(f"a process is for objective 'marginal', not {objective!r}")
        if process is None and objective == "marginal":
            process = UniformProcess(self.num_classes)
        self.process = process

    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        logits = self._checked(self.model(image), image)
        if self._asks_per_class:
            if self.objective == "multi-label":
                # By that paper's text every class of a mix is a positive. timm's --bce-target-thresh, usually 0.2,
                # leaves out those that hardly show (most mixes by Mixup at alpha 0.2 have one), and it leaves
                # nothing of label smoothing, although recipe A1 lists that as well.
                target = (target > PRESENT_SHARE).to(target.dtype)
            return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)
        if self.objective == "generalized-cross-entropy":
            each = -torch.expm1(GENERALIZED_EXPONENT * logits.log_softmax(-1)) / GENERALIZED_EXPONENT
            return (target * each).sum(-1)
        if self.process is None:
            return F.cross_entropy(logits, target, reduction="none")
        t = sample_time(u[..., 0].T)  # draws first: they share the images' targets
        log_q = log_marginal(logits.log_softmax(-1).expand(*t.shape, -1), self.process.schedule.total(t))
        return marginal_score_entropy(log_q, target, t, self.process).mean(0)

    @torch.no_grad()
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        answers = [self._answer(image)]
        count = self._count_views(settings)
        if count > 1:
            answers += map(self._answer, allowed(self.views)(image, count, settings.get("seed", 0))[1:])
        probs = answers[0].probs if count == 1 else torch.stack([answer.probs for answer in answers]).mean(0)
        return Posterior(probs, count, features=answers[0].features)

    def resolve(self, **settings: Any) -> tuple[None, dict[str, Any]]:
        count = self._count_views(settings)
        if count > 1:
            allowed(self.views)
        return None, {"views": count} if count > 1 else {}

    def multiply_adds(self, size: int, calls: float, **settings: Any) -> int:
        return cost(self.model, size).total(calls, self._count_views(settings))

    @staticmethod
    def _count_views(settings: Mapping[str, Any]) -> int:
        if unknown := [name for name in settings if name not in ("views", "seed")]:
            named = ", ".join("sampler" if name == "method" else name for name in unknown)
            raise UserError(f"a standard classifier has no sampler to set: leave out {named}")
        count: int = coerce(settings.get("views", 1), Few, "views")
        return count

    def _answer(self, image: Tensor) -> Posterior:
        model: Any = self.model
        if image.ndim == 2:  # features that were computed earlier
            logits, features = model(image), image
        elif _has_features(model):
            x = model.forward_features(image)
            logits = model.forward_head(x)
            features = _pooled(model.forward_head(x, pre_logits=True))
        else:  # without timm's interface, logits are all there is
            features = logits = at_least_float32(model(image))
        logits = self._checked(logits, image)
        # As of a diffusion classifier: an error, but from a compiled or exported graph, which cannot raise, NaN.
        if not torch.compiler.is_compiling() and not bool(logits.isfinite().all()):
            raise FloatingPointError(
                "the network returned non-finite logits: its weights or the image are broken, or half precision "
                "overflowed; check them, or run the network in float32"
            )
        if not self._asks_per_class:
            return Posterior(logits.softmax(-1), 1, features=features)
        # Each sigmoid estimates the probability of its class; a softmax would sharpen them.
        log_probs = F.logsigmoid(logits)
        return Posterior((log_probs - log_probs.logsumexp(-1, keepdim=True)).exp(), 1, features=features)

    @property
    def _asks_per_class(self) -> bool:
        return self.objective in ("binary-cross-entropy", "multi-label")

    def _checked(self, logits: Tensor, image: Tensor) -> Tensor:
        if logits.shape != (image.shape[0], self.num_classes):
            raise ValueError(
                f"the network returned logits of shape {tuple(logits.shape)} for {len(image)} images and "
                f"{self.num_classes} classes: its num_classes must be the number of its outputs"
            )
        return at_least_float32(logits)


class Ensemble(Classifier):
    """Classifiers over the same classes, whose posterior is the mean of theirs."""

    numbers_per_draw = 0  # it has no loss

    def __init__(self, members: Iterable[Classifier]) -> None:
        members = tuple(members)
        if not members or not all(isinstance(member, Classifier) for member in members):
            raise UserError("an ensemble needs members: give at least one classifier, and nothing else")
        counts = sorted({member.num_classes for member in members})
        if len(counts) > 1:
            raise UserError(f"the members of an ensemble have {counts} classes: they must have the same ones")
        super().__init__(nn.ModuleList(member.model for member in members), counts[0])
        self.members = members
        first = members[0].sampler
        self.sampler = first if all(member.sampler == first for member in members) else None

    @property
    def in_chans(self) -> int:
        return self.members[0].in_chans

    def losses(self, image: Tensor, target: Tensor, u: Tensor) -> Tensor:
        raise UserError("an ensemble has no loss: train its members one by one")

    @torch.no_grad()
    def posterior(self, image: Tensor, callback: Callback | None = None, **settings: Any) -> Posterior:
        """The mean of the members' probabilities; setting `members` asks the first so many, others go to each."""
        if callback is not None:
            raise UserError("an ensemble has no trajectory of its own: ask its members for theirs")
        members, settings = self.asked(settings)
        answers = [member.posterior(image, **settings) for member in members]
        probs = torch.stack([answer.probs for answer in answers]).mean(0)
        nfe = sum(answer.nfe for answer in answers)
        found = [answer.features for answer in answers if answer.features is not None]
        features = torch.cat(found, 1) if found else None
        if all(answer.calls is None for answer in answers):
            return Posterior(probs, nfe, features=features)
        each = [torch.full((len(probs),), a.nfe) if a.calls is None else a.calls.cpu() for a in answers]
        return Posterior(probs, nfe, torch.stack(each).sum(0), features)

    def resolve(self, **settings: Any) -> tuple[Sampler | None, dict[str, Any]]:
        """Members that differ in their samplers have those settings in common that change them."""
        members, settings = self.asked(settings)
        resolved = [member.resolve(**settings) for member in members]
        sampler, identity = resolved[0]
        if any(other != resolved[0] for other in resolved):
            deciding = set().union(*(own for _, own in resolved))
            sampler, identity = None, {name: x for name, x in settings.items() if name in deciding}
        part = {"members": len(members)} if len(members) < len(self.members) else {}
        return sampler, identity | part

    def multiply_adds(self, size: int, calls: float, **settings: Any) -> int:
        members, settings = self.asked(settings)  # they share the network calls
        return sum(member.multiply_adds(size, calls / len(members), **settings) for member in members)

    def asked(self, settings: Mapping[str, Any]) -> tuple[tuple[Classifier, ...], dict[str, Any]]:
        own = dict(settings)
        count = coerce(own.pop("members", len(self.members)), Natural, "members")
        if count > len(self.members):
            raise UserError(f"members is {count}, but the ensemble has {len(self.members)}: ask for fewer")
        return self.members[:count], own


class Loss(nn.Module):
    """A module whose forward is the classifier's loss, for wrappers such as DDP that only know `forward`.

    Wrappers for mixed precision round what they are given, which is fine for images but not for targets and random
    numbers: `bits` carries those past them.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: Tensor, *others: Tensor | None) -> Tensor:
        """Mean training loss; `others` are the other arguments of `Classifier.loss`, perhaps as bits."""
        exact: Any = [x if x is None or x.dtype != torch.int32 else x.view(torch.float32) for x in others]
        return self.classifier.loss(image, *exact)

    @staticmethod
    def bits(x: Tensor) -> Tensor:
        """A float32 tensor as the integers that it is made of."""
        return x.float().contiguous().view(torch.int32)


class _Remembering:
    """A score network that keeps the features it encoded first, those of the image itself."""

    features: Features

    def __init__(self, network: ScoreFunction) -> None:
        self._network = network
        self.score = network.score

    def encode(self, image: Tensor) -> Features:
        features = self._network.encode(image)
        self.features = self.__dict__.get("features", features)
        return features


def _pooled(features: Features) -> Tensor:
    """Features as one vector per image (B, D), in float32 or better: maps by their mean and spread per channel."""
    vectors = []
    for x in map(at_least_float32, (features,) if isinstance(features, Tensor) else features):
        x = x.flatten(2) if x.dim() > 2 else x.reshape(*x.shape, *[1] * (3 - x.dim()))  # (B, channels, places)
        vectors += [x.mean(-1), *([x.std(-1, correction=0)] if x.shape[-1] > 1 else [])]
    return torch.cat(vectors, 1)


def _has_features(model: nn.Module) -> bool:
    """Whether a network has timm's parts, and calling it is calling them: no hook or later `forward` does more."""
    model = getattr(model, "_orig_mod", model)  # without torch.compile's wrapper
    parts = ("forward_features", "forward_head")
    if not all(hasattr(model, name) for name in (*parts, "get_classifier")):
        return False
    written = [cls for cls in type(model).__mro__ if "forward" in vars(cls) and cls is not nn.Module]
    overridden = len(written) > 1 and not any(name in vars(written[0]) for name in parts)
    return not overridden and not model._forward_hooks and not model._forward_pre_hooks


def num_classes_of(model: nn.Module) -> int:
    """The number of classes that a network says it has."""
    num_classes = getattr(model, "num_classes", None)
    if not isinstance(num_classes, Integral) or isinstance(num_classes, bool):
        raise UserError(f"{type(model).__name__} does not say how many classes it has: set its num_classes")
    return int(num_classes)

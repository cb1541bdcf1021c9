"""What the server asks of a model, whatever runs it: images and a question in, posteriors out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from didicm.data.picture import Picture
from didicm.errors import UserError

if TYPE_CHECKING:
    from didicm.evaluation.label_sets import ConformalRule
    from didicm.inference.onnx import OnnxPredictor
    from didicm.inference.predictor import Predictor

Probs = np.ndarray[Any, np.dtype[np.floating[Any]]]


@dataclass(frozen=True)
class Question:
    """How images are to be asked about: those that share it can share a batch."""

    steps: int | None = None  # None: as stored with the model
    sampler: str | None = None
    trajectory: bool = False

    def sampler_settings(self) -> dict[str, Any]:
        """The settings of the sampler that it changes."""
        return {key: x for key, x in (("steps", self.steps), ("method", self.sampler)) if x is not None}


@dataclass(frozen=True)
class Answer:
    """What a model says about one image."""

    probs: Probs  # (K,), in the model's order
    conformal_set: list[str] | None  # None if the question is not the one that was calibrated
    trajectory: list[tuple[float, Probs]] | None  # from time 1 to 0, if it was asked for
    outlier_score: float | None = None  # how unlike the training images it is, if that is known
    unlike_training: bool | None = None  # whether that is too much


class Engine(Protocol):
    """A model that is served. `read` is called from several threads at once, `predict` from one."""

    class_names: list[str]
    training_prior: dict[str, Any] | None
    rule: "ConformalRule | None"  # of its conformal sets
    has_trajectory: bool

    def describe(self) -> dict[str, Any]:
        """What a client may know of it: no paths."""

    def check(self, question: Question) -> None:
        """Complain about a question that it cannot answer."""

    def read(self, image: Picture) -> Any:
        """What the network sees of an image."""

    def predict(self, images: Sequence[Any], question: Question) -> list[Answer]:
        """Posteriors of images that `read` made."""


class TorchEngine:
    """A `Predictor` as the server sees it."""

    def __init__(self, predictor: "Predictor") -> None:
        self.predictor = predictor
        self.class_names = predictor.class_names
        self.training_prior, self.rule = predictor.model.checkpoint.training_prior, predictor.rule
        sampler = predictor.model.resolved_sampler
        self.has_trajectory = sampler is not None and sampler.method != "readout"
        self._for = lru_cache(maxsize=32)(self._changed)

    def describe(self) -> dict[str, Any]:
        """Its transform, sampler and calibration."""
        model, rule = self.predictor.model, self.predictor.rule
        sampler = model.resolved_sampler
        return {
            "kind": "standard classifier" if sampler is None else "diffusion classifier",
            "engine": "pytorch",
            "input": {"size": model.transform.size, "channels": model.transform.channels},
            "sampler": None if sampler is None else sampler.identity(),
            "calibrated": self.predictor.calibration is not None,
            "coverage": None if rule is None else 1 - rule.alpha,
        }

    def check(self, question: Question) -> None:
        """Settings of a sampler that it does not have, or a trajectory where there is none."""
        predictor = self._for(replace(question, trajectory=False))
        if question.trajectory:
            predictor.check_trajectory()

    def read(self, image: Picture) -> Any:
        """A normalised tensor (C, H, W)."""
        return self.predictor.read(image)

    def predict(self, images: Sequence[Any], question: Question) -> list[Answer]:
        """Posteriors, after the temperature if the question is the calibrated one."""
        import torch

        predictor = self._for(replace(question, trajectory=False))
        predictions = predictor.predict_batch(torch.stack(list(images)), trajectory=question.trajectory)
        return [
            Answer(
                prediction.probs.double().numpy(),
                prediction.conformal_set,
                None
                if prediction.trajectory is None
                else [(max(time, 0.0), probs.double().numpy()) for time, probs in prediction.trajectory],
                prediction.outlier_score,
                prediction.unlike_training,
            )
            for prediction in predictions
        ]

    def warm_up(self, batch_size: int) -> None:
        """Compile now what batches of any size need, while no client waits."""
        import torch

        transform = self.predictor.model.transform
        while batch_size:
            image = torch.zeros(batch_size, transform.channels, transform.size, transform.size)
            self.predictor.predict_batch(image)
            batch_size //= 2

    def _changed(self, question: Question) -> "Predictor":
        settings = question.sampler_settings()
        return self.predictor.changed(**settings) if settings else self.predictor


class OnnxEngine:
    """An exported model as the server sees it: it answers one question, for which it was exported."""

    has_trajectory = False

    def __init__(self, predictor: "OnnxPredictor") -> None:
        self.predictor, self.class_names = predictor, predictor.class_names
        self.training_prior, self.rule = predictor.metadata.training_prior, predictor.rule

    def describe(self) -> dict[str, Any]:
        """What its file says of itself."""
        metadata, rule = self.predictor.metadata, self.predictor.rule
        return {
            "kind": "diffusion classifier" if metadata.sampler else "standard classifier",
            "engine": "onnxruntime",
            "input": {name: metadata.transform[name] for name in ("size", "channels")},
            "sampler": metadata.sampler[0] if metadata.sampler else None,
            "calibrated": metadata.temperature is not None,
            "coverage": None if rule is None else 1 - rule.alpha,
        }

    def check(self, question: Question) -> None:
        """Any question but the one."""
        if question != Question():
            raise UserError("this model answers as it was exported: leave out steps, sampler and trajectory")

    def read(self, image: Picture) -> Any:
        """8-bit pixels (H, W, C)."""
        return self.predictor.read(image)

    def predict(self, images: Sequence[Any], question: Question) -> list[Answer]:
        """Posteriors, calibrated if the file is."""
        return [
            Answer(
                prediction.probs.astype(np.float64),
                prediction.conformal_set,
                None,
                prediction.outlier_score,
                prediction.unlike_training,
            )
            for prediction in self.predictor.predict_batch(images)
        ]


def check_pixels(image: Picture, pixels: int) -> None:
    """Refuse an image of more pixels than the server takes, before any is decoded."""
    if (found := image.width * image.height) > pixels:
        raise UserError(f"the image has {found:,} pixels: at most {pixels:,} are allowed")

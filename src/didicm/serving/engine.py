"""What the server asks of a model, whatever runs it: images and a question in, predictions out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from didicm.data.picture import Picture
from didicm.errors import UserError
from didicm.inference.prediction import BasePredictor, Prediction


@dataclass(frozen=True)
class Question:
    """How images are to be asked about: those that share it can share a batch."""

    steps: int | None = None  # None: as stored with the model
    sampler: str | None = None
    trajectory: bool = False


class Engine:
    """A model that is served. `read` is called from several threads at once, `predict` from one."""

    def __init__(self, predictor: BasePredictor) -> None:
        self.predictor, self.class_names, self.rule = predictor, predictor.class_names, predictor.rule
        self.training_prior, self.has_trajectory = predictor.training_prior, predictor.has_trajectory
        self._for = lru_cache(maxsize=32)(self._changed)

    def describe(self) -> dict[str, Any]:
        """What a client may know of it."""
        return {**self.predictor.describe(), "coverage": None if self.rule is None else 1 - self.rule.alpha}

    def check(self, question: Question) -> None:
        """Complain about a question that it cannot answer."""
        predictor = self._for(replace(question, trajectory=False))
        if question.trajectory:
            predictor.check_trajectory()

    def read(self, image: Picture) -> Any:
        """What the network sees of an image."""
        return self.predictor.read(image)

    def predict(self, images: Sequence[Any], question: Question) -> list[Prediction]:
        """Predictions for images that `read` made, calibrated if the question is the calibrated one."""
        predictor = self._for(replace(question, trajectory=False))
        return predictor.predict_batch(images, trajectory=question.trajectory)

    def _changed(self, question: Question) -> BasePredictor:
        asked = {"steps": question.steps, "method": question.sampler}
        settings = {name: value for name, value in asked.items() if value is not None}
        return self.predictor.changed(**settings) if settings else self.predictor


def check_pixels(image: Picture, pixels: int) -> None:
    """Refuse an image of more pixels than the server takes, before any is decoded."""
    if (found := image.width * image.height) > pixels:
        raise UserError(f"the image has {found:,} pixels: at most {pixels:,} are allowed")

"""From images to predictions, with all that is stored beside a model: classes, transform, calibration."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from didicm.diffusion import Posterior, Step
from didicm.errors import UserError
from didicm.evaluation.calibration import Calibration, apply_temperature, find_calibration
from didicm.evaluation.stored import StoredModel, open_model
from didicm.inference.adjust import Bools, Prior, Taxonomy, adjusted, kept_rule, make_adjustment, note_on_sets
from didicm.inference.optimize import optimize_for_inference
from didicm.inference.prediction import Prediction, Source, read_source
from didicm.inference.rows import Outliers

Picture: TypeAlias = Source | Tensor  # 8-bit pixels (C, H, W)
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++")


class Predictor:
    """A trained model ready for use: `Predictor.load(directory)("cat.jpg")`."""

    def __init__(
        self,
        model: StoredModel,
        calibration: Calibration | None = None,
        *,
        conformal: str = "lac",
        note: str = "",
        classes: Sequence[str] | None = None,
        prior: Prior | None = None,
        taxonomy: Taxonomy | None = None,
    ) -> None:
        if calibration is not None and calibration.posterior != model.posterior:
            raise UserError("the calibration was fitted with other settings: omit the calibration or the settings")
        if calibration is not None and conformal not in calibration.conformal:
            raise UserError(f"conformal must be one of {', '.join(calibration.conformal)}, got {conformal!r}")
        self.model, self.calibration, self.conformal, self.note = model, calibration, conformal, note
        self.adjusting: dict[str, Any] = {"classes": classes, "prior": prior, "taxonomy": taxonomy}
        known = model.class_names
        self.adjustment = make_adjustment(known, model.checkpoint.training_prior, **self.adjusting)
        self.class_names = known if self.adjustment is None else self.adjustment.names
        self.rule = None
        if calibration is not None:
            self.rule = kept_rule(calibration.conformal[conformal], self.adjustment)
        self.compiled = False
        self.origin: tuple[str, dict[str, Any]] | None = None  # what `load` needs in another process

    @classmethod
    def load(
        cls,
        directory: str | Path,
        device: str | torch.device = "auto",
        *,
        calibrated: bool = True,
        size: int | None = None,
        conformal: str = "lac",
        optimize: bool = False,
        compile: bool = False,
        classes: Sequence[str] | None = None,
        prior: Prior | None = None,
        taxonomy: Taxonomy | None = None,
        **sampler: Any,
    ) -> "Predictor":
        """Load a run's best model, a model directory or `hf://owner/name`.

        Args:
            directory: where the model is.
            device: where it runs; auto takes a GPU if there is one.
            calibrated: apply the calibration stored with the model, if it fits the settings; `note` tells.
            size: pixels, instead of the stored size.
            conformal: lac (small sets) or aps (sets that adapt to the image).
            optimize: the same answers faster, up to rounding: see `optimize_for_inference`.
            compile: the same, and compiled: the first batch then takes a minute.
            classes: those that can occur here: the posterior is renormalised to them.
            prior: how frequent each class is here: by name, uniform, or training, which undoes `balance`.
            taxonomy: coarser names and their classes, whose probabilities are summed.
            sampler: fields of `Sampler` to change, for a diffusion classifier.
        """
        model = open_model(directory, device=device, size=size, sampler=sampler)
        if optimize or compile:
            model = optimized(model, compile=compile)
        calibration, note = None, "calibration left out"
        if calibrated:
            calibration, note = find_calibration(model.place, model.posterior)
        adjusting: dict[str, Any] = {"classes": classes, "prior": prior, "taxonomy": taxonomy}
        predictor = cls(model, calibration, conformal=conformal, note=note, **adjusting)
        if calibration is not None:
            predictor.note += note_on_sets(calibration.conformal[conformal], predictor.adjustment)
        asked = {"calibrated": calibrated, "size": size, "conformal": conformal, "optimize": optimize, **adjusting}
        predictor.origin = str(model.place), {"device": str(device), "compile": compile, **asked, **sampler}
        predictor.compiled = compile
        return predictor

    def changed(self, **sampler: Any) -> "Predictor":
        """The same model asked with other settings of its sampler; a calibration that does not fit is left out."""
        model = replace(self.model, sampler={**self.model.sampler, **sampler})
        calibration, posterior = self.calibration, model.posterior  # a wrong setting shows now
        if calibration is not None and calibration.posterior != posterior:
            note = "calibration left out: it was fitted with other settings"
            return Predictor(model, note=note, **self.adjusting)
        return Predictor(model, calibration, conformal=self.conformal, note=self.note, **self.adjusting)

    @overload
    def __call__(self, images: Picture, *, trajectory: bool = ..., batch_size: int = ...) -> Prediction: ...
    @overload
    def __call__(
        self, images: list[Picture] | tuple[Picture, ...], *, trajectory: bool = ..., batch_size: int = ...
    ) -> list[Prediction]: ...
    def __call__(
        self,
        images: Picture | list[Picture] | tuple[Picture, ...],
        *,
        trajectory: bool = False,
        batch_size: int = 32,
    ) -> Prediction | list[Prediction]:
        """Predict one image, or a list of them: paths, files, bytes, PIL images, or 8-bit pixels."""
        if not isinstance(images, (list, tuple)):
            return self([images], trajectory=trajectory)[0]
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        predictions: list[Prediction] = []
        for start in range(0, len(images), batch_size):
            batch = torch.stack([self.read(image) for image in images[start : start + batch_size]])
            predictions += self.predict_batch(batch, trajectory=trajectory)
        return predictions

    def read(self, image: Picture) -> Tensor:
        """What the network sees of an image (C, H, W): upright, in its channels and size, normalised."""
        if isinstance(image, Tensor):
            image = _tensor_pixels(image)
        return read_source(image, self.model.transform)

    def predict_batch(self, image: Tensor, *, trajectory: bool = False) -> list[Prediction]:
        """Predict images (B, C, H, W) that `read` made."""
        self._check_shape(image)
        if trajectory:
            self.check_trajectory()
        classifier = self.model.classifier
        steps: list[Step] = []
        device = next(classifier.parameters()).device
        callback = steps.append if trajectory else None
        posterior = classifier.posterior(image.to(device), callback, **self.model.sampler)
        probs, sets = self._answer(posterior.probs)
        start = torch.full_like(posterior.probs, 1 / posterior.probs.shape[1])
        path = [(1.0, start), *((step.time, step.probs) for step in steps)] if trajectory else []
        states = [(time, self._answer(state)[0]) for time, state in path]
        outliers = self._outliers(posterior)
        return [
            Prediction.of(
                row,
                self.class_names,
                None if sets is None else sets[i],
                [(time, state[i]) for time, state in states] if trajectory else None,
                *((None, None) if outliers is None else (outliers.scores[i].item(), outliers.unlike[i].item())),
            )
            for i, row in enumerate(probs)
        ]

    def answers(self, image: Tensor) -> tuple[Floats, Bools | None, npt.NDArray[np.int64], Outliers | None]:
        """Probabilities and conformal sets (B, M), network calls (B,) and outliers of images that `read` made."""
        posterior = self.model.classifier.posterior(image, **self.model.sampler)
        calls = torch.full((len(image),), posterior.nfe) if posterior.calls is None else posterior.calls.cpu()
        probs, sets = self._answer(posterior.probs)
        return probs.numpy(), sets, calls.numpy(), self._outliers(posterior)

    def check_trajectory(self) -> None:
        """Complain if the posterior does not come about step by step."""
        sampler = self.model.resolved_sampler
        if sampler is None or sampler.method == "readout":
            kind = "a standard classifier" if sampler is None else "sampler readout"
            raise UserError(f"{kind} answers in one network call: it has no trajectory over diffusion time")

    def _check_shape(self, image: Tensor) -> None:
        transform = self.model.transform
        expected = (transform.channels, transform.size, transform.size)
        if tuple(image.shape[1:]) != expected:
            shape = ", ".join(map(str, expected))
            raise UserError(f"a batch must be of shape (B, C, H, W) = (B, {shape}), got {tuple(image.shape)}")

    def _outliers(self, posterior: Posterior) -> Outliers | None:
        rule = None if self.calibration is None else self.calibration.outliers
        if rule is None or posterior.features is None:
            return None
        scores = rule.scores(posterior.features).numpy()
        return Outliers(scores, scores > rule.threshold)

    def _answer(self, probs: Tensor) -> tuple[Tensor, Bools | None]:
        """Calibrated and adjusted probabilities (N, M) of (N, K), and conformal sets."""
        probs = probs.cpu()
        if self.calibration is not None:
            probs = apply_temperature(probs, self.calibration.temperature)
        found, sets = adjusted(probs.numpy(), self.rule, self.adjustment)
        return torch.from_numpy(found), sets


def optimized(model: StoredModel, *, compile: bool = False) -> StoredModel:
    """The same model with a faster copy of its classifier, in whose place it stands."""
    if compile and model.device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise UserError(
            f"--compile needs a C++ compiler ({' or '.join(COMPILERS[1:])}): install one or leave it out"
        )
    classifier = optimize_for_inference(model.classifier, compile=compile)
    return replace(model, checkpoint=replace(model.checkpoint, classifier=classifier))


def _tensor_pixels(image: Tensor) -> np.ndarray[Any, Any]:
    if image.dtype != torch.uint8 or image.dim() != 3:
        raise UserError(
            f"a tensor must be 8-bit pixels of shape (C, H, W), got {image.dtype} of shape {tuple(image.shape)}: "
            "convert it, give a list of such images, or call the classifier itself"
        )
    return image.permute(1, 2, 0).cpu().numpy()

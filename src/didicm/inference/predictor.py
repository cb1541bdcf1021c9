"""From images to predictions, with all that is stored beside a model: classes, transform, calibration."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from didicm.diffusion import Step
from didicm.errors import UserError
from didicm.evaluation.calibration import Calibration, apply_temperature, find_calibration
from didicm.evaluation.stored import StoredModel, open_model
from didicm.inference.fuse import optimize_for_inference
from didicm.inference.prediction import Prediction, Source, read_source

Picture: TypeAlias = Source | Tensor  # 8-bit pixels (C, H, W)
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++")


class Predictor:
    """A trained model ready for use: `Predictor.load(directory)("cat.jpg")`."""

    def __init__(
        self, model: StoredModel, calibration: Calibration | None = None, *, conformal: str = "lac", note: str = ""
    ) -> None:
        if calibration is not None and calibration.posterior != model.posterior:
            raise UserError("the calibration was fitted with other settings: leave it or the settings out")
        if calibration is not None and conformal not in calibration.conformal:
            raise UserError(f"conformal must be one of {', '.join(calibration.conformal)}, got {conformal!r}")
        self.model, self.calibration, self.conformal, self.note = model, calibration, conformal, note
        self.rule = None if calibration is None else calibration.conformal[conformal]
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
            sampler: fields of `Sampler` to change, for a diffusion classifier.
        """
        model = open_model(directory, device=device, size=size, sampler=sampler)
        if optimize or compile:
            model = optimized(model, compile=compile)
        calibration, note = None, "calibration left out"
        if calibrated:
            calibration, note = find_calibration(model.place, model.posterior)
        predictor = cls(model, calibration, conformal=conformal, note=note)
        asked = {"calibrated": calibrated, "size": size, "conformal": conformal, "optimize": optimize}
        predictor.origin = str(model.place), {"device": str(device), "compile": compile, **asked, **sampler}
        predictor.compiled = compile
        return predictor

    def changed(self, **sampler: Any) -> "Predictor":
        """The same model asked with other settings of its sampler; a calibration that does not fit is left out."""
        model = replace(self.model, sampler={**self.model.sampler, **sampler})
        calibration, posterior = self.calibration, model.posterior  # a wrong setting shows now
        if calibration is not None and calibration.posterior != posterior:
            return Predictor(model, note="calibration left out: it was fitted with other settings")
        return Predictor(model, calibration, conformal=self.conformal, note=self.note)

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
        if trajectory:
            self.check_trajectory()
        classifier = self.model.classifier
        steps: list[Step] = []
        device = next(classifier.parameters()).device
        callback = steps.append if trajectory else None
        posterior = classifier.posterior(image.to(device), callback, **self.model.sampler)
        probs = self._calibrate(posterior.probs)
        start = torch.full_like(probs, 1 / probs.shape[1])
        states = [(1.0, start), *((step.time, self._calibrate(step.probs)) for step in steps)]
        sets = None if self.rule is None else self.rule.sets(probs)
        return [
            Prediction.of(
                row,
                self.model.class_names,
                None if sets is None else sets[i],
                [(time, state[i]) for time, state in states] if trajectory else None,
            )
            for i, row in enumerate(probs)
        ]

    def posteriors(self, image: Tensor) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Calibrated probabilities (B, K) of images (B, C, H, W) that `read` made, and the network calls (B,)."""
        posterior = self.model.classifier.posterior(image, **self.model.sampler)
        calls = torch.full((len(image),), posterior.nfe) if posterior.calls is None else posterior.calls.cpu()
        return self._calibrate(posterior.probs).numpy(), calls.numpy()

    def check_trajectory(self) -> None:
        """Complain if the posterior does not come about step by step."""
        sampler = self.model.resolved_sampler
        if sampler is None or sampler.method == "readout":
            kind = "a standard classifier" if sampler is None else "sampler readout"
            raise UserError(f"{kind} answers in one network call: it has no trajectory over diffusion time")

    def _calibrate(self, probs: Tensor) -> Tensor:
        probs = probs.cpu()
        return probs if self.calibration is None else apply_temperature(probs, self.calibration.temperature)


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

"""From image files to predictions, with all that is stored beside a model: classes, transform, calibration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from PIL import Image
from torch import Tensor

from didicm.checkpoint import Checkpoint, load
from didicm.data import UnreadableImageError
from didicm.data.images import open_image, readable
from didicm.diffusion import Step
from didicm.errors import UserError
from didicm.evaluation.calibration import apply_temperature
from didicm.evaluation.run import (
    Calibration,
    describe_posterior,
    find_calibration,
    model_directory,
    resolve_sampler,
    view_of,
)

Picture: TypeAlias = str | Path | Image.Image


@dataclass(frozen=True)
class Prediction:
    """What a model says about one image."""

    classes: list[tuple[str, float]]  # all class names with their probabilities, the most probable first
    entropy: float  # of the posterior, in nats
    conformal_set: list[str] | None  # classes that hold the true one as often as was calibrated; None without
    probs: Tensor  # (K,), in the model's order
    # From time 1 to 0, each with probabilities (K,), after the same temperature; None unless asked for.
    trajectory: list[tuple[float, Tensor]] | None = None


class Predictor:
    """A trained model ready for use: `Predictor.load(directory)("cat.jpg")`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        calibration: Calibration | None = None,
        *,
        device: str | torch.device = "cpu",
        conformal: str = "lac",
        note: str = "",
        **settings: Any,
    ) -> None:
        self.classifier = checkpoint.classifier.to(device).eval()
        self.sampler = resolve_sampler(self.classifier, settings)
        self.view = view_of(checkpoint)
        self.class_names = checkpoint.class_names or [str(k) for k in range(self.classifier.num_classes)]
        if calibration is not None and calibration.posterior != describe_posterior(checkpoint, settings):
            raise UserError("the calibration was fitted with other settings: leave it or the settings out")
        if calibration is not None and conformal not in calibration.conformal:
            raise UserError(f"conformal must be one of {', '.join(calibration.conformal)}, got {conformal!r}")
        self.calibration, self.note = calibration, note
        self.rule = None if calibration is None else calibration.conformal[conformal]
        self._settings, self._device = settings, torch.device(device)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        device: str | torch.device = "cpu",
        *,
        calibrated: bool = True,
        size: int | None = None,
        conformal: str = "lac",
        **settings: Any,
    ) -> "Predictor":
        """Load a run's best model, a model directory or `hf://owner/name`.

        Args:
            directory: where the model is.
            device: where it runs.
            calibrated: apply the calibration stored with the model, if it fits the settings; `note` tells.
            size: pixels, instead of the stored size.
            conformal: lac (small sets) or aps (sets that adapt to the image).
            settings: fields of `Sampler` to change, for a diffusion classifier.
        """
        place = model_directory(directory)
        checkpoint = load(place)
        if size is not None:
            checkpoint = replace(checkpoint, transform=view_of(checkpoint, size).to_dict())
        calibration, note = None, "calibration left out"
        if calibrated:
            calibration, note = find_calibration(place, checkpoint, settings)
        return cls(checkpoint, calibration, device=device, conformal=conformal, note=note, **settings)

    def check_trajectory(self) -> None:
        """Complain if the posterior does not come about step by step."""
        if self.sampler is None or self.sampler.method == "readout":
            kind = "a standard classifier" if self.sampler is None else "sampler readout"
            raise UserError(f"{kind} answers in one network call: it has no trajectory over diffusion time")

    @overload
    def __call__(self, images: Picture, *, trajectory: bool = ..., batch_size: int = ...) -> Prediction: ...
    @overload
    def __call__(
        self, images: Sequence[Picture], *, trajectory: bool = ..., batch_size: int = ...
    ) -> list[Prediction]: ...
    def __call__(
        self, images: Picture | Sequence[Picture], *, trajectory: bool = False, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """Predict one image, or a list of them, given as paths or PIL images."""
        if isinstance(images, (str, Path, Image.Image)):
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
        try:
            if isinstance(image, Image.Image):
                return self.view(image)
            with open_image(image) as opened:
                return self.view(opened)
        except Exception as error:  # a broken file can raise nearly anything from inside a decoder
            name = "an image" if isinstance(image, Image.Image) else readable(str(image))
            reason = "no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
            reason = reason or type(error).__name__
            raise UnreadableImageError(f"{name} cannot be read as an image ({reason})") from error

    def predict_batch(self, image: Tensor, *, trajectory: bool = False) -> list[Prediction]:
        """Predict images (B, C, H, W) that `read` made."""
        if trajectory:
            self.check_trajectory()
        steps: list[Step] = []
        callback = steps.append if trajectory else None
        posterior = self.classifier.posterior(image.to(self._device), callback, **self._settings)
        probs = self._calibrate(posterior.probs)
        start = torch.full_like(probs, 1 / probs.shape[1])
        states = [(1.0, start), *((step.time, self._calibrate(step.probs)) for step in steps)]
        sets = None if self.rule is None else self.rule.sets(probs)
        return [
            self._describe(
                row,
                None if sets is None else sets[i],
                [(time, state[i]) for time, state in states] if trajectory else None,
            )
            for i, row in enumerate(probs)
        ]

    def _calibrate(self, probs: Tensor) -> Tensor:
        probs = probs.cpu()
        return probs if self.calibration is None else apply_temperature(probs, self.calibration.temperature)

    def _describe(
        self, probs: Tensor, inside: Tensor | None, trajectory: list[tuple[float, Tensor]] | None
    ) -> Prediction:
        order = probs.argsort(descending=True, stable=True).tolist()
        values = probs.tolist()
        return Prediction(
            classes=[(self.class_names[k], values[k]) for k in order],
            entropy=math.fsum(-p * math.log(p) for p in values if p > 0),
            conformal_set=None if inside is None else [self.class_names[k] for k in order if inside[k]],
            probs=probs,
            trajectory=trajectory,
        )

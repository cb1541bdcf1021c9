"""From images to predictions, with all that is stored beside a model: classes, transform, calibration."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from didicm.checkpoint import HUB
from didicm.data import EvalTransform
from didicm.data.loader import batch_loader, started
from didicm.data.picture import Picture
from didicm.diffusion import Posterior, Step
from didicm.errors import UserError
from didicm.evaluation.calibration import Calibration, apply_temperature, find_calibration, weights_digest
from didicm.evaluation.stored import StoredModel, open_model
from didicm.inference.adjust import Bools, Prior, Taxonomy, adjusted
from didicm.inference.optimize import optimize_for_inference
from didicm.inference.prediction import Answers, Array, BasePredictor, Batch, Source, Work, decode
from didicm.inference.rows import Outliers

COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++")


class Predictor(BasePredictor):
    """A trained model ready for use: `Predictor.load(directory)("cat.jpg")`."""

    compiled = False

    def __init__(self, model: StoredModel, calibration: Calibration | None = None, **asked: Any) -> None:
        if calibration is not None and calibration.posterior != model.posterior:
            raise UserError("the calibration was fitted with other settings: omit the calibration or the settings")
        rules = {} if calibration is None else calibration.conformal
        super().__init__(model.class_names, model.checkpoint.training_prior, rules, **asked)
        self.model, self.calibration, self.calls = model, calibration, model.calls
        self.on_cpu = model.device.type == "cpu"
        self.scores_outliers = calibration is not None and calibration.outliers is not None
        sampler = model.resolved_sampler
        self.has_trajectory = sampler is not None and sampler.method != "readout"

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
        model: nn.Module | None = None,
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
            model: your own network, for a model that was saved with one.
            sampler: fields of `Sampler` to change, for a diffusion classifier.
        """
        stored = open_model(directory, device=device, size=size, sampler=sampler, model=model)
        if optimize or compile:
            stored = optimized(stored, compile=compile)
        calibration, note = None, "calibration left out"
        if calibrated:
            calibration, note = find_calibration(stored.place, stored.posterior)
        adjusting: dict[str, Any] = {"classes": classes, "prior": prior, "taxonomy": taxonomy}
        predictor = cls(stored, calibration, conformal=conformal, note=note, **adjusting)
        asked = {"calibrated": calibrated, "size": size, "conformal": conformal, "optimize": optimize, **adjusting}
        asked |= {"device": str(device), "compile": compile, "model": model, **sampler}
        predictor.origin = str(stored.place), asked
        predictor.compiled = compile
        return predictor

    def changed(self, **sampler: Any) -> "Predictor":
        """The same model asked with other settings of its sampler; a calibration that does not fit is left out."""
        model = replace(self.model, sampler={**self.model.sampler, **sampler})
        posterior = model.posterior  # a wrong setting shows now
        fits = self.calibration is None or self.calibration.posterior == posterior
        calibration = self.calibration if fits else None
        predictor = Predictor(model, calibration, conformal=self.conformal, **self.adjusting)
        predictor.note = self.note if fits else "calibration left out: it was fitted with other settings"
        return predictor

    def warm_up(self, batch_size: int) -> None:
        """Compile now what batches of up to this size need, while nobody waits."""
        transform = self.model.transform
        while batch_size:
            self.predict_batch(torch.zeros(batch_size, transform.channels, transform.size, transform.size))
            batch_size //= 2

    def read(self, image: Source | Tensor) -> Tensor:
        """What the network sees of an image (C, H, W): upright, in its channels and size, normalised."""
        seen: Tensor = super().read(_tensor_pixels(image) if isinstance(image, Tensor) else image)
        return seen

    def prepare(self, image: Picture) -> Array:
        return _pixels(self.model.transform, image)

    def see(self, image: Picture) -> Tensor:
        return self.model.transform(image)

    def answers(self, images: Tensor | Sequence[Tensor], *, trajectory: bool = False) -> Answers:
        """Answers about images (B, C, H, W) that `read` made."""
        image = images if isinstance(images, Tensor) else torch.stack(list(images))
        self._check_shape(image)
        steps: list[Step] = []
        callback = steps.append if trajectory else None
        posterior = self.model.classifier.posterior(image.to(self.model.device), callback, **self.model.sampler)
        calls = torch.full((len(image),), posterior.nfe) if posterior.calls is None else posterior.calls.cpu()
        probs, sets = self._answer(posterior.probs)
        start = torch.full_like(posterior.probs, 1 / posterior.probs.shape[1])
        path = [(1.0, start), *((step.time, step.probs) for step in steps)] if trajectory else []
        states = [(time, self._answer(state)[0]) for time, state in path]
        return Answers(probs, sets, calls.numpy(), self._outliers(posterior), states)

    def answer_pixels(self, pixels: Tensor | Array, batch_size: int) -> Answers:
        pixels = torch.as_tensor(pixels).to(self.model.device, non_blocking=True)
        count = len(pixels)
        if self.compiled and count < batch_size:  # another shape would be compiled anew
            pixels = torch.cat([pixels, pixels.new_zeros(batch_size - count, *pixels.shape[1:])])
        probs, sets, nfe, outliers, _ = self.answers(self.model.transform.finish(pixels.permute(0, 3, 1, 2)))
        kept = None if outliers is None else Outliers(outliers.scores[:count], outliers.unlike[:count])
        return Answers(probs[:count], None if sets is None else sets[:count], nfe[:count], kept)

    def decoded(self, work: Iterable[Work], workers: int) -> Iterator[Batch]:
        """Batches of images, decoded ahead by so many processes."""
        return started(batch_loader(_Decoder(self.model.transform), work, workers, self.model.device))

    def check_trajectory(self) -> None:
        if not self.has_trajectory:
            kind = "a standard classifier" if self.model.resolved_sampler is None else "sampler readout"
            raise UserError(f"{kind} answers in one network call: it has no trajectory over diffusion time")

    def describe(self) -> dict[str, Any]:
        sampler, transform = self.model.resolved_sampler, self.model.transform
        return {
            "kind": "standard classifier" if sampler is None else "diffusion classifier",
            "engine": "pytorch",
            "input": {"size": transform.size, "channels": transform.channels},
            "sampler": None if sampler is None else sampler.identity(),
            "calibrated": self.calibration is not None,
        }

    def identity(self) -> dict[str, Any]:
        place, rule, calibration = str(self.model.place), self.rule, self.calibration
        sampler, resolved = self.model.classifier.resolve(**self.model.sampler)
        outliers = None if calibration is None else calibration.outliers
        return {
            "model": place if place.startswith(HUB) else weights_digest(Path(place)),
            "transform": self.model.transform.to_dict(),
            "sampler": {**({} if sampler is None else asdict(sampler)), **resolved} or None,
            "calibration": None if calibration is None else [calibration.temperature, rule and rule.to_dict()],
            **({} if outliers is None else {"outliers": outliers.to_dict()}),
        }

    def _check_shape(self, image: Tensor) -> None:
        transform = self.model.transform
        expected = (transform.channels, transform.size, transform.size)
        if tuple(image.shape[1:]) != expected or image.dtype != torch.float32:
            shape = ", ".join(map(str, expected))
            raise UserError(
                f"a batch must be float32 of shape (B, C, H, W) = (B, {shape}), got {image.dtype} of shape "
                f"{tuple(image.shape)}: make it of what read returns"
            )

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


class _Decoder(Dataset[Batch]):
    """What a worker process does: it is given the images of a batch, and keeps nothing."""

    def __init__(self, transform: EvalTransform) -> None:
        self._transform = transform

    def __getitem__(self, work: Work) -> Batch:
        batch = decode(work, partial(_pixels, self._transform))
        return batch._replace(pixels=torch.from_numpy(batch.pixels))


def _pixels(transform: EvalTransform, image: Picture) -> Array:
    return np.asarray(transform.prepare(image)).reshape(transform.size, transform.size, -1)


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

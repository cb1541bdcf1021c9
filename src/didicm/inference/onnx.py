"""Run a model that `didicm export` wrote: by ONNX Runtime, without PyTorch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from didicm.data.decode import resize_and_crop, to_channels
from didicm.data.picture import Picture
from didicm.errors import UserError, did_you_mean, reason
from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.adjust import Bools, Prior, Taxonomy, adjusted, kept_rule, make_adjustment, note_on_sets
from didicm.inference.prediction import Array, Prediction, Source, read_source
from didicm.inference.rows import Floats, Outliers

SUFFIX = ".onnx"
FORMAT = 1
# uint8 (B, H, W, C) in; float32 (B, K) and, where the model has an outlier score, float64 (B,) out
IMAGE, PROBS, SCORE = "image", "probs", "outlier_score"


@dataclass(frozen=True)
class Metadata:
    """What an exported model says of itself: each field is one entry of the file's metadata, as JSON."""

    class_names: list[str]
    transform: dict[str, Any]  # how an image becomes `IMAGE`, but for the normalisation, which is in the graph
    sampler: list[dict[str, Any]]  # that the graph unrolls: one per member of an ensemble, none without diffusion
    schedule: list[dict[str, Any]]  # of the noise, likewise
    temperature: float | None  # that the graph applies
    conformal: dict[str, Any]  # rules for sets of classes, by name
    versions: dict[str, str]
    training_prior: dict[str, Any] | None = None  # as in a model's config; older files lack it
    outliers: dict[str, Any] | None = None  # threshold of `SCORE`, and its false alarms; likewise
    nfe: int | None = None  # network calls per image; likewise
    format: int = FORMAT

    def to_strings(self) -> dict[str, str]:
        """As ONNX stores it."""
        return {name: json.dumps(value, ensure_ascii=False) for name, value in vars(self).items()}

    @classmethod
    def from_strings(cls, strings: dict[str, str]) -> "Metadata":
        """As ONNX stores it; what is missing or unknown is an error."""
        metadata = cls(**{name: json.loads(text) for name, text in strings.items()})
        if metadata.format != FORMAT:
            raise ValueError("this version of didicm does not read its format")
        return metadata

    @property
    def calls(self) -> int:
        """Network calls per image; older files say it only of diffusion."""
        return self.nfe or sum(sampler.get("steps", 1) for sampler in self.sampler) or 1

    @property
    def outlier_threshold(self) -> float | None:
        """The score above which an image is unlike the training images."""
        return None if self.outliers is None else float(self.outliers["threshold"])


class OnnxPredictor:
    """An exported model ready for use, as `Predictor` is: `OnnxPredictor.load("model.onnx")("cat.jpg")`."""

    def __init__(
        self,
        session: Any,
        metadata: Metadata,
        path: Path,
        *,
        conformal: str = "lac",
        note: str = "",
        classes: Sequence[str] | None = None,
        prior: Prior | None = None,
        taxonomy: Taxonomy | None = None,
    ) -> None:
        self.session, self.metadata, self.note = session, metadata, note
        self.path, self.adjusting = path, {"classes": classes, "prior": prior, "taxonomy": taxonomy}
        self.adjustment = make_adjustment(
            metadata.class_names, metadata.training_prior, classes=classes, prior=prior, taxonomy=taxonomy
        )
        self.class_names = metadata.class_names if self.adjustment is None else self.adjustment.names
        rules = {name: ConformalRule.from_dict(rule) for name, rule in metadata.conformal.items()}
        if rules and conformal not in rules:
            raise UserError(f"there are no conformal sets {conformal!r}: {did_you_mean(conformal, rules)}")
        self.rule = kept_rule(rules.get(conformal), self.adjustment)
        self.note += note_on_sets(rules.get(conformal), self.adjustment)

    @classmethod
    def load(
        cls, path: str | Path, device: str = "auto", *, conformal: str = "lac", **adjusting: Any
    ) -> "OnnxPredictor":
        """Open a file of `didicm export`.

        Args:
            path: the file.
            device: cpu or cuda; auto takes a GPU if this ONNX Runtime can use one.
            conformal: lac (small sets) or aps (sets that adapt to the image).
            adjusting: classes, prior and taxonomy, as for `Predictor.load`.
        """
        session = _open_session(Path(path), device)
        try:
            metadata = Metadata.from_strings(session.get_modelmeta().custom_metadata_map)
            calibrated = "not calibrated" if metadata.temperature is None else "calibrated"
            scored = SCORE in (output.name for output in session.get_outputs())
            if scored != (metadata.outlier_threshold is not None):
                raise ValueError("its outlier score and its threshold do not belong together")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} is not a model that didicm export wrote ({reason(error)}): export it again"
            ) from error
        note = f"{path}: as exported, {calibrated}"
        return cls(session, metadata, Path(path), conformal=conformal, note=note, **adjusting)

    @overload
    def __call__(self, images: Source, *, batch_size: int = ...) -> Prediction: ...
    @overload
    def __call__(
        self, images: list[Source] | tuple[Source, ...], *, batch_size: int = ...
    ) -> list[Prediction]: ...
    def __call__(
        self, images: Source | list[Source] | tuple[Source, ...], *, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """Predict one image, or a list of them: paths, files, bytes, PIL images, or 8-bit pixels."""
        if not isinstance(images, (list, tuple)):
            return self([images])[0]
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        predictions: list[Prediction] = []
        for start in range(0, len(images), batch_size):
            predictions += self.predict_batch([self.read(image) for image in images[start : start + batch_size]])
        return predictions

    def read(self, image: Source) -> Array:
        """What the graph takes of an image: upright, in its channels and size, 8-bit pixels (H, W, C)."""
        return read_source(image, self.prepare)

    def prepare(self, image: Picture) -> Array:
        """`read` of an opened image."""
        transform = self.metadata.transform
        size, image = transform["size"], to_channels(image, transform["channels"])
        image = resize_and_crop(image, size, transform["crop_pct"], transform["interpolation"])
        return np.asarray(image).reshape(size, size, -1)

    def posterior(self, images: Array) -> tuple[Array, Array | None]:
        """P(class | image), (B, K), and outlier scores (B,) of images (B, H, W, C) that `read` made."""
        outputs = [PROBS] if self.metadata.outliers is None else [PROBS, SCORE]
        found: list[Array] = self.session.run(outputs, {IMAGE: images})
        if not all(np.isfinite(values).all() for values in found):
            raise FloatingPointError("the model answered with numbers that are not finite: its weights are broken")
        return found[0], found[1] if len(found) > 1 else None

    def answers(self, images: Array) -> tuple[Floats, Bools | None, Outliers | None]:
        """Adjusted probabilities and conformal sets (B, M), and outliers, of images that `read` made."""
        probs, scores = self.posterior(images)
        threshold = self.metadata.outlier_threshold
        outliers = None if scores is None or threshold is None else Outliers(scores, scores > threshold)
        return *adjusted(probs, self.rule, self.adjustment), outliers

    def predict_batch(self, images: Sequence[Array]) -> list[Prediction]:
        """Predict images that `read` made."""
        probs, sets, outliers = self.answers(np.stack(images))
        return [
            Prediction.of(
                row,
                self.class_names,
                None if sets is None else sets[i],
                None,
                *((None, None) if outliers is None else (outliers.scores[i].item(), outliers.unlike[i].item())),
            )
            for i, row in enumerate(probs)
        ]


def _open_session(path: Path, device: str) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise UserError(f'{path} needs ONNX Runtime: pip install "didicm[onnx]"') from error
    if not path.is_file():
        raise UserError(f"{path} is not a file: give one that didicm export wrote")
    known = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    usable = [name for name, provider in known.items() if provider in onnxruntime.get_available_providers()]
    if device != "auto" and device not in usable:
        raise UserError(f"device {device} cannot be used by this ONNX Runtime: try {' or '.join(usable)}")
    chosen = reversed(usable) if device == "auto" else [device]
    try:
        return onnxruntime.InferenceSession(path, providers=[known[name] for name in chosen])
    except Exception as error:  # its errors have no common base
        raise UserError(f"{path} cannot be opened by ONNX Runtime ({reason(error)}): export it again") from error

"""Run a model that `didicm export` wrote: by ONNX Runtime, without PyTorch."""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from didicm.data.decode import resize_and_crop, to_channels
from didicm.data.picture import Picture
from didicm.errors import UserError, reason
from didicm.evaluation.label_sets import ConformalRule
from didicm.files import sha256
from didicm.inference.adjust import adjusted
from didicm.inference.prediction import Answers, Array, BasePredictor, Batch, Work, decode
from didicm.inference.rows import Outliers

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


class OnnxPredictor(BasePredictor):
    """An exported model ready for use, as `Predictor` is: `OnnxPredictor.load("model.onnx")("cat.jpg")`."""

    def __init__(self, session: Any, metadata: Metadata, path: Path, **asked: Any) -> None:
        rules = {name: ConformalRule.from_dict(rule) for name, rule in metadata.conformal.items()}
        super().__init__(metadata.class_names, metadata.training_prior, rules, **asked)
        self.session, self.metadata, self.path = session, metadata, path
        self.on_cpu = "CUDAExecutionProvider" not in session.get_providers()
        self.scores_outliers, self.calls = metadata.outliers is not None, metadata.calls

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

    def prepare(self, image: Picture) -> Array:
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

    def answers(self, images: Array | Sequence[Array], *, trajectory: bool = False) -> Answers:
        """Answers about images (B, H, W, C) that `read` made."""
        probs, scores = self.posterior(np.asarray(images))
        threshold = self.metadata.outlier_threshold
        outliers = None if scores is None or threshold is None else Outliers(scores, scores > threshold)
        calls = np.full(len(probs), self.metadata.calls)
        return Answers(*adjusted(probs, self.rule, self.adjustment), calls, outliers)

    def answer_pixels(self, pixels: Array, batch_size: int) -> Answers:
        return self.answers(pixels)

    def decoded(self, work: Iterable[Work], workers: int) -> Iterator[Batch]:
        """Batches of images, each decoded by so many threads: decoders release Python's lock."""
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for images in work:
                yield decode(images, self.prepare, pool.map)

    def describe(self) -> dict[str, Any]:
        metadata = self.metadata
        return {
            "kind": "diffusion classifier" if metadata.sampler else "standard classifier",
            "engine": "onnxruntime",
            "input": {name: metadata.transform[name] for name in ("size", "channels")},
            "sampler": metadata.sampler[0] if metadata.sampler else None,
            "calibrated": metadata.temperature is not None,
        }

    def identity(self) -> dict[str, Any]:
        return {"model": sha256(self.path), "conformal": self.rule and self.rule.to_dict()}


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

"""What a model says about an image, and which images it can be asked about; shared by all ways to run a model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
from PIL import Image

from didicm.data import UnreadableImageError, open_image, readable
from didicm.data.listing import ImageRef
from didicm.data.picture import MOST_CHANNELS, Bands, Picture, from_array
from didicm.errors import UserError, did_you_mean, reason
from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.adjust import Bools, Prior, Taxonomy, kept_rule, make_adjustment, note_on_sets
from didicm.inference.rows import Outliers

FIXED = "this model answers as it was exported: leave out steps, sampler and trajectory"
T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, Any]
# A path, an open file or its bytes, a PIL image, or 8-bit pixels (H, W) or (H, W, C).
Source: TypeAlias = str | Path | bytes | IO[bytes] | Picture | Array
Work: TypeAlias = tuple[int, bool, list[ImageRef]]  # a part's number, whether these are its last images, and they


@dataclass(frozen=True)
class Prediction:
    """What a model says about one image. Numbers come as tensors, or as arrays from an exported model."""

    classes: list[tuple[str, float]]  # all class names with their probabilities, the most probable first
    entropy: float  # of the posterior, in nats
    conformal_set: list[str] | None  # classes that hold the true one as often as was calibrated, or None
    probs: Any  # (K,), in the model's order
    # From time 1 to 0, each with probabilities (K,), after the same temperature; None unless asked for.
    trajectory: list[tuple[float, Any]] | None = None
    outlier_score: float | None = None  # how unlike the training images it is; None if that is not known
    unlike_training: bool | None = None  # whether that is too much to rely on the probabilities, or to have a set

    @classmethod
    def of(
        cls,
        probs: Any,
        class_names: Sequence[str],
        inside: Any = None,
        trajectory: list[tuple[float, Any]] | None = None,
        outlier_score: float | None = None,
        unlike_training: bool | None = None,
    ) -> "Prediction":
        """Describe probabilities (K,), of which `inside` (K,) says what is in the conformal set.

        No set covers the truth of an image that is unlike the training images, so such an image has none.
        """
        values: list[float] = probs.tolist()
        order = sorted(range(len(values)), key=lambda k: -values[k])  # of equals the first comes first
        covered = inside is not None and not unlike_training
        return cls(
            classes=[(class_names[k], values[k]) for k in order],
            entropy=entropy(values),
            conformal_set=[class_names[k] for k in order if inside[k]] if covered else None,
            probs=probs,
            trajectory=trajectory,
            outlier_score=outlier_score,
            unlike_training=unlike_training,
        )

    def to_record(self, top: int, claimed: str | None) -> dict[str, Any]:
        """As JSON, with the `top` classes, and with what is claimed of the conformal set if there is one."""
        return {
            "classes": [{"name": name, "probability": p} for name, p in self.classes[:top]],
            "entropy": self.entropy,
            "outlier_score": self.outlier_score,
            "unlike_training": self.unlike_training,
            "conformal_set": self.conformal_set,
            "conformal_claim": None if self.conformal_set is None else claimed,
        }


def entropy(probs: Iterable[float]) -> float:
    """In nats."""
    return max(0.0, math.fsum(-p * math.log(p) for p in probs if p > 0))


class Answers(NamedTuple):
    """What a model says about B images."""

    probs: Any  # (B, M), a tensor or an array
    sets: Bools | None  # (B, M), which classes are in the conformal sets
    nfe: npt.NDArray[np.int64]  # (B,), network calls
    outliers: Outliers | None
    states: Sequence[tuple[float, Any]] = ()  # times from 1 to 0, each with probabilities (B, M), if asked for


class Batch(NamedTuple):
    """Decoded images of one part; those that could not be read are black."""

    part: int
    last: bool  # of the part
    names: list[str]
    errors: list[str | None]
    pixels: Any  # (B, H, W, C), uint8, a tensor or an array


class BasePredictor(ABC):
    """A model ready for use, whatever runs it; as declared here, one that answers as it was exported."""

    has_trajectory = False  # whether the posterior comes about step by step
    on_cpu: bool  # whether it shares the cores with the decoding of images
    scores_outliers: bool  # whether it knows how unlike the training images an image is
    calls: int  # of the network per image, unless an early stop saves some
    origin: tuple[str, dict[str, Any]] | None = None  # what `load` needs in another process

    def __init__(
        self,
        class_names: list[str],
        training_prior: Mapping[str, Any] | None,
        rules: Mapping[str, ConformalRule],
        *,
        conformal: str = "lac",
        note: str = "",
        classes: Sequence[str] | None = None,
        prior: Prior | None = None,
        taxonomy: Taxonomy | None = None,
    ) -> None:
        if rules and conformal not in rules:
            raise UserError(f"there are no conformal sets {conformal!r}: {did_you_mean(conformal, rules)}")
        self.conformal, self.training_prior = conformal, training_prior
        self.adjusting: dict[str, Any] = {"classes": classes, "prior": prior, "taxonomy": taxonomy}
        self.adjustment = make_adjustment(class_names, training_prior, **self.adjusting)
        self.class_names = class_names if self.adjustment is None else self.adjustment.names
        self.rule = kept_rule(rules.get(conformal), self.adjustment)
        self.note = note + note_on_sets(rules.get(conformal), self.adjustment)

    @abstractmethod
    def prepare(self, image: Picture) -> Array:
        """8-bit pixels (H, W, C) of an image: upright, in the model's channels and size."""

    def see(self, image: Picture) -> Any:
        """What the model is asked about: by default the pixels."""
        return self.prepare(image)

    @abstractmethod
    def answers(self, images: Any, *, trajectory: bool = False) -> Answers:
        """Answers about images that `see` or `read` made."""

    @abstractmethod
    def answer_pixels(self, pixels: Any, batch_size: int) -> Answers:
        """Answers about pixels (B, H, W, C); `batch_size` is the usual B."""

    @abstractmethod
    def decoded(self, work: Iterable[Work], workers: int) -> Iterator[Batch]:
        """Batches of images, decoded ahead by so many workers."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What anybody may know of the model: no paths."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All of the model that decides its answers, rounding apart; for JSON."""

    def changed(self, **sampler: Any) -> "BasePredictor":
        """The same model asked with other settings of its sampler."""
        raise UserError(FIXED)

    def check_trajectory(self) -> None:
        """Complain if the posterior does not come about step by step."""
        raise UserError(FIXED)

    @overload
    def __call__(
        self, images: list[Any] | tuple[Any, ...], *, trajectory: bool = ..., batch_size: int = ...
    ) -> list[Prediction]: ...
    @overload
    def __call__(self, images: Any, *, trajectory: bool = ..., batch_size: int = ...) -> Prediction: ...
    def __call__(
        self, images: Any, *, trajectory: bool = False, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """Predict one image, or a list of them: paths, files, bytes, PIL images, or 8-bit pixels."""
        if not isinstance(images, (list, tuple)):
            alone: list[Prediction] = self([images], trajectory=trajectory)
            return alone[0]
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        predictions: list[Prediction] = []
        for start in range(0, len(images), batch_size):
            try:
                batch = [self.read(image) for image in images[start : start + batch_size]]
            except UnreadableImageError as error:
                if len(images) == 1:
                    raise
                remedy = "leave it out, or use didicm.predict, which writes the error into that image's row"
                raise UnreadableImageError(f"{error}: {remedy}") from error
            predictions += self.predict_batch(batch, trajectory=trajectory)
        return predictions

    def read(self, image: Source) -> Any:
        """What `predict_batch` takes of an image; one that cannot be read is told by its name."""
        return read_source(image, self.see)

    def predict_batch(self, images: Any, *, trajectory: bool = False) -> list[Prediction]:
        """Predict images that `read` made."""
        if trajectory:
            self.check_trajectory()
        found = self.answers(images, trajectory=trajectory)
        outliers: list[Any] = [(None, None)] * len(found.probs)
        if found.outliers is not None:
            outliers = list(zip(*(values.tolist() for values in found.outliers), strict=True))
        return [
            Prediction.of(
                row,
                self.class_names,
                None if found.sets is None else found.sets[i],
                [(time, state[i]) for time, state in found.states] if trajectory else None,
                *outliers[i],
            )
            for i, row in enumerate(found.probs)
        ]


def decode(work: Work, prepare: Callable[[Picture], Array], each: Callable[..., Iterable[Any]] = map) -> Batch:
    """Decode the images of a batch to pixels, `each` by itself."""
    part, last, images = work
    read: list[Array | str] = list(each(partial(read_or_error, prepare), images))
    seen = [found for found in read if not isinstance(found, str)]
    black = np.zeros_like(seen[0]) if seen else np.zeros(0, dtype=np.uint8)
    pixels = np.stack([black if isinstance(found, str) else found for found in read])
    errors = [found if isinstance(found, str) else None for found in read]
    return Batch(part, last, [image.name for image in images], errors, pixels)


def read_or_error(transform: Callable[[Picture], T], image: ImageRef) -> T | str:
    """What `transform` makes of an image, or what kept it from being read."""
    try:
        with image.open() as opened:
            return transform(opened)
    except Exception as error:  # a broken file can raise nearly anything from inside a decoder
        return _why_unreadable(error)


def read_source(image: Source, transform: Callable[[Picture], T]) -> T:
    """What `transform` makes of an image; one that cannot be read is told by its name."""
    if isinstance(image, np.ndarray):
        image = _array_image(image)
    if not isinstance(image, (str, Path, bytes, Image.Image, Bands)) and not hasattr(image, "read"):
        raise UserError(
            f"{type(image).__name__} is not an image: give a path, a file, bytes, a PIL image or pixels"
        )
    try:
        if isinstance(image, (Image.Image, Bands)):
            return transform(image)
        content = image if isinstance(image, (str, Path, bytes)) else image.read()
        if not isinstance(image, (str, Path)) and not isinstance(content, bytes):
            raise ValueError("it was opened as text: open it with mode 'rb'")
        with open_image(content) as opened:
            return transform(opened)
    except Exception as error:  # a broken file can raise nearly anything from inside a decoder
        name = readable(str(image)) if isinstance(image, (str, Path)) else "the image given"
        raise UnreadableImageError(f"{name} cannot be read as an image ({_why_unreadable(error)})") from error


def _why_unreadable(error: Exception) -> str:
    """What kept an image from being read, without its name."""
    return "no such file" if isinstance(error, FileNotFoundError) else reason(error)


def _array_image(image: Array) -> Picture:
    channels = image.shape[2] if image.ndim == 3 else 1
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or channels > MOST_CHANNELS or not image.size:
        raise UserError(
            f"an array must be 8-bit pixels of shape (H, W) or (H, W, C), got {image.dtype} of shape "
            f"{image.shape}: convert it, or give a list of such images"
        )
    return from_array(image)

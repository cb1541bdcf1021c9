"""A stored model on labelled images: what `didicm evaluate` and `didicm calibrate` do, as functions."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from didicm.checkpoint import HUB, Checkpoint, load, model_directory
from didicm.classifier import Classifier
from didicm.data import (
    Corruptions,
    DataError,
    EvalTransform,
    ImageSet,
    hold_out,
    open_data,
    relabel,
    stratified_split,
)
from didicm.errors import UserError
from didicm.evaluation.calibration import (
    Calibration,
    apply_temperature,
    find_calibration,
    fit_temperature,
    save_calibration,
)
from didicm.evaluation.conformal import coverage, fit_aps, fit_lac, mean_size
from didicm.evaluation.diagnostics import ClassRow, per_class
from didicm.evaluation.intervals import bootstrap
from didicm.evaluation.metrics import BINS, evaluate_probs
from didicm.evaluation.run import evaluate
from didicm.models import cost
from didicm.settings import TrainConfig, override, read_yaml

CONFIG_YAML = "config.yaml"
Progress = Callable[[int, int], None]  # is told the number of images done and to do


@dataclass(frozen=True)
class StoredModel:
    """A model, how it is asked, and what is known of the training it comes from."""

    place: str | Path  # directory, or its address on the hub
    checkpoint: Checkpoint
    transform: EvalTransform
    sampler: Mapping[str, Any]  # settings of the sampler to change
    training: TrainConfig | None  # None if it does not lie in the folder of a run

    @property
    def classifier(self) -> Classifier:
        """The classifier itself."""
        return self.checkpoint.classifier

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes, or their numbers."""
        return self.checkpoint.class_names or [str(k) for k in range(self.classifier.num_classes)]

    @cached_property
    def posterior(self) -> dict[str, Any]:
        """All that changes a posterior but not the weights: a calibration holds for this and nothing else."""
        if self.classifier.sampler is None and not self.sampler:
            return {"size": self.transform.size}
        return {"size": self.transform.size, **self.classifier.resolve(self.sampler).identity()}

    def images(self, uri: str, split: str | None = None) -> tuple[ImageSet, str]:
        """Labelled images and a few words on which they are; the training's own split is cut again."""
        data, trained = open_data(uri, channels=self.transform.channels, strict=False), self.training
        own = data.val is None and trained is not None and same_place(uri, trained.data)
        if own and trained is not None:
            data = hold_out(data, trained.val_fraction, trained.seed)
        if split == "train":
            return self._numbered(data.train), f"training split of {uri}"
        if data.val is not None:
            return self._numbered(
                data.val
            ), f"held out from training on {uri}" if own else f"validation split of {uri}"
        if split == "val":
            raise UserError(f"--data {uri} has no validation split: leave out --split to use all of its images")
        return self._numbered(data.train), f"all of {uri}"

    def _numbered(self, images: ImageSet) -> ImageSet:
        """Number the labels as the classifier does, by name; without names, at least the count must agree."""
        if self.checkpoint.class_names is not None:
            return relabel(images, self.checkpoint.class_names)
        known, found = self.classifier.num_classes, len(images.class_names)
        if known != found:
            raise UserError(
                f"the data has {found} classes and the model, which stores no class names, {known}: "
                "save or import the model with its class names, or give data with the same classes"
            )
        return images


def open_model(
    source: str | Path,
    *,
    device: str | torch.device = "auto",
    size: int | None = None,
    sampler: Mapping[str, Any] | None = None,
) -> StoredModel:
    """Load a run's best model, a model directory or `hf://owner/name`, to be asked in a certain way.

    Args:
        source: where the model is.
        device: where it runs; auto takes a GPU if there is one.
        size: pixels, instead of the stored size.
        sampler: fields of `Sampler` to change, for a diffusion classifier.
    """
    place = model_directory(source)
    checkpoint = load(place)
    described = checkpoint.transform or ({"channels": checkpoint.classifier.model.in_chans} if size else None)
    if described is None:
        raise UserError(f"{place} stores no transform: say with a size how large its images should be")
    transform = EvalTransform.from_dict({**described, "size": size} if size else described)
    checkpoint.classifier.to(find_device(device)).eval()
    model = StoredModel(place, checkpoint, transform, dict(sampler or {}), _training_of(place))
    _ = model.posterior  # a wrong setting of the sampler shows now
    return model


def find_device(name: str | torch.device) -> torch.device:
    """A device by name; one that is not there is told in a sentence."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error


def same_place(one: str, other: str) -> bool:
    """Whether two URIs name the same data."""
    one, other = one.removeprefix("folder:"), other.removeprefix("folder:")
    paths = [Path(uri).expanduser() for uri in (one, other)]
    return one == other or (all(path.exists() for path in paths) and os.path.samefile(*paths))


@dataclass(frozen=True)
class ModelEvaluation:
    """How good a model's posterior is on labelled images, how sure that is, and what it costs."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of the metrics, 95 %
    conformal: dict[str, dict[str, float]]  # by rule: target, coverage, mean_size
    classes: list[ClassRow]
    nfe: int  # network calls per image
    multiply_adds: int  # per image
    images_per_second: float  # of network and sampler, without reading images
    images: str  # which images, in a few words
    skipped: list[str]  # images that could not be read, each with the reason
    calibration: Calibration | None
    note: str  # on the calibration
    probs: Tensor  # (N, K), after the temperature
    labels: Tensor  # (N,)
    class_names: list[str]
    image_names: list[str]


def evaluate_model(
    model: str | Path | StoredModel,
    data: str,
    *,
    split: str | None = None,
    corruption: str | Corruptions | None = None,
    calibrated: bool = True,
    bins: int = BINS,
    seed: int = 0,
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress | None = None,
) -> ModelEvaluation:
    """Measure a model on labelled images: metrics with intervals, conformal sets, a table by class, cost.

    Args:
        model: a run, a model directory, `hf://owner/name`, or an opened model.
        data: where the images are.
        split: val or train; by default val, or all images if there is none.
        corruption: applied to every image first, such as noise:3.
        calibrated: apply the calibration stored with the model, if it fits.
        bins: of the calibration errors.
        seed: of corruption and intervals.
        batch_size: changes the speed, not the result.
        workers: processes that decode images.
        progress: called with the number of images done and to do.
    """
    model = model if isinstance(model, StoredModel) else open_model(model)
    images, described = model.images(data, split)
    calibration, note = None, "calibration left out"
    if calibrated:
        calibration, note = find_calibration(model.place, model.posterior)
    found = evaluate(
        model.classifier,
        images,
        model.transform,
        {"": model.sampler},
        corruption=_parse(corruption),
        batch_size=batch_size,
        workers=workers,
        seed=seed,
        progress=progress,
    )
    probs, labels = found.probs[""], found.labels
    if calibration is not None:
        probs = apply_temperature(probs, calibration.temperature)
    rules = calibration.conformal if calibration is not None else {}
    sets = {name: (rule, rule.sets(probs)) for name, rule in rules.items()}
    return ModelEvaluation(
        metrics=evaluate_probs(probs, labels, bins=bins),
        intervals=bootstrap(probs, labels, seed=seed, bins=bins),
        conformal={
            name: {"target": 1 - rule.alpha, "coverage": coverage(inside, labels), "mean_size": mean_size(inside)}
            for name, (rule, inside) in sets.items()
        },
        classes=per_class(probs, labels, model.class_names),
        nfe=found.nfe[""],
        multiply_adds=cost(model.classifier.model, model.transform.size).total(found.nfe[""]),
        images_per_second=found.images_per_second[""],
        images=described,
        skipped=found.skipped,
        calibration=calibration,
        note=note,
        probs=probs,
        labels=labels,
        class_names=model.class_names,
        image_names=found.image_names,
    )


@dataclass(frozen=True)
class ModelCalibration:
    """A calibration as it was stored, and what there is to say about it."""

    calibration: Calibration
    path: Path
    notes: list[str]


def calibrate_model(
    model: str | Path | StoredModel,
    data: str,
    *,
    alpha: float = 0.1,
    fraction: float = 0.5,
    corruption: str | Corruptions | None = None,
    seed: int = 0,
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress | None = None,
) -> ModelCalibration:
    """Fit a temperature and conformal sets on one part of held-out images, check them on the other, store them.

    The temperature and the thresholds see the same images. The guarantee of conformal sets asks for others; a single
    number fitted before changes little, and the check on the other images shows what is left.

    Args:
        model: a run, a model directory or an opened model; on the hub nothing can be stored.
        data: where the images are; those that the model was trained on are refused.
        alpha: share of sets that may miss the true class.
        fraction: of the images to fit on.
        corruption: applied to every image first.
        seed: of the split and the corruption.
        batch_size: changes the speed, not the result.
        workers: processes that decode images.
        progress: called with the number of images done and to do.
    """
    for name, value in (("alpha", alpha), ("fraction", fraction)):
        if not 0 < value < 1:
            raise UserError(f"{name} must lie between 0 and 1, got {value}")
    model = model if isinstance(model, StoredModel) else open_model(model)
    if str(model.place).startswith(HUB):
        raise UserError(
            f"{model.place} is on the hub, where nothing can be stored: download it and give its folder"
        )
    images, described = model.images(data)
    notes = _refuse_training_images(images, data, model)
    if not os.access(model.place, os.W_OK):
        raise UserError(f"{model.place} may not be written to: copy the model to a folder of yours")
    found = evaluate(
        model.classifier,
        images,
        model.transform,
        {"": model.sampler},
        corruption=_parse(corruption),
        batch_size=batch_size,
        workers=workers,
        seed=seed,
        progress=progress,
    )
    fit, rest = (torch.from_numpy(part) for part in stratified_split(found.labels.numpy(), 1 - fraction, seed))
    if not len(rest):
        raise UserError(f"{len(found.labels)} held-out images are too few to fit on some and check on others")
    probs, labels = found.probs[""][fit], found.labels[fit]
    temperature = fit_temperature(probs, labels)
    scaled = apply_temperature(probs, temperature.value)
    rules = {"lac": fit_lac(scaled, labels, alpha), "aps": fit_aps(scaled, labels, alpha)}
    check: dict[str, Any] = {"images": len(rest)}
    before = found.probs[""][rest]
    after = apply_temperature(before, temperature.value)
    for when, checked in (("before", before), ("after", after)):
        metrics = evaluate_probs(checked, found.labels[rest])
        check[when] = {name: metrics[name] for name in ("cls/NLL", "cal/ECE")}
    for name, rule in rules.items():
        sets = rule.sets(after)
        check[name] = {"coverage": coverage(sets, found.labels[rest]), "mean_size": mean_size(sets)}
    source = {
        "data": data,
        "split": described,
        "images": len(fit),
        "fraction": fraction,
        "seed": seed,
        "corruption": None if corruption is None else str(corruption),
    }
    calibration = Calibration(temperature.value, rules, model.posterior, source, check)
    notes += [temperature.warning] if temperature.warning else []
    notes += [f"{len(found.skipped)} images are left out, the first: {found.skipped[0]}"] if found.skipped else []
    return ModelCalibration(calibration, save_calibration(model.place, calibration), notes)


def _training_of(place: str | Path) -> TrainConfig | None:
    """Settings of the run that a model lies in."""
    if str(place).startswith(HUB):
        return None
    for folder in (Path(place), Path(place).absolute().parent):
        if (folder / CONFIG_YAML).is_file():
            try:
                return override(TrainConfig(), read_yaml(folder / CONFIG_YAML))
            except UserError as error:
                raise UserError(f"{folder / CONFIG_YAML} is damaged ({error}): restore it") from error
    return None


def _refuse_training_images(images: ImageSet, uri: str, model: StoredModel) -> list[str]:
    """Stop when the model was trained on any of the images, whatever name leads to them; say what is not known."""
    if model.training is None:
        return ["this model does not say what it was trained on; make sure it is not these images"]
    trained = model.training
    try:
        data = open_data(trained.data, channels=model.transform.channels, strict=False)
        seen_images = hold_out(data, trained.val_fraction, trained.seed).train
    except DataError:
        return [f"the training images {trained.data} are gone; make sure that these are others"]
    seen = {_place(seen_images.name(i)) for i in range(len(seen_images))}
    known = sum(_place(images.name(i)) in seen for i in range(len(images)))
    if known:
        raise UserError(
            f"the model was trained on {known} of the {len(images)} images of {uri}: calibrate on others, "
            f"such as --data {trained.data}, of which the held-out images are taken"
        )
    return []


def _place(name: str) -> str:
    """An image's name without symbolic links on the way to it."""
    folder, slash, file = name.rpartition("/")
    return os.path.join(_real(folder), file) if slash else name


@lru_cache(maxsize=2**16)
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def _parse(corruption: str | Corruptions | None) -> Corruptions | None:
    return Corruptions.parse(corruption) if isinstance(corruption, str) else corruption

"""How good a stored model is: `didicm evaluate` as a function."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from didicm.data import ImageSet
from didicm.evaluation import run
from didicm.evaluation.calibration import (
    Calibration,
    apply_temperature,
    find_calibration,
)
from didicm.evaluation.conformal import coverage, mean_size
from didicm.evaluation.diagnostics import ClassRow, per_class
from didicm.evaluation.intervals import bootstrap
from didicm.evaluation.met_images import leave_out_fitted, note_choice
from didicm.evaluation.metrics import BINS, evaluate_probs
from didicm.evaluation.stored import StoredModel, open_model


@dataclass(frozen=True)
class ModelEvaluation:
    """How good a model's posterior is on labelled images, how sure that is, and what it costs."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of the metrics, 95 %
    conformal: dict[str, dict[str, float]]  # by rule: target, coverage, mean_size
    classes: list[ClassRow]
    nfe: float  # network calls per image, on average where an early stop saves some
    multiply_adds: int  # per image
    images_per_second: float  # of network and sampler, without reading images
    images: str  # which images, in a few words
    skipped: list[str]  # images that could not be read, each with the reason
    calibration: Calibration | None
    note: str  # on the calibration
    notes: list[str]  # on images that the model has met before
    probs: Tensor  # (N, K), after the temperature
    labels: Tensor  # (N,)
    class_names: list[str]
    image_names: list[str]
    unlike_training: float | None  # share of images that are flagged so; None without an outlier score


class TestImages(NamedTuple):
    """Images to measure a model on, and the calibration that its answers get."""

    images: ImageSet
    described: str  # in a few words
    calibration: Calibration | None
    note: str  # on the calibration
    notes: list[str]  # on images that the model has met before


def open_test_images(
    model: StoredModel, data: str, split: str | None, labels: str | None, group_by: str | None, *, calibrated: bool
) -> TestImages:
    """Open images without those that the calibration was fitted on; arguments are those of `evaluate`."""
    images, described = model.images(data, split, labels, group_by)
    notes = note_choice(images, data, model) if split != "train" else []
    calibration, note = None, "calibration left out"
    if calibrated:
        calibration, note = find_calibration(model.place, model.posterior)
    if calibration is not None:
        images, told = leave_out_fitted(images, data, calibration)
        notes += told
    return TestImages(images, described, calibration, note, notes)


def evaluate(
    model: str | Path | StoredModel,
    data: str,
    *,
    split: str | None = None,
    labels: str | None = None,
    group_by: str | None = None,
    calibrated: bool = True,
    bins: int = BINS,
    seed: int = 0,
    **loading: Any,
) -> ModelEvaluation:
    """Measure a model on labelled images: metrics with intervals, conformal sets, a table by class, cost.

    Images that the calibration was fitted on are left out.

    Args:
        model: a run, a model directory, `hf://owner/name`, or an opened model.
        data: where the images are.
        split: val or train; by default val, or all images if there is none.
        labels: a table of what the images of a folder show, as for `open_data`; by default that of the training.
        group_by: which images stay together in a split, likewise.
        calibrated: apply the calibration stored with the model, if it fits.
        bins: of the calibration errors.
        seed: of corruption and intervals.
        loading: corruption, batch_size, workers and progress, as for `run.evaluate`.
    """
    model = model if isinstance(model, StoredModel) else open_model(model)
    test = open_test_images(model, data, split, labels, group_by, calibrated=calibrated)
    images, calibration = test.images, test.calibration
    outliers = None if calibration is None else calibration.outliers
    asked: dict[str, Any] = {"seed": seed, "features": outliers is not None, **loading}
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler}, **asked)
    probs, truth = found.probs[""], found.labels
    if calibration is not None:
        probs = apply_temperature(probs, calibration.temperature)
    unlike = None
    if outliers is not None and found.features is not None:
        unlike = (outliers.scores(found.features) > outliers.threshold).double().mean().item()
    rules = calibration.conformal if calibration is not None else {}
    sets = {name: (rule, rule.sets(probs)) for name, rule in rules.items()}
    return ModelEvaluation(
        metrics=evaluate_probs(probs, truth, bins=bins),
        intervals=bootstrap(probs, truth, seed=seed, bins=bins),
        conformal={
            name: {"target": 1 - rule.alpha, "coverage": coverage(inside, truth), "mean_size": mean_size(inside)}
            for name, (rule, inside) in sets.items()
        },
        classes=per_class(probs, truth, model.class_names),
        nfe=found.nfe[""],
        multiply_adds=model.classifier.multiply_adds(model.transform.size, found.nfe[""], **model.sampler),
        images_per_second=found.images_per_second[""],
        images=test.described,
        skipped=found.skipped,
        calibration=calibration,
        note=test.note,
        notes=test.notes,
        probs=probs,
        labels=truth,
        class_names=model.class_names,
        image_names=found.image_names,
        unlike_training=unlike,
    )

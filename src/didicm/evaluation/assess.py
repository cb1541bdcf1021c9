"""How good a stored model is, and its calibration: `didicm evaluate` and `didicm calibrate` as functions."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from didicm.checkpoint import HUB
from didicm.data import stratified_split
from didicm.errors import UserError
from didicm.evaluation import run
from didicm.evaluation.calibration import (
    WEAK_PRIOR,
    Calibration,
    apply_temperature,
    find_calibration,
    fit_temperature,
    load_calibration,
    save_calibration,
)
from didicm.evaluation.conformal import coverage, fit_aps, fit_lac, mean_size
from didicm.evaluation.diagnostics import ClassRow, per_class
from didicm.evaluation.intervals import bootstrap
from didicm.evaluation.label_sets import conformal_rank
from didicm.evaluation.met_images import leave_out_fitted, note_choice, pack_digests, refuse_training_images
from didicm.evaluation.metrics import BINS, evaluate_probs
from didicm.evaluation.outliers import FEWEST, fit_outliers
from didicm.evaluation.stored import StoredModel, open_model
from didicm.models import cost


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
    images, described = model.images(data, split, labels, group_by)
    notes = note_choice(images, data, model) if split != "train" else []
    calibration, note = None, "calibration left out"
    if calibrated:
        calibration, note = find_calibration(model.place, model.posterior)
    if calibration is not None:
        images, told = leave_out_fitted(images, data, calibration)
        notes += told
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
        multiply_adds=cost(model.classifier.model, model.transform.size).total(found.nfe[""]),
        images_per_second=found.images_per_second[""],
        images=described,
        skipped=found.skipped,
        calibration=calibration,
        note=note,
        notes=notes,
        probs=probs,
        labels=truth,
        class_names=model.class_names,
        image_names=found.image_names,
        unlike_training=unlike,
    )


@dataclass(frozen=True)
class ModelCalibration:
    """A calibration as it was stored, and what there is to say about it."""

    calibration: Calibration
    path: Path
    images: str  # which images, in a few words
    notes: list[str]


def calibrate(
    model: str | Path | StoredModel,
    data: str,
    *,
    labels: str | None = None,
    group_by: str | None = None,
    alpha: float = 0.1,
    fraction: float = 0.5,
    per_class: bool = False,
    replace: bool = False,
    false_alarms: float = 0.05,
    seed: int = 0,
    **loading: Any,
) -> ModelCalibration:
    """Fit a temperature and conformal sets on one part of held-out images, check them on the other, store them.

    The temperature and the thresholds see the same images. The guarantee of conformal sets asks for others; a
    single number fitted before changes little, and the check on the other images shows what is left.

    Args:
        model: a run, a model directory or an opened model; on the hub nothing can be stored.
        data: where the images are; those that the model was trained on are refused.
        labels: as for `evaluate`.
        group_by: as for `evaluate`; both parts have groups of their own.
        alpha: share of sets that may miss the true class.
        fraction: of the images to fit on.
        per_class: a conformal threshold for every class, which then covers the images of each.
        replace: a calibration that was made from more images, too.
        false_alarms: share of images like these that may be called unlike the training images.
        seed: of the split and the corruption.
        loading: corruption, batch_size, workers and progress, as for `run.evaluate`.
    """
    for name, value in (("alpha", alpha), ("fraction", fraction), ("false_alarms", false_alarms)):
        if not 0 < value < 1:
            raise UserError(f"{name} must lie between 0 and 1, got {value}")
    check_storable(model.place if isinstance(model, StoredModel) else model)
    model = model if isinstance(model, StoredModel) else open_model(model)
    images, described = model.images(data, labels=labels, group_by=group_by)
    notes = refuse_training_images(images, data, model) + note_choice(images, data, model)
    to_fit = images.labels[stratified_split(images.labels, 1 - fraction, seed, images.groups)[0]]
    notes += _check_enough(to_fit, model.class_names, alpha, per_class, data)
    if not replace:
        _check_replaced(model.place, len(to_fit))
    if not os.access(model.place, os.W_OK):
        raise UserError(f"{model.place} may not be written to: copy the model to a folder of yours")
    asked: dict[str, Any] = {"seed": seed, "features": True, **loading}
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler}, **asked)
    parts = stratified_split(found.labels.numpy(), 1 - fraction, seed, found.groups)
    fit, rest = (torch.from_numpy(part) for part in parts)
    if not len(rest):
        raise UserError(f"{len(found.labels)} held-out images are too few to fit on some and check on others")
    probs, truth = found.probs[""][fit], found.labels[fit]
    temperature = fit_temperature(probs, truth, WEAK_PRIOR)
    scaled = apply_temperature(probs, temperature.value)
    rules = {
        "lac": fit_lac(scaled, truth, alpha, per_class=per_class),
        "aps": fit_aps(scaled, truth, alpha, per_class=per_class),
    }
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
        "corruption": str(loading["corruption"]) if loading.get("corruption") else None,
        "image_digests": pack_digests(found.image_names[i] for i in fit.tolist()),
    }
    assert found.features is not None
    outliers = fit_outliers(found.features[fit], found.features[rest], false_alarms)
    if outliers is None:
        notes.append(
            f"{len(found.labels)} images are too few for an outlier score with false alarms of {false_alarms:g}: "
            f"that takes {FEWEST} to fit and {ceil(1 / false_alarms)} others"
        )
    calibration = Calibration(temperature.value, rules, model.posterior, source, check, outliers)
    notes += [temperature.warning] if temperature.warning else []
    worse = [check[when]["cls/NLL"] for when in ("before", "after")]
    if worse[1] > worse[0]:
        told = f"the temperature made the NLL of the other images worse, {worse[1]:.4f} and not {worse[0]:.4f}"
        notes.append(f"{told}: calibrate on more images, or on images that are more alike")
    notes += [f"{len(found.skipped)} images are left out, the first: {found.skipped[0]}"] if found.skipped else []
    return ModelCalibration(calibration, save_calibration(model.place, calibration), described, notes)


def check_storable(place: str | Path) -> None:
    """Refuse a model that is on the hub, before it is fetched."""
    if str(place).startswith(HUB):
        raise UserError(f"{place} is on the hub, where nothing can be stored: give the folder of a download")


def _check_enough(
    labels: npt.NDArray[np.int64], names: Sequence[str], alpha: float, per_class: bool, data: str
) -> list[str]:
    """Refuse too few images to fit on; say which classes have none."""
    conformal_rank(len(labels), alpha)
    counts = np.bincount(labels, minlength=len(names))
    if per_class:
        fewest = int(counts.argmin())
        conformal_rank(int(counts[fewest]), alpha, f" of every class, such as {names[fewest]},")
    missing = [name for name, count in zip(names, counts, strict=True) if not count]
    if not missing:
        return []
    more = f" and {len(missing) - 1} more classes" if len(missing) > 1 else ""
    return [f"{data} has no image to fit on of class {missing[0]}{more}: of those the calibration knows nothing"]


def _check_replaced(place: str | Path, images: int) -> None:
    """Refuse to replace a calibration of these weights that was made from more images."""
    try:
        old = load_calibration(place)
    except UserError:  # of other weights, or damaged
        return
    before = 0 if old is None else old.fitted_on.get("images", 0)
    if before > images:
        raise UserError(
            f"{place} has a calibration from {before} images, more than these {images}: --replace replaces it"
        )

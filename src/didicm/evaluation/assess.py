"""How good a stored model is, and its calibration: `didicm evaluate` and `didicm calibrate` as functions."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from didicm.checkpoint import HUB
from didicm.data import DataError, ImageSet, hold_out, open_data, stratified_split
from didicm.errors import UserError
from didicm.evaluation import run
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
from didicm.evaluation.stored import StoredModel, open_model
from didicm.models import cost
from didicm.text import quoted


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
    probs: Tensor  # (N, K), after the temperature
    labels: Tensor  # (N,)
    class_names: list[str]
    image_names: list[str]


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
    calibration, note = None, "calibration left out"
    if calibrated:
        calibration, note = find_calibration(model.place, model.posterior)
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler}, seed=seed, **loading)
    probs, truth = found.probs[""], found.labels
    if calibration is not None:
        probs = apply_temperature(probs, calibration.temperature)
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
        probs=probs,
        labels=truth,
        class_names=model.class_names,
        image_names=found.image_names,
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
        seed: of the split and the corruption.
        loading: corruption, batch_size, workers and progress, as for `run.evaluate`.
    """
    for name, value in (("alpha", alpha), ("fraction", fraction)):
        if not 0 < value < 1:
            raise UserError(f"{name} must lie between 0 and 1, got {value}")
    check_storable(model.place if isinstance(model, StoredModel) else model)
    model = model if isinstance(model, StoredModel) else open_model(model)
    images, described = model.images(data, labels=labels, group_by=group_by)
    notes = _refuse_training_images(images, data, model)
    if not os.access(model.place, os.W_OK):
        raise UserError(f"{model.place} may not be written to: copy the model to a folder of yours")
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler}, seed=seed, **loading)
    parts = stratified_split(found.labels.numpy(), 1 - fraction, seed, found.groups)
    fit, rest = (torch.from_numpy(part) for part in parts)
    if not len(rest):
        raise UserError(f"{len(found.labels)} held-out images are too few to fit on some and check on others")
    probs, truth = found.probs[""][fit], found.labels[fit]
    temperature = fit_temperature(probs, truth)
    scaled = apply_temperature(probs, temperature.value)
    rules = {"lac": fit_lac(scaled, truth, alpha), "aps": fit_aps(scaled, truth, alpha)}
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
    }
    calibration = Calibration(temperature.value, rules, model.posterior, source, check)
    notes += [temperature.warning] if temperature.warning else []
    notes += [f"{len(found.skipped)} images are left out, the first: {found.skipped[0]}"] if found.skipped else []
    return ModelCalibration(calibration, save_calibration(model.place, calibration), described, notes)


def check_storable(place: str | Path) -> None:
    """Refuse a model that is on the hub, before it is fetched."""
    if str(place).startswith(HUB):
        raise UserError(f"{place} is on the hub, where nothing can be stored: give the folder of a download")


def _refuse_training_images(images: ImageSet, uri: str, model: StoredModel) -> list[str]:
    """Stop when the model was trained on any of the images, whatever name leads to them; say what is not known."""
    if model.training is None:
        return ["this model does not say what it was trained on; make sure it is not these images"]
    trained = model.training
    try:
        data = open_data(
            trained.data,
            labels=trained.labels,
            group_by=trained.group_by,
            channels=model.transform.channels,
            strict=False,
        )
        seen_images = hold_out(data, trained.val_fraction, trained.seed).train
    except DataError:
        return [f"the training images {trained.data} are gone; make sure that these are others"]
    seen = {_place(seen_images.name(i)) for i in range(len(seen_images))}
    known = sum(_place(images.name(i)) in seen for i in range(len(images)))
    if known:
        raise UserError(
            f"the model was trained on {known} of the {len(images)} images of {uri}: calibrate on others, "
            f"such as --data {quoted(trained.data)}, of which the held-out images are taken"
        )
    return []


def _place(name: str) -> str:
    """An image's name without symbolic links on the way to it."""
    folder, slash, file = name.rpartition("/")
    return os.path.join(_real(folder), file) if slash else name


@lru_cache(maxsize=2**16)
def _real(folder: str) -> str:
    return os.path.realpath(folder)

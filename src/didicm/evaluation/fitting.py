"""A calibration for a stored model, fitted, checked and stored: `didicm calibrate` as a function."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    Conformal,
    Temperature,
    apply_temperature,
    coverage,
    fit_conformal,
    fit_temperature,
    load_calibration,
    mean_size,
    save_calibration,
)
from didicm.evaluation.label_sets import conformal_rank, fewest_images
from didicm.evaluation.met_images import note_met, pack_digests, refuse_training_images
from didicm.evaluation.metrics import evaluate_probs, nll
from didicm.evaluation.outliers import FEWEST, fit_outliers
from didicm.evaluation.stored import StoredModel, open_model
from didicm.text import count


@dataclass(frozen=True)
class ModelCalibration:
    """A calibration as it was stored, and what there is to say about it."""

    calibration: Calibration
    path: Path
    images: str  # which images, in a few words
    notes: list[str]


def calibrate(
    model: str | Path | StoredModel,
    data: str | Path,
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
    data = os.fspath(data)
    check_storable(model.place if isinstance(model, StoredModel) else model)
    model = model if isinstance(model, StoredModel) else open_model(model)
    images, described = model.images(data, labels=labels, group_by=group_by)
    notes = refuse_training_images(images, data, model)
    to_fit = images.labels[stratified_split(images.labels, 1 - fraction, seed, images.groups)[0]]
    notes += _check_enough(to_fit, model.class_names, alpha, per_class, data)
    if not replace:
        _check_replaced(model.place, len(to_fit))
    if not os.access(model.place, os.W_OK):
        raise UserError(f"{model.place} is not writable: copy the model to a folder of yours")
    asked: dict[str, Any] = {"seed": seed, "features": True, **loading}
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler}, **asked)
    notes += note_met(found.image_names, data, model)
    parts = stratified_split(found.labels.numpy(), 1 - fraction, seed, found.groups)
    fit, rest = (torch.from_numpy(part) for part in parts)
    if not len(rest):
        raise UserError(
            f"{len(found.labels)} held-out images are too few to fit on one part and check on the other"
        )
    notes += _note_groups(None if found.groups is None else found.groups[parts[0]], alpha)
    probs, truth = found.probs[""][fit], found.labels[fit]
    temperature, told = _helpful_temperature(
        fit_temperature(probs, truth, WEAK_PRIOR), found.probs[""][rest], found.labels[rest]
    )
    notes += told
    scaled = apply_temperature(probs, temperature)
    rules = {
        "lac": fit_conformal("lac", scaled, truth, alpha, per_class=per_class),
        "aps": fit_conformal("aps", scaled, truth, alpha, per_class=per_class),
    }
    check = _check(found.probs[""][rest], found.labels[rest], temperature, rules)
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
            f"that takes {FEWEST} to fit and {fewest_images(false_alarms)} others"
        )
    calibration = Calibration(temperature, rules, model.posterior, source, check, outliers)
    if found.skipped:
        notes += [f"skipped {count(len(found.skipped), 'unreadable image')}, the first: {found.skipped[0]}"]
    return ModelCalibration(calibration, save_calibration(model.place, calibration), described, notes)


def _helpful_temperature(fitted: Temperature, probs: Tensor, labels: Tensor) -> tuple[float, list[str]]:
    """A fitted temperature, or 1 where it makes the NLL of other images worse; and what there is to say of it."""
    before, after = (nll(apply_temperature(probs, x), labels).mean().item() for x in (1.0, fitted.value))
    if after <= before:
        return fitted.value, [fitted.warning] if fitted.warning else []
    told = f"a temperature of {fitted.value:.3f} would make the NLL of the other images worse, {after:.4f} and not"
    return 1.0, [
        f"{told} {before:.4f}: it stays 1; calibrate on more images, or on images that are more alike, to fit one"
    ]


def _check(probs: Tensor, labels: Tensor, temperature: float, rules: Mapping[str, Conformal]) -> dict[str, Any]:
    """What the calibration does to images that it was not fitted on."""
    scaled = apply_temperature(probs, temperature)
    check: dict[str, Any] = {"images": len(labels)}
    for when, checked in (("before", probs), ("after", scaled)):
        metrics = evaluate_probs(checked, labels)
        check[when] = {name: metrics[name] for name in ("cls/NLL", "cal/ECE")}
    for name, rule in rules.items():
        sets = rule.sets(scaled)
        check[name] = {"coverage": coverage(sets, labels), "mean_size": mean_size(sets)}
    return check


def check_storable(place: str | Path) -> None:
    """Refuse a model that is on the hub, before it is fetched."""
    if str(place).startswith(HUB):
        raise UserError(f"{place} is on the hub, where nothing can be stored: give the folder of a download")


def _check_enough(
    labels: npt.NDArray[np.int64], names: Sequence[str], alpha: float, per_class: bool, data: str
) -> list[str]:
    """Refuse too few images to fit on; say which classes have none."""
    conformal_rank(len(labels), alpha, " to fit on, and others to check")
    counts = np.bincount(labels, minlength=len(names))
    if per_class:
        fewest = int(counts.argmin())
        conformal_rank(int(counts[fewest]), alpha, f" of every class, such as {names[fewest]}")
    missing = [name for name, number in zip(names, counts, strict=True) if not number]
    if not missing:
        return []
    more = f" and {len(missing) - 1} more classes" if len(missing) > 1 else ""
    return [f"{data} has no image to fit on of class {missing[0]}{more}: of those the calibration knows nothing"]


def _note_groups(groups: np.ndarray | None, alpha: float) -> list[str]:
    """Say when groups are so few that the sets would promise nothing if each had a single image."""
    if groups is None or (number := len(np.unique(groups))) >= (fewest := fewest_images(alpha)):
        return []
    return [
        f"the images it was fitted on come from {count(number, 'group')}, and alpha {alpha:g} asks for {fewest}: "
        "sets of images of other groups may miss more often"
    ]


def _check_replaced(place: str | Path, images: int) -> None:
    """Refuse to replace a calibration of these weights that was made from more images."""
    try:
        old = load_calibration(place)
    except UserError:  # of other weights, or damaged
        return
    before = 0 if old is None else old.fitted_on.get("images", 0)
    if before > images:
        raise UserError(f"{place} has a calibration from {before} images, more than these {images}: add --replace")

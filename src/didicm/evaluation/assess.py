"""How good a stored model is: `didicm.evaluate`, `didicm.evaluate_shift`, and the labels that it doubts."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from didicm.data import ImageSet
from didicm.data.corruptions import SEVERITIES, SUITE, Corruptions
from didicm.errors import UserError
from didicm.evaluation import run
from didicm.evaluation.calibration import Calibration, apply_temperature, coverage, find_calibration, mean_size
from didicm.evaluation.diagnostics import ClassRow, per_class
from didicm.evaluation.intervals import bootstrap
from didicm.evaluation.met_images import leave_out_fitted, names_of, note_met
from didicm.evaluation.metrics import BINS, calibration_error, evaluate_probs, nll
from didicm.evaluation.stored import StoredModel, open_model

AnyModel: TypeAlias = str | Path | StoredModel
UNLIKE = "unlike"  # share of images that are flagged as unlike those of training
SURE = 0.5  # least probability of the other class, for a label to be suspect


@dataclass(frozen=True)
class ModelEvaluation:
    """How good a model's posterior is on labelled images, how sure that is, and what it costs."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of the metrics, 95 %
    conformal: dict[str, dict[str, float]]  # by rule: target, coverage, mean_size
    classes: list[ClassRow]
    nfe: float  # network calls per image, on average where an early stop saves some
    most_calls: int  # network calls per image without an early stop
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
    """A model, images to measure it on, and the calibration that its answers get."""

    model: StoredModel
    images: ImageSet
    described: str  # in a few words
    calibration: Calibration | None
    note: str  # on the calibration
    notes: list[str]  # on images that the model has met before

    def calibrated(self, probs: Tensor) -> Tensor:
        """Probabilities (N, K) after the temperature, if there is one."""
        return probs if self.calibration is None else apply_temperature(probs, self.calibration.temperature)

    def unlike(self, features: Tensor | None) -> Tensor | None:
        """1 for images that are flagged as unlike those of training, (N,); None without an outlier score."""
        rule = None if self.calibration is None else self.calibration.outliers
        return None if rule is None or features is None else (rule.scores(features) > rule.threshold).double()


def open_test_images(
    model: AnyModel,
    data: str | Path,
    split: str | None,
    labels: str | None,
    group_by: str | None,
    *,
    calibrated: bool,
) -> TestImages:
    """Open images without those that the calibration was fitted on; arguments are those of `evaluate`."""
    data = os.fspath(data)
    model = model if isinstance(model, StoredModel) else open_model(model)
    images, described = model.images(data, split, labels, group_by)
    notes = note_met(names_of(images), data, model) if split != "train" else []
    calibration, note = None, "calibration left out"
    if calibrated:
        calibration, note = find_calibration(model.place, model.posterior)
    if calibration is not None:
        images, told = leave_out_fitted(images, data, calibration)
        notes += told
    return TestImages(model, images, described, calibration, note, notes)


def evaluate(
    model: str | Path | StoredModel,
    data: str | Path,
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
        group_by: which images stay together in a split, and count as one in intervals, likewise.
        calibrated: apply the calibration stored with the model, if it fits.
        bins: of the calibration errors.
        seed: of corruption and intervals.
        loading: corruption, batch_size, workers and progress, as for `run.evaluate`.
    """
    test = open_test_images(model, data, split, labels, group_by, calibrated=calibrated)
    model, calibration = test.model, test.calibration
    scored = calibration is not None and calibration.outliers is not None
    asked: dict[str, Any] = {"seed": seed, "features": scored, **loading}
    found = run.evaluate(model.classifier, test.images, model.transform, {"": model.sampler}, **asked)
    probs, truth, unlike = test.calibrated(found.probs[""]), found.labels, test.unlike(found.features)
    rules = calibration.conformal if calibration is not None else {}
    sets = {name: (rule, rule.sets(probs)) for name, rule in rules.items()}
    return ModelEvaluation(
        metrics=evaluate_probs(probs, truth, bins=bins),
        intervals=bootstrap(probs, truth, groups=found.groups, seed=seed, bins=bins),
        conformal={
            name: {"target": 1 - rule.alpha, "coverage": coverage(inside, truth), "mean_size": mean_size(inside)}
            for name, (rule, inside) in sets.items()
        },
        classes=per_class(probs, truth, model.class_names),
        nfe=found.nfe[""],
        most_calls=model.calls,
        multiply_adds=model.classifier.multiply_adds(model.transform.size, found.nfe[""], **model.sampler),
        images_per_second=found.images_per_second[""],
        images=test.described,
        skipped=found.skipped,
        calibration=calibration,
        note=test.note,
        notes=[*test.notes, *_note_groups(found.groups)],
        probs=probs,
        labels=truth,
        class_names=model.class_names,
        image_names=found.image_names,
        unlike_training=None if unlike is None else unlike.mean().item(),
    )


def _note_groups(groups: np.ndarray | None) -> list[str]:
    if groups is None:
        return []
    if (number := len(np.unique(groups))) == 1:
        return ["all images are of one group: what another would give is not known, and intervals are of width 0"]
    return [f"intervals are over {number:,} groups, which are drawn whole"]


@dataclass(frozen=True)
class ShiftEvaluation:
    """Accuracy, NLL, ECE and, with an outlier score, the share of flagged images, by name; clean and corrupted."""

    clean: dict[str, float]
    corruptions: dict[str, list[dict[str, float]]]  # by corruption, at each severity
    test: TestImages  # which images
    num_images: int
    skipped: list[str]  # images that could not be read, each with the reason

    @property
    def mean(self) -> list[dict[str, float]]:
        """Means over the corruptions, at each severity."""
        levels = zip(*self.corruptions.values(), strict=True)
        return [{name: sum(row[name] for row in rows) / len(rows) for name in self.clean} for rows in levels]


def evaluate_shift(
    model: str | Path | StoredModel,
    data: str | Path,
    *,
    split: str | None = None,
    labels: str | None = None,
    group_by: str | None = None,
    calibrated: bool = True,
    bins: int = BINS,
    seed: int = 0,
    batch_size: int = 64,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ShiftEvaluation:
    """Measure a model on labelled images as they are and under the whole suite of corruptions.

    Each image is decoded once, and no posterior is kept. Arguments are those of `evaluate`; `seed` decides what is
    random in the corruptions, each of which is as with `corruption` there.
    """
    test = open_test_images(model, data, split, labels, group_by, calibrated=calibrated)
    model = test.model
    views = [None, *(Corruptions.parse(f"{name}:{severity}") for name in SUITE for severity in SEVERITIES)]
    loading: dict[str, Any] = {"corruption": views, "seed": seed, "workers": workers}
    loading["batch_size"] = max(1, batch_size // len(views))
    found: list[dict[str, Tensor]] = []
    skipped: list[str] = []
    done, count = 0, len(test.images)
    for _, batch in run.stream(model.classifier, test.images, model.transform, {"": model.sampler}, **loading):
        found.append({name: x.view(-1, len(views)) for name, x in _per_row(batch, test).items()})
        done, skipped = done + len(batch.label) // len(views), batch.skipped
        if progress is not None:
            progress(done + len(skipped), count)
    if not found:
        raise UserError(f"none of the {count} images can be read: look at them with didicm doctor")
    rows = {name: torch.cat([part[name] for part in found]).T.contiguous() for name in found[0]}  # (views, N) each
    by_view = [_metrics({name: x[i] for name, x in rows.items()}, bins) for i in range(len(views))]
    levels = len(SEVERITIES)
    corrupted = {name: by_view[1 + levels * i :][:levels] for i, name in enumerate(SUITE)}
    return ShiftEvaluation(by_view[0], corrupted, test, done, skipped)


def _per_row(batch: run.Batch, test: TestImages) -> dict[str, Tensor]:
    """What the metrics need of each row of a batch, (B,) each."""
    probs, unlike = test.calibrated(batch.probs[""]), test.unlike(batch.features)
    right = (probs.argmax(-1) == batch.label).double()
    rows = {"confidence": probs.amax(-1), "right": right, "nll": nll(probs, batch.label)}
    return rows if unlike is None else {**rows, UNLIKE: unlike}


def _metrics(rows: dict[str, Tensor], bins: int) -> dict[str, float]:
    error = calibration_error(rows["confidence"], rows["right"], bins)
    metrics = {"cls/Acc": rows["right"].mean().item(), "cls/NLL": rows["nll"].mean().item(), "cal/ECE": error}
    return metrics | ({UNLIKE: rows[UNLIKE].mean().item()} if UNLIKE in rows else {})


@dataclass(frozen=True)
class Suspect:
    """An image that is likely to have the wrong label: a model that never saw it is sure of another class."""

    name: str
    label: str
    likely: str  # the class that the model says instead
    probability: float  # of that class

    def __str__(self) -> str:
        return f"{self.name}: labelled {self.label}, {self.likely} with {100 * self.probability:.1f} %"


@dataclass(frozen=True)
class Suspects:
    """The suspects among the images that a model was not trained on, the most confident first."""

    found: list[Suspect]
    ranked: int  # images that were looked at
    described: str  # which they are, in a few words
    accuracy: float  # of the model on them, by the labels as they are


def find_suspects(model: StoredModel, data: str, **asked: Any) -> Suspects:
    """Look for suspects among a model's held-out images: of those it was trained on it knows the labels by heart.

    `asked` are `labels` and `group_by`, as for `StoredModel.images`.
    """
    images, described = model.images(data, **asked)
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler})
    top, likely = found.probs[""].max(dim=1)
    doubted = ((likely != found.labels) & (top >= SURE)).nonzero().squeeze(1)
    ranked = doubted[top[doubted].argsort(descending=True, stable=True)].tolist()
    names = model.class_names
    suspects = [
        Suspect(found.image_names[i], names[int(found.labels[i])], names[int(likely[i])], float(top[i]))
        for i in ranked
    ]
    accuracy = (likely == found.labels).double().mean().item()
    return Suspects(suspects, len(found.labels), described, accuracy)

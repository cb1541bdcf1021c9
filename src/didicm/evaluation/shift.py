"""How a model fares when images get worse than those of training: every corruption, at every severity."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from didicm.data.corruptions import SEVERITIES, SUITE, Corruptions
from didicm.errors import UserError
from didicm.evaluation import run
from didicm.evaluation.assess import TestImages, open_test_images
from didicm.evaluation.calibration import apply_temperature
from didicm.evaluation.metrics import BINS, calibration_error, nll
from didicm.evaluation.stored import StoredModel, open_model

UNLIKE = "unlike"  # share of images that are flagged as unlike those of training


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
    data: str,
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
    model = model if isinstance(model, StoredModel) else open_model(model)
    test = open_test_images(model, data, split, labels, group_by, calibrated=calibrated)
    names = [f"{name}:{severity}" for name in SUITE for severity in SEVERITIES]
    views = [None, *map(Corruptions.parse, names)]
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
    probs, calibration = batch.probs[""], test.calibration
    if calibration is not None:
        probs = apply_temperature(probs, calibration.temperature)
    right = (probs.argmax(-1) == batch.label).double()
    rows = {"confidence": probs.amax(-1), "right": right, "nll": nll(probs, batch.label)}
    if calibration is not None and calibration.outliers is not None:
        rows[UNLIKE] = (calibration.outliers.scores(batch.features) > calibration.outliers.threshold).double()
    return rows


def _metrics(rows: dict[str, Tensor], bins: int) -> dict[str, float]:
    error = calibration_error(rows["confidence"], rows["right"], bins)
    metrics = {"cls/Acc": rows["right"].mean().item(), "cls/NLL": rows["nll"].mean().item(), "cal/ECE": error}
    return metrics | ({UNLIKE: rows[UNLIKE].mean().item()} if UNLIKE in rows else {})

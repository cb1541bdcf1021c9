"""One cell of a grid: train it, measure its posteriors, and store what every table and figure needs."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor

from didicm.checkpoint import load, write_files
from didicm.classifier import Classifier, DiffusionClassifier
from didicm.data import ArraySet, ImageSet, UnreadableImageError, make_loader, stratified_split
from didicm.data.memory import is_small
from didicm.diffusion import Step
from didicm.evaluation import apply_temperature, evaluate_probs, fit_temperature, save_posteriors
from didicm.models import cost
from didicm.study.cells import Cell
from didicm.training.config import TrainConfig
from didicm.training.loop import BEST, LAST, STATE, Training
from didicm.training.setup import Parts, build, check_batches
from didicm.training.state import has_state

HELD_OUT = 0.1  # of the training images, for the temperature
EVAL_SEED = 0  # the test images are corrupted alike for every method and seed
BATCH = 250
SHOWN = 200  # test images that are kept to look at
TRACED = 24  # of them, with their way through diffusion time
ONE_CALL = "1 call"

OnStep = Callable[[float], None]  # is told the share of the training that is done


@dataclass(frozen=True)
class Reading:
    """One way to get a posterior from a trained network."""

    name: str
    settings: dict[str, Any]
    stored: bool  # whether its posteriors are kept, or only its metrics


class _Watched(Training):
    """A training that tells how far it is."""

    on_step: OnStep = staticmethod(lambda share: None)

    def _steps(self) -> Iterator[dict[str, float]]:
        for numbers in super()._steps():
            yield numbers
            self.on_step(self.position.step / self.total_steps)


def prepare(config: TrainConfig) -> tuple[Parts, ImageSet]:
    """Parts whose validation images are cut from the training images, and the test images.

    So nothing is ever chosen or fitted on test images, whether or not the data has a split of its own for them.
    """
    parts = build(config)
    kept, held = stratified_split(parts.train.labels, HELD_OUT, config.seed)
    test = parts.val
    parts = replace(parts, train=parts.train.select(kept), val=parts.train.select(held))
    check_batches(config, parts, 1)
    return parts, test


def shrink(parts: Parts, test: ImageSet) -> tuple[Parts, ImageSet]:
    """Resize small sets once and not in every epoch, where that gives the very same pixels."""
    view, size = parts.view, (parts.view.size, parts.view.size)
    if parts.corrupt_train or parts.corrupt_eval or not parts.train_transform.keeps(size):
        return parts, test

    def resize(images: ImageSet) -> ImageSet:
        if not is_small(images):
            return images
        try:
            resized = [np.asarray(view.prepare(images.load(i))) for i in range(len(images))]
        except UnreadableImageError:
            return images  # the loader knows what to do about those
        return ArraySet(
            np.stack(resized), images.labels, images.class_names, channels=view.channels, origin=images
        )

    return replace(parts, train=resize(parts.train), val=resize(parts.val)), resize(test)


def run_cell(cell: Cell, base: TrainConfig, out: Path, on_step: OnStep | None = None) -> dict[str, Any]:
    """Train or resume a cell, evaluate it, store posteriors and pictures, and return its line of the results."""
    key = cell.key(base)
    folder = out / "cells" / key
    config = replace(cell.config(base), out=str(folder))
    parts, test = shrink(*prepare(config))
    seconds = _train(config, parts, folder, on_step)
    checkpoint = load(folder / LAST)
    classifier = checkpoint.classifier
    price = cost(classifier.model, parts.view.size)
    readings = readings_of(classifier)

    measured, labels, names = _posteriors(classifier, readings, test, parts)
    held, held_labels, _ = _posteriors(classifier, [r for r in readings if r.stored], parts.val, parts)
    lines = []
    for reading in readings:
        probs, calls = measured[reading.name]
        line = {
            "name": reading.name,
            "calls": calls,
            "multiply_adds": price.total(calls),
            "metrics": evaluate_probs(probs, labels),
            "temperature": None,
            "tempered": None,
            "posteriors": None,
        }
        if reading.stored:
            fitted = fit_temperature(held[reading.name][0], held_labels)
            line["temperature"] = fitted.value
            line["tempered"] = evaluate_probs(apply_temperature(probs, fitted.value), labels)
            file = folder / f"posteriors-{reading.name.replace(' ', '-')}.safetensors"
            meta = {"cell": key, "reading": reading.name, "temperature": fitted.value}
            save_posteriors(file, probs, labels, parts.class_names, names, meta)
            line["posteriors"] = str(file.relative_to(out))
        lines.append(line)
    _store_pictures(classifier, measured[readings[0].name][0], test, parts, folder)
    return {
        "key": key,
        "method": cell.method,
        **asdict(cell.setting),
        "seed": cell.seed,
        "num_train": len(parts.train),
        "num_held_out": len(parts.val),
        "num_test": len(labels),
        "num_classes": len(parts.class_names),
        "parameters": price.parameters,
        "train_seconds": seconds,
        "readings": lines,
        "versions": {package: version(package) for package in ("didicm", "torch", "timm")},
    }


def readings_of(classifier: Classifier) -> list[Reading]:
    """The ways to read a classifier: the sampler of its recipe first, then fewer steps, and a single call."""
    if not isinstance(classifier, DiffusionClassifier):
        return [Reading(ONE_CALL, {}, stored=True)]
    steps = classifier.sampler.steps
    first = Reading(_steps_name(steps), {"method": "cp", "steps": steps}, stored=True)
    fewer = [2**i for i in range(12) if 2**i < steps]
    return [
        first,
        Reading(ONE_CALL, {"method": "readout"}, stored=True),
        *(Reading(_steps_name(n), {"method": "cp", "steps": n}, stored=False) for n in reversed(fewer)),
    ]


def forget_training(cell: Cell, base: TrainConfig, out: Path) -> None:
    """Remove what only a resumed training needs; the trained model stays."""
    for name in (STATE, BEST):
        shutil.rmtree(out / "cells" / cell.key(base) / name, ignore_errors=True)


def _train(config: TrainConfig, parts: Parts, folder: Path, on_step: OnStep | None) -> float | None:
    """Run the training loop with what it prints going to a file; seconds, unless it was resumed."""
    resumed = has_state(folder / STATE)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with open(folder / "train.log", "a", encoding="utf-8") as log, redirect_stdout(log):
        fabric = Fabric(accelerator=config.run.accelerator, devices=1, precision=config.run.precision)
        fabric.launch()
        training = _Watched(config, parts, fabric)
        training.on_step = on_step or (lambda share: None)
        training.run()
    return None if resumed else time.monotonic() - begun


@torch.no_grad()
def _posteriors(
    classifier: Classifier, readings: list[Reading], images: ImageSet, parts: Parts
) -> tuple[dict[str, tuple[Tensor, int]], Tensor, list[str]]:
    """Probabilities and network calls of each reading, labels, and the names of the images that could be read."""
    loader = make_loader(
        images, parts.view, BATCH, train=False, seed=EVAL_SEED, corruption=parts.corrupt_eval, workers=0
    )
    probs: dict[str, list[Tensor]] = {reading.name: [] for reading in readings}
    calls = dict.fromkeys(probs, 0)
    labels, index = [], []
    for image, label in loader:
        for reading in readings:
            posterior = classifier.posterior(image, **reading.settings)
            probs[reading.name].append(posterior.probs.float())
            calls[reading.name] = posterior.nfe
        labels.append(label)
        index += loader.index.tolist()
    measured = {name: (torch.cat(parts), calls[name]) for name, parts in probs.items()}
    return measured, torch.cat(labels), [images.name(i) for i in index]


@torch.no_grad()
def _store_pictures(classifier: Classifier, probs: Tensor, test: ImageSet, parts: Parts, folder: Path) -> None:
    """Keep some test images as the network sees them, and the way of some of those through diffusion time."""
    count = len(probs)
    shown = torch.linspace(0, count - 1, min(SHOWN, count)).long()
    loader = make_loader(test, parts.view, BATCH, train=False, seed=EVAL_SEED, corruption=parts.corrupt_eval)
    image = _some(loader, shown)
    tensors = {"shown": shown, "images": parts.view.restore(image)}
    if isinstance(classifier, DiffusionClassifier):
        # From the surest to the least sure, so that both kinds are there.
        order = torch.special.entr(probs[shown]).sum(-1).argsort()
        traced = order[torch.linspace(0, len(order) - 1, min(TRACED, len(order))).long()]
        path: list[Step] = []
        classifier.posterior(image[traced], callback=path.append, method="cp")
        start = torch.full_like(path[0].probs, 1 / classifier.num_classes)
        tensors["traced"] = traced
        tensors["trajectory"] = torch.stack([start, *(step.probs for step in path)], 1).float()
        tensors["times"] = torch.tensor([1.0, *(step.time for step in path)])
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    write_files(folder, {"pictures.safetensors": lambda path: save_file(tensors, path)})


def _some(loader: Any, shown: Tensor) -> Tensor:
    """Pick images, a batch at a time: the whole set may be too large to hold."""
    picked, start = [], 0
    for batch, _ in loader:
        inside = shown[(shown >= start) & (shown < start + len(batch))] - start
        picked.append(batch[inside])
        start += len(batch)
    return torch.cat(picked)


def _steps_name(steps: int) -> str:
    return f"{steps} steps" if steps > 1 else "1 step"

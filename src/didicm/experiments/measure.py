"""One cell of a grid: train it, measure its posteriors, and store what every table and figure needs."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from didicm.checkpoint import load
from didicm.classifier import Classifier, DiffusionClassifier
from didicm.data import ImageSet, make_loader
from didicm.diffusion import Step
from didicm.evaluation import apply_temperature, evaluate_probs, fit_temperature, save_posteriors
from didicm.experiments.cells import Cell, Reading
from didicm.experiments.train_cell import OnStep, prepare, shrink, train_cell
from didicm.files import write_files
from didicm.models import cost
from didicm.settings import TrainConfig
from didicm.training.build import RunComponents
from didicm.training.devices import make_fabric
from didicm.training.loop import LAST

EVAL_SEED = 0  # the test images are corrupted alike for every method and seed
BATCH = 250
PRIOR = 10.0  # images: few are held out where there are few
SHOWN = 200  # test images that are kept to look at
TRACED = 24  # of them, with their way through diffusion time
ONE_CALL = "1 call"
CELLS, MEASURED, PICTURES = "cells", "measured", "pictures.safetensors"


def run_cell(cell: Cell, base: TrainConfig, out: Path, trainings: Path, on_step: OnStep) -> dict[str, Any]:
    """Train or resume a cell, evaluate it, store posteriors and pictures, and return its line of the results."""
    key = cell.key(base)
    config = replace(cell.config(base), out=str(trainings / CELLS / key))
    parts, test = shrink(*prepare(config, cell.held_out))
    seconds = train_cell(config, cell.held_out, parts, on_step)
    classifier = load(Path(config.out) / LAST).classifier
    price = cost(classifier.model, parts.view.size)
    classifier.to(make_fabric(replace(config.run, devices=1)).device)

    readings = readings_of(classifier, cell.readings)
    workers = config.run.workers
    measured, labels, names = _posteriors(classifier, readings, test, parts, workers)
    held, held_labels = None, None
    if cell.held_out:
        held, held_labels, _ = _posteriors(classifier, readings, parts.val, parts, workers)
    folder = out / MEASURED / key
    lines = []
    for i, reading in enumerate(readings):
        probs, calls = measured[reading.name]
        line = {
            "name": reading.name,
            "group": reading.group or reading.name,
            "settings": dict(reading.settings),
            "calls": calls,
            "multiply_adds": price.total(calls),
            "metrics": evaluate_probs(probs, labels),
            "temperature": None,
            "tempered": None,
            "posteriors": None,
        }
        if held is not None:
            line["temperature"] = fit_temperature(held[reading.name][0], held_labels, PRIOR).value
            line["tempered"] = evaluate_probs(apply_temperature(probs, line["temperature"]), labels)
        if reading.stored:
            file = folder / f"posteriors-{i}.safetensors"
            meta = {"cell": key, "reading": reading.name, "temperature": line["temperature"]}
            save_posteriors(file, probs, labels, parts.class_names, names, meta)
            line["posteriors"] = str(file.relative_to(out))
        lines.append(line)
    _store_pictures(classifier, readings[0], measured[readings[0].name][0], test, parts, folder)
    return {
        "key": key,
        "method": cell.method,
        "standard": not isinstance(classifier, DiffusionClassifier),
        **asdict(cell.setting),
        "seed": cell.seed,
        "num_train": len(parts.train),
        "num_held_out": len(parts.val) if cell.held_out else 0,
        "num_test": len(labels),
        "num_classes": len(parts.class_names),
        "parameters": price.parameters,
        "train_seconds": seconds,
        "readings": lines,
        "versions": {package: version(package) for package in ("didicm", "torch", "timm")},
    }


def readings_of(classifier: Classifier, asked: Sequence[Reading] = ()) -> list[Reading]:
    """The ways to read a classifier: those asked for, or its recipe's sampler, a single call, and fewer steps."""
    if not isinstance(classifier, DiffusionClassifier):
        return [Reading(ONE_CALL)]
    if asked:
        return list(asked)
    steps = classifier.sampler.steps
    fewer = [2**i for i in range(12) if 2**i < steps]
    return [
        Reading(_steps_name(steps), {"method": "cp", "steps": steps}),
        Reading(ONE_CALL, {"method": "readout"}),
        *(Reading(_steps_name(n), {"method": "cp", "steps": n}, stored=False) for n in reversed(fewer)),
    ]


@torch.no_grad()
def _posteriors(
    classifier: Classifier, readings: Sequence[Reading], images: ImageSet, parts: RunComponents, workers: int
) -> tuple[dict[str, tuple[Tensor, int]], Tensor, list[str]]:
    """Probabilities and network calls of each reading, labels, and the names of the images that could be read."""
    loader = make_loader(
        images, parts.view, BATCH, train=False, seed=EVAL_SEED, corruption=parts.corrupt_eval, workers=workers
    )
    probs: dict[str, list[Tensor]] = {reading.name: [] for reading in readings}
    calls = dict.fromkeys(probs, 0)
    labels, index = [], []
    device = next(classifier.parameters()).device
    for image, label in loader:
        for reading in readings:
            posterior = classifier.posterior(image.to(device), **reading.settings)
            probs[reading.name].append(posterior.probs.float().cpu())
            calls[reading.name] = posterior.nfe
        labels.append(label)
        index += loader.index.tolist()
    measured = {name: (torch.cat(parts), calls[name]) for name, parts in probs.items()}
    return measured, torch.cat(labels), [images.name(i) for i in index]


@torch.no_grad()
def _store_pictures(
    classifier: Classifier, reading: Reading, probs: Tensor, test: ImageSet, parts: RunComponents, folder: Path
) -> None:
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
        image = image[traced].to(next(classifier.parameters()).device)
        classifier.posterior(image, callback=path.append, **{**reading.settings, "method": "cp"})
        start = torch.full_like(path[0].probs, 1 / classifier.num_classes)
        tensors["traced"] = traced
        tensors["trajectory"] = torch.stack([start, *(step.probs for step in path)], 1).float().cpu()
        tensors["times"] = torch.tensor([1.0, *(step.time for step in path)])
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    write_files(folder, {PICTURES: lambda path: save_file(tensors, path)})


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

"""Commands on whole models: `didicm models`, `import-official`, `ensemble`, `export` and `push`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.table import Table

from didicm.checkpoint import CONFIG, WEIGHTS, save
from didicm.cli.flags import parse
from didicm.cli.options import right
from didicm.data import EvalTransform
from didicm.errors import UserError, reason
from didicm.evaluation.stored import ensemble, open_model
from didicm.files import JSON_BYTES, check_replaceable, read_text
from didicm.inference.export import BATCHES, export, is_exported
from didicm.inference.hub import push
from didicm.inference.onnx import SUFFIX
from didicm.models import ScoreModel, cost, create_model, list_models
from didicm.official import read_official
from didicm.text import SafeConsole
from didicm.values import Natural, Pixels, Range

SUFFIXES = {"onnx": SUFFIX, "torch": ".pt2"}


@dataclass(frozen=True)
class ModelsOptions:
    """List the networks with their parameters and multiply-adds for one image.

    Args:
        size: image size in pixels
        classes: number of classes
        channels: image channels
        steps: network calls per posterior
    """

    size: Pixels = 224
    classes: Annotated[int, Range(2)] = 1000
    channels: Natural = 3
    steps: Natural = 8


def main(argv: list[str]) -> int:
    """Print one line per network."""
    options = parse(argv, ModelsOptions, command="models")
    table = Table("model", *right("parameters", "one call", f"{options.steps} calls"), "kind")
    for name in list_models():
        with torch.device("meta"):  # shapes are enough to count
            model = create_model(name, num_classes=options.classes, in_chans=options.channels)
        price, scores = cost(model, options.size), isinstance(model, ScoreModel)
        table.add_row(
            name,
            f"{price.parameters / 1e6:.1f} M",
            f"{price.total(1) / 1e9:.3f} G",
            f"{price.total(options.steps) / 1e9:.3f} G" if scores else "-",
            "score network" if scores else "baseline",
        )
    console = SafeConsole()
    console.print(table)
    console.print(
        f"Multiply-adds at {options.size} px, {options.classes} classes. What does not depend on the diffusion "
        "step is computed once per image. backbone_* take any timm model; shown: resnet18."
    )
    return 0


@dataclass(frozen=True)
class ImportOptions:
    """Convert a .pth.tar of the authors' released code into a model directory.

    Args:
        file: the .pth.tar file
        out: the model directory to write
        weights: which weights to take; best means the averaged ones if there are any
        class_names: a text file with one class name per line, in order
        force: replace a model that is there
    """

    file: Path
    out: Path = field(kw_only=True)
    weights: Literal["best", "model", "ema"] = "best"
    class_names: Path | None = None
    force: bool = False


def import_official_main(argv: list[str]) -> int:
    """Convert and say what came out."""
    options = parse(argv, ImportOptions, command="import-official", positional=["file"])
    # A model that was trained looks like one that was imported: neither is replaced.
    for name in (CONFIG, WEIGHTS):
        if os.path.lexists(options.out / name) and not options.force:
            raise UserError(f"{options.out} already holds {name}: give another --out, or replace it with --force")
    classifier, training = read_official(options.file, options.weights)
    names = None
    if options.class_names is not None:
        try:
            names = read_text(options.class_names, JSON_BYTES).removesuffix("\n").split("\n")
        except (OSError, ValueError) as error:
            raise UserError(f"--class-names {options.class_names} cannot be read: {reason(error)}") from error
    try:
        transform = _released_transform(training)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{options.file} was trained on images that cannot be reproduced: {reason(error)}"
        ) from error
    save(classifier, options.out, class_names=names, transform=transform.to_dict())
    price = cost(classifier.model, transform.size)
    return _tell(
        f"DiDiRN with {classifier.num_classes} classes, {price.parameters / 1e6:.1f} M parameters, "
        f"{transform.size} px, written to {options.out}\n"
        "It samples as the released code does; --sampler.solver exact makes evaluate and predict use our default."
    )


def _released_transform(training: dict[str, Any]) -> EvalTransform:
    """The evaluation transform of the released code, as far as the stored arguments tell."""
    size = training.get("input_size") or training.get("img_size") or 224
    return EvalTransform(
        size=int(size[-1] if isinstance(size, (list, tuple)) else size),
        channels=3,
        mean=tuple(training.get("mean") or (0.485, 0.456, 0.406)),
        std=tuple(training.get("std") or (0.229, 0.224, 0.225)),
        crop_pct=training.get("crop_pct") or 0.875,
        interpolation=training.get("interpolation") or "bicubic",
    )


@dataclass(frozen=True)
class EnsembleOptions:
    """Make one model of several: its posterior is the mean of theirs.

    It is used as any other model.

    Args:
        runs: runs (their best models), model directories, or hf://owner/name
        out: the model directory to write
    """

    runs: tuple[str, ...]
    out: str = field(kw_only=True)


def ensemble_main(argv: list[str]) -> int:
    """Write the ensemble and say what is known of it."""
    options = parse(argv, EnsembleOptions, command="ensemble", positional=["runs"])
    notes = ensemble(options.runs, options.out)
    return _tell(f"ensemble of {len(options.runs)} models written to {options.out}", notes)


@dataclass(frozen=True)
class ExportOptions:
    """Write a model as one graph: 8-bit images in, posterior out, checked against PyTorch from image files.

    Args:
        run: a run (its best model), a model directory, or hf://owner/name
        out: the file to write: model.onnx, or model.pt2 with --format torch
        format: onnx, for ONNX Runtime; or torch, a torch.export program for programs that have PyTorch
        images: image files to check it with, separated by commas; by default a few JPEG files are made
        sampler: how the posterior is sampled, as in --sampler.steps 2; by default as stored with the model
        size: input size in pixels; by default as stored with the model
        calibration: put the calibration stored with the model into the file; --no-calibration leaves it out
        force: replace a file there that this command did not make
    """

    run: str
    out: Path = field(kw_only=True)
    format: Literal["onnx", "torch"] = "onnx"
    images: tuple[str, ...] = ()
    sampler: Mapping[str, Any] = field(default_factory=dict)
    size: Natural | None = None
    calibration: bool = True
    force: bool = False


def export_main(argv: list[str]) -> int:
    """Export, check, say what was written."""
    options = parse(argv, ExportOptions, command="export", positional=["run"])
    if options.out.suffix != SUFFIXES[options.format]:
        raise UserError(f"--out {options.out} must end in .onnx, or in .pt2 with --format torch")
    check_replaceable(options.out, is_exported, "--out", force=options.force)
    model = open_model(options.run, device="cpu", size=options.size, sampler=options.sampler)
    made = export(model, options.out, format=options.format, images=options.images, calibrated=options.calibration)
    batches = ", ".join(map(str, BATCHES))
    return _tell(
        f"{made.path}: {made.path.stat().st_size / 1e6:.1f} MB; {made.note}\n"
        f"from image files, in batches of {batches}, it differs from PyTorch by at most {made.difference:.1g}"
    )


@dataclass(frozen=True)
class PushOptions:
    """Upload a model to the Hugging Face hub, with its calibration and a card.

    Log in first: hf auth login.

    Args:
        run: a run (its best model) or a model directory
        destination: hf://owner/name
        private: make the repository visible to you alone
    """

    run: str
    destination: str
    private: bool = False


def push_main(argv: list[str]) -> int:
    """Upload, say what and where."""
    options = parse(argv, PushOptions, command="push", positional=["run", "destination"])
    pushed = push(options.run, options.destination, private=options.private)
    return _tell(f"{pushed.address}: {', '.join(sorted(pushed.files))}", pushed.notes)


def _tell(text: str, notes: Sequence[str] = ()) -> int:
    console = SafeConsole(soft_wrap=True)
    for line in (text, *(f"note: {note}" for note in notes)):
        console.print(line)
    return 0

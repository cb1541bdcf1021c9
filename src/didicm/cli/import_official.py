"""`didicm import-official`: a checkpoint of the authors' released code as a model directory."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from didicm.checkpoint import CONFIG, save
from didicm.errors import UserError
from didicm.models import cost
from didicm.official import read_official


def main(argv: list[str]) -> None:
    """Convert and say what came out."""
    parser = argparse.ArgumentParser(
        prog="didicm import-official",
        description="Convert a .pth.tar of the authors' released code into a model directory.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the .pth.tar file")
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument(
        "--weights",
        choices=["best", "model", "ema"],
        default="best",
        help="which weights to take; best (the default) means the averaged ones if there are any",
    )
    parser.add_argument("--class-names", type=Path, help="a text file with one class name a line, in order")
    arguments = parser.parse_args(argv)
    if (arguments.out / CONFIG).exists():
        raise UserError(f"{arguments.out} already holds a model: give another --out")
    classifier, training = read_official(arguments.file, arguments.weights)
    names = None
    if arguments.class_names:
        if not arguments.class_names.is_file():
            raise UserError(f"--class-names {arguments.class_names} does not exist")
        names = arguments.class_names.read_text(encoding="utf-8").split("\n")
        names = names[:-1] if names[-1] == "" else names
    transform = _transform(training)
    save(classifier, arguments.out, class_names=names, transform=transform)
    price = cost(classifier.model, transform["size"])
    Console().print(
        f"{classifier.model.recipe['name']} with {classifier.num_classes} classes, {price.parameters / 1e6:.1f} M "
        f"parameters, {transform['size']} px, written to {arguments.out}"
    )


def _transform(training: dict[str, Any]) -> dict[str, Any]:
    """The evaluation transform of the released code, as far as the stored arguments tell."""
    size = training.get("input_size") or training.get("img_size") or 224
    return {
        "size": int(size[-1] if isinstance(size, (list, tuple)) else size),
        "channels": 3,
        "mean": list(training.get("mean") or (0.485, 0.456, 0.406)),
        "std": list(training.get("std") or (0.229, 0.224, 0.225)),
        "crop_pct": training.get("crop_pct") or 0.875,
        "interpolation": training.get("interpolation") or "bicubic",
    }

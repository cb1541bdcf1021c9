"""`didicm import-official`: a checkpoint of the authors' released code as a model directory."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from didicm.checkpoint import CONFIG, WEIGHTS, save
from didicm.cli.flags import parse
from didicm.data import EvalTransform
from didicm.errors import UserError, reason
from didicm.files import JSON_BYTES, read_text
from didicm.models import cost
from didicm.official import read_official
from didicm.text import SafeConsole


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


def main(argv: list[str]) -> int:
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
        transform = evaluation_transform(training)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{options.file} was trained on images that cannot be reproduced: {reason(error)}"
        ) from error
    save(classifier, options.out, class_names=names, transform=transform.to_dict())
    price = cost(classifier.model, transform.size)
    SafeConsole().print(
        f"DiDiRN with {classifier.num_classes} classes, {price.parameters / 1e6:.1f} M parameters, "
        f"{transform.size} px, written to {options.out}\n"
        "It samples as the released code does; --sampler.solver exact makes evaluate and predict use our default.",
        soft_wrap=True,
    )
    return 0


def evaluation_transform(training: dict[str, Any]) -> EvalTransform:
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

"""`didicm export`: a model as one file that runs without this package, or without PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from didicm.cli.flags import parse
from didicm.errors import UserError
from didicm.evaluation.stored import open_model
from didicm.files import check_replaceable
from didicm.inference.export import BATCHES, export, is_exported
from didicm.inference.onnx import SUFFIX
from didicm.text import SafeConsole
from didicm.values import Natural

SUFFIXES = {"onnx": SUFFIX, "torch": ".pt2"}


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


def main(argv: list[str]) -> int:
    """Export, check, say what was written."""
    options = parse(argv, ExportOptions, command="export", positional=["run"])
    if options.out.suffix != SUFFIXES[options.format]:
        raise UserError(f"--out {options.out} must end in .onnx, or in .pt2 with --format torch")
    check_replaceable(options.out, is_exported, "--out", force=options.force)
    model = open_model(options.run, device="cpu", size=options.size, sampler=options.sampler)
    made = export(model, options.out, format=options.format, images=options.images, calibrated=options.calibration)
    batches = ", ".join(map(str, BATCHES))
    SafeConsole(soft_wrap=True).print(
        f"{made.path}: {made.path.stat().st_size / 1e6:.1f} MB; {made.note}\n"
        f"from image files, in batches of {batches}, it differs from PyTorch by at most {made.difference:.1g}",
    )
    return 0

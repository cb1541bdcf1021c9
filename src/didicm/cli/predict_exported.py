"""`didicm predict model.onnx`: the same by ONNX Runtime, without PyTorch; how it is asked was fixed at export."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from didicm.cli.flags import parse
from didicm.cli.options import WORKERS
from didicm.cli.predictions import (
    PredictionOptions,
    read_batches,
    show,
    show_estimate,
    standard_input,
    to_line,
    write_rows,
)
from didicm.data.listing import list_images
from didicm.errors import UserError
from didicm.inference.adjust import claim, read_prior, read_taxonomy
from didicm.inference.bulk_exported import estimate_exported, predict_exported
from didicm.inference.onnx import OnnxPredictor
from didicm.text import SafeConsole
from didicm.values import Natural

FIXED = (
    "sampler",
    "size",
    "calibration",
    "optimize",
    "compile",
    "trajectory",
    "engine",
    "actors",
)  # of runs alone


@dataclass(frozen=True)
class ExportedOptions(PredictionOptions):
    """Options of `didicm predict` for an exported model.

    Args:
        run: a file that didicm export wrote
        device: cpu or cuda; auto takes a GPU if ONNX Runtime can use one
        workers: threads that decode images
    """

    workers: Natural = WORKERS


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    text = "Classify images by an exported model: the most probable classes, the entropy, the conformal set."
    _refuse_fixed(argv)
    options = parse(argv, ExportedOptions, command="predict", description=text, positional=["run", "images"])
    options.check()
    predictor = OnnxPredictor.load(
        options.run,
        options.device,
        conformal=options.conformal,
        classes=options.classes,
        prior=read_prior(options.prior),
        taxonomy=read_taxonomy(options.taxonomy),
    )
    console = SafeConsole(soft_wrap=True)
    print(predictor.note, file=sys.stderr)
    if options.dry_run:
        return show_estimate(options, predictor.class_names, partial(estimate_exported, predictor), console)
    if options.out is not None:
        errors = SafeConsole(stderr=True, soft_wrap=True)
        return write_rows(options, partial(predict_exported, predictor), predictor.metadata.calls, errors)
    images, failed = list_images(options.images, standard_input()), 0
    claimed = claim(predictor.rule, predictor.adjustment)
    for read, seen, unreadable in read_batches(images, options.batch_size, predictor.prepare):
        failed += unreadable
        for image, prediction in zip(read, predictor.predict_batch(seen) if seen else [], strict=True):
            if options.json:
                print(to_line(image.name, prediction, claimed, options.top))
            else:
                show(image.name, prediction, claimed, options.top, console)
    return 2 if failed else 0


def _refuse_fixed(argv: Sequence[str]) -> None:
    for flag in (argument.partition("=")[0] for argument in argv if argument.startswith("--")):
        if flag[2:].removeprefix("no-").partition(".")[0] in FIXED:
            raise UserError(
                f"an exported model answers as it was exported: leave out {flag}, or give the run itself"
            )

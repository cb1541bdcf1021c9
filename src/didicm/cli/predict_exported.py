"""`didicm predict model.onnx`: the same by ONNX Runtime, without PyTorch; how it is asked was fixed at export."""

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from didicm.cli.flags import parse
from didicm.cli.predictions import claim, show, to_line
from didicm.data.listing import list_images
from didicm.errors import UserError
from didicm.inference.adjust import read_prior, read_taxonomy
from didicm.inference.onnx import OnnxPredictor
from didicm.inference.prediction import why_unreadable
from didicm.text import SafeConsole, readable
from didicm.values import Natural


@dataclass(frozen=True)
class ExportedOptions:
    """Options of `didicm predict` for an exported model.

    Args:
        run: a file that didicm export wrote
        images: image files, folders, patterns, .tar and .parquet files; - reads a list of them from standard input
        top: classes to show
        json: one line of JSON per image
        conformal: kind of set: lac (small) or aps (adapts to the image)
        classes: those that are possible here, as in cat,dog: the posterior is renormalised to them
        prior: how frequent each class is here: a YAML file (cat: 0.2), uniform, or training to undo --balance
        taxonomy: a YAML file of coarser names (animal: [cat, dog]), to which probabilities are summed
        device: cpu or cuda; auto takes a GPU if ONNX Runtime can use one
        batch_size: changes the speed, not the result
    """

    run: str
    images: tuple[str, ...] = ()
    top: Natural = 5
    json: bool = False
    conformal: Literal["lac", "aps"] = "lac"
    classes: tuple[str, ...] | None = None
    prior: str | None = None
    taxonomy: Path | None = None
    device: str = "auto"
    batch_size: Natural = 64


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    text = "Classify images by an exported model: the most probable classes, the entropy, the conformal set."
    options = parse(argv, ExportedOptions, command="predict", description=text, positional=["run", "images"])
    if not options.images:
        raise UserError("didicm predict needs IMAGES: files, folders, patterns, .tar or .parquet files, or -")
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
    images, failed = list_images(options.images, sys.stdin.buffer), 0
    while batch := list(islice(images, options.batch_size)):
        names, seen = [], []
        for image in batch:
            try:
                with image.open() as opened:
                    seen.append(predictor.prepare(opened))
                names.append(image.name)
            except Exception as error:  # a broken file can raise nearly anything from inside a decoder
                failed += 1
                told = f"{image.name} cannot be read as an image ({why_unreadable(error)})"
                print(f"didicm: {readable(told)}", file=sys.stderr)
        for name, prediction in zip(names, predictor.predict_batch(seen) if seen else [], strict=True):
            if options.json:
                print(to_line(name, prediction, options.top))
            else:
                show(name, prediction, claim(predictor.rule, predictor.adjustment), options.top, console)
    return 2 if failed else 0

"""`didicm predict model.onnx`: the same by ONNX Runtime, without PyTorch; how it is asked was fixed at export."""

import sys
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Literal

from didicm.cli.flags import parse
from didicm.cli.options import WORKERS
from didicm.cli.predictions import claim, parse_shard, show, show_estimate, tell_rows, to_line
from didicm.data.listing import list_images
from didicm.errors import UserError
from didicm.inference.adjust import read_prior, read_taxonomy
from didicm.inference.bulk_exported import estimate_exported, predict_exported
from didicm.inference.onnx import OnnxPredictor
from didicm.inference.parts import BulkSettings, Parts, Tally
from didicm.inference.prediction import why_unreadable
from didicm.inference.rows import Format, RowWriter
from didicm.progress import ProgressDisplay
from didicm.text import SafeConsole, readable
from didicm.values import Natural

FOR_ROWS = ("parquet", "csv", "all_probs", "part_size", "workers", "shard")


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
        out: write rows instead: a .jsonl, .csv or .parquet file, or a folder of parts; run again to go on
        parquet: parts in Parquet
        csv: parts in CSV
        all_probs: the probabilities of all classes, too
        part_size: rows per part
        workers: threads that decode images
        shard: i/n: predict the i-th of n shares; all may write into one folder
        force: replace a file that is there already
        dry_run: measure a few hundred images, and say what a million and a billion would take
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
    out: Path | None = None
    parquet: bool = False
    csv: bool = False
    all_probs: bool = False
    part_size: Natural = BulkSettings.part_size
    workers: Natural = WORKERS
    shard: str = "1/1"
    force: bool = False
    dry_run: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if not self.images:
            raise UserError("didicm predict needs IMAGES: files, folders, patterns, .tar or .parquet files, or -")
        if self.parquet and self.csv:
            raise UserError("--parquet and --csv are two formats: choose one")
        for item in fields(self):
            given = item.name in FOR_ROWS and getattr(self, item.name) != item.default
            if given and self.out is None and not self.dry_run:
                raise UserError(f"--{item.name.replace('_', '-')} is for rows in a file: say where, by --out")

    @property
    def format(self) -> Format | None:
        """The format that was asked for."""
        return "parquet" if self.parquet else "csv" if self.csv else None

    @property
    def settings(self) -> BulkSettings:
        """What a row says, and how the work is cut."""
        return BulkSettings(self.top, self.all_probs, self.part_size, self.batch_size, self.workers)


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    text = "Classify images by an exported model: the most probable classes, the entropy, the conformal set."
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
        writer = RowWriter(Parts(options.out or Path("rows"), options.format).format, predictor.class_names)
        images = list_images(options.images, sys.stdin.buffer)
        show_estimate(estimate_exported(predictor, images, writer, options.settings), options.workers, console)
        return 0
    if options.out is not None:
        return write_rows(predictor, options, options.out)
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


def write_rows(predictor: OnnxPredictor, options: ExportedOptions, out: Path) -> int:
    """Write a row per image, with progress, and say what there is; exit code 2 when no image could be read."""
    console = SafeConsole(stderr=True, soft_wrap=True)
    with ProgressDisplay(console, 1) as display:

        def progress(done: Tally, todo: int) -> None:
            display.update(done.images, f"{done.images}/{todo} images", total=todo)

        done = predict_exported(
            predictor,
            options.images,
            out,
            format=options.format,
            shard=parse_shard(options.shard),
            lines=sys.stdin.buffer,
            settings=options.settings,
            progress=progress,
            force=options.force,
        )
    console.print(tell_rows(out, done), highlight=False)
    return 2 if done.images and done.images == done.unreadable else 0

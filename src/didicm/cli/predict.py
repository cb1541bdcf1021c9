"""`didicm predict`: what is on images, how sure the model is, and how it came to that.

An exported model (.onnx) is run by ONNX Runtime, without PyTorch; how it is asked was fixed at export.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from didicm.cli.flags import parse
from didicm.cli.options import WORKERS, ModelOptions, right
from didicm.cli.predictions import draw, read_batches, show, tell_rows, to_line
from didicm.data.listing import ImageRef, list_images
from didicm.errors import UserError
from didicm.files import check_replaceable, is_our_picture
from didicm.inference.adjust import claim, read_prior, read_taxonomy
from didicm.inference.bulk import BulkSettings, Engine, Tally, estimate_bulk, predict
from didicm.inference.onnx import SUFFIX
from didicm.inference.parts import Parts
from didicm.inference.prediction import BasePredictor, Prediction
from didicm.inference.rows import Format, RowWriter
from didicm.progress import ProgressDisplay, duration
from didicm.text import SafeConsole, count
from didicm.values import Count, Natural

MOST_DRAWN = 12  # images in a picture of trajectories
DEVICES = (1, 8, 64)  # for which --dry-run says what many images would take
FIXED = ("sampler", "size", "calibration", "optimize", "compile", "trajectory", "engine", "actors")  # at export
FOR_ROWS = ("parquet", "csv", "all_probs", "part_size", "workers", "shard", "engine", "actors")


@dataclass(frozen=True)
class PredictOptions(ModelOptions):
    """Classify images: the most probable classes, the entropy, the conformal set if calibrated.

    The probabilities assume that an image shows one of the model's classes and is like the images of training; a
    calibrated model flags images that are unlike them.

    Args:
        run: a run (its best model), a model directory, hf://owner/name, or a file of didicm export (.onnx)
        images: image files, folders, patterns, .tar and .parquet files; - reads a list of them from standard input
        top: number of classes to show
        json: one line of JSON per image, with its error if it cannot be read
        conformal: kind of set: lac (small) or aps (adapts to the image)
        classes: classes that are possible here, as in cat,dog; the posterior is renormalised to them
        prior: how frequent each class is here: a YAML file (cat: 0.2), uniform, or training to undo --balance
        taxonomy: a YAML file of coarser names (animal: [cat, dog]), to which probabilities are summed
        trajectory: a PNG file: draw the posterior over diffusion time
        out: write a row per image instead, into a file (.jsonl, .csv, .parquet) or a folder of parts; run the same
            command again to resume after a crash
        parquet: parts of a folder in Parquet
        csv: parts of a folder in CSV
        all_probs: write the probabilities of all classes in every row
        part_size: rows per part
        workers: processes that decode images; threads, for an exported model
        shard: i/n: predict only the i-th of n shares; all may write into one folder
        engine: local, or ray: actors of Ray Data on the cluster that RAY_ADDRESS names, or on this machine
        actors: number of Ray actors; by default one per GPU, or per CPU if there is none
        force: replace files that this command did not make
        dry_run: measure a few hundred images, and say what a million and a billion would take
    """

    images: tuple[str, ...] = ()
    top: Natural = 5
    json: bool = False
    conformal: Literal["lac", "aps"] = "lac"
    classes: tuple[str, ...] | None = None
    prior: str | None = None
    taxonomy: Path | None = None
    trajectory: Path | None = None
    out: Path | None = None
    parquet: bool = False
    csv: bool = False
    all_probs: bool = False
    part_size: Natural = BulkSettings.part_size
    workers: Count = WORKERS
    shard: str = "1/1"
    engine: Engine = "local"
    actors: Natural | None = None
    force: bool = False
    dry_run: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if not self.images:
            raise UserError("didicm predict needs IMAGES: files, folders, patterns, .tar or .parquet files, or -")
        if self.parquet and self.csv:
            raise UserError("--parquet and --csv are two formats: choose one")
        shard, for_rows = self.parsed_shard, self.out is not None or self.dry_run
        for item in fields(self):
            if not for_rows and item.name in FOR_ROWS and getattr(self, item.name) != item.default:
                raise UserError(f"--{item.name.replace('_', '-')} is for rows in a file: say where with --out")
        list_images(self.images)  # names that do not exist are told before the model is loaded
        if self.out is not None:
            Parts(self.out, self.format, shard, force=self.force).check_free()
        if self.trajectory is not None:
            if self.trajectory.suffix.lower() != ".png":
                raise UserError(f"--trajectory {self.trajectory} must be a .png file")
            check_replaceable(self.trajectory, is_our_picture, "--trajectory", force=self.force)
            if for_rows:
                other = "--dry-run" if self.out is None else "--out"
                raise UserError(f"--trajectory draws only a few images: omit either --trajectory or {other}")
        if self.actors is not None and self.engine != "ray":
            raise UserError("--actors is for Ray: add --engine ray, or omit --actors")

    @property
    def parsed_shard(self) -> tuple[int, int]:
        """Which shard, and of how many."""
        found = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if found is None:
            raise UserError(f"--shard must be i/n with i from 1 to n, as in 2/8, got {self.shard!r}")
        return int(found[1]), int(found[2])

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
    if any(argument.endswith(SUFFIX) for argument in argv):
        _refuse_fixed(argv)
    options = parse(argv, PredictOptions, command="predict", positional=["run", "images"])
    options.check()
    console, errors = SafeConsole(soft_wrap=True), SafeConsole(stderr=True, soft_wrap=True)
    predictor = options.load(
        conformal=options.conformal,
        classes=options.classes,
        prior=read_prior(options.prior),
        taxonomy=read_taxonomy(options.taxonomy),
    )
    if options.trajectory is not None:
        predictor.check_trajectory()
    errors.print(predictor.note)
    if options.dry_run:
        return show_estimate(options, predictor, console)
    if options.out is not None:
        return write_rows(options, options.out, predictor, errors)
    return show_all(options, predictor, console, errors)


def _refuse_fixed(argv: Sequence[str]) -> None:
    for flag in (argument.partition("=")[0] for argument in argv if argument.startswith("--")):
        if flag[2:].removeprefix("no-").partition(".")[0] in FIXED:
            raise UserError(
                f"an exported model answers as it was exported: leave out {flag}, or give the run itself"
            )


def show_all(options: PredictOptions, predictor: BasePredictor, console: Console, errors: Console) -> int:
    """Print every prediction; exit code 2 when an image could not be read."""
    failed, predicted = 0, 0
    drawn: list[tuple[ImageRef, Prediction]] = []
    images = list_images(options.images, _standard_input())
    claimed = claim(predictor.rule, predictor.adjustment)
    for batch in read_batches(images, options.batch_size, predictor.see):
        wanted = options.trajectory is not None and len(drawn) < MOST_DRAWN
        seen = [found for _, found in batch if not isinstance(found, str)]
        predictions = iter(predictor.predict_batch(seen, trajectory=wanted) if seen else ())
        predicted, failed = predicted + len(seen), failed + len(batch) - len(seen)
        for image, found in batch:
            answer = found if isinstance(found, str) else next(predictions)
            if options.json:
                print(to_line(image.name, answer, claimed, options.top))
            elif isinstance(answer, Prediction):
                show(image.name, answer, claimed, options.top, console)
            if wanted and isinstance(answer, Prediction) and len(drawn) < MOST_DRAWN:
                drawn.append((image, answer))
    if drawn and options.trajectory is not None:
        draw(drawn, predictor.class_names, options.trajectory, options.top)
        left = f", the first {len(drawn)} of {predicted} images" if predicted > len(drawn) else ""
        errors.print(f"trajectories: {options.trajectory}{left}")
    return 2 if failed else 0


def write_rows(options: PredictOptions, out: Path, predictor: BasePredictor, console: Console) -> int:
    """Write a row per image, with progress, and say what there is; exit code 2 when no image could be read."""
    with ProgressDisplay(console, 1) as display:

        def progress(done: Tally, todo: int) -> None:
            unreadable = f", {done.unreadable} unreadable" if done.unreadable else ""
            display.update(done.images, f"{done.images}/{todo} images{unreadable}", total=todo)

        done = predict(
            predictor,
            options.images,
            out,
            format=options.format,
            shard=options.parsed_shard,
            engine=options.engine,
            actors=options.actors,
            lines=_standard_input(),
            settings=options.settings,
            progress=progress,
            force=options.force,
        )
    console.print(tell_rows(out, done, predictor.calls))
    return 2 if done.images and done.images == done.unreadable else 0


def show_estimate(options: PredictOptions, predictor: BasePredictor, console: Console) -> int:
    """Measure a few hundred images, and show what a million and a billion would take."""
    writer = RowWriter(Parts(options.out or Path("rows"), options.format).format, predictor.class_names)
    found = estimate_bulk(predictor, list_images(options.images, _standard_input()), writer, options.settings)
    table = Table(*right("images", "files", "size", *(count(n, "device") for n in DEVICES)))
    for name, images in (("a million", 10**6), ("a billion", 10**9)):
        times = (duration(found.seconds(images, options.workers, n)) for n in DEVICES)
        table.add_row(name, f"{found.files(images):,}", f"{found.bytes(images) / 10**9:,.1f} GB", *times)
    console.print(table)
    console.print(
        f"measured on {count(found.images, 'image')}, {found.unreadable} of them unreadable: "
        f"{1e3 * found.decoding:.1f} ms to decode one, {1e3 * found.network:.1f} ms to predict it; "
        f"{count(options.workers, 'worker')} per device to decode images; files for --part-size "
        f"{options.part_size}",
    )
    return 0


def _standard_input() -> Iterator[bytes]:
    """Its lines, if anybody asks for them."""
    yield from sys.stdin.buffer

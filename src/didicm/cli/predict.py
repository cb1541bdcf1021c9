"""`didicm predict`: what is on images, how sure the model is, and how it came to that."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from rich.console import Console

from didicm.cli.flags import parse
from didicm.cli.options import WORKERS, AskOptions
from didicm.cli.predictions import claim, parse_shard, show, show_estimate, tell_rows, to_line
from didicm.data.bands import viewable
from didicm.data.decode import own_channels, to_channels
from didicm.data.listing import ImageRef, list_images
from didicm.errors import UserError
from didicm.files import SOFTWARE, check_replaceable, is_our_picture, write_files
from didicm.inference.adjust import read_prior, read_taxonomy
from didicm.inference.bulk import BulkSettings, Engine, Tally, estimate_bulk, predict
from didicm.inference.parts import Parts
from didicm.inference.prediction import Prediction, why_unreadable
from didicm.inference.predictor import Predictor
from didicm.inference.rows import Format, RowWriter
from didicm.progress import ProgressDisplay
from didicm.text import SafeConsole, readable
from didicm.values import Count, Natural

FOR_ROWS = ("parquet", "csv", "all_probs", "part_size", "workers", "shard", "engine", "actors")
MOST_DRAWN = 12  # images in a picture of trajectories


@dataclass(frozen=True)
class PredictOptions(AskOptions):
    """Options of `didicm predict`.

    Args:
        run: a run (its best model), a model directory, hf://owner/name, or a file of didicm export (.onnx)
        images: image files, folders, patterns, .tar and .parquet files; - reads a list of them from standard input
        top: classes to show
        json: one line of JSON per image
        trajectory: a PNG file: draw the posterior over diffusion time
        conformal: kind of set: lac (small) or aps (adapts to the image)
        classes: those that are possible here, as in cat,dog: the posterior is renormalised to them
        prior: how frequent each class is here: a YAML file (cat: 0.2), uniform, or training to undo --balance
        taxonomy: a YAML file of coarser names (animal: [cat, dog]), to which probabilities are summed
        out: write a row per image instead, into a file (.jsonl, .csv, .parquet) or a folder of parts; run the same
            command again to go on after a crash
        parquet: parts of a folder in Parquet
        csv: parts of a folder in CSV
        all_probs: with the probabilities of all classes in every row
        part_size: rows per part
        workers: processes that decode images
        shard: i/n: predict the i-th of n shares; all may write into one folder
        engine: local, or ray: actors of Ray Data on the cluster that RAY_ADDRESS names, or on this machine
        actors: of Ray; by default one per GPU, or per CPU where there is none
        dry_run: measure a few hundred images, and say what a million and a billion would take
    """

    images: tuple[str, ...] = ()
    top: Natural = 5
    json: bool = False
    trajectory: Path | None = None
    conformal: Literal["lac", "aps"] = "lac"
    classes: tuple[str, ...] | None = None
    prior: str | None = None
    taxonomy: Path | None = None
    out: Path | None = None
    parquet: bool = False
    csv: bool = False
    all_probs: bool = False
    part_size: Natural = BulkSettings.part_size
    workers: Count = WORKERS
    shard: str = "1/1"
    engine: Engine = "local"
    actors: Natural | None = None
    dry_run: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if not self.images:
            raise UserError("didicm predict needs IMAGES: files, folders, patterns, .tar or .parquet files, or -")
        if self.trajectory is not None and self.trajectory.suffix.lower() != ".png":
            raise UserError(f"--trajectory {self.trajectory} must be a .png file")
        if self.trajectory is not None:
            check_replaceable(self.trajectory, is_our_picture, "--trajectory", force=self.force)
        if self.trajectory is not None and (self.out is not None or self.dry_run):
            raise UserError("--trajectory draws a few images: leave it or --out out")
        if self.parquet and self.csv:
            raise UserError("--parquet and --csv are two formats: choose one")
        if self.actors is not None and self.engine != "ray":
            raise UserError("--actors are Ray's: add --engine ray, or leave it out")
        _ = self.parsed_shard
        if self.out is None and not self.dry_run:
            for item in fields(self):
                if item.name in FOR_ROWS and getattr(self, item.name) != item.default:
                    raise UserError(f"--{item.name.replace('_', '-')} is for rows in a file: say where, by --out")

    @property
    def parsed_shard(self) -> tuple[int, int]:
        """Which shard, and of how many."""
        return parse_shard(self.shard)

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
    text = (
        "Classify images: the most probable classes, the entropy, the conformal set if calibrated. The "
        "probabilities assume that an image shows one of the model's classes and is like the images of training; "
        "a calibrated model flags images that are unlike them."
    )
    options = parse(argv, PredictOptions, command="predict", description=text, positional=["run", "images"])
    options.check()
    console, errors = SafeConsole(soft_wrap=True), SafeConsole(stderr=True, soft_wrap=True)
    predictor = Predictor.load(
        options.run,
        options.device,
        calibrated=options.calibration,
        size=options.size,
        conformal=options.conformal,
        optimize=options.optimize,
        compile=options.compile,
        classes=options.classes,
        prior=read_prior(options.prior),
        taxonomy=read_taxonomy(options.taxonomy),
        **options.sampler,
    )
    if options.trajectory is not None:
        predictor.check_trajectory()
    errors.print(predictor.note, highlight=False)
    if options.dry_run:
        writer = RowWriter(Parts(options.out or Path("rows"), options.format).format, predictor.class_names)
        images = list_images(options.images, standard_input())
        show_estimate(estimate_bulk(predictor, images, writer, options.settings), options.workers, console)
        return 0
    if options.out is not None:
        return write_rows(predictor, options, errors)
    return show_all(predictor, options, console, errors)


def show_all(predictor: Predictor, options: PredictOptions, console: Console, errors: Console) -> int:
    """Print every prediction; exit code 2 when an image could not be read."""
    failed, count = 0, 0
    drawn: list[tuple[ImageRef, Prediction]] = []
    images = list_images(options.images, standard_input())
    while batch := list(islice(images, options.batch_size)):
        read, seen = [], []
        for image in batch:
            try:
                with image.open() as opened:
                    seen.append(predictor.model.transform(opened))
                read.append(image)
            except Exception as error:  # a broken file can raise nearly anything from inside a decoder
                failed += 1
                told = f"{image.name} cannot be read as an image ({why_unreadable(error)})"
                print(f"didicm: {readable(told)}", file=sys.stderr)
        if not seen:
            continue
        wanted = options.trajectory is not None and len(drawn) < MOST_DRAWN
        predictions = predictor.predict_batch(torch.stack(seen), trajectory=wanted)
        count += len(predictions)
        for image, prediction in zip(read, predictions, strict=True):
            if options.json:
                print(to_line(image.name, prediction, options.top))
            else:
                show(image.name, prediction, claim(predictor.rule, predictor.adjustment), options.top, console)
        drawn += list(zip(read, predictions, strict=True))[: MOST_DRAWN - len(drawn)] if wanted else []
    if drawn and options.trajectory is not None:
        draw(drawn, options.trajectory, options.top)
        left = f", the first {len(drawn)} of {count} images" if count > len(drawn) else ""
        errors.print(f"trajectories: {options.trajectory}{left}", highlight=False)
    return 2 if failed else 0


def write_rows(predictor: Predictor, options: PredictOptions, console: Console) -> int:
    """Write a row per image, with progress, and say what there is; exit code 2 when no image could be read."""
    assert options.out is not None
    with ProgressDisplay(console, 1) as display:

        def progress(done: Tally, todo: int) -> None:
            unreadable = f", {done.unreadable} unreadable" if done.unreadable else ""
            display.update(done.images, f"{done.images}/{todo} images{unreadable}", total=todo)

        done = predict(
            predictor,
            options.images,
            options.out,
            format=options.format,
            shard=options.parsed_shard,
            engine=options.engine,
            actors=options.actors,
            lines=standard_input(),
            settings=options.settings,
            progress=progress,
            force=options.force,
        )
    console.print(tell_rows(options.out, done), highlight=False)
    return 2 if done.images and done.images == done.unreadable else 0


def standard_input() -> Iterator[bytes]:
    """Its lines, if anybody asks for them."""
    yield from sys.stdin.buffer


def _upright(image: ImageRef) -> Image.Image:
    with image.open() as opened:
        return viewable(to_channels(opened, own_channels(opened)))


def draw(drawn: Sequence[tuple[ImageRef, Prediction]], path: Path, top: int) -> None:
    """One row per image: the image, and its most probable classes over diffusion time."""
    from didicm.report.images import Traced, trajectory_picture
    from didicm.report.style import drawing

    items = []
    for image, prediction in drawn:
        order = prediction.probs.argsort(descending=True, stable=True)[:top]
        times = [max(time, 0.0) for time, _ in prediction.trajectory or []]  # `official` ends a little below 0
        states = torch.stack([probs[order] for _, probs in prediction.trajectory or []]).numpy()  # (T, top)
        names = [name for name, _ in prediction.classes[:top]]
        items.append(Traced(Path(image.name).name, _upright(image), times, states, names))
    with drawing():
        figure = trajectory_picture(items)
        save = partial(figure.savefig, dpi=120, format="png", metadata=SOFTWARE)
        write_files(path.parent, {path.name: save})

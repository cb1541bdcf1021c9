"""What both kinds of `didicm predict` share: options, reading images, showing and writing predictions."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from didicm.cli.options import WORKERS, percent
from didicm.data.listing import NO_IMAGES, ImageRef, list_images
from didicm.data.picture import Picture
from didicm.errors import UserError
from didicm.inference.adjust import read_prior, read_taxonomy
from didicm.inference.bulk import estimate_bulk
from didicm.inference.parts import BulkSettings, Parts, Tally
from didicm.inference.prediction import BasePredictor, Prediction, why_unreadable
from didicm.inference.rows import Format, RowWriter
from didicm.progress import ProgressDisplay, duration
from didicm.text import count, readable
from didicm.values import Count, Natural

T = TypeVar("T")
DEVICES = (1, 8, 64)  # for which --dry-run says what many images would take
FOR_ROWS = ("parquet", "csv", "all_probs", "part_size", "workers", "shard", "engine", "actors")


@dataclass(frozen=True)
class PredictionOptions:
    """Options of `didicm predict`, whatever runs the model.

    Args:
        images: image files, folders, patterns, .tar and .parquet files; - reads a list of them from standard input
        batch_size: changes the speed, not the result
        top: number of classes to show
        json: one line of JSON per image
        conformal: kind of set: lac (small) or aps (adapts to the image)
        classes: classes that are possible here, as in cat,dog; the posterior is renormalised to them
        prior: how frequent each class is here: a YAML file (cat: 0.2), uniform, or training to undo --balance
        taxonomy: a YAML file of coarser names (animal: [cat, dog]), to which probabilities are summed
        out: write a row per image instead, into a file (.jsonl, .csv, .parquet) or a folder of parts; run the same
            command again to resume after a crash
        parquet: parts of a folder in Parquet
        csv: parts of a folder in CSV
        all_probs: write the probabilities of all classes in every row
        part_size: rows per part
        shard: i/n: predict only the i-th of n shares; all may write into one folder
        force: replace files that this command did not make
        dry_run: measure a few hundred images, and say what a million and a billion would take
    """

    run: str
    images: tuple[str, ...] = ()
    device: str = "auto"
    batch_size: Natural = 64
    top: Natural = 5
    json: bool = False
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
    force: bool = False
    dry_run: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if not self.images:
            raise UserError("didicm predict needs IMAGES: files, folders, patterns, .tar or .parquet files, or -")
        if self.parquet and self.csv:
            raise UserError("--parquet and --csv are two formats: choose one")
        _ = self.parsed_shard
        for item in fields(self):
            if not self.for_rows and item.name in FOR_ROWS and getattr(self, item.name) != item.default:
                raise UserError(f"--{item.name.replace('_', '-')} is for rows in a file: say where with --out")
        list_images(self.images)  # names that do not exist are told before the model is loaded
        if self.out is not None:
            Parts(self.out, self.format, self.parsed_shard, force=self.force).check_free()

    @property
    def for_rows(self) -> bool:
        """Whether rows are asked for, or what they would take."""
        return self.out is not None or self.dry_run

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
    def adjusting(self) -> dict[str, Any]:
        """Sets, classes, prior and taxonomy, as a predictor takes them."""
        return {
            "conformal": self.conformal,
            "classes": self.classes,
            "prior": read_prior(self.prior),
            "taxonomy": read_taxonomy(self.taxonomy),
        }

    @property
    def settings(self) -> BulkSettings:
        """What a row says, and how the work is cut."""
        return BulkSettings(self.top, self.all_probs, self.part_size, self.batch_size, self.workers)


def standard_input() -> Iterator[bytes]:
    """Its lines, if anybody asks for them."""
    yield from sys.stdin.buffer


def read_batches(
    images: Iterable[ImageRef], size: int, prepare: Callable[[Picture], T]
) -> Iterator[tuple[list[ImageRef], list[T], int]]:
    """Batches of the images that can be read, what `prepare` makes of them, and how many could not be read."""
    rest, some = iter(images), False
    while batch := list(islice(rest, size)):
        some = True
        read, seen = [], []
        for image in batch:
            try:
                with image.open() as opened:
                    seen.append(prepare(opened))
                read.append(image)
            except Exception as error:  # a broken file can raise nearly anything from inside a decoder
                told = f"{image.name} cannot be read as an image ({why_unreadable(error)})"
                print(f"didicm: {readable(told)}", file=sys.stderr)
        yield read, seen, len(batch) - len(read)
    if not some:  # an empty list on standard input
        raise UserError(NO_IMAGES)


def write_rows(options: PredictionOptions, predict: Callable[..., Tally], calls: int, console: Console) -> int:
    """Write a row per image, with progress, and say what there is; exit code 2 when no image could be read.

    `calls` of the network are what an image takes at most; an early stop may save some.
    """
    assert options.out is not None
    with ProgressDisplay(console, 1) as display:

        def progress(done: Tally, todo: int) -> None:
            unreadable = f", {done.unreadable} unreadable" if done.unreadable else ""
            display.update(done.images, f"{done.images}/{todo} images{unreadable}", total=todo)

        done = predict(
            options.images,
            options.out,
            format=options.format,
            shard=options.parsed_shard,
            lines=standard_input(),
            settings=options.settings,
            progress=progress,
            force=options.force,
        )
    console.print(tell_rows(options.out, done, calls))
    return 2 if done.images and done.images == done.unreadable else 0


def show_estimate(options: PredictionOptions, predictor: BasePredictor, console: Console) -> int:
    """Measure a few hundred images, and show what a million and a billion would take."""
    writer = RowWriter(Parts(options.out or Path("rows"), options.format).format, predictor.class_names)
    found = estimate_bulk(predictor, list_images(options.images, standard_input()), writer, options.settings)
    table = Table("images", "files", "size", *(count(n, "device") for n in DEVICES))
    for column in table.columns:
        column.justify = "right"
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


def tell_rows(out: Path, done: Tally, calls: int) -> str:
    """What came of writing rows, in a sentence."""
    text = f"{out}: {count(done.images, 'row')} written now" if done.images else f"{out} was complete"
    if done.unreadable:
        text += f"; {done.unreadable} of them without a prediction: the column error says why"
    if readable_images := done.images - done.unreadable:
        text += f"; {count(round(done.calls / readable_images, 2), 'network call')} per image"
        if done.calls < calls * readable_images:
            text += (
                f" instead of {calls}: the early stop saved {percent(1 - done.calls / calls / readable_images)}"
            )
    return text


def to_line(image: str, prediction: Prediction, claimed: str | None, top: int) -> str:
    """One line of JSON, with what is claimed of the set."""
    line: dict[str, Any] = {
        "image": image,
        "classes": [{"name": label, "probability": p} for label, p in prediction.classes[:top]],
        "entropy": prediction.entropy,
        "outlier_score": prediction.outlier_score,
        "unlike_training": prediction.unlike_training,
        "conformal_set": prediction.conformal_set,
        "conformal_claim": None if prediction.conformal_set is None else claimed,
    }
    if prediction.trajectory is not None:
        line["trajectory"] = [{"time": time, "probs": probs.tolist()} for time, probs in prediction.trajectory]
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    return text if is_utf8() and text == readable(text) else json.dumps(line)


def is_utf8() -> bool:
    """Whether what we print may be any character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def show(image: str, prediction: Prediction, claimed: str | None, top: int, console: Console) -> None:
    """A small table, the entropy and the set, with what is claimed of it."""
    table = Table("class", "probability", "", title=readable(image), title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, p in prediction.classes[:top]:
        table.add_row(readable(name), percent(p), ("█" if is_utf8() else "#") * round(20 * p))
    console.print(table)
    text = f"entropy {prediction.entropy:.2f} nats, of {math.log(len(prediction.classes)):.2f} at most"
    if prediction.conformal_set is not None:
        text += f"; {claimed}: {', '.join(map(readable, prediction.conformal_set))}"
    if prediction.unlike_training:
        text += (
            f"; unlike the training images (outlier score {prediction.outlier_score:.2f}): do not rely on these "
            "probabilities, and no set of classes is sure to hold the truth"
        )
    console.print(text)

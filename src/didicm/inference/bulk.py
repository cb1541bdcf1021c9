"""A million images: their predictions as rows on disk, the same whatever machines, workers and crashes made them.

The images are written down in a fixed order and cut into parts. Each part becomes one file of rows, written when
the last of its images is done; a part that is there is never predicted again. `estimate_bulk` says from a few
hundred images what all of this would take.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from didicm.data.listing import NO_IMAGES, ImageRef, Listing, list_images
from didicm.errors import UserError
from didicm.inference.onnx import SUFFIX, OnnxPredictor
from didicm.inference.parts import Parts, written_down
from didicm.inference.prediction import Answers, BasePredictor, Batch, Work, decode
from didicm.inference.rows import Format, Outliers, Rows, RowWriter, join_rows, make_rows
from didicm.processes import usable_cores
from didicm.values import plain

Engine: TypeAlias = Literal["local", "ray"]
FORMAT = 1
SAMPLE = 256  # images that an estimate measures


@dataclass(frozen=True)
class BulkSettings:
    """What a row says, and how the work is cut; only the first three change what is written."""

    top: int = 5  # classes per row
    all_probs: bool = False  # every class's probability as well
    part_size: int = 4096  # rows per part: what a crash can cost, and the number of files in a folder
    batch_size: int = 64
    workers: int = 0  # processes that decode


@dataclass(frozen=True)
class Tally:
    """How much is done."""

    images: int = 0
    unreadable: int = 0
    calls: int = 0  # of the network, for all images that could be read

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.images + other.images, self.unreadable + other.unreadable, self.calls + other.calls)


def predict(
    model: str | Path | BasePredictor,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    format: Format | None = None,
    shard: tuple[int, int] = (1, 1),
    engine: Engine = "local",
    actors: int | None = None,
    lines: Iterable[bytes] = (),
    settings: BulkSettings | None = None,
    progress: Callable[[Tally, int], None] | None = None,
    force: bool = False,
) -> Tally:
    """Write a row for every image; run it again to go on after a crash. Returns what was done now.

    Args:
        model: a run, a model directory, `hf://owner/name`, an exported model (.onnx), or a loaded predictor.
        images: one or several files, folders, patterns, tar and parquet files; `-` stands for `lines`.
        out: a file, if its suffix says so (.jsonl, .csv, .parquet), else a folder of parts.
        format: of the parts in a folder; by default JSON lines.
        shard: which one this is, and how many there are: each predicts its share of the parts.
        engine: this process, or actors of Ray Data.
        actors: of Ray; by default one per GPU, or per CPU where there is none.
        lines: names of images.
        settings: what a row says, and how the work is cut.
        progress: called with what is done and the number of images that were to do.
        force: replace a file that is there already.
    """
    predictor = model if isinstance(model, BasePredictor) else _load(model)
    settings, parts, done = settings or BulkSettings(), Parts(Path(out), format, shard, force=force), Tally()
    writer = RowWriter(parts.format, predictor.class_names)
    sources = map(str, [images] if isinstance(images, (str, Path)) else images)
    with parts.owned(), written_down(list_images(sources, lines), parts.folder, settings.part_size) as listing:
        mine = parts.share(listing)
        parts.begin(_plan(predictor, listing, settings))
        missing = [k for k in mine if not parts.path(k).exists()]
        todo = sum(map(listing.part_length, missing))
        job = BulkJob(listing, parts, writer, settings)
        steps = job.run(predictor, missing)
        if engine == "ray":
            from didicm.inference.on_ray import predict_on_ray  # Ray is an extra

            steps = predict_on_ray(job, predictor, missing, actors)
        for step in steps:
            done += step
            if progress is not None:
                progress(done, todo)
        parts.finish(mine, listing.parts, writer)
    return done


def _load(model: str | Path) -> BasePredictor:
    if str(model).endswith(SUFFIX):
        return OnnxPredictor.load(model)
    from didicm.inference.predictor import Predictor  # exported models do without PyTorch

    return Predictor.load(model)


@dataclass(frozen=True)
class BulkJob:
    """All that a process needs to know to turn parts of a listing into files of rows; a predictor apart."""

    listing: Listing
    parts: Parts
    writer: RowWriter
    settings: BulkSettings

    def run(self, predictor: BasePredictor, numbers: Sequence[int]) -> Iterator[Tally]:
        """Predict and write some parts, batch by batch; images are decoded ahead, across the ends of parts."""
        collected: list[Rows] = []
        batches_per_part = -(-self.settings.part_size // self.settings.batch_size)
        workers = min(self.settings.workers, len(numbers) * batches_per_part)
        for batch in predictor.decoded(self._work(numbers), workers):
            rows = predict_batch(predictor, batch, self.settings)
            collected.append(rows)
            if batch.last:
                self.parts.write(batch.part, join_rows(collected), self.writer)
                collected = []
            unreadable = sum(error is not None for error in rows.errors)
            yield Tally(len(rows), unreadable, int(rows.nfe.sum()))

    def _work(self, numbers: Sequence[int]) -> Iterator[Work]:
        """The batches of some parts, read from the listing as they are asked for."""
        for number in numbers:
            images = self.listing.part(number)
            for start in range(0, len(images), self.settings.batch_size):
                end = start + self.settings.batch_size
                yield number, end >= len(images), images[start:end]


def predict_batch(predictor: BasePredictor, batch: Batch, settings: BulkSettings) -> Rows:
    """Rows of decoded images."""
    good = np.array([error is None for error in batch.errors])
    if good.any():
        found = predictor.answer_pixels(batch.pixels, settings.batch_size)
    else:
        probs = np.zeros((len(good), len(predictor.class_names)), dtype=np.float32)
        outliers = Outliers(np.zeros(len(good)), good) if predictor.scores_outliers else None
        found = Answers(probs, None if predictor.rule is None else probs > 0, good.astype(np.int64), outliers)
    return make_rows(
        batch.names,
        batch.errors,
        np.asarray(found.probs),
        np.where(good, found.nfe, 0),
        found.sets,
        found.outliers,
        top=settings.top,
        all_probs=settings.all_probs,
    )


def _plan(predictor: BasePredictor, listing: Listing, settings: BulkSettings) -> dict[str, Any]:
    """All that decides what is written, rounding apart."""
    return {
        "format": FORMAT,
        "images": {"count": listing.count, "sha256": listing.digest},
        **predictor.identity(),
        **{name: plain(asked) for name, asked in predictor.adjusting.items() if asked is not None},
        "top": settings.top,
        "all_probs": settings.all_probs,
        "part_size": settings.part_size,
    }


@dataclass(frozen=True)
class Estimate:
    """Measured costs of an image, and what follows for many."""

    images: int  # that were measured
    unreadable: int
    decoding: float  # seconds per image, of one worker
    network: float  # seconds per image, of the device; all cores of a CPU
    row: float  # bytes
    cores: int  # that decoding and network share; 0 where the network has a GPU
    part_size: int

    def seconds(self, images: float, workers: int, devices: int = 1) -> float:
        """Time for so many images on so many devices, each with its own `workers`, or decoding itself without."""
        if not workers:
            each = self.decoding + self.network
        else:
            each = max(self.network, self.decoding / workers)
            if self.cores:  # what both need in sum, shared by all cores
                each = max(each, self.network + self.decoding / self.cores)
        return images * each / devices

    def files(self, images: int) -> int:
        """Parts of a folder."""
        return -(-images // self.part_size)

    def bytes(self, images: int) -> float:
        """Size of all rows."""
        return images * self.row


def estimate_bulk(
    predictor: BasePredictor, images: Iterable[ImageRef], writer: RowWriter, settings: BulkSettings
) -> Estimate:
    """Decode, predict and write the first few hundred images, each step by itself; nothing is kept."""
    sample = list(islice(images, SAMPLE))
    if not sample:
        raise UserError(NO_IMAGES)
    size = min(settings.batch_size, -(-len(sample) // 2))  # at least two batches: the first one warms up
    rows, decoding, network, timed = [], 0.0, 0.0, 0
    for start in range(0, len(sample), size):
        batch = sample[start : start + size]
        begun = time.perf_counter()
        seen = decode((0, False, batch), predictor.prepare)
        decoded = time.perf_counter()
        rows.append(predict_batch(predictor, seen, settings))
        if start or len(sample) == 1:
            decoding, network = decoding + decoded - begun, network + time.perf_counter() - decoded
            timed += len(batch)
    joined = join_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        writer.write(Path(folder) / "rows", joined)
        written = (Path(folder) / "rows").stat().st_size
    return Estimate(
        images=len(sample),
        unreadable=sum(error is not None for error in joined.errors),
        decoding=decoding / timed,
        network=network / timed,
        row=written / len(sample),
        cores=usable_cores() if predictor.on_cpu else 0,
        part_size=settings.part_size,
    )

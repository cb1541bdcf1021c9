"""A million images: their predictions as rows on disk, the same whatever machines, workers and crashes made them.

The images are written down in a fixed order and cut into parts. Each part becomes one file of rows, written when
the last of its images is done; a part that is there is never predicted again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from didicm.checkpoint import HUB
from didicm.data import EvalTransform
from didicm.data.listing import ImageRef, Listing, list_images
from didicm.data.loader import batch_loader, started
from didicm.evaluation.calibration import weights_digest
from didicm.inference.parts import BulkSettings as BulkSettings
from didicm.inference.parts import Estimate, Parts, estimate, written_down
from didicm.inference.parts import Tally as Tally
from didicm.inference.prediction import why_unreadable
from didicm.inference.predictor import Predictor
from didicm.inference.rows import Floats, Format, Outliers, Rows, RowWriter, join_rows, make_rows
from didicm.values import plain

Engine: TypeAlias = Literal["local", "ray"]
Progress: TypeAlias = Callable[["Tally", int], None]
FORMAT = 1


def predict(
    model: str | Path | Predictor,
    images: Sequence[str],
    out: str | Path,
    *,
    format: Format | None = None,
    shard: tuple[int, int] = (1, 1),
    engine: Engine = "local",
    actors: int | None = None,
    lines: Iterable[bytes] = (),
    settings: BulkSettings | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Tally:
    """Write a row for every image; run it again to go on after a crash. Returns what was done now.

    Args:
        model: a run, a model directory, `hf://owner/name`, or a loaded predictor.
        images: files, folders, patterns, tar and parquet files; `-` stands for `lines`.
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
    predictor = model if isinstance(model, Predictor) else Predictor.load(model)
    settings, parts, done = settings or BulkSettings(), Parts(Path(out), format, shard, force=force), Tally()
    writer = RowWriter(parts.format, predictor.class_names)
    with parts.owned(), written_down(list_images(images, lines), parts.folder, settings.part_size) as listing:
        mine = parts.share(listing)
        parts.begin(_plan(predictor, listing, settings))
        missing = [k for k in mine if not parts.path(k).exists()]
        todo = sum(map(listing.part_length, missing))
        job = BulkJob(listing, parts, writer, settings)
        for step in job.run(predictor, missing) if engine == "local" else _on_ray(job, predictor, missing, actors):
            done += step
            if progress is not None:
                progress(done, todo)
        parts.finish(mine, listing.parts, writer)
    return done


@dataclass(frozen=True)
class BulkJob:
    """All that a process needs to know to turn parts of a listing into files of rows; a predictor apart."""

    listing: Listing
    parts: Parts
    writer: RowWriter
    settings: BulkSettings

    def run(self, predictor: Predictor, numbers: Sequence[int]) -> Iterator[Tally]:
        """Predict and write some parts, batch by batch; images are decoded ahead, across the ends of parts."""
        collected: list[Rows] = []
        for batch in self._batches(predictor, numbers):
            rows = predict_batch(predictor, batch, self.settings)
            collected.append(rows)
            if batch.last:
                self.parts.write(batch.part, join_rows(collected), self.writer)
                collected = []
            unreadable = sum(error is not None for error in rows.errors)
            yield Tally(len(rows), unreadable, int(rows.nfe.sum()))

    def _batches(self, predictor: Predictor, numbers: Sequence[int]) -> Iterator["Batch"]:
        batches_per_part = -(-self.settings.part_size // self.settings.batch_size)
        workers = min(self.settings.workers, len(numbers) * batches_per_part)
        work = _Work(self.listing, numbers, self.settings.batch_size)
        return started(batch_loader(Decoder(predictor.model.transform), work, workers, predictor.model.device))


class Batch(NamedTuple):
    """Decoded images of one part; those that could not be read are black."""

    part: int
    last: bool  # of the part
    names: list[str]
    errors: list[str | None]
    pixels: Tensor  # (B, H, W, C), uint8


class Decoder(Dataset[Batch]):
    """What a worker process does: it is given the images of a batch, and keeps nothing."""

    def __init__(self, transform: EvalTransform) -> None:
        self._transform = transform

    def __getitem__(self, work: tuple[int, bool, list[ImageRef]]) -> Batch:
        part, last, images = work
        size, channels = self._transform.size, self._transform.channels
        pixels = np.zeros((len(images), size, size, channels), dtype=np.uint8)
        errors: list[str | None] = []
        for image, row in zip(images, pixels, strict=True):
            try:
                with image.open() as opened:
                    row[:] = np.asarray(self._transform.prepare(opened)).reshape(row.shape)
                errors.append(None)
            except Exception as error:  # a broken file can raise nearly anything from inside a decoder
                errors.append(why_unreadable(error))
        return Batch(part, last, [image.name for image in images], errors, torch.from_numpy(pixels))


def predict_batch(predictor: Predictor, batch: Batch, settings: BulkSettings) -> Rows:
    """Rows of decoded images."""
    model, count = predictor.model, len(batch.names)
    probs: Floats = np.zeros((count, len(predictor.class_names)), dtype=np.float32)
    nfe, inside = np.zeros(count, dtype=np.int64), None if predictor.rule is None else probs > 0
    rule = None if predictor.calibration is None else predictor.calibration.outliers
    outliers = None if rule is None else Outliers(np.zeros(count), np.zeros(count, dtype=bool))
    if any(error is None for error in batch.errors):
        pixels = batch.pixels.to(model.device, non_blocking=True)
        if predictor.compiled and count < settings.batch_size:  # another shape would be compiled anew
            pixels = torch.cat([pixels, pixels.new_zeros(settings.batch_size - count, *pixels.shape[1:])])
        answered, sets, calls, found = predictor.answers(model.transform.finish(pixels.permute(0, 3, 1, 2)))
        probs, inside = answered[:count], None if sets is None else sets[:count]
        nfe = np.where([error is None for error in batch.errors], calls[:count], 0)
        outliers = None if found is None else Outliers(found.scores[:count], found.unlike[:count])
    names, errors = batch.names, batch.errors
    return make_rows(names, errors, probs, nfe, inside, outliers, top=settings.top, all_probs=settings.all_probs)


def estimate_bulk(
    predictor: Predictor, images: Iterable[ImageRef], writer: RowWriter, settings: BulkSettings
) -> Estimate:
    """What many images would take, from a few hundred."""
    decoder = Decoder(predictor.model.transform)
    return estimate(
        images,
        writer,
        settings,
        decode=lambda batch: decoder[0, False, list(batch)],
        predict=lambda _, decoded: predict_batch(predictor, decoded, settings),
        on_cpu=predictor.model.device.type == "cpu",
    )


class _Work:
    """The batches of some parts, read from the listing as they are asked for."""

    def __init__(self, listing: Listing, numbers: Sequence[int], batch_size: int) -> None:
        self._listing, self._numbers, self._batch_size = listing, numbers, batch_size

    def __iter__(self) -> Iterator[tuple[int, bool, list[ImageRef]]]:
        for number in self._numbers:
            images = self._listing.part(number)
            for start in range(0, len(images), self._batch_size):
                end = start + self._batch_size
                yield number, end >= len(images), images[start:end]


def _plan(predictor: Predictor, listing: Listing, settings: BulkSettings) -> dict[str, Any]:
    """All that decides what is written, rounding apart."""
    model, rule, calibration = predictor.model, predictor.rule, predictor.calibration
    outliers = None if calibration is None else calibration.outliers
    sampler, identity = model.classifier.resolve(**model.sampler)
    return {
        "format": FORMAT,
        "images": {"count": listing.count, "sha256": listing.digest},
        "model": str(model.place) if str(model.place).startswith(HUB) else weights_digest(Path(model.place)),
        "transform": model.transform.to_dict(),
        "sampler": {**({} if sampler is None else asdict(sampler)), **identity} or None,
        "calibration": None if calibration is None else [calibration.temperature, rule and rule.to_dict()],
        **({} if outliers is None else {"outliers": outliers.to_dict()}),
        **{name: plain(asked) for name, asked in predictor.adjusting.items() if asked is not None},
        "top": settings.top,
        "all_probs": settings.all_probs,
        "part_size": settings.part_size,
    }


def _on_ray(job: BulkJob, predictor: Predictor, numbers: Sequence[int], actors: int | None) -> Iterator[Tally]:
    from didicm.inference.on_ray import predict_on_ray  # Ray is an extra

    return predict_on_ray(job, predictor, numbers, actors)

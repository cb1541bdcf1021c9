"""Rows for any number of images by an exported model, without PyTorch: as `bulk`, with threads that decode."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from didicm.data.listing import ImageRef, list_images
from didicm.files import sha256
from didicm.inference.onnx import OnnxPredictor
from didicm.inference.parts import BulkSettings, Estimate, Parts, Tally, estimate, written_down
from didicm.inference.prediction import Array, why_unreadable
from didicm.inference.rows import Floats, Format, Outliers, Rows, RowWriter, join_rows, make_rows
from didicm.values import plain

FORMAT = 1


def predict_exported(
    predictor: OnnxPredictor,
    images: Sequence[str],
    out: Path,
    *,
    format: Format | None = None,
    shard: tuple[int, int] = (1, 1),
    lines: Iterable[bytes] = (),
    settings: BulkSettings,
    progress: Callable[[Tally, int], None],
    force: bool = False,
) -> Tally:
    """Write a row for every image; run it again to go on after a crash. Arguments are those of `bulk.predict`."""
    parts, done = Parts(out, format, shard, force=force), Tally()
    writer = RowWriter(parts.format, predictor.class_names)
    with parts.owned(), written_down(list_images(images, lines), parts.folder, settings.part_size) as listing:
        mine = parts.share(listing)
        parts.begin(_plan(predictor, {"count": listing.count, "sha256": listing.digest}, settings))
        missing = [k for k in mine if not parts.path(k).exists()]
        todo = sum(map(listing.part_length, missing))
        with ThreadPoolExecutor(max(1, settings.workers)) as pool:  # decoders release Python's lock
            for number in missing:
                chosen, collected = listing.part(number), []
                for start in range(0, len(chosen), settings.batch_size):
                    batch = chosen[start : start + settings.batch_size]
                    read = list(pool.map(partial(read_image, predictor), batch))
                    rows = predict_batch(predictor, batch, read, settings)
                    collected.append(rows)
                    done += Tally(len(rows), sum(error is not None for error in rows.errors), int(rows.nfe.sum()))
                    progress(done, todo)
                parts.write(number, join_rows(collected), writer)
        parts.finish(mine, listing.parts, writer)
    return done


def predict_batch(
    predictor: OnnxPredictor, images: Sequence[ImageRef], read: Sequence[Array | str], settings: BulkSettings
) -> Rows:
    """Rows of images that were read, or could not be."""
    errors = [found if isinstance(found, str) else None for found in read]
    good = np.array([error is None for error in errors])
    seen = [found for found in read if not isinstance(found, str)]
    probs: Floats = np.zeros((len(images), len(predictor.class_names)), dtype=np.float32)
    inside = None if predictor.rule is None else probs > 0
    outliers = None
    if predictor.metadata.outliers is not None:
        outliers = Outliers(np.zeros(len(images)), np.zeros(len(images), dtype=bool))
    if seen:
        probs[good], sets, found = predictor.answers(np.stack(seen))
        if inside is not None:
            inside[good] = sets
        if outliers is not None and found is not None:
            outliers.scores[good], outliers.unlike[good] = found
    names, calls = [image.name for image in images], predictor.metadata.calls * good.astype(np.int64)
    return make_rows(names, errors, probs, calls, inside, outliers, top=settings.top, all_probs=settings.all_probs)


def estimate_exported(
    predictor: OnnxPredictor, images: Iterable[ImageRef], writer: RowWriter, settings: BulkSettings
) -> Estimate:
    """What many images would take, from a few hundred."""
    return estimate(
        images,
        writer,
        settings,
        decode=lambda batch: [read_image(predictor, image) for image in batch],
        predict=lambda batch, read: predict_batch(predictor, batch, read, settings),
        on_cpu="CUDAExecutionProvider" not in predictor.session.get_providers(),
    )


def read_image(predictor: OnnxPredictor, image: ImageRef) -> Array | str:
    """What the graph sees of an image, or why it cannot be read."""
    try:
        with image.open() as opened:
            return predictor.prepare(opened)
    except Exception as error:  # a broken file can raise nearly anything from inside a decoder
        return why_unreadable(error)


def _plan(predictor: OnnxPredictor, images: dict[str, Any], settings: BulkSettings) -> dict[str, Any]:
    """All that decides what is written, rounding apart."""
    return {
        "format": FORMAT,
        "images": images,
        "model": sha256(predictor.path),
        "conformal": predictor.rule and predictor.rule.to_dict(),
        **{name: plain(asked) for name, asked in predictor.adjusting.items() if asked is not None},
        "top": settings.top,
        "all_probs": settings.all_probs,
        "part_size": settings.part_size,
    }

"""Predictions as rows of a table: JSON lines, CSV or Parquet.

From plain arrays, so that any way to run a model can write them.
"""

import csv
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from didicm.errors import UserError
from didicm.evaluation.label_sets import Floats

Format: TypeAlias = Literal["jsonl", "csv", "parquet"]
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip

# A spreadsheet takes a cell that begins with one of these for a formula; the last four are their wide forms.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


class Outliers(NamedTuple):
    """How unlike the training images B images are, and which of them too much so."""

    scores: Floats  # (B,)
    unlike: npt.NDArray[np.bool_]  # (B,)


@dataclass(frozen=True)
class Rows:
    """What a model says about N images; where there is an error, nothing else counts."""

    images: list[str]
    errors: list[str | None]
    classes: npt.NDArray[np.int64]  # (N, top), the most probable first
    probs: Floats  # (N, top), of those
    entropy: Floats  # (N,), in nats
    nfe: npt.NDArray[np.int64]  # (N,), network calls
    sets: list[list[int] | None] | None  # conformal sets, the most probable class first; of an outlier, None
    all_probs: Floats | None  # (N, K), in the model's order
    outlier_scores: Floats | None  # (N,)
    unlike: npt.NDArray[np.bool_] | None  # (N,), which are too unlike the training images

    def __len__(self) -> int:
        return len(self.images)


def make_rows(
    images: list[str],
    errors: list[str | None],
    probs: Floats,
    nfe: npt.NDArray[np.int64],
    inside: npt.NDArray[np.bool_] | None = None,
    outliers: Outliers | None = None,
    *,
    top: int,
    all_probs: bool = False,
) -> Rows:
    """Rows of probabilities (N, K), of which `inside` (N, K) says what is in the conformal sets."""
    probs = probs.astype(np.float32, copy=False)
    classes = most_probable(probs, min(top, probs.shape[1]))
    values = probs.astype(np.float64)
    logs = np.log(values, out=np.zeros_like(values), where=values > 0)
    sets: list[list[int] | None] | None = None
    if inside is not None:
        sets = [
            sorted(np.flatnonzero(row).tolist(), key=lambda k, p=p: -p[k])  # type: ignore[misc]
            for row, p in zip(inside, probs, strict=True)
        ]
        if outliers is not None:  # no coverage can be claimed for them
            sets = [None if unlike else found for found, unlike in zip(sets, outliers.unlike, strict=True)]
    best, entropy = np.take_along_axis(probs, classes, 1), 0 - (values * logs).sum(1)
    every = probs if all_probs else None
    return Rows(images, errors, classes, best, entropy, nfe, sets, every, *(outliers or (None, None)))


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows one after the other."""

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):
            return list(chain.from_iterable(values))
        return None if values[0] is None else np.concatenate(values)

    return Rows(*(joined(field.name) for field in fields(Rows)))


def most_probable(probs: Floats, count: int) -> npt.NDArray[np.int64]:
    """The `count` most probable classes (N, count) of (N, K); of equally probable ones the first comes first."""
    # The bits of floats that are not negative are ordered as the floats; below them goes the class.
    bits = np.ascontiguousarray(probs, dtype=np.float32).view(np.int32).astype(np.int64)
    keys = np.arange(probs.shape[1]) - (bits << 32)
    chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(keys, chosen, 1), axis=1)
    return np.take_along_axis(chosen, order, 1)


def to_records(rows: Rows, class_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows as JSON has them; what an error leaves unknown is None."""
    best, entropy = _rounded(rows.probs), _rounded(rows.entropy)
    every = None if rows.all_probs is None else _rounded(rows.all_probs)
    scores = None if rows.outlier_scores is None else _rounded(rows.outlier_scores)
    for i, (image, error) in enumerate(zip(rows.images, rows.errors, strict=True)):
        known = error is None
        top = zip(rows.classes[i].tolist(), best[i], strict=True)
        record: dict[str, Any] = {
            "image": image,
            "classes": [{"name": class_names[k], "probability": p} for k, p in top] if known else None,
            "entropy": entropy[i] if known else None,
        }
        if scores is not None and rows.unlike is not None:
            record["outlier_score"] = scores[i] if known else None
            record["unlike_training"] = bool(rows.unlike[i]) if known else None
        if rows.sets is not None:
            found = rows.sets[i]
            record["conformal_set"] = [class_names[k] for k in found] if known and found is not None else None
        if every is not None:
            record["probabilities"] = dict(zip(class_names, every[i], strict=True)) if known else None
        yield {**record, "nfe": int(rows.nfe[i]) if known else None, "error": error}


class RowWriter:
    """Writes rows into files of one format."""

    def __init__(self, format: Format, class_names: Sequence[str]) -> None:
        self.format, self.class_names = format, list(class_names)
        if format == "parquet":
            _parquet()  # if it is missing, that is told before the work

    def write(self, path: Path, rows: Rows) -> None:
        """Write a file."""
        if self.format == "parquet":
            _parquet().write_table(self._table(rows), path)
            return
        records = to_records(rows, self.class_names)
        with open(path, "w", encoding="utf-8", newline="") as file:
            if self.format == "csv":
                writer, header = csv.writer(file, lineterminator="\n"), self._header(rows)
                writer.writerows([header, *(_cells(record, len(header)) for record in records)])
            else:
                file.writelines(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in records)

    def join(self, path: Path, parts: Sequence[Path]) -> None:
        """Make one file of several, which are read one after the other."""
        if self.format == "parquet":
            with _parquet().ParquetWriter(path, _parquet().read_schema(parts[0])) as writer:
                for part in parts:
                    writer.write_table(_parquet().read_table(part))
            return
        with open(path, "w", encoding="utf-8", newline="") as whole:
            for i, part in enumerate(parts):
                with open(part, encoding="utf-8", newline="") as file:
                    if self.format == "csv" and i:
                        next(csv.reader(iter(file.readline, "")))  # the header, which may go over several lines
                    shutil.copyfileobj(file, whole)

    def _header(self, rows: Rows) -> list[str]:
        top = [f"{what}_{i + 1}" for i in range(rows.classes.shape[1]) for what in ("class", "probability")]
        sets = [] if rows.outlier_scores is None else ["outlier_score", "unlike_training"]
        sets += [] if rows.sets is None else ["conformal_set"]
        every = [] if rows.all_probs is None else [f"probability_of_{name}" for name in self.class_names]
        return ["image", *top, "entropy", *sets, *every, "nfe", "error"]

    def _table(self, rows: Rows) -> Any:
        """An Arrow table; with all probabilities, the names of the classes are in its metadata."""
        pa = import_module("pyarrow")
        bad = np.array([error is not None for error in rows.errors])
        names, width = np.array(self.class_names, dtype=object), rows.classes.shape[1]

        def lists(values: Any, length: int, kind: Any) -> Any:
            flat = pa.array(values.ravel(), kind)
            return pa.FixedSizeListArray.from_arrays(flat, length, mask=pa.array(bad)).cast(pa.list_(kind))

        columns: dict[str, Any] = {
            "image": pa.array(rows.images, pa.string()),
            "classes": lists(names[rows.classes], width, pa.string()),
            "probabilities": lists(rows.probs, width, pa.float32()),
            "entropy": pa.array(rows.entropy, pa.float64(), mask=bad),
        }
        if rows.outlier_scores is not None:
            columns["outlier_score"] = pa.array(rows.outlier_scores, pa.float64(), mask=bad)
            columns["unlike_training"] = pa.array(rows.unlike, pa.bool_(), mask=bad)
        if rows.sets is not None:
            known = (None if b or s is None else names[s].tolist() for s, b in zip(rows.sets, bad, strict=True))
            columns["conformal_set"] = pa.array(list(known), pa.list_(pa.string()))
        if rows.all_probs is not None:
            columns["all_probabilities"] = lists(rows.all_probs, len(names), pa.float32())
        columns["nfe"] = pa.array(rows.nfe, pa.int64(), mask=bad)
        columns["error"] = pa.array(rows.errors, pa.string())
        metadata = {} if rows.all_probs is None else {"class_names": json.dumps(self.class_names)}
        return pa.table(columns).replace_schema_metadata(metadata)


def _cells(record: dict[str, Any], width: int) -> Iterator[Any]:
    """A record as the `width` cells of a row of CSV; a set is a JSON list, what is unknown is empty."""
    if record["error"] is not None:
        yield from [_harmless(record["image"]), *[""] * (width - 2), _harmless(record["error"])]
        return
    yield _harmless(record["image"])
    for best in record["classes"]:
        yield from (_harmless(best["name"]), best["probability"])
    yield record["entropy"]
    if "outlier_score" in record:
        yield from (record["outlier_score"], json.dumps(record["unlike_training"]))
    if "conformal_set" in record:
        found = record["conformal_set"]
        yield "" if found is None else json.dumps(found, ensure_ascii=False)
    yield from record.get("probabilities", {}).values()
    yield from (record["nfe"], "")


def _harmless(text: str) -> str:
    """Text that no spreadsheet runs as a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def _parquet() -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ImportError:
        raise UserError("--parquet needs the package pyarrow: pip install pyarrow") from None


def _rounded(values: Floats) -> list[Any]:
    """To nine decimals, for text: float32 in full would show many digits that mean nothing."""
    found: list[Any] = np.round(values.astype(np.float64), 9).tolist()
    return found

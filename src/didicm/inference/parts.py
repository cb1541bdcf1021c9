"""Rows on disk that survive a crash: numbered parts, each written at once, and a plan that says what they are of.

A folder keeps its parts. A file is joined from them at the end; until then they lie in a hidden folder beside it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from didicm.data.listing import NO_IMAGES, ImageRef, Listing, write_listing
from didicm.errors import UserError
from didicm.files import read_json, to_json, write_files, writing
from didicm.inference.rows import SUFFIXES, Format, Rows, RowWriter
from didicm.processes import LOCK, held
from didicm.text import count

PLAN, LISTING = ".plan.json", ".images-"
AGAIN = "give another --out, or remove it to start anew"
WORDS = {"rows": "format of the rows", "format": "version of didicm"}  # for what a plan calls otherwise
# Files of other kinds: a folder that is called like one was not meant.
OTHER_FILES = frozenset((
    ".txt", ".tsv", ".xls", ".xlsx", ".html", ".md", ".xml", ".yaml", ".yml", ".npy", ".npz", ".pkl", ".h5",
    ".hdf5", ".db", ".sqlite", ".pq", ".arrow", ".feather", ".orc", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar",
    ".onnx",
))  # fmt: skip


class Parts:
    """The parts of one output, of which this process, shard i of n, has its share: every n-th, from the i-th."""

    def __init__(
        self, out: Path, format: Format | None, shard: tuple[int, int] = (1, 1), *, force: bool = False
    ) -> None:
        if not 1 <= shard[0] <= shard[1]:
            raise UserError(f"--shard must be i/n with i from 1 to n, got {shard[0]}/{shard[1]}")
        named = None if out.is_dir() else SUFFIXES.get(out.suffix.lower())
        if format and named and format != named:
            raise UserError(f"--out {out} ends in {out.suffix}, but {format} was asked for: leave out one of them")
        if out.suffix.lower() in OTHER_FILES and not out.is_dir():
            raise UserError(
                f"--out {out} ends in {out.suffix}, which is none of our formats: give a .jsonl, .csv or .parquet "
                "file, or a folder"
            )
        self.out, self.shard, self.force = out, shard, force
        self.format: Format = named or format or "jsonl"
        self.single = named is not None
        self.folder = out.with_name(f".{out.name}.parts") if self.single else out

    def path(self, number: int) -> Path:
        """Where a part lies."""
        return self.folder / f"part-{number:06}.{self.format}"

    def check_free(self) -> None:
        """Refuse a file that is there already, unless these parts are to become it."""
        if self.single and not self.force and os.path.lexists(self.out) and not (self.folder / PLAN).exists():
            raise UserError(f"{self.out} exists already: give another --out, or replace it with --force")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the output, or this shard of it, against other processes; a file that is there is refused."""
        self.check_free()
        lock = "{}-{}-of-{}".format(LOCK, *self.shard)
        with held(self.folder, lock, command="didicm predict"):
            try:
                yield
            finally:
                if self.folder.exists() and not (self.folder / PLAN).exists():  # nothing came of it
                    (self.folder / lock).unlink()
                    with suppress(OSError):
                        self.folder.rmdir()

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Store what the parts belong to, or check that those that are there belong to the same."""
        plan = {**plan, "rows": self.format}
        if self.single:
            plan["shard"] = "{}/{}".format(*self.shard)
        path = self.folder / PLAN
        if path.exists():
            old = read_json(path, AGAIN)
            changed = [name for name in {**old, **plan} if old.get(name) != plan.get(name)]
            if changed:
                what = ", ".join(WORDS.get(name, name.replace("_", " ")) for name in changed)
                raise UserError(f"{self.folder} was begun with other settings ({what}): {AGAIN}")
        elif any(self.folder.glob("part-*")):
            raise UserError(f"{self.folder} holds parts of something else: give another --out")
        else:
            write_files(self.folder, {PLAN: to_json(plan)})

    def share(self, listing: Listing) -> Sequence[int]:
        """The parts of this shard, of which there must be some."""
        index, shards = self.shard
        if not (mine := listing.parts[index - 1 :: shards]):
            raise UserError(
                f"there is nothing for shard {index}/{shards}: {count(listing.count, 'image')} make "
                f"{count(len(listing.parts), 'part')} of --part-size {listing.part_size}; use smaller parts or "
                "fewer shards"
            )
        return mine

    def write(self, number: int, rows: Rows, writer: RowWriter) -> None:
        """Write a part: it is there as a whole or not at all."""
        path = self.path(number)
        write_files(self.folder, {path.name: lambda part: writer.write(part, rows)})

    def finish(self, mine: Sequence[int], numbers: Sequence[int], writer: RowWriter) -> None:
        """Make a file of this shard's parts; of a folder that has all its parts, clear away what crashes left."""
        if self.single:
            paths = [self.path(k) for k in mine]
            write_files(self.out.parent, {self.out.name: lambda part: writer.join(part, paths)})
            for path in paths:  # before the plan: without it they would belong to nothing
                path.unlink()
            shutil.rmtree(self.folder)
        elif all(self.path(k).exists() for k in numbers):
            for path in chain(self.folder.glob(f"{LISTING}*"), self.folder.glob(f"{LOCK}-*")):
                path.unlink(missing_ok=True)


@contextmanager
def written_down(images: Iterable[ImageRef], folder: Path, part_size: int) -> Iterator[Listing]:
    """The images in a file, beside the parts: machines that share those find it too."""
    with writing(folder):
        handle, name = tempfile.mkstemp(prefix=LISTING, dir=folder)
        os.close(handle)
    try:
        with writing(folder):
            listing = write_listing(Path(name).absolute(), images, part_size)
        if not listing.count:
            raise UserError(NO_IMAGES)
        yield listing
    finally:
        Path(name).unlink(missing_ok=True)

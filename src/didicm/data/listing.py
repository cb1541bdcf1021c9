"""Images without labels, by name: files, folders, patterns, lists, shards and parquet files.

They are listed one by one, in an order that depends on their names alone, and can be written down: a million of
them take no memory, and a process that starts later finds the same.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from didicm.data.decode import open_image
from didicm.data.folder import EXTENSIONS, image_files
from didicm.data.images import DataError
from didicm.data.picture import Picture
from didicm.data.webdataset import expand, image_members, open_member
from didicm.errors import reason
from didicm.text import readable

STDIN = "-"
SCHEMES = ("wds://", "hf://")  # as for training; here the kind of a file is told by its name anyway
IMAGE_COLUMNS = ("image", "img")
NO_IMAGES = "there are no images: name some files, folders or patterns"


class ImageFile(NamedTuple):
    """An image in a file of its own."""

    path: str

    @property
    def name(self) -> str:
        return readable(self.path)

    def open(self) -> Picture:
        if os.path.isdir(self.path) and next(image_files(self.path), None) is None:
            raise DataError("the folder holds no images")
        return open_image(self.path)


class TarMember(NamedTuple):
    """An image inside a tar file."""

    path: str
    member: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        return readable(f"{self.path}:{self.member}")

    def open(self) -> Picture:
        return open_member(self.path, self.offset, self.size)


class ParquetCell(NamedTuple):
    """An image in a row of a parquet file."""

    path: str
    group: int  # of rows
    row: int  # in the group
    number: int  # in the file

    @property
    def name(self) -> str:
        return f"{readable(self.path)}[{self.number}]"

    def open(self) -> Picture:
        return open_cell(_row_group(self.path, self.group)[self.row].as_py())


ImageRef: TypeAlias = ImageFile | TarMember | ParquetCell
KINDS: dict[str, type[ImageRef]] = {"file": ImageFile, "tar": TarMember, "parquet": ParquetCell}
NAMES = {kind: name for name, kind in KINDS.items()}


def list_images(sources: Iterable[str], lines: Iterable[bytes] = ()) -> Iterator[ImageRef]:
    """All images that the sources name; `-` stands for `lines`, each of which names a source as it is.

    A source that does not exist and a pattern that fits nothing are errors, told before anything is listed. What
    holds no image is listed: a line that names nothing, or a folder without images. Reading it says so.
    """
    found = [path for source in sources for path in _find(source)]

    def listed() -> Iterator[ImageRef]:
        for path in found:
            if path != STDIN:
                yield from _inside(path)
                continue
            for line in lines:
                if name := os.fsdecode(line).rstrip("\r\n"):
                    yield from _inside(name)

    return listed()


def _find(source: str) -> list[str]:
    if source == STDIN:
        return [source]
    for scheme in SCHEMES:
        source = source.removeprefix(scheme)
    source = os.path.expanduser(source)
    if os.path.lexists(source):
        return [source]
    if (found := expand(source)) == [source]:
        raise DataError(f"{readable(source)} does not exist; check its name")
    if not found:
        raise DataError(f"{readable(source)} matches no files; check the pattern")
    return found


def _inside(path: str) -> Iterator[ImageRef]:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in EXTENSIONS:  # most are images: those are not looked at twice
        yield ImageFile(path)
    elif os.path.isdir(path):
        found = None
        for found in image_files(path):
            yield ImageFile(found)
        if found is None:
            yield ImageFile(path)
    elif suffix == ".tar":
        yield from (TarMember(path, *place) for place in image_members(path))
    elif suffix == ".parquet":
        yield from _cells(path)
    else:
        yield ImageFile(path)


def _cells(path: str) -> Iterator[ParquetCell]:
    file = open_parquet(path)
    _image_column(file, path)  # if there is none, that is told before the work
    number = 0
    for group in range(file.num_row_groups):
        for row in range(file.metadata.row_group(group).num_rows):
            yield ParquetCell(path, group, row, number)
            number += 1


def open_cell(cell: Any) -> Picture:
    """Open an image in a table: the bytes of one, or as the hub stores it, with bytes or a path."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if cell is None:
        raise ValueError("the cell is empty")
    return open_image(cell)


def open_parquet(path: str) -> Any:
    """A parquet file; not as a table, for which parts of the path such as `year=2024` would be columns."""
    try:
        return import_module("pyarrow.parquet").ParquetFile(path)
    except ImportError:
        raise DataError("parquet needs the package pyarrow; install it with: pip install pyarrow") from None
    except Exception as error:  # pyarrow has many kinds
        raise DataError(f"{readable(path)} cannot be read as parquet ({reason(error)}); write it again") from error


@lru_cache(maxsize=1)  # images come in order, so a worker is mostly inside one group
def _row_group(path: str, group: int) -> Any:
    """The images of a group of rows, still encoded."""
    file = open_parquet(path)
    column = _image_column(file, path)
    return file.read_row_group(group, columns=[column]).column(column)


def _image_column(file: Any, path: str) -> str:
    """The column by its usual name, or the first that holds bytes, plain or as the hub stores them."""
    schema, types = file.schema_arrow, import_module("pyarrow.types")
    named = [name for name in IMAGE_COLUMNS if name in schema.names]
    encoded = [
        field.name
        for field in schema
        if types.is_binary(field.type)
        or types.is_large_binary(field.type)
        or (types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)
    ]
    if not named + encoded:
        names = ", ".join(schema.names)
        raise DataError(f"{readable(path)} has no column 'image', only {names}; rename the right one")
    return str((named + encoded)[0])


@dataclass(frozen=True)
class Listing:
    """Images written down in a file, to be read in parts of `part_size`."""

    path: Path
    part_size: int
    count: int
    digest: str  # of the file
    starts: "array[int]"  # where each part begins

    @property
    def parts(self) -> range:
        """Numbers of the parts."""
        return range(len(self.starts))

    def part(self, number: int) -> list[ImageRef]:
        """The images of one part."""
        with open(self.path, "rb") as file:
            file.seek(self.starts[number])
            lines = map(json.loads, islice(file, self.part_size))
            return [KINDS[kind](*fields) for kind, *fields in lines]

    def part_length(self, number: int) -> int:
        """How many images a part has: all alike, but for the last."""
        return min(self.part_size, self.count - number * self.part_size)


def write_listing(path: Path, images: Iterable[ImageRef], part_size: int) -> Listing:
    """Write images down as they come."""
    starts, count, digest = array("q"), 0, hashlib.sha256()
    with open(path, "wb") as file:
        for image in images:
            if count % part_size == 0:
                starts.append(file.tell())
            line = json.dumps([NAMES[type(image)], *image]).encode("ascii") + b"\n"
            digest.update(line)
            file.write(line)
            count += 1
    return Listing(path, part_size, count, digest.hexdigest(), starts)

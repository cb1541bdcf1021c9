"""WebDataset shards: plain tar files, indexed once so that any image can be read by its offset."""

import glob
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from didicm.data.decode import open_image
from didicm.data.folder import EXTENSIONS, Strings, by_split, find_splits
from didicm.data.images import DataError, ImageSet, names_and_labels
from didicm.data.picture import Picture
from didicm.errors import reason
from didicm.files import parse_json, read_json
from didicm.text import readable


class ShardSet(ImageSet):
    """Images inside tar files. A sample is the members that share a name: `0001.jpg` and `0001.cls`."""

    def __init__(self, paths: list[str], uri: str) -> None:
        missing = [path for path in paths if not os.path.isfile(path)]
        if missing:
            raise DataError(f"the shard {missing[0]} of {uri} does not exist; check the range in the pattern")
        samples = [(shard, *sample) for shard, path in enumerate(paths) for sample in _index(path)]
        if not samples:
            raise DataError(
                f"{uri} holds no samples; a sample is an image and a .cls or .json member of the same name"
            )
        shards, members, offsets, sizes, values = zip(*samples, strict=True)
        self._paths, self._members = paths, Strings.of(members)
        self._places = np.array([shards, offsets, sizes], dtype=np.int64).T
        self.class_names, self.labels = names_and_labels(values)
        names = _read_names(Path(paths[0]).parent)
        if names is not None:
            self._rename(names)

    def _rename(self, names: list[str]) -> None:
        """Use the list of class names beside the shards: numbers index it, names are looked up in it."""
        index = {name: k for k, name in enumerate(names)}
        index |= {str(k): k for k in range(len(names)) if str(k) not in index}
        unknown = [name for name in self.class_names if name not in index]
        if unknown:
            raise DataError(
                f"{self._paths[0]} or a shard beside it has the class {unknown[0]!r}, "
                f"which the {len(names)} class names listed there lack; complete the list"
            )
        self.labels = np.array([index[name] for name in self.class_names], dtype=np.int64)[self.labels]
        self.class_names = names

    def name(self, i: int) -> str:
        return f"{self._paths[self._places[i, 0]]}:{readable(self._members[i])}"

    def original(self, i: int) -> Picture:
        shard, offset, size = (int(v) for v in self._places[i])
        return open_member(self._paths[shard], offset, size)


def open_shards(pattern: str) -> tuple[ImageSet, ImageSet | None]:
    """Open shards by pattern; a folder may hold shards of a training and a validation split."""
    uri = f"wds://{pattern}"
    folder = Path(pattern).expanduser()
    if not folder.is_dir():
        paths = expand(pattern)
        if not paths:
            raise DataError(f"{uri} matches no files; give a pattern such as wds://shards/train-{{000..009}}.tar")
        return ShardSet(paths, uri), None
    splits = by_split([*sorted(folder.glob("*.tar")), *sorted(folder.glob("*/*.tar"))], folder)
    train, val = find_splits(splits)
    if train is None:
        raise DataError(f"{uri} holds no training shards (*.tar); name the shards by a pattern")
    return ShardSet(splits[train], uri), ShardSet(splits[val], uri) if val else None


def open_member(path: str, offset: int, size: int) -> Picture:
    """Open an image inside a shard."""
    with open(path, "rb") as file:
        file.seek(offset)
        return open_image(file.read(size))


def image_members(path: str) -> Iterator[tuple[str, int, int]]:
    """Member name, offset and size of each image in a shard, one by one."""
    with _readable_tar(path):
        for member, _, extension in _members(path):
            if extension in EXTENSIONS:
                yield member.name, member.offset_data, member.size


def _index(path: str) -> Iterator[tuple[str, int, int, str]]:
    """Member name, offset, size and label of each image in a shard."""
    images: dict[str, tuple[str, int, int]] = {}
    values: dict[str, str] = {}
    with _readable_tar(path), open(path, "rb") as file:
        for member, key, extension in _members(path):
            if extension in EXTENSIONS:
                images[key] = (member.name, member.offset_data, member.size)
            elif extension in (".cls", ".json"):
                file.seek(member.offset_data)
                content = file.read(member.size)
                if extension == ".cls":
                    values[key] = content.decode().strip()
                elif key not in values:
                    record = parse_json(content)
                    known = record if isinstance(record, dict) else {}
                    label = next((known[k] for k in ("label", "cls") if k in known), None)
                    if label is not None:
                        values[key] = str(label)
    for key, (name, offset, size) in images.items():
        if key not in values:
            raise DataError(f"{path} has no .cls and no .json label for {name}; add one")
        yield name, offset, size, values[key]


def _members(path: str) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """The files in a shard that are not hidden, each with the key of its sample and its extension."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            folder, _, base = member.name.rpartition("/")
            if member.isfile() and not base.startswith("."):
                # WebDataset's rule: the key ends at the first dot of the base name.
                key, _, extension = base.partition(".")
                yield member, f"{folder}/{key}", "." + extension.rpartition(".")[2].lower()
            # tarfile remembers every member, which is too much for a large shard.
            tar.members.clear()  # type: ignore[attr-defined]


@contextmanager
def _readable_tar(path: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as an uncompressed tar file ({reason(error)}); write it again"
        ) from error


def expand(pattern: str) -> list[str]:
    """Expand `{000..009}` and `{a,b}`, then globs."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        path = os.path.expanduser(pattern)
        return sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if numbers:
        first, last = numbers.groups()
        options = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        options = braces[1].split(",")
    return [p for o in options for p in expand(pattern[: braces.start()] + o + pattern[braces.end() :])]


def _read_names(folder: Path) -> list[str] | None:
    """Class names from `classes.txt` or timm's `_info.json` beside the shards, or one folder up."""
    for place in (folder, folder.parent):
        for file in (place / "classes.txt", place / "classnames.txt"):
            if file.is_file():
                try:
                    text = file.read_text(encoding="utf-8")
                except (OSError, ValueError) as error:
                    raise DataError(f"{file} cannot be read ({reason(error)}); save it in UTF-8") from error
                return [line.strip() for line in text.splitlines() if line.strip()]
        info = place / "_info.json"
        record = read_json(info, "restore it, or delete it") if info.is_file() else {}
        names = (record.get("class_names") or record.get("classes")) if isinstance(record, dict) else None
        if isinstance(names, (list, dict)) and names:
            return [str(name) for name in names]
    return None

"""A folder of images: the name of a subfolder is the class of all images below it.

The listing of a large folder, which can take minutes on shared disks, is kept as long as nothing in it changes: in
this process, and in a file for others. A folder changes when a file comes, goes or gets another name, which its
modification time tells, and the time of its status even where that was set back.
"""

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from didicm.data.decode import open_image
from didicm.data.images import DataError, ImageSet, normalise, sort_names
from didicm.data.picture import Picture
from didicm.files import write_files
from didicm.text import readable

# The names timm accepts for splits, and `test`. The first that exists is used.
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "eval", "evaluation", "test")
SCHEMES = {".parquet": "hf", ".tar": "wds"}  # of files that hold images

EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".tga",
    *((".heic", ".heif") if find_spec("pillow_heif") else ()),
))  # fmt: skip
ARRAY = ".npy"  # an image where a folder holds no others: beside images it is likely to be something about them

FORMAT = 1  # of a kept listing
LARGE = 10_000  # images; fewer are listed in no time
SETTLED = 2 * 10**9  # nanoseconds: the clocks of some file systems tick so slowly


@dataclass(frozen=True)
class Strings:
    """Many strings in one block of memory.

    A list would be copied into every worker: to read a string is to write its reference count.
    """

    block: np.ndarray  # UTF-8
    ends: np.ndarray  # where each string ends, after a 0

    @classmethod
    def of(cls, strings: Sequence[str]) -> "Strings":
        """Join them."""
        encoded = [s.encode("utf-8", "surrogateescape") for s in strings]
        ends = np.cumsum([0] + [len(s) for s in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> str:
        return self.block[self.ends[i] : self.ends[i + 1]].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class FolderListing:
    """Images below class folders, and the folders they were found in, as paths from the root."""

    class_names: Strings
    labels: np.ndarray  # (N,), int64
    paths: Strings  # N
    folders: Strings  # all that were read, the root among them
    changes: np.ndarray  # (folders, 2), int64: when each had last changed before it was read
    begun: int  # when the listing was, in nanoseconds

    @property
    def settled(self) -> bool:
        """Whether every later change will show."""
        return bool(self.changes.max() + SETTLED < self.begun)

    def is_current(self, root: Path) -> bool:
        """Whether nothing has changed since."""
        try:
            return all(
                np.array_equal(_last_change(os.path.join(root, folder)), before)
                for folder, before in zip(self.folders, self.changes, strict=True)
            )
        except OSError:  # one is gone
            return False


def _last_change(folder: str | Path) -> tuple[int, int]:
    """When files last came, went or were renamed in a folder: its own time, and that of its status."""
    status = os.stat(folder)
    return status.st_mtime_ns, status.st_ctime_ns


_listings: dict[str, FolderListing] = {}  # of this process, by root


def _list(root: Path, index: Path | None) -> FolderListing:
    """Scan a folder, unless this process did, or another that kept its listing in folder `index`."""
    where = os.path.abspath(root)
    found = _listings.pop(where, None) or (None if index is None else _read(_file(index, where)))
    if found is None or not found.is_current(root):
        found = _scan(root)
        if index is not None and index.is_dir() and found.settled:
            _write(_file(index, where), found)
    if found.settled:
        _listings[where] = found
    return found


def keep_listings(index: Path) -> None:
    """Make the folder that keeps this process's listings of large folders for others, if there are any."""
    for where, listing in _listings.items():
        if len(listing.paths) >= LARGE and not _file(index, where).exists():
            _write(_file(index, where), listing)


def _file(index: Path, where: str) -> Path:
    return index / f"{hashlib.sha256(os.fsencode(where)).hexdigest()[:16]}.npz"


def _write(file: Path, listing: FolderListing) -> None:
    arrays = {"format": np.array(FORMAT)}
    for name, value in vars(listing).items():
        if isinstance(value, Strings):
            arrays |= {f"{name}.{part}": array for part, array in vars(value).items()}
        else:
            arrays[name] = np.asarray(value)

    def write(path: Path) -> None:
        with open(path, "wb") as handle:
            np.savez(handle, **arrays)  # type: ignore[arg-type]

    write_files(file.parent, {file.name: write})


def _read(file: Path) -> FolderListing | None:
    """What `_write` wrote; None if that is damaged or of another version, as it can be made again."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if arrays["format"] != FORMAT:
                return None
            strings = {
                name: Strings(arrays[f"{name}.block"], arrays[f"{name}.ends"])
                for name in ("class_names", "paths", "folders")
            }
            return FolderListing(
                labels=arrays["labels"], changes=arrays["changes"], begun=int(arrays["begun"]), **strings
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


class PathSet(ImageSet):
    """Images in files of their own below a folder."""

    root: Path
    _paths: Strings

    def name(self, i: int) -> str:
        return readable(os.path.join(self.root, self._paths[i]))

    def original(self, i: int) -> Picture:
        return open_image(os.path.join(self.root, self._paths[i]))


class FolderSet(PathSet):
    """Images below class folders."""

    def __init__(self, root: Path, index: Path | None = None) -> None:
        listing = _list(root, index)
        self.root, self._paths = root, listing.paths
        self.class_names, self.labels = list(listing.class_names), listing.labels


def open_folder(path: str, index: Path | None = None) -> tuple[ImageSet, ImageSet | None]:
    """Open a folder with class subfolders, or `train/` and `val/` that have them; for `index` see `open_data`."""
    root = Path(path).expanduser()
    if not path or not root.exists():
        raise DataError(
            f"{readable(path)!r} does not exist; give a folder of images, hf://, wds://, timm:// or fashion-mini"
        )
    if not root.is_dir():
        scheme = SCHEMES.get(root.suffix.lower())
        hint = f"write {scheme}://{path}" if scheme else "give the folder with one subfolder per class"
        raise DataError(f"{readable(path)} is a file, not a folder; {hint}")
    folders = _subfolders(root)
    # One that holds images itself is a class: `train` may be a vehicle.
    splits = {
        f.name for f in folders if f.name in TRAIN_NAMES + VAL_NAMES and (_subfolders(f) or not _has_images(f))
    }
    train, val = find_splits(splits)
    if train is None and val is not None and len(folders) == 1:
        alone = readable(str(root / val))
        raise DataError(f"{readable(path)} has no train folder; give {alone} to use that split alone")
    if train is None:
        return _open_split(root, index), None
    return _open_split(root / train, index), _open_split(root / val, index) if val else None


def by_split(files: Iterable[Path], root: Path) -> dict[str, list[str]]:
    """Group files below `root`; `train.tar`, `data/train-00000-of-00002.tar` and `train/0.tar` all are train."""
    splits: dict[str, list[str]] = {}
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        words = (part.replace("_", "-").split("-")[0].lower() for part in reversed(parts))
        split = next((word for word in words if word in TRAIN_NAMES + VAL_NAMES), "train")
        splits.setdefault(split, []).append(str(file))
    return splits


def find_splits(known: Container[str]) -> tuple[str | None, str | None]:
    """The names of the training and the validation split, among those known."""
    train, val = (next(filter(known.__contains__, names), None) for names in (TRAIN_NAMES, VAL_NAMES))
    return train, val


def _open_split(root: Path, index: Path | None) -> ImageSet:
    images = FolderSet(root, index)
    if len(images):
        return images
    where = readable(str(root))
    if _has_images(root):
        raise DataError(
            f"the images in {where} have no classes; move them into one subfolder per class, or give a table of "
            "their labels with --labels TABLE"
        )
    if images.class_names:
        others = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
        if (other := min(others, default=None)) is not None:
            raise DataError(
                f"the subfolders of {where} hold no images of a type that is read, but files such as "
                f"{readable(str(other))}; save them as PNG"
            )
        raise DataError(
            f"the subfolders of {where} hold no images; put the images of each class into its subfolder"
        )
    if schemes := {SCHEMES[path.suffix] for path in root.iterdir() if path.suffix in SCHEMES}:
        raise DataError(f"{where} holds no images but files of them; write {min(schemes)}://{where}")
    raise DataError(f"{where} is empty; make one subfolder per class and put the images there")


def _scan(root: Path) -> FolderListing:
    """List the images below the class folders of a root; two spellings of a name are one class."""
    begun, read, changes = time.time_ns(), [os.curdir], [_last_change(root)]

    def note(folder: str | Path) -> None:
        read.append(os.path.relpath(folder, root))
        changes.append(_last_change(folder))

    folders: dict[str, list[Path]] = {}
    for folder in _subfolders(root):
        folders.setdefault(normalise(readable(folder.name)), []).append(folder)
    names = sort_names(folders)
    found = [sorted(os.path.relpath(p, root) for f in folders[n] for p in image_files(f, note)) for n in names]
    return FolderListing(
        class_names=Strings.of(names),
        labels=np.array([label for label, paths in enumerate(found) for _ in paths], dtype=np.int64),
        paths=Strings.of([path for paths in found for path in paths]),
        folders=Strings.of(read),
        changes=np.array(changes, dtype=np.int64),
        begun=begun,
    )


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name))
    except PermissionError:
        raise DataError(f"{readable(str(folder))} may not be read; change its permissions") from None


def image_files(
    folder: str | Path, before: Callable[[str | Path], object] | None = None, above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Paths of the images in a folder, then of those below it, by name; never round in circles of links.

    `before` is told every folder that is going to be read.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    if before is not None:
        before(folder)
    files, arrays, folders = [], [], []  # of names alone: a folder may hold a million
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.is_dir():  # also one that is called x.jpg
                    folders.append(entry.name)
                elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                    files.append(entry.name)
                elif entry.name.lower().endswith(ARRAY):
                    arrays.append(entry.name)
    except PermissionError:
        raise DataError(f"{readable(str(folder))} may not be read; change its permissions") from None
    for name in sorted(files or arrays):
        yield os.path.join(folder, name)
    for name in sorted(folders):
        yield from image_files(os.path.join(folder, name), before, above | {here})


def _has_images(folder: Path) -> bool:
    known = {*EXTENSIONS, ARRAY}
    return any(e.suffix.lower() in known and not is_hidden(e.name) and e.is_file() for e in folder.iterdir())


def is_hidden(name: str) -> bool:
    """Whether a file or folder is none of the user's images, by its name."""
    return name.startswith(".") or name == "__MACOSX"

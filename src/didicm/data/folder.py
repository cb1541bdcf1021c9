"""A folder of images: the name of a subfolder is the class of all images below it."""

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from didicm.data.decode import open_image
from didicm.data.images import DataError, ImageSet, normalise, readable, sort_names
from didicm.data.index import FolderListing, Strings, last_change, list_once
from didicm.data.picture import Picture

# The names timm accepts for splits, and `test`. The first that exists is used.
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "eval", "evaluation", "test")

EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".tga",
    *((".heic", ".heif") if find_spec("pillow_heif") else ()),
))  # fmt: skip
ARRAY = ".npy"  # an image where a folder holds no others: beside images it is likely to be something about them


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
        listing = list_once(root, index, _scan)
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
        hint = {".parquet": f"write hf://{path}", ".tar": f"write wds://{path}"}.get(root.suffix.lower())
        hint = hint or "give the folder with one subfolder per class"
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
    train, val = (next((name for name in names if name in known), None) for names in (TRAIN_NAMES, VAL_NAMES))
    return train, val


def _open_split(root: Path, index: Path | None) -> ImageSet:
    images = FolderSet(root, index)
    if len(images):
        return images
    where = readable(str(root))
    if _has_images(root):
        raise DataError(f"the images in {where} have no classes; move them into one subfolder per class")
    if images.class_names:
        raise DataError(
            f"the subfolders of {where} hold no images; put the images of each class into its subfolder"
        )
    raise DataError(f"{where} is empty; make one subfolder per class and put the images there")


def _scan(root: Path) -> FolderListing:
    """List the images below the class folders of a root; two spellings of a name are one class."""
    begun, read, changes = time.time_ns(), [os.curdir], [last_change(root)]

    def note(folder: str | Path) -> None:
        read.append(os.path.relpath(folder, root))
        changes.append(last_change(folder))

    folders: dict[str, list[Path]] = {}
    for folder in _subfolders(root):
        folders.setdefault(normalise(readable(folder.name)), []).append(folder)
    class_names = sort_names(folders)
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        found = sorted(os.path.relpath(p, root) for f in folders[name] for p in image_files(f, before=note))
        paths += found
        labels += [label] * len(found)
    return FolderListing(
        class_names=Strings.of(class_names),
        labels=np.array(labels, dtype=np.int64),
        paths=Strings.of(paths),
        folders=Strings.of(read),
        changes=np.array(changes, dtype=np.int64),
        begun=begun,
    )


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _hidden(entry.name))
    except PermissionError:
        raise DataError(f"{readable(str(folder))} may not be read; change its permissions") from None


def image_files(
    folder: str | Path, above: frozenset[str] = frozenset(), before: Callable[[str | Path], object] | None = None
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
                if _hidden(entry.name):
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
        yield from image_files(os.path.join(folder, name), above | {here}, before)


def _has_images(folder: Path) -> bool:
    known = {*EXTENSIONS, ARRAY}
    return any(e.suffix.lower() in known and not _hidden(e.name) and e.is_file() for e in folder.iterdir())


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"

"""A folder of images: the name of a subfolder is the class of all images below it."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from didicm.data.classes import normalise, sort_names
from didicm.data.images import DataError, ImageSet, Strings, open_image, readable

# The names timm accepts for splits, and `test`. The first that exists is used.
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "eval", "evaluation", "test")

EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif", ".tga",
))  # fmt: skip


class FolderSet(ImageSet):
    """Images below class folders."""

    def __init__(self, root: Path, channels: int) -> None:
        folders: dict[str, list[Path]] = {}
        for folder in _subfolders(root):
            folders.setdefault(normalise(readable(folder.name)), []).append(folder)
        self.root = root
        self.channels = channels
        self.class_names = sort_names(folders)
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.class_names):
            found = sorted(os.path.relpath(p, root) for f in folders[name] for p in _images(f, set()))
            paths += found
            labels += [label] * len(found)
        self.labels = np.array(labels, dtype=np.int64)
        self._paths = Strings(paths)

    def name(self, i: int) -> str:
        return readable(os.path.join(self.root, self._paths[i]))

    def original(self, i: int) -> Image.Image:
        return open_image(os.path.join(self.root, self._paths[i]))


def open_folder(path: str, channels: int) -> tuple[ImageSet, ImageSet | None]:
    """Open a folder with class subfolders, or with `train/` and `val/` that have them."""
    root = Path(path).expanduser()
    if not path or not root.exists():
        raise DataError(
            f"{readable(path)!r} does not exist; give a folder of images, or hf:, wds:, timm:, fashion-mini"
        )
    if not root.is_dir():
        hint = {".parquet": f"write hf:{path}", ".tar": f"write wds:{path}"}.get(root.suffix.lower())
        hint = hint or "give the folder with one subfolder per class"
        raise DataError(f"{readable(path)} is a file, not a folder; {hint}")
    train, val = _find_split(root, TRAIN_NAMES), _find_split(root, VAL_NAMES)
    if train is None and val is not None and len(_subfolders(root)) == 1:
        raise DataError(f"{readable(path)} has no train folder; give {readable(str(val))} to use that split alone")
    if train is None:
        return _open_split(root, channels), None
    return _open_split(train, channels), _open_split(val, channels) if val else None


def _open_split(root: Path, channels: int) -> ImageSet:
    images = FolderSet(root, channels)
    if len(images):
        return images
    where = readable(str(root))
    if any(_is_image(entry) for entry in root.iterdir()):
        raise DataError(f"the images in {where} have no classes; move them into one subfolder per class")
    if images.class_names:
        raise DataError(
            f"the subfolders of {where} hold no images; put the images of each class into its subfolder"
        )
    raise DataError(f"{where} is empty; make one subfolder per class and put the images there")


def _find_split(root: Path, names: tuple[str, ...]) -> Path | None:
    """The split's folder. One that holds images itself is a class: `train` may be a vehicle."""
    for name in names:
        folder = root / name
        if folder.is_dir() and (_subfolders(folder) or not any(_is_image(e) for e in folder.iterdir())):
            return folder
    return None


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _hidden(entry.name))
    except PermissionError:
        raise DataError(f"{readable(str(folder))} may not be read; change its permissions") from None


def _images(folder: str | Path, above: set[str]) -> Iterator[str]:
    """Paths of the images below a folder, through symbolic links but never round in circles."""
    here = os.path.realpath(folder)
    if here in above:
        return
    try:
        entries = list(os.scandir(folder))
    except PermissionError:
        raise DataError(f"{readable(str(folder))} may not be read; change its permissions") from None
    for entry in entries:
        if _hidden(entry.name):
            continue
        if entry.is_dir():  # also one that is called x.jpg
            yield from _images(entry.path, above | {here})
        elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
            yield entry.path


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and not _hidden(path.name) and path.is_file()


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"

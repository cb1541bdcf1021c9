"""Images that the page offers: a folder of the user's, or those that ship with us if the classes are theirs."""

import io
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import chain, groupby, zip_longest
from pathlib import Path

import numpy as np
from PIL import Image

from didicm.errors import UserError
from didicm.serving.security import Limits
from didicm.serving.service import Example
from didicm.serving.uploads import load_pixels, open_upload

MOST = 12
DRAWN = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP")  # by all browsers


def find_examples(folder: Path | None, class_names: Sequence[str], limits: Limits) -> list[Example]:
    """At most a dozen examples; none if nothing fits."""
    return _shipped(class_names) if folder is None else _of_folder(folder, limits)


def _of_folder(folder: Path, limits: Limits) -> list[Example]:
    if not folder.is_dir():
        raise UserError(f"--examples {folder} is no folder: give one with a few images")
    found: list[Example] = []
    for path in _in_turn(folder):
        try:
            if path.stat().st_size > limits.upload_bytes:  # the page could not send it
                continue
            data = path.read_bytes()
            kind = load_pixels(open_upload(data, limits.pixels)).format
        except (OSError, UserError):
            continue  # a folder of images may hold other files
        if kind not in DRAWN:
            continue
        found.append(Example(path.stem, data, Image.MIME[kind]))
        if len(found) == MOST:
            break
    if not found:
        kinds = f"{', '.join(DRAWN[:-1])} or {DRAWN[-1]}"
        raise UserError(
            f"--examples {folder} holds no image that a page can show: give a folder with a few {kinds}"
        )
    return found


def _in_turn(folder: Path) -> Iterator[Path]:
    """The first file of every folder, then the second, and so on: classes often have a folder each."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    folders = groupby(sorted(files, key=lambda path: (path.parent, path.name)), key=lambda path: path.parent)
    turns = zip_longest(*(list(inside) for _, inside in folders))
    return (path for path in chain.from_iterable(turns) if path is not None)


def _shipped(class_names: Sequence[str]) -> list[Example]:
    """The first test image of each class of fashion-mini, which a model trained on it has never seen."""
    shipped = resources.files("didicm.data") / "fashion_mini.npz"
    with shipped.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        names = [str(name) for name in file["class_names"]]
        if sorted(names) != sorted(class_names):
            return []
        images, labels = file["x_test"], file["y_test"]
    found = []
    for k, name in enumerate(names[:MOST]):
        buffer = io.BytesIO()
        Image.fromarray(images[int(np.argmax(labels == k))]).save(buffer, "PNG")
        found.append(Example(name, buffer.getvalue(), "image/png"))
    return found

"""Images that the page offers: a folder of the user's, or those that ship with us if the classes are theirs."""

import io
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from didicm.errors import UserError
from didicm.serving.service import Example
from didicm.serving.uploads import load_pixels, open_upload

MOST = 12


def find_examples(folder: Path | None, class_names: Sequence[str], pixels: int) -> list[Example]:
    """At most a dozen examples; none if nothing fits."""
    return _shipped(class_names) if folder is None else _of_folder(folder, pixels)


def _of_folder(folder: Path, pixels: int) -> list[Example]:
    if not folder.is_dir():
        raise UserError(f"--examples {folder} is no folder: give one with a few images")
    found: list[Example] = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        data = path.read_bytes()
        try:
            kind = load_pixels(open_upload(data, pixels)).format or ""
        except UserError:
            continue  # a folder of images may hold other files
        if not kind:  # an array, which no browser shows
            continue
        found.append(Example(path.stem, data, Image.MIME[kind]))
        if len(found) == MOST:
            break
    if not found:
        raise UserError(f"--examples {folder} holds no image: give a folder with a few images")
    return found


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

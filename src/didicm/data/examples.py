"""A picture of what the transforms do: original, three augmented views, and what evaluation sees."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from didicm.data.images import DataError
from didicm.data.randomness import keys, preserved
from didicm.data.transforms import TrainTransform, stack

CELL, GAP, HEADER = 160, 8, 16
COLUMNS = ("original", "training", "training", "training", "evaluation")


def save_examples(
    images: Sequence[Image.Image], transform: TrainTransform, path: str | Path, seed: int = 0
) -> Path:
    """Save a PNG with a row for each image; returns its path."""
    sheet = Image.new(
        "RGB", (len(COLUMNS) * (CELL + GAP) + GAP, HEADER + len(images) * (CELL + GAP) + GAP), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(COLUMNS):
        draw.text((GAP + column * (CELL + GAP), 4), title, fill="black")
    for row, image in enumerate(images):
        for column, cell in enumerate([image, *_views(image, transform, keys(seed, row, np.arange(3)))]):
            fitted = _fit(cell.convert("RGB"))
            left = GAP + column * (CELL + GAP) + (CELL - fitted.width) // 2
            top = HEADER + GAP + row * (CELL + GAP) + (CELL - fitted.height) // 2
            sheet.paste(fitted, (left, top))
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path, "PNG")
    except OSError as error:
        raise DataError(f"the examples could not be saved at {path}: {error.strerror or error}") from error
    return path


def _views(image: Image.Image, transform: TrainTransform, key: np.ndarray) -> list[Image.Image]:
    """Through the very transforms that training and evaluation use, and back to pixels."""
    with preserved():
        prepared = stack([transform.prepare(image, int(k)) for k in key])
    seen = torch.cat([transform.finish(prepared, key), transform.view(image)[None]])
    return [_to_image(pixels) for pixels in transform.view.restore(seen)]


def _to_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy())


def _fit(image: Image.Image) -> Image.Image:
    scale = CELL / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC)

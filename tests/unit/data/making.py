"""Real image files for the tests."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed=0, size=(32, 24), mode="RGB"):
    """Smooth shapes with some noise, so that every corruption has something to spoil."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse, dtype=np.float64) + rng.normal(0, 8, (size[1], size[0], 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)


def write(path: Path, seed=0, size=(32, 24), mode="RGB", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, size, mode).save(path, **options)
    return path


def make_folder(root: Path, classes=("cat", "dog"), count=6, size=(32, 24), extension="png") -> Path:
    for k, name in enumerate(classes):
        for i in range(count):
            write(root / name / f"{i}.{extension}", seed=1000 * k + i, size=size)
    return root


def png_bytes(image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()

"""Real image files for the tests."""

import io

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def picture():
    """Smooth shapes with some noise, so that every corruption has something to act on."""

    def make(seed=0, size=(32, 24), mode="RGB"):
        rng = np.random.default_rng(seed)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
        pixels = smooth + rng.normal(0, 8, (size[1], size[0], 3))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)

    return make


@pytest.fixture(scope="session")
def write(picture):
    def write(path, seed=0, size=(32, 24), mode="RGB", **options):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(seed, size, mode).save(path, **options)
        return path

    return write


@pytest.fixture(scope="session")
def make_folder(write):
    def make_folder(root, classes=("cat", "dog"), count=6):
        for k, name in enumerate(classes):
            for i in range(count):
                write(root / name / f"{i}.png", seed=1000 * k + i)
        return root

    return make_folder


@pytest.fixture(scope="session")
def png_bytes(picture):
    """The bytes of a PNG file."""

    def make(seed):
        file = io.BytesIO()
        picture(seed).save(file, "PNG")
        return file.getvalue()

    return make

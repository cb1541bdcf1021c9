"""Loader throughput against timm's, on a generated folder of 500 x 375 JPEGs with the weak recipe.

Both decode the same files with the same transforms and workers. Their epochs alternate in one process, and
the best epoch of each counts: on a shared machine noise only ever slows down.
"""

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from benchmarks.measure import Result
from didicm.data import EvalTransform, TrainTransform, make_loader, open_data
from didicm.settings import load_recipe

Batch = tuple[Tensor, Tensor]
CLASSES, IMAGES, BATCH, WORKERS, ROUNDS = 4, 200, 10, 2, 8
WEAK, SMALL = (load_recipe(name).augment for name in ("weak", "small"))


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), IMAGES)
        results = [_against_timm(folder, size) for size in (224, 112, 56)]
    return [*results, _small_images()]


def _against_timm(folder: str, size: int) -> Result:
    loaders = {"ours": _ours(folder, size), "timm": _timms(folder, size)}
    best = dict.fromkeys(loaders, 0.0)
    for epoch in range(ROUNDS + 1):
        for name, epoch_of in loaders.items():
            speed = _images_per_second(epoch_of(epoch))
            best[name] = max(best[name], speed if epoch else 0)  # the first epoch starts the workers
    return Result(f"JPEGs of 500 x 375 to {size} px", best["ours"] / best["timm"], "x timm's speed", 1.0)


def _small_images() -> Result:
    """The in-memory path: 2,000 images of 28 x 28 with the small recipe, one core."""
    transform = TrainTransform(SMALL, EvalTransform(size=28, channels=1, crop_pct=1.0))
    loader = make_loader(open_data("fashion-mini", channels=1).train, transform, 128, train=True, seed=0)
    best = 0.0
    for epoch in range(ROUNDS + 1):
        loader.set_epoch(epoch)
        best = max(best, _images_per_second(loader))
    return Result("28 px from memory, in units of 20,000 images/s", best / 20_000, "x", 1.0)


def _ours(folder: str, size: int) -> Callable[[int], Iterable[Batch]]:
    transform, images = TrainTransform(WEAK, EvalTransform(size=size)), open_data(folder).train
    loader = make_loader(images, transform, BATCH, train=True, seed=0, workers=WORKERS, in_memory=False)

    def epoch_of(epoch: int) -> Iterable[Batch]:
        loader.set_epoch(epoch)
        return loader

    return epoch_of


def _timms(folder: str, size: int) -> Callable[[int], Iterable[Batch]]:
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", root=folder, split="train"),
        input_size=(3, size, size),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=False,
        scale=WEAK.scale,
        ratio=WEAK.ratio,
        hflip=WEAK.hflip,
        color_jitter=WEAK.color_jitter,
        interpolation=WEAK.train_interpolation,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    return lambda epoch: loader


def _images_per_second(loader: Iterable[Batch]) -> float:
    start, count = time.perf_counter(), 0
    for _, label in loader:
        count += len(label)
    return count / (time.perf_counter() - start)


def write_images(folder: Path, count: int) -> None:
    """Write images about as heavy to decode as photographs: smooth shapes, and some noise (40 to 60 kB)."""
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.float32)
        pixels = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        place = folder / f"class{i % CLASSES}" / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place, quality=85)

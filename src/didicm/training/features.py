"""Features of a frozen backbone, computed once: the head is trained and validated on them in seconds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from didicm.data import EvalTransform, FeatureSet, ImageSet, TrainTransform, make_loader
from didicm.data.randomness import keys
from didicm.files import write_files
from didicm.models.backbone import Backbone
from didicm.settings import TrainConfig
from didicm.training.build import RunComponents, count_feature_views, keeps_features

FEATURES = "features"  # folder of a run, until it is finished
BATCH = 64


def with_features(
    config: TrainConfig, run: RunComponents, fabric: Fabric, folder: Path, tell: Callable[[str], object]
) -> RunComponents:
    """The run with stored features in place of its images, if its backbone is frozen; else the run as it is.

    They lie in files that are mapped into memory, so that a resumed run sees the very same ones and no set of
    images is too large.
    """
    if not keeps_features(config, run.classifier):
        return run
    seeds = [int(keys(config.seed, view)) % 2**63 for view in range(count_feature_views(config, run))]

    def computed(
        name: str, images: ImageSet, transform: TrainTransform | EvalTransform, seeds: list[int]
    ) -> FeatureSet:
        network: Backbone = run.classifier.model.to(fabric.device).eval()  # type: ignore[assignment]
        shape, place = (len(seeds), len(images), network.num_features), folder / FEATURES / f"{name}.npy"
        loading: dict[str, Any] = {"workers": config.run.workers, "device": fabric.device}
        loading["corruption"] = run.corrupt_eval if name == "val" else run.corrupt_train

        @torch.no_grad()
        def compute(path: Path) -> None:
            stored = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
            stored[:] = np.nan  # what cannot be read stays so
            for rows, seed in zip(stored, seeds, strict=True):
                loader = make_loader(images, transform, BATCH, train=False, seed=seed, **loading)
                for image, _ in loader:
                    with fabric.autocast():
                        rows[loader.index.numpy()] = network.embed(image).float().cpu().numpy()
            stored.flush()

        if not place.exists() or np.load(place, mmap_mode="r").shape != shape:
            tell(f"computing features of {shape[0] * shape[1]:,} {name} images")
            write_files(place.parent, {place.name: compute})
        return FeatureSet(images, np.load(place, mmap_mode="r"))

    train = computed("train", run.train, run.train_transform, seeds)
    return replace(run, train=train, val=computed("val", run.val, run.eval_transform, [config.seed]))

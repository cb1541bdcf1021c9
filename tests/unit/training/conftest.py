"""Trainings of a second, in this process."""

from dataclasses import replace

import numpy as np
import pytest

from didicm.settings import load_recipe
from didicm.training import loop
from didicm.training.build import build
from didicm.values import override


@pytest.fixture
def tiny_config():
    """Settings of the `small` recipe, shrunk to five steps; changes by dotted names with `__` for the dot."""

    def make(out, **changes):
        tiny = {
            "data": "fashion-mini", "model_args.width": 0.125, "fraction": 0.05, "image.size": 8, "batch_size": 20,
            "epochs": 1, "out": str(out), "run.log_seconds": 0, "optimizer.ema": None, "draws_per_image": 1,
        }  # fmt: skip
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        return override(load_recipe("small", settings.get("method", "diffusion")), {**tiny, **settings})

    return make


@pytest.fixture
def train(tmp_path, tiny_config):
    """Carry out such a run, validated on a few images."""

    def train(name="run", on_step=None, **changes):
        config = tiny_config(tmp_path / name, **changes)
        components = build(config)
        few = components.val.select(np.arange(0, len(components.val), 25))
        return loop.train(config, components=replace(components, val=few), on_step=on_step)

    return train

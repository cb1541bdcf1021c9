"""What a grid is made of: a method, an uncertainty setting and a seed make a cell, which is one training."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from didicm.settings import TrainConfig, flatten, override

# The contestants of a comparison: what each changes in the recipe. All have the same trunk, epochs and batches.
METHODS: dict[str, dict[str, Any]] = {
    "standard": {"method": "standard"},
    "standard-smooth": {"method": "standard", "augment.label_smoothing": 0.1},
    "didicm-score": {"method": "diffusion", "model_args.parameterization": "score"},
    "didicm-posterior": {"method": "diffusion", "model_args.parameterization": "posterior"},
}
LABELS = {
    "standard": "standard",
    "standard-smooth": "standard, smoothed labels",
    "didicm-score": "DiDiCM score",  # the paper's form
    "didicm-posterior": "DiDiCM posterior",
}


@dataclass(frozen=True)
class Setting:
    """How little the images tell.

    Args:
        resolution: pixels that the network sees; none means the recipe's size
        fraction: of the training images
        corruption: of training and test images, such as noise:3
    """

    resolution: int | None = None
    fraction: float = 1.0
    corruption: str | None = None

    def __str__(self) -> str:
        size = f"{self.resolution} px, " if self.resolution else ""
        spoilt = f", {self.corruption}" if self.corruption else ""
        return f"{size}{100 * self.fraction:g} % of the images{spoilt}"

    @property
    def short(self) -> str:
        """A name for the axis of a plot."""
        size = f"{self.resolution} px\n" if self.resolution else ""
        return f"{size}{100 * self.fraction:g} %" + (f"\n{self.corruption}" if self.corruption else "")


@dataclass(frozen=True)
class Reading:
    """One way to get a posterior from a trained network."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the sampler
    stored: bool = True  # whether its posteriors are kept, or only its metrics
    group: str = ""  # what it shares with readings that differ in their steps alone


@dataclass(frozen=True)
class Cell:
    """One training of a grid, and how its network is read.

    Args:
        method: name of the contestant
        overrides: dotted names of TrainConfig, such as `augment.mixup`
        readings: of a diffusion classifier, the main one first; none means its recipe's, and fewer steps
        held_out: share of the training images that is kept for the temperature; 0 means no temperature
    """

    method: str
    setting: Setting = field(default_factory=Setting)
    seed: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    readings: tuple[Reading, ...] = ()
    held_out: float = 0.1

    def config(self, base: TrainConfig) -> TrainConfig:
        """Settings of the training."""
        setting = self.setting
        own: dict[str, Any] = {**self.overrides, "seed": self.seed, "fraction": setting.fraction}
        if setting.resolution is not None:
            own["image.size"] = setting.resolution
        if setting.corruption is not None:
            own |= {"corrupt_train": setting.corruption, "corrupt_eval": setting.corruption}
        config = override(base, own)
        # Nobody looks at the curve of a single cell.
        devices = 1 if config.run.devices == "auto" else config.run.devices
        run = replace(config.run, devices=devices, nodes=1, strategy="auto", tensorboard=False, wandb=None)
        return replace(config, run=replace(run, validate_epochs=config.epochs))

    def key(self, base: TrainConfig) -> str:
        """A name that is the same for the same settings, and fit for a file."""
        # How a run is carried out is no part of what it is, but for its precision.
        config = self.config(base)
        values = {k: v for k, v in flatten(config).items() if k != "out" and k[:4] != "run."}
        values |= {"held out": self.held_out, "precision": config.run.precision}
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        setting = f"{self.setting.resolution or 'own'}px-{self.setting.fraction:g}"
        kind = f"{values['method']}-{values['model']}"
        name = f"{kind}_{setting}_{self.setting.corruption or 'none'}_seed{self.seed}_{digest}"
        return re.sub(r"[^A-Za-z0-9._+-]", "-", name)

    def __str__(self) -> str:
        return f"{LABELS.get(self.method, self.method)}, {self.setting}, seed {self.seed}"


def make_cells(
    methods: Mapping[str, Mapping[str, Any]], settings: Iterable[Setting], seeds: Iterable[int]
) -> list[Cell]:
    """Every method in every setting with every seed; seed by seed, so that an early look shows whole columns."""
    return [
        Cell(name, setting, seed, overrides)
        for seed, setting, (name, overrides) in product(list(seeds), list(settings), methods.items())
    ]

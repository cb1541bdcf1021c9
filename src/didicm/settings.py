"""Settings of a training run: these dataclasses are the YAML keys and the command line's flags."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from didicm import files
from didicm.classifier import Objective, Sampler
from didicm.data import Augment
from didicm.data.corruptions import LabelNoise
from didicm.data.picture import MOST_CHANNELS
from didicm.data.transforms import CropPct, Interpolation
from didicm.errors import UserError, did_you_mean
from didicm.values import (
    Amount,
    Count,
    Few,
    Fraction,
    Natural,
    NonNegative,
    Pixels,
    Positive,
    Range,
    Settings,
    Workers,
    field_types,
    override,
    plain,
    renamed,
)

RECIPES = Path(__file__).with_name("recipes")
# Settings of earlier versions that mattered in training alone, and what all trainings have now.
GONE = {"stratified_time": False, "time_sampling": "uniform"}

# Settings that change how a run is carried out but not what comes out: a resumed run may have others.
CHANGEABLE_ON_RESUME = tuple(
    f"run.{name}"
    for name in ("workers", "grad_checkpointing", "log_seconds", "save_seconds", "tensorboard", "wandb")
)


@dataclass(frozen=True)
class ImageConfig(Settings):
    """What the network sees of an image.

    Args:
        size: pixels; by default the images' own size, at most `limit`
        channels: 1 (grey), 3 (RGB), or as many as the images have, which is the default
        crop_pct: evaluation keeps this fraction of the shorter side; 1 keeps the border
    """

    prefix = "image."
    size: Pixels | None = None
    limit: Pixels = 224
    channels: Annotated[int, Range(1, MOST_CHANNELS)] | None = None
    crop_pct: CropPct = 0.875
    interpolation: Interpolation = "bicubic"


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """How the weights move.

    Args:
        name: any of timm's optimisers
        scale_lr: multiply lr by sqrt(1 / fraction), the paper's rule for less data
        clip: largest gradient norm
        ema: decay of averaged weights, which are then what is validated and saved
        swa: stochastic weight averaging, in place of ema: over this last share of the steps the learning rate
            stays as it is and the weights are averaged, each step alike
        snapshots: anneal the learning rate this many times; the models at the end of each become an ensemble in
            snapshots/
    """

    prefix = "optimizer."
    name: str = "lamb"
    lr: Annotated[float, Range(0, 1000, open=True)] = 2e-3
    scale_lr: bool = False
    weight_decay: Annotated[float, Range(0, 1000)] = 0.1
    warmup_epochs: NonNegative = 5
    clip: Positive | None = None
    ema: Annotated[float, Range(0, 1)] | None = None
    swa: Annotated[float, Range(0, 1, open=True)] | None = None
    momentum: Annotated[float, Range(0, 1)] = 0.9
    snapshots: Annotated[int, Range(2, 100)] | None = None


@dataclass(frozen=True)
class RunConfig(Settings):
    """Where and how the run is carried out.

    Args:
        strategy: auto, ddp, fsdp (which splits the weights over the processes), or others of lightning-fabric
        validate_epochs: validate every this many epochs, and at the end
        save_seconds: save the state at least this often, and at the end
        log_seconds: seconds between lines in metrics.jsonl, and on the screen if it is not a terminal
        grad_checkpointing: compute activations again for the backward pass instead of keeping them, to save memory
        sync_batch_norm: take batch statistics over all devices instead of each; GPUs only
        wandb: name of the project to log to
    """

    prefix = "run."
    accelerator: str = "auto"
    devices: Few | Literal["auto"] = "auto"
    nodes: Annotated[int, Range(1, 10_000)] = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    grad_checkpointing: bool = False
    sync_batch_norm: bool = False
    compile: bool = False
    workers: Workers = 4
    validate_epochs: Natural = 1
    save_seconds: NonNegative = 300
    log_seconds: NonNegative = 10
    tensorboard: bool = False
    wandb: str | None = None


@dataclass(frozen=True)
class TrainConfig(Settings):
    """A training run.

    Args:
        data: where the images are: a folder, hf://..., wds://..., timm://..., fashion-mini
        labels: a table with the labels of the images in a folder (CSV or parquet, here or in that folder): columns
            path and label, or path and the votes for each class; optionally split and group
        group_by: a column, or a regular expression for the names of images, that tells the patient, camera or
            sequence of an image; each is kept on one side of every split
        out: the run's directory
        method: a diffusion classifier, or the standard classifier on the same trunk
        model: see `didicm models`
        model_args: stem, width, layout, parameterization, noise_embedding, backbone, ...
        objective: loss of a standard classifier
        draws_per_image: noisy labels drawn for every image of a batch
        feature_views: with a frozen backbone, augmented views of every image whose features are computed once; 0
            computes them in every step
        label_proposal: least share of noisy labels drawn from all classes, with importance weights; 0 is the paper
        mask: share of the draws whose label is masked, which train the answer without a label by cross-entropy: 0
            is DiDiCM, 1 a standard classifier (with sampler.method readout)
        teacher: a run or model directory whose posteriors of the augmented and mixed images are the targets
        teacher_sampler: how the teacher is asked, as in --teacher-sampler.views 8; by default as stored with it
        fraction: fraction of the training images, the same of every class; a whole number from 2 is a number of
            images per class
        label_noise: share of training labels to replace by wrong ones, or a table with a confusion matrix: the
            true class in column label, and how often it is labelled as each class; validation labels stay right
        val_fraction: fraction held out from training when the data has no validation split
        corrupt_train: such as noise:3 or blur:2+jpeg:4
        batch_size: images per step over all processes
        accumulate: split a step's batch into this many parts, to save memory
        data_seed: decides which images are held out, the subset and the label noise, so that runs with other seeds
            see the same images; by default the seed
    """

    data: str = ""
    labels: str | None = None
    group_by: str | None = None
    out: str = ""
    method: Literal["diffusion", "standard"] = "diffusion"
    model: str = "didirn18"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective = "cross-entropy"
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "log-linear"})
    draws_per_image: Few = 1
    feature_views: Annotated[int, Range(0, 1000)] = 8
    label_proposal: Annotated[float, Range(0, 1)] = 0.0
    mask: Annotated[float, Range(0, 1)] = 0.0
    teacher: str | None = None
    teacher_sampler: Mapping[str, Any] = field(default_factory=dict)
    sampler: Sampler = field(default_factory=Sampler)
    image: ImageConfig = field(default_factory=ImageConfig)
    augment: Augment = field(default_factory=Augment)
    fraction: Amount = 1.0
    label_noise: LabelNoise = 0.0
    val_fraction: Fraction = 0.1
    corrupt_train: str | None = None
    corrupt_eval: str | None = None
    balance: Literal["none", "sampling", "weights"] = "none"
    epochs: Annotated[int, Range(1, 1_000_000)] = 100
    batch_size: Natural = 128
    accumulate: Natural = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: Count = 0
    data_seed: Count | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for name, kind in field_types(TrainConfig).items():
            value = getattr(self, name)
            if isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, Mapping):
                raise UserError(
                    f"{name} as names and values, {value}, would reset the rest of it: use "
                    f"didicm.settings.override(config, {{{name!r}: ...}}), or load_recipe(..., {name}=...)"
                )
        super().__post_init__()

    @property
    def image_seed(self) -> int:
        """The seed that chooses the images."""
        return self.seed if self.data_seed is None else self.data_seed


# Recipes


def recipes() -> list[str]:
    """Names for `--recipe`."""
    return sorted({path.stem.removesuffix("-standard") for path in RECIPES.glob("*.yaml")})


def load_recipe(name: str, method: str = "diffusion", **changes: Any) -> TrainConfig:
    """Settings of a recipe, with the defaults of what it does not say; `changes` are merged, also nested ones."""
    return override(TrainConfig(), read_recipe(name, method), {"method": method}, changes)


def read_recipe(name: str, method: str) -> dict[str, Any]:
    """What a recipe says; a standard classifier has a file of its own where it needs other settings."""
    if name not in recipes():
        raise UserError(f"unknown recipe {name!r}: {did_you_mean(name, recipes())}")
    special = RECIPES / f"{name}-standard.yaml"
    path = special if method == "standard" and special.exists() else RECIPES / f"{name}.yaml"
    return deepcopy(_read_shipped(path))


@cache
def _read_shipped(path: Path) -> dict[str, Any]:
    """A file of the package, which stays as it is: a study asks for the same recipe for each of its runs."""
    return read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of settings; names that older versions used are understood."""
    return renamed(files.read_yaml(path, "give a YAML file of settings, with lines such as epochs: 30"))


def read_config(path: Path) -> TrainConfig:
    """Settings as a run stored them."""
    stored = read_yaml(path)
    for name in GONE:
        stored.pop(name, None)
    try:
        return override(TrainConfig(), stored)
    except UserError as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or give another --out") from error


def to_yaml(config: TrainConfig) -> str:
    """Every setting, resolved, as the run stores it."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)

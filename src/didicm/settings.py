"""Settings of a training run: these dataclasses are the YAML keys and the command line's flags."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from didicm.classifier import Objective, Sampler
from didicm.data import Augment
from didicm.errors import UserError
from didicm.values import coerce, kinds_of

T = TypeVar("T")

# Settings that change how a run is carried out but not what comes out: a resumed run may have others.
CHANGEABLE_ON_RESUME = ("run.workers", "run.log_seconds", "run.save_seconds", "run.tensorboard", "run.wandb")


@dataclass(frozen=True)
class ImageConfig:
    """What the network sees of an image.

    Args:
        size: pixels; none means the images' own size, at most `limit`
        channels: 1 or 3; none means grey if all images are
        crop_pct: evaluation keeps this share of the shorter side; 1 keeps the border
    """

    size: int | None = None
    limit: int = 224
    channels: int | None = None
    crop_pct: float = 0.875
    interpolation: str = "bicubic"


@dataclass(frozen=True)
class OptimizerConfig:
    """How the weights move.

    Args:
        scale_lr: multiply lr by sqrt(1 / fraction), the paper's rule for less data
        clip: largest norm of the gradient
        ema: decay of averaged weights, which are then what is validated and saved
    """

    name: str = "lamb"
    lr: float = 2e-3
    scale_lr: bool = False
    weight_decay: float = 0.1
    warmup_epochs: float = 5
    clip: float | None = None
    ema: float | None = None
    momentum: float = 0.9


@dataclass(frozen=True)
class RunConfig:
    """Where and how the run is carried out.

    Args:
        strategy: auto, ddp, fsdp (which splits the weights over the processes), or others of lightning-fabric
        validate_epochs: validate every so many epochs, and at the end
        save_seconds: save the state at least this often, and at the end
        log_seconds: a line in metrics.jsonl, and on the screen if it is no terminal
        wandb: name of the project to log to
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    nodes: int = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    compile: bool = False
    workers: int = 4
    validate_epochs: int = 1
    save_seconds: float = 300
    log_seconds: float = 10
    tensorboard: bool = False
    wandb: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Args:
        data: where the images are: a folder, hf:..., wds:..., timm:..., fashion-mini
        out: the run's directory
        model: see `didicm models`; a standard classifier takes the same trunk
        model_args: stem, width, layout, parameterization, backbone, ...
        objective: of a standard classifier
        draws_per_image: noisy labels for every image of a batch
        label_proposal: least share of noisy labels drawn from all classes, and weighted for it; 0 is the paper
        fraction: of the training images, the same of every class
        val_fraction: held out from training when the data has no validation split
        corrupt_train: such as noise:3 or blur:2+jpeg:4
        batch_size: images per step over all processes
        accumulate: split a step's batch into so many parts, to save memory
    """

    data: str = ""
    out: str = ""
    method: Literal["diffusion", "standard"] = "diffusion"
    model: str = "didirn18"
    model_args: dict[str, Any] = field(default_factory=dict)
    objective: Objective = "cross-entropy"
    schedule: dict[str, Any] = field(default_factory=lambda: {"name": "log-linear"})
    draws_per_image: int = 1
    label_proposal: float = 0.0
    sampler: Sampler = field(default_factory=Sampler)
    image: ImageConfig = field(default_factory=ImageConfig)
    augment: Augment = field(default_factory=Augment)
    fraction: float = 1.0
    val_fraction: float = 0.1
    corrupt_train: str | None = None
    corrupt_eval: str | None = None
    balance: Literal["none", "sampling", "weights"] = "none"
    epochs: int = 100
    batch_size: int = 128
    accumulate: int = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "draws_per_image"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction must lie in (0, 1], got {self.fraction}")


def recipes() -> list[str]:
    """Names for `--recipe`."""
    names = (path.name for path in files("didicm").joinpath("recipes").iterdir() if path.name.endswith(".yaml"))
    return sorted({name.removesuffix(".yaml").removesuffix("-standard") for name in names})


def recipe_path(name: str, method: str) -> Path:
    """File of a recipe: a standard classifier has its own where it needs other settings."""
    if name not in recipes():
        raise UserError(f"unknown recipe {name!r}: choose one of {', '.join(recipes())}")
    folder = Path(str(files("didicm").joinpath("recipes")))
    special = folder / f"{name}-standard.yaml"
    return special if method == "standard" and special.exists() else folder / f"{name}.yaml"


def load_recipe(name: str, method: str = "diffusion") -> TrainConfig:
    """Settings of a recipe."""
    return override(TrainConfig(), yaml.safe_load(recipe_path(name, method).read_text(encoding="utf-8")))


def override(config: T, values: Mapping[str, Any], prefix: str = "") -> T:
    """Replace settings, given by their dotted names or nested; a wrong name or value is told in a sentence.

    All at once: halfway between two recipes, settings may exclude each other.
    """
    kinds, changes, nested = kinds_of(type(config)), {}, {}
    for name, value in values.items():
        head, _, rest = str(name).partition(".")
        whole = prefix + str(name)
        if head not in kinds:
            raise UserError(f"there is no setting {whole!r}: see didicm train --help")
        inner = getattr(config, head)
        if is_dataclass(inner):
            if not rest and not isinstance(value, Mapping):
                raise UserError(f"{whole} must be a set of names and values, got {value!r}")
            nested.setdefault(head, {}).update({rest: value} if rest else value)
        elif not rest:
            changes[head] = coerce(value, kinds[head], whole)
        elif isinstance(inner, dict):
            changes[head] = {**changes.get(head, inner), rest: value}
        else:
            raise UserError(f"there is no setting {whole!r}: see didicm train --help")
    for head, inner in nested.items():
        changes[head] = override(getattr(config, head), inner, f"{prefix}{head}.")
    return replace(config, **changes)


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a training by their dotted names, of whichever form they are."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = is_dataclass(getattr(TrainConfig(), str(name), None)) and isinstance(value, Mapping)
        flat |= {f"{name}.{key}": x for key, x in value.items()} if inner else {str(name): value}
    return flat


def to_yaml(config: TrainConfig) -> str:
    """Every setting, resolved, as the run stores it."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    flat: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{item.name}."))
        else:
            flat[prefix + item.name] = _plain(value)
    return flat


def differences(stored: TrainConfig, asked: TrainConfig) -> list[str]:
    """What a resumed run was asked to change, and may not."""
    old, new = flatten(stored), flatten(asked)
    return [
        f"{name} is {old[name]}, not {new[name]}"
        for name in old
        if old[name] != new[name] and name not in CHANGEABLE_ON_RESUME
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

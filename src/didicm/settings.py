"""Settings of a training run: these dataclasses are the YAML keys and the command line's flags.

Every value is checked against the type and range it is declared with, wherever it comes from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from didicm.classifier import Objective, Sampler
from didicm.data import Augment
from didicm.errors import UserError, did_you_mean, reason

T = TypeVar("T")

RECIPES = Path(__file__).with_name("recipes")

# Settings that change how a run is carried out but not what comes out: a resumed run may have others.
CHANGEABLE_ON_RESUME = ("run.workers", "run.log_seconds", "run.save_seconds", "run.tensorboard", "run.wandb")


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `open` leaves out the lower one."""

    least: float = -math.inf
    most: float = math.inf
    open: bool = False

    def __contains__(self, x: float) -> bool:
        return self.least <= x <= self.most and not (self.open and x == self.least)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"above {self.least:g}" if self.open else f"at least {self.least:g}"
        return f"in {'(' if self.open else '['}{self.least:g}, {self.most:g}]"


Natural = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, open=True)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, open=True)]


class Settings:
    """A dataclass of settings: every field is checked when it is made."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            if name != "prefix":
                object.__setattr__(self, name, coerce(getattr(self, name), kind, self.prefix + name))


@dataclass(frozen=True)
class ImageConfig(Settings):
    """What the network sees of an image.

    Args:
        size: pixels; by default the images' own size, at most `limit`
        channels: 1 or 3; by default grey if all images are
        crop_pct: evaluation keeps this fraction of the shorter side; 1 keeps the border
    """

    prefix = "image."
    size: Natural | None = None
    limit: Natural = 224
    channels: Literal[1, 3] | None = None
    crop_pct: Fraction = 0.875
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] = "bicubic"


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """How the weights move.

    Args:
        name: any of timm's optimisers
        scale_lr: multiply lr by sqrt(1 / fraction), the paper's rule for less data
        clip: largest norm of the gradient
        ema: decay of averaged weights, which are then what is validated and saved
    """

    prefix = "optimizer."
    name: str = "lamb"
    lr: Positive = 2e-3
    scale_lr: bool = False
    weight_decay: NonNegative = 0.1
    warmup_epochs: NonNegative = 5
    clip: Positive | None = None
    ema: Annotated[float, Range(0, 1)] | None = None
    momentum: Annotated[float, Range(0, 1)] = 0.9


@dataclass(frozen=True)
class RunConfig(Settings):
    """Where and how the run is carried out.

    Args:
        strategy: auto, ddp, fsdp (which splits the weights over the processes), or others of lightning-fabric
        validate_epochs: validate every so many epochs, and at the end
        save_seconds: save the state at least this often, and at the end
        log_seconds: a line in metrics.jsonl, and on the screen if it is no terminal
        wandb: name of the project to log to
    """

    prefix = "run."
    accelerator: str = "auto"
    devices: Natural | Literal["auto"] = "auto"
    nodes: Natural = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    compile: bool = False
    workers: Count = 4
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
        out: the run's directory
        method: a diffusion classifier, or the standard classifier on the same trunk
        model: see `didicm models`
        model_args: stem, width, layout, parameterization, backbone, ...
        objective: of a standard classifier
        draws_per_image: noisy labels for every image of a batch
        label_proposal: least share of noisy labels drawn from all classes, with importance weights; 0 is the paper
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
    model_args: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective = "cross-entropy"
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "log-linear"})
    draws_per_image: Natural = 1
    label_proposal: Annotated[float, Range(0, 1)] = 0.0
    sampler: Sampler = field(default_factory=Sampler)
    image: ImageConfig = field(default_factory=ImageConfig)
    augment: Augment = field(default_factory=Augment)
    fraction: Fraction = 1.0
    val_fraction: Fraction = 0.1
    corrupt_train: str | None = None
    corrupt_eval: str | None = None
    balance: Literal["none", "sampling", "weights"] = "none"
    epochs: Natural = 100
    batch_size: Natural = 128
    accumulate: Natural = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)


# Recipes


def recipes() -> list[str]:
    """Names for `--recipe`."""
    return sorted({path.stem.removesuffix("-standard") for path in RECIPES.glob("*.yaml")})


def load_recipe(name: str, method: str = "diffusion") -> TrainConfig:
    """Settings of a recipe; a standard classifier has a file of its own where it needs other settings."""
    if name not in recipes():
        raise UserError(f"unknown recipe {name!r}: {did_you_mean(name, recipes())}")
    special = RECIPES / f"{name}-standard.yaml"
    path = special if method == "standard" and special.exists() else RECIPES / f"{name}.yaml"
    return override(TrainConfig(), {**read_yaml(path), "method": method})


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of settings; names that older versions used are understood."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}): give a YAML file of settings") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings: write lines such as epochs: 30")
    return _renamed(content)


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run that version 0.1.0 stored, by today's names."""
    settings = {"label_proposal" if name == "redraw" else name: value for name, value in settings.items()}
    if isinstance(sampler := settings.get("sampler"), dict) and "query" in sampler:
        own = {name: value for name, value in sampler.items() if name != "query"}
        settings["sampler"] = {**own, "score_time": "midpoint" if sampler["query"] == "middle" else "start"}
    if isinstance(arguments := settings.get("model_args"), dict) and "prediction" in arguments:
        own = {name: value for name, value in arguments.items() if name != "prediction"}
        settings["model_args"] = {**own, "parameterization": arguments["prediction"]}
    return settings


def to_yaml(config: TrainConfig) -> str:
    """Every setting, resolved, as the run stores it."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


# Changing settings by name


def override(config: T, *changes: Mapping[str, Any]) -> T:
    """Replace settings, given by their dotted names or nested; later changes win, free mappings merge.

    All at once: halfway between two recipes, settings may exclude each other.
    """
    values, kinds = _leaves(config), setting_types(type(config))
    for change in changes:
        for name, value in _named(change, kinds):
            setting, _, key = (name, "", "") if name in kinds else name.rpartition(".")
            if not is_mapping(kinds[setting]):
                values[setting] = coerce(value, kinds[setting], setting)
            else:
                values[setting] = _merged(values[setting], {key: value} if key else value, setting)
    return _rebuilt(type(config), values)


def flatten(config: Any) -> dict[str, Any]:
    """Settings by their dotted names, as plain values."""
    return {name: _plain(value) for name, value in _leaves(config).items()}


@lru_cache
def field_types(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, with their ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cls)}


@lru_cache
def setting_types(cls: type) -> dict[str, Any]:
    """Types of all settings of a dataclass and those inside it, by dotted name."""
    found = {}
    for name, kind in field_types(cls).items():
        inner = (
            {f"{name}.{key}": x for key, x in setting_types(kind).items()} if is_dataclass(kind) else {name: kind}
        )
        found |= inner
    return found


def is_mapping(kind: Any) -> bool:
    """Whether a setting holds names and values of its own."""
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _named(change: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Changes by full dotted names; what no setting is called is told with the nearest name."""
    found: list[tuple[str, Any]] = []
    for given, value in change.items():
        name = str(given).replace("-", "_")
        parent = name.rpartition(".")[0]
        if name in kinds or (parent in kinds and is_mapping(kinds[parent])):
            found.append((name, value))
        elif any(kind.startswith(f"{name}.") for kind in kinds):
            if not isinstance(value, Mapping):
                raise UserError(f"{name} must be a set of names and values, got {value!r}")
            found += _named({f"{name}.{key}": x for key, x in value.items()}, kinds)
        else:
            raise UserError(f"there is no setting {given!r}: {did_you_mean(name, kinds)}")
    return found


def _merged(old: Mapping[str, Any], new: Any, name: str) -> dict[str, Any]:
    """A free mapping with some of its entries changed; `null` removes one, and another `name` starts anew."""
    new = coerce(new, Mapping[str, Any], name)
    old = {} if new.get("name", old.get("name")) != old.get("name") else old
    return {key: value for key, value in {**old, **new}.items() if value is not None}


def _leaves(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        found |= (
            {f"{item.name}.{k}": x for k, x in _leaves(value).items()}
            if is_dataclass(value)
            else {item.name: value}
        )
    return found


def _rebuilt(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    made = {
        name: _rebuilt(kind, values, f"{prefix}{name}.") if is_dataclass(kind) else values[prefix + name]
        for name, kind in field_types(cls).items()
    }
    try:
        return cls(**made)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{prefix.rstrip('.') or 'settings'}: {error}") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# Values and their types

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def coerce(value: Any, kind: Any, name: str) -> Any:
    """The value as its type asks for; else one sentence on what it must be."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = coerce(value, parts[0], name)
        if value not in parts[1]:
            raise UserError(f"{name} must be {parts[1]}, got {value:g}")
        return value
    if kind is Any or (is_dataclass(kind) and isinstance(value, kind)):
        return value
    if origin is Literal and value in parts and not isinstance(value, bool):
        return value
    if origin in (Union, UnionType):
        return _coerce_union(value, parts, kind, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(coerce(x, part, name) for x, part in zip(value, kinds, strict=True))
    elif is_mapping(kind) and isinstance(value, Mapping):
        return {
            coerce(k, parts[0], f"a name in {name}"): coerce(x, parts[1], f"{name}: {k}") for k, x in value.items()
        }
    elif kind is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:  # to YAML, 1e-3 is text
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    elif kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    elif kind in _WORDS and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UserError(f"{name} must be {describe(kind)}, got {value!r}")


def _coerce_union(value: Any, parts: tuple[Any, ...], kind: Any, name: str) -> Any:
    told: UserError | None = None
    for part in parts:
        try:
            return coerce(value, part, name)
        except UserError as error:
            # Of the right type but out of range: that says more than a list of the types.
            told = (
                error if get_origin(part) is Annotated and "must be " + describe(part) not in str(error) else told
            )
    raise told or UserError(f"{name} must be {describe(kind)}, got {value!r}")


def describe(kind: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is Annotated:
        return describe(parts[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe(part) for part in parts))
    if origin is tuple:
        return f"a list, each entry {describe(parts[0])}"
    return "a path" if kind is Path else "a set of names and values"

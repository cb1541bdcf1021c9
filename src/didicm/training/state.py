"""What a run keeps: its state, enough to go on bit by bit and never harmed by a crash, and its models.

Tensors lie in a safetensors file, everything else in JSON: nothing is ever unpickled. There is no random state:
every random number of a step is a function of the seed and the step.

The models are the last, the best, and where it learns in cycles, what every cycle ended with. In cycles of the
learning rate one training ends in several minima; their ensemble costs no more training than one network (snapshot
ensembles, Huang et al. 2017).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.utils import ModelEmaV3
from torch import Tensor

from didicm.checkpoint import load, save, storable
from didicm.classifier import Classifier, Ensemble
from didicm.data.images import some
from didicm.errors import UserError, reason
from didicm.files import parse_json, write_files
from didicm.settings import CHANGEABLE_ON_RESUME, GONE, TrainConfig, read_config, read_yaml
from didicm.text import quoted
from didicm.training.build import RunComponents, build_classifier
from didicm.training.devices import first_alone, gather, is_sharded, prepare_network
from didicm.training.tracking import METRICS
from didicm.values import flatten

CONFIG = "config.yaml"
HELD = ".train.lock"  # by the process that trains
STATE = "state/state.safetensors"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # in optimisers' state
LAST, BEST, SNAPSHOTS = "last", "best", "snapshots"
CYCLES = "cycles"  # folder of the models that `SNAPSHOTS` is made of, until it is


def holds_run(folder: Path) -> bool:
    """Whether a folder is one of ours: somebody else's config.yaml makes no run."""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in (HELD, METRICS, STATE, LAST))


def run_folder(out: str) -> Path:
    """The folder of a run, which holds that run or nothing."""
    if not out:
        raise UserError("no --out: say where the run's directory should be")
    folder = Path(out)
    others = folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {HELD})
    if others and not holds_run(folder):
        raise UserError(f"{folder} is not empty and holds no run: give another --out")
    return folder


def resume(folder: Path, asked: TrainConfig, *, extend: bool = False, elsewhere: bool = False) -> TrainConfig:
    """Settings to go on with, which must be those of the run but for what may change on the way.

    `elsewhere` lets all of run.* be other, as in a study that goes on with other devices.
    """
    stored = read_config(folder / CONFIG)
    for name, value in read_yaml(folder / CONFIG).items():
        if value != GONE.get(name, value):
            raise UserError(f"{folder} has {name} {value}, which is no longer an option: give another --out")
    old, new = (dict(_entries(config)) for config in (stored, asked))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name) and name != "out"]
    free = tuple(name for name in changed if name.startswith("run.")) if elsewhere else CHANGEABLE_ON_RESUME
    refused = [name for name in changed if name not in free]
    if extend and "epochs" in refused:
        refused.remove("epochs")
        if asked.epochs < stored.epochs:
            raise UserError(f"--extend needs more epochs than the {stored.epochs} of {folder}")
        if stored.optimizer.snapshots:
            raise UserError(
                f"--extend would change the cycles of {folder}, whose snapshots stay: give another --out"
            )
    if refused:
        told = "; ".join(f"{name} is {old.get(name)}, not {new.get(name)}" for name in refused)
        remedy = "add --extend to train longer, " if refused == ["epochs"] else ""
        raise UserError(
            f"{folder} was started with other settings ({told}): {remedy}"
            f"resume it with just --out {quoted(folder)}, or give another --out"
        )
    return replace(asked, out=str(folder))


def _entries(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Settings by name, those of free mappings one by one."""
    for name, value in flatten(config).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    best: list[float] | None = None  # accuracy and negative log-likelihood of the best validation so far
    skipped_steps: int = 0  # steps that half precision could not take
    unreadable: int = 0  # training images that could not be read
    finished: bool = False
    epochs: int | None = None  # that it was finished after; None in runs of version 0.1.0
    scaler: dict[str, float] = field(default_factory=dict)  # of the gradient, where float16 needs one
    classes: list[str] | None = None  # of the data, by label; None in runs of version 0.1.0
    images: int | None = None  # to train on

    def improved_by(self, accuracy: float, nll: float) -> bool:
        """Whether a validation is the best so far: by its NLL; accuracy decides between equals."""
        return self.best is None or (nll, -accuracy) < (self.best[1], -self.best[0])


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state, on its device."""

    progress: Progress
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Any]


@dataclass
class TrainState:
    """What changes while a run goes on: weights, their average, and how far it has come."""

    config: TrainConfig
    classifier: Classifier
    ema: ModelEmaV3 | None
    device: torch.device
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def make(cls, config: TrainConfig, classifier: Classifier, fabric: Fabric) -> "TrainState":
        """The state before the first step."""
        classifier.model = prepare_network(classifier.model, config.run, fabric)
        ema, network = None, classifier.model
        if config.optimizer.ema is not None:
            # Warm-up: at first the average follows the weights, or a short run would keep its random start.
            ema = ModelEmaV3(network.to(fabric.device), config.optimizer.ema, use_warmup=True)
        elif config.optimizer.swa is not None:  # a warm-up of this power never ends: the mean of all steps
            ema = ModelEmaV3(network.to(fabric.device), 1.0, use_warmup=True, warmup_power=1.0)
        return cls(config, classifier, ema, fabric.device)

    def annealing(self, total_steps: int) -> int:
        """Steps in which the learning rate follows its schedule; `swa` averages those after them."""
        share = self.config.optimizer.swa
        if self.ema is None or share is None:
            return total_steps
        steps = total_steps - max(1, round(share * total_steps))
        self.ema.update_after_step = steps - 1  # it copies the weights of the step after this one
        return steps

    def average(self) -> None:
        """Move the averaged weights, if there are any."""
        if self.ema is not None:
            self.ema.update(self.classifier.model, step=self.progress.step)

    @contextmanager
    def as_saved(self) -> Iterator[None]:
        """Use the weights that are validated and saved inside the block: averaged ones, or sharded ones joined."""
        trained = self.classifier.model
        if self.ema is not None:
            self.classifier.model = self.ema.module
        elif is_sharded(self.config.run):
            channels = int(trained.in_chans)  # type: ignore[arg-type]
            whole = build_classifier(self.config, self.classifier.num_classes, channels, fresh=False).model
            whole.load_state_dict(gather(trained.state_dict()))
            self.classifier.model = whole.to(self.device)
        try:
            yield
        finally:
            self.classifier.model = trained

    def copy(self, optimizer: Any) -> Snapshot:
        """Everything that a step changes."""
        ema = None if self.ema is None else self.ema.module.state_dict()
        parts = self.progress, self.classifier.model.state_dict(), ema, optimizer.optimizer.state_dict()
        return Snapshot(*deepcopy(parts))

    def go_back(self, before: Snapshot, optimizer: Any) -> None:
        """Undo all steps since a copy, which becomes the state and must not be used again."""
        vars(self.progress).update(vars(before.progress))
        self.classifier.model.load_state_dict(before.model)
        if self.ema is not None and before.ema is not None:
            self.ema.module.load_state_dict(before.ema)
        optimizer.optimizer.load_state_dict(before.optimizer)

    def save(self, folder: Path, optimizer: Any, fabric: Fabric) -> None:
        """Write all that the run needs to go on, in one file; all processes take part."""
        weights = {"model": gather(self.classifier.model.state_dict())}
        optimizer_state = gather(optimizer.optimizer.state_dict())
        self.progress.scaler = fabric.strategy.precision.state_dict()
        if self.ema is not None:
            weights["ema"] = self.ema.module.state_dict()
        first_alone(fabric, lambda: save_state(folder, self.progress, weights, optimizer_state))

    def restore(self, folder: Path, fabric: Fabric, classes: list[str]) -> dict[str, Any]:
        """Go on from what was saved, for data of the same classes; returns the optimiser's state."""
        self.progress, weights, optimizer = load_state(folder)
        trained = self.progress.classes or classes
        if trained != classes:
            changed = sorted(set(trained) ^ set(classes)) or classes  # or only in another order
            raise UserError(
                f"the data has other classes than {folder} was started with (new or gone: {some(changed)}): "
                "train on the data that it was started with, or give another --out"
            )
        try:
            self.classifier.model.load_state_dict(weights["model"])
            if self.ema is not None:
                self.ema.module.load_state_dict(weights["ema"])
        except (KeyError, RuntimeError) as error:
            raise UserError(
                f"{folder} holds the weights of another network, such as for images of other channels: "
                "train on the data that it was started with, or give another --out"
            ) from error
        if self.progress.scaler:
            fabric.strategy.precision.load_state_dict(self.progress.scaler)
        self.progress.finished = False
        return optimizer


def save_state(
    folder: Path, progress: Progress, weights: dict[str, dict[str, Tensor]], optimizer: dict[str, Any]
) -> None:
    """Write all that the run needs to go on, in one file."""
    tensors = {f"{part}/{name}": x for part, state in weights.items() for name, x in state.items()}
    plain = _separate(optimizer, "optimizer", tensors)
    metadata = {"position": json.dumps(vars(progress)), "optimizer": json.dumps(plain)}
    place = folder / STATE
    write_files(place.parent, {place.name: lambda path: save_file(storable(tensors), path, metadata)})


def load_state(folder: Path) -> tuple[Progress, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read what `save_state` wrote."""
    path = folder / STATE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        progress = Progress(**parse_json(metadata["position"]))
        optimizer = _join(parse_json(metadata["optimizer"]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        told = f"{path} is damaged, or just being replaced ({reason(error)})"
        raise UserError(
            f"{told}: unless another process trains here, delete the run and start it again"
        ) from error
    weights: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        part, _, key = name.partition("/")
        if part != "optimizer":
            weights.setdefault(part, {})[key] = x
    return progress, weights, optimizer


def has_state(folder: Path) -> bool:
    """Whether a run can be resumed."""
    return (folder / STATE).exists()


def _separate(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Replace the tensors of a nested state by references, and collect them."""
    if isinstance(value, Tensor):
        tensors[f"optimizer/{name}"] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _separate(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_separate(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return value


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[f"optimizer/{value['tensor']}"]
    if "dtype" in value:
        return DTYPES[value["dtype"]]
    if "dict" in value:
        return {key: _join(item, tensors) for key, item in value["dict"]}
    return [_join(item, tensors) for item in value["list"]]


def keep(run: RunComponents, classifier: Classifier, *places: Path) -> None:
    """Write a classifier into model directories."""
    for place in places:
        save(
            classifier,
            place,
            class_names=run.class_names,
            transform=run.eval_transform.to_dict(),
            training_prior=run.training_prior,
        )


def check_cycles(config: TrainConfig, classifier: Classifier) -> None:
    """Refuse snapshots of a network that no ensemble can be saved with, before it is trained."""
    if config.optimizer.snapshots and getattr(classifier.model, "recipe", None) is None:
        raise UserError(
            "optimizer.snapshots: an ensemble with a network of your own cannot be saved; leave it out"
        )


def ended_cycle(config: TrainConfig, epochs: int) -> int | None:
    """The cycle, counted from 1, that ends after so many epochs, if one does."""
    if config.optimizer.snapshots is None:
        return None
    cycle, rest = divmod(epochs, config.epochs // config.optimizer.snapshots)
    return None if rest else cycle


def join_cycles(config: TrainConfig, run: RunComponents, folder: Path) -> None:
    """Make one model of what the cycles ended with: the later first, as first members may be asked alone."""
    if (folder / CYCLES).is_dir():
        cycles = range(config.optimizer.snapshots or 0, 0, -1)
        members = [load(folder / CYCLES / str(cycle)).classifier for cycle in cycles]
        keep(run, Ensemble(members), folder / SNAPSHOTS)

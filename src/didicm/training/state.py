"""The state of a run on disk: enough to go on bit by bit, written so that a crash never spoils the last one.

Tensors lie in a safetensors file, everything else in JSON: nothing is ever unpickled. There is no random state:
every random number of a step is a function of the seed and the step.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from didicm.errors import UserError
from didicm.files import write_files

STATE = "state.safetensors"


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    best: list[float] | None = None  # accuracy and negative log-likelihood of the best validation so far
    skipped_steps: int = 0  # steps that half precision could not take
    unreadable: int = 0  # images that could not be read
    finished: bool = False


def save_state(
    folder: Path, position: Progress, weights: dict[str, dict[str, Tensor]], optimizer: dict[str, Any]
) -> None:
    """Write all that the run needs to go on, in one file."""
    tensors = {f"{part}/{name}": x for part, state in weights.items() for name, x in state.items()}
    plain = _separate(optimizer, "optimizer", tensors)
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    metadata = {"position": json.dumps(vars(position)), "optimizer": json.dumps(plain)}
    write_files(folder, {STATE: lambda path: save_file(_unshared(tensors), path, metadata)})


def load_state(folder: Path) -> tuple[Progress, dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read what `save_state` wrote."""
    path = folder / STATE
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        position = Progress(**json.loads(metadata["position"]))
        optimizer = _join(json.loads(metadata["optimizer"]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): delete the run and start it again") from error
    weights: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        part, _, key = name.partition("/")
        if part != "optimizer":
            weights.setdefault(part, {})[key] = x
    return position, weights, optimizer


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
    return value


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[f"optimizer/{value['tensor']}"]
    if "dict" in value:
        return {key: _join(item, tensors) for key, item in value["dict"]}
    return [_join(item, tensors) for item in value["list"]]


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory, which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, x in tensors.items():
        place = x.untyped_storage().data_ptr()
        result[name] = x.clone() if place in seen and x.numel() else x
        seen.add(place)
    return result

"""Posteriors on disk: one safetensors file, enough to recompute every metric and plot without the model."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation.metrics import check
from didicm.files import parse_json, write_files

FORMAT = "didicm posteriors 1"


@dataclass(frozen=True)
class Posteriors:
    """What a file of posteriors holds."""

    probs: Tensor  # (N, K)
    labels: Tensor  # (N,)
    class_names: list[str]  # K, in the order of the columns
    image_names: list[str] | None  # N, in the order of the rows
    meta: dict[str, Any]  # where they come from: model, data, sampler


def save_posteriors(
    path: str | Path,
    probs: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    image_names: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write probabilities (N, K) and labels (N,); an interrupted save leaves the file that was there."""
    probs, labels = check(probs, labels)
    names = _check_names(probs, class_names, image_names)
    tensors = {"probs": probs.contiguous(), "labels": labels.contiguous()}
    strings = {**names, "meta": dict(meta or {}), "sha256": _digest(probs, labels)}
    metadata = {"format": FORMAT, **{key: json.dumps(x) for key, x in strings.items()}}
    path = Path(path)
    write_files(path.parent, {path.name: lambda part: save_file(tensors, part, metadata)})
    return path


def is_posteriors(path: Path) -> bool:
    """Whether a file is one that `save_posteriors` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError, RuntimeError, ValueError):
        return False


def load_posteriors(path: str | Path) -> Posteriors:
    """Read a file that `save_posteriors` wrote."""
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file: give posteriors that an evaluation stored")
    try:
        with safe_open(path, framework="pt") as file:
            strings = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no plain dict
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}): evaluate again") from error
    if strings.pop("format", None) != FORMAT:
        raise UserError(f"{path} holds no posteriors that this version of didicm reads: evaluate again")
    try:
        values = {key: parse_json(x) for key, x in strings.items()}
        probs, labels = check(tensors["probs"], tensors["labels"])
        names = _check_names(probs, values["class_names"], values["image_names"])
        intact = values["sha256"] == _digest(probs, labels)
        meta = values["meta"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}): evaluate again") from error
    if not intact:
        raise UserError(f"{path} is damaged (its numbers are not the ones that were saved): evaluate again")
    return Posteriors(probs, labels, **names, meta=meta)


def _check_names(probs: Tensor, classes: Sequence[str], images: Sequence[str] | None) -> dict[str, Any]:
    if len(classes) != probs.shape[1]:
        raise UserError(f"got {len(classes)} class names for {probs.shape[1]} classes: give one each")
    if images is not None and len(images) != len(probs):
        raise UserError(f"got {len(images)} image names for {len(probs)} images: give one each")
    return {"class_names": list(classes), "image_names": None if images is None else list(images)}


def _digest(probs: Tensor, labels: Tensor) -> str:
    digest = hashlib.sha256(probs.contiguous().numpy().data)
    digest.update(labels.contiguous().numpy().data)
    return digest.hexdigest()

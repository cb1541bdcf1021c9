"""Checkpoints of the authors' released code, converted to ours."""

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from didicm.classifier import DiffusionClassifier
from didicm.errors import UserError, reason
from didicm.models import create_model
from didicm.models.resnet import ARCHITECTURES
from didicm.values import coerce

Weights: TypeAlias = Literal["best", "model", "ema"]

_RENAMED = [
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.bn."),
    (r"^ff_emb\.mlp\.", "condition.noise."),
    (r"^label_embedder\.", "condition.label."),
    (r"\.skip_connection\.0\.", ".skip.conv."),
    (r"\.skip_connection\.1\.", ".skip.bn."),
]
_BLOCK = re.compile(r"layer(\d)\.(\d+)\.")


def read_official(path: str | Path, weights: Weights = "best") -> tuple[DiffusionClassifier, dict[str, Any]]:
    """Read a `.pth.tar` of the released code: the classifier, and the training arguments stored with it.

    `weights` is "model", "ema", or "best": the averaged weights if there are any. Nothing but tensors and plain
    values is unpickled.
    """
    coerce(weights, Weights, "weights")
    file = _read(Path(path))
    averaged = weights == "ema" or (weights == "best" and file.get("state_dict_ema"))
    key = "state_dict_ema" if averaged else "state_dict"
    state = file.get(key)
    if not state:
        raise UserError(
            f"{path} holds no {key!r}: it is not a checkpoint of the released code, or has no such weights"
        )
    state = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): x for name, x in state.items()}
    try:
        model = create_model(_name(state), num_classes=len(state["fc.weight"]), layout="official")
        converted = convert(state)
        if state["conv1.weight"].shape[1] != 3:
            raise UserError(
                f"{path} takes {state['conv1.weight'].shape[1]} channels; the released code only has 3"
            )
        model.load_state_dict(converted)
    except (KeyError, RuntimeError, IndexError) as error:
        raise UserError(f"{path} does not hold a DiDiRN of the released code: {reason(error)[:200]}") from error
    arguments = file.get("args") or {}
    return DiffusionClassifier(model), dict(
        vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    )


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the released code's parameters to ours, and join the blocks' conditioning layers into one."""
    blocks = sorted({_place(match) for name in state if (match := _BLOCK.match(name))})
    converted = {}
    for name, x in state.items():
        if "emb_layers" in name:
            continue
        if "out_layers" in name and (match := _BLOCK.match(name)):
            name = f"norms.{blocks.index(_place(match))}.{name.rsplit('.', 1)[1]}"
        for old, new in _RENAMED:
            name = re.sub(old, new, name)
        converted[name] = x
    for part in ("weight", "bias"):
        joined = [state[f"layer{stage}.{block}.emb_layers.1.{part}"] for stage, block in blocks]
        converted[f"project.{part}"] = torch.cat(joined)
    return converted


def _place(match: re.Match[str]) -> tuple[int, int]:
    """Stage and number of a block."""
    return int(match[1]), int(match[2])


def _name(state: Mapping[str, Tensor]) -> str:
    depths = tuple(
        len({m.group(2) for name in state if (m := _BLOCK.match(name)) and m.group(1) == str(stage)})
        for stage in range(1, 5)
    )
    bottleneck = "layer1.0.conv3.weight" in state
    for size, architecture in ARCHITECTURES.items():
        if architecture.depths == depths and architecture.bottleneck == bottleneck:
            return f"didirn{size}"
    raise KeyError(f"{depths} blocks in its stages, which no DiDiRN has")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist or is no file: give a .pth.tar of the released code")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            file = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        detail = reason(error)[:200]
        raise UserError(f"{path} is damaged or holds more than weights and plain values: {detail}") from error
    if not isinstance(file, dict):
        raise UserError(f"{path} is not a checkpoint of the released code: it holds a {type(file).__name__}")
    return file

"""Checkpoints of the authors' released code, converted to ours."""

import argparse
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from didicm.classifier import DiffusionClassifier, Sampler
from didicm.errors import UserError, reason
from didicm.models import create_model
from didicm.models.resnet import ARCHITECTURES, Architecture
from didicm.models.weights import not_finite
from didicm.values import coerce

Weights: TypeAlias = Literal["best", "model", "ema"]

# How the released code samples when it is not told otherwise.
SAMPLER = Sampler(solver="official", steps=8, select="argmin", chains=10, average="one-hot")
_SELECT = {"min": "argmin", "max": "argmax", "random": "sample"}
_BLOCK = re.compile(r"layer(\d)\.(\d+)\.")
_RENAMED = {
    r"^(module\.|_orig_mod\.)+": "",
    r"^conv1\.": "stem.conv.",
    r"^bn1\.": "stem.bn.",
    r"^ff_emb\.mlp\.": "condition.noise.",
    r"^label_embedder\.": "condition.label.",
    r"\.skip_connection\.0\.": ".skip.conv.",
    r"\.skip_connection\.1\.": ".skip.bn.",
}


def read_official(path: str | Path, weights: Weights = "best") -> tuple[DiffusionClassifier, dict[str, Any]]:
    """Read a `.pth.tar` of the released code: the classifier, and the training arguments stored with it.

    The classifier samples as that training validated. `weights` is "model", "ema", or "best": the averaged weights
    if there are any. Nothing but tensors and plain values is unpickled.
    """
    coerce(weights, Weights, "weights")
    file = _read(Path(path))
    averaged = weights == "ema" or (weights == "best" and file.get("state_dict_ema"))
    key = "state_dict_ema" if averaged else "state_dict"
    if not file.get(key):
        raise UserError(
            f"{path} holds no {key!r}: it is not a checkpoint of the released code, or has no such weights"
        )
    try:
        name, state = _convert(file[key])
        channels, num_classes = state["stem.conv.weight"].shape[1], len(state["fc.weight"])
        if channels != 3:
            raise UserError(f"{path} takes {channels} channels; the released code only has 3")
        model = create_model(name, num_classes=num_classes, layout="official")
        model.load_state_dict(state)
    except UserError:
        raise
    except Exception as error:  # what lies where weights should lie may be anything
        raise UserError(f"{path} does not hold a DiDiRN of the released code: {reason(error)[:200]}") from error
    if not_finite(state):
        raise UserError(f"{path} holds weights that are not finite: take another checkpoint")
    stored = file.get("args") or {}
    stored = vars(stored) if isinstance(stored, argparse.Namespace) else stored
    training = dict(coerce(stored, Mapping[str, Any], f"args of {path}"))
    if (noise := training.get("diffusion_noise", "loglinear")) != "loglinear":
        raise UserError(f"{path} was trained with {noise} noise: only loglinear, the released default, is known")
    try:
        sampler = _sampler(training)
    except (UserError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} samples in a way the released code does not: {reason(error)}") from error
    try:
        return DiffusionClassifier(model, sampler=sampler), training
    except ValueError as error:
        raise UserError(
            f"{path} has {num_classes} classes, for which the released schedule does not end near uniform, where "
            "sampling starts: import a checkpoint of fewer classes"
        ) from error


def _sampler(training: Mapping[str, Any]) -> Sampler:
    own = training.get("diffusion_sampler_kwargs") or {}
    given: dict[str, Any] = {
        "method": training.get("diffusion_sampler"),
        "steps": training.get("diffusion_steps"),
        "select": _SELECT[own["mode"]] if "mode" in own else None,
        "chains": own.get("N"),
    }
    return replace(SAMPLER, **{name: value for name, value in given.items() if value is not None})


def _convert(released: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Our name of the network and its parameters: renamed, the blocks' conditioning layers joined into one."""
    state = {}
    for name, x in released.items():
        for old, new in _RENAMED.items():
            name = re.sub(old, new, name)
        state[name] = x
    blocks = sorted({(int(match[1]), int(match[2])) for name in state if (match := _BLOCK.match(name))})
    depths = tuple(Counter(stage for stage, _ in blocks).values())
    architecture = Architecture(depths, bottleneck="layer1.0.conv3.weight" in state)
    sizes = [size for size, known in ARCHITECTURES.items() if known == architecture]
    if not sizes:
        raise KeyError(f"{depths} blocks in its stages, which no DiDiRN has")
    for part in ("weight", "bias"):
        names = [f"layer{stage}.{block}" for stage, block in blocks]
        state[f"project.{part}"] = torch.cat([state.pop(f"{name}.emb_layers.1.{part}") for name in names])
        for i, name in enumerate(names):
            state[f"norms.{i}.{part}"] = state.pop(f"{name}.out_layers.0.{part}")
    return f"didirn{sizes[0]}", state


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: give a .pth.tar of the released code")
    try:
        _check_unpacked(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            file = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything from inside the unpickler
        # PyTorch's own words advise to run whatever code the file holds.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        detail = f"it asks for {found[1]}" if found else type(error).__name__
        raise UserError(f"{path} is damaged or holds more than weights and plain values: {detail}") from None
    if not isinstance(file, dict):
        raise UserError(f"{path} is not a checkpoint of the released code: it holds a {type(file).__name__}")
    return file


def _check_unpacked(path: Path) -> None:
    """Refuse an archive that unfolds to far more than it is; PyTorch does not compress its own."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > 2 * path.stat().st_size + 2**20:
                raise ValueError("compressed")

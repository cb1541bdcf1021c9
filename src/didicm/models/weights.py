"""Weights from elsewhere: state dicts of timm's backbones, and whole networks of ours."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.models import load_pretrained, model_entrypoint
from torch import Tensor, nn

from didicm.errors import UserError, reason
from didicm.models.backbone import Backbone

# Where training scripts keep a state dict, averaged weights first, and what wrappers put before its names.
_INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model")
_DEEPEST = 10  # one inside the other; a file may also hold one that contains itself
_PREFIXES = ("module.", "_orig_mod.", "model.")
_PER_CLASS = ("fc.", "correct.", "condition.label.")  # layers of our networks that depend on the number of classes


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a state dict that `torch.save` wrote; no code in it is ever run."""
    if not path.is_file():
        raise UserError(f"weights {path} does not exist: give a file of weights, a run or a model directory")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpicklers raise nearly anything
        told = reason(error).partition(". ")[0]
        raise UserError(
            f"weights {path} cannot be read ({told}): give a safetensors file, or a plain state dict of torch.save"
        ) from error
    found = found if isinstance(found, Mapping) else {}
    for _ in range(_DEEPEST):
        found = next((found[key] for key in _INSIDE if isinstance(found.get(key), Mapping)), found)
    state = {str(name): x for name, x in found.items() if isinstance(x, Tensor)}
    if not state:
        raise UserError(f"weights {path} holds no state dict: save model.state_dict() and give that")
    if broken := not_finite(state):
        raise UserError(f"weights {path} is broken: {broken} holds numbers that are not finite; copy it again")
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): x for name, x in state.items()}
    return state


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that holds numbers that are not finite, if there is one."""
    return next((name for name, x in tensors.items() if not bool(x.isfinite().all())), None)


def load_backbone(network: Backbone, path: Path) -> None:
    """Give a timm backbone the weights of a file, with timm's own conversion; a classifier in it is left out."""
    state, backbone = read_state(path), network.backbone
    if network.backbone_name is None:
        raise UserError(f"weights {path} is for timm's backbones: load those of your own module yourself")
    config = {**backbone.pretrained_cfg, "source": "", "state_dict": state}
    unmatched: list[Any] = []
    hook = backbone.register_load_state_dict_post_hook(lambda _, found: unmatched.append(found))
    try:
        load_pretrained(
            backbone, config, num_classes=0, in_chans=network.in_chans, filter_fn=_filter(network.backbone_name)
        )
    except Exception as error:  # of shapes, and from conversions that expect other names
        first = str(error).strip().splitlines()[:2][-1].strip()
        raise _unfit(path, network.backbone_name, first) from error
    finally:
        hook.remove()
    heads = config.get("classifier") or ()
    heads = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    missing, unexpected = unmatched[0]
    unexpected = [name for name in unexpected if not name.startswith(heads or ("head.",))]
    if missing or unexpected:
        kind, names = ("lacks", missing) if missing else ("has an unknown", unexpected)
        raise _unfit(path, network.backbone_name, f"it {kind} {_some(names)}")


def load_network(network: nn.Module, state: Mapping[str, Tensor], source: str | Path) -> None:
    """Give one of our networks the weights of another of its kind; other classes keep their new last layers."""
    own = network.state_dict()
    recipe: Any = getattr(network, "recipe", None)
    name = type(network).__name__ if recipe is None else str(recipe["name"])
    if strange := sorted(own.keys() ^ state.keys()):
        kind = "lacks" if strange[0] in own else "has an unknown"
        raise _unfit(source, name, f"it {kind} {_some(strange)}")
    other = [key for key, x in own.items() if x.shape != state[key].shape]
    if wrong := [key for key in other if not key.startswith(_PER_CLASS)]:
        shapes = f"{tuple(state[wrong[0]].shape)}, not {tuple(own[wrong[0]].shape)}"
        raise _unfit(source, name, f"its {wrong[0]} has shape {shapes}")
    kept = {key: x for key, x in state.items() if not (other and key.startswith(_PER_CLASS))}
    network.load_state_dict(kept, strict=False)


def _unfit(source: str | Path, name: str, detail: str) -> UserError:
    return UserError(f"weights {source} does not fit {name}: {detail}; give weights of the same network")


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _filter(name: str) -> Any:
    """What timm converts older names of this network's weights with; its modules have it under one name."""
    module = sys.modules[model_entrypoint(timm.models.split_model_name_tag(name)[0]).__module__]
    return getattr(module, "checkpoint_filter_fn", None)

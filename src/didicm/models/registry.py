"""Every network by name, in timm's registry and in ours."""

from dataclasses import astuple, dataclass
from typing import Any, get_type_hints

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from didicm.diffusion import ScoreFunction
from didicm.errors import UserError, did_you_mean
from didicm.models.backbone import Backbone, BackboneBaseline, BackboneScore
from didicm.models.resnet import ARCHITECTURES, ResNet, Trunk
from didicm.models.score import DiDiRN
from didicm.values import coerce

# name -> class and the arguments that the name stands for
_NETWORKS: dict[str, tuple[type[Backbone | Trunk], dict[str, Any]]] = {
    **{f"didirn{size}": (DiDiRN, {"architecture": a}) for size, a in ARCHITECTURES.items()},
    **{f"didirn{size}_baseline": (ResNet, {"architecture": a}) for size, a in ARCHITECTURES.items()},
    "backbone_score": (BackboneScore, {}),
    "backbone_baseline": (BackboneBaseline, {}),
}

# What timm's tools read; the first and last layer are where fine-tuning replaces something.
_CONFIG = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "first_conv": "stem.conv",
    "classifier": "fc",
}
default_cfgs = generate_default_cfgs(
    {name: {**_CONFIG, "first_conv": None} if "backbone" in name else _CONFIG for name in _NETWORKS}
)
_TIMM_ONLY = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def _register(name: str, network: type[Backbone | Trunk], fixed: dict[str, Any]) -> None:
    def create(pretrained: bool = False, **arguments: Any) -> nn.Module:
        own = {key: value for key, value in arguments.items() if key not in _TIMM_ONLY}
        model: Backbone | Trunk
        if issubclass(network, Backbone):
            # Pretrained weights are the backbone's; timm's builder would look for some of the whole network.
            model = network(pretrained=pretrained, **own)
            model.pretrained_cfg = model.default_cfg = default_cfgs[name].default.to_dict()
        else:
            model = build_model_with_cfg(network, name, pretrained, **fixed, **arguments)
        if not isinstance(own.get("backbone"), nn.Module):  # a module of the user's own is given again at loading
            model.recipe = {"name": name, "arguments": own}  # for its checkpoint, which brings the weights
        return model

    create.__name__ = name
    register_model(create)


for _name in _NETWORKS:
    _register(_name, *_NETWORKS[_name])


def list_models() -> list[str]:
    """Names that `create_model` knows."""
    return list(_NETWORKS)


def baseline_name(name: str) -> str:
    """Name of the standard classifier on the same trunk as a score network."""
    return name.replace("_score", "_baseline") if name.endswith("_score") else f"{name}_baseline"


def create_model(name: str, **arguments: Any) -> nn.Module:
    """Build a network by name; unknown names and arguments are told in a sentence."""
    if name not in _NETWORKS:
        raise UserError(f"unknown model {name!r}: {did_you_mean(name, _NETWORKS)}")
    kinds = get_type_hints(_NETWORKS[name][0].__init__, include_extras=True)
    allowed = kinds.keys() - {"architecture", "return"}
    if unknown := sorted(arguments.keys() - allowed):
        raise UserError(f"model {name} has no argument {unknown[0]!r}: {did_you_mean(unknown[0], allowed)}")
    try:
        for key, value in arguments.items():
            if value is not None and key != "backbone":  # that may be a module, too
                arguments[key] = coerce(value, kinds[key], key)
        return timm.create_model(name, **arguments)
    except (AssertionError, TypeError, ValueError) as error:  # how networks of timm's refuse their arguments
        raise UserError(f"model {name}: {error}") from error


@dataclass(frozen=True)
class Cost:
    """What a network costs: parameters, and multiply-adds per image."""

    parameters: int
    per_image: int  # multiply-adds of what is computed once
    per_call: int  # multiply-adds of every network call

    def total(self, calls: float, views: int = 1) -> int:
        """Multiply-adds of a posterior that takes so many network calls, perhaps on average, and views."""
        return views * self.per_image + round(calls * self.per_call)


def cost(model: nn.Module, size: int) -> Cost:
    """Count the multiply-adds of a network on one image of size x size pixels, by PyTorch's own counter."""
    if isinstance(model, nn.ModuleList):  # an ensemble: its members share the network calls that it counts
        costs = [cost(member, size) for member in model]
        parameters, per_image, per_call = (sum(x) for x in zip(*map(astuple, costs), strict=True))
        return Cost(parameters, per_image, per_call // len(costs))
    weights = next(model.parameters())
    channels: int = getattr(model, "in_chans", 3)
    return _count(model, torch.zeros(1, channels, size, size, device=weights.device, dtype=weights.dtype))


def head_cost(model: Backbone) -> Cost:
    """Count the same from the backbone's features on."""
    return _count(model, next(model.parameters()).new_zeros(1, model.num_features))


def _count(model: nn.Module, image: Tensor) -> Cost:
    label, total = torch.zeros(1, dtype=torch.long, device=image.device), image.new_ones(1)
    training = model.training
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as once:
        features = model.encode(image) if isinstance(model, ScoreFunction) else model(image)
    with torch.no_grad(), FlopCounterMode(display=False) as each:
        if isinstance(model, ScoreFunction):
            model.score(features, label, total)
    model.train(training)
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(parameters, once.get_total_flops() // 2, each.get_total_flops() // 2)

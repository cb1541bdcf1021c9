"""Networks on any timm backbone: a score network that encodes the image once, and its baseline."""

from typing import Any, Literal, TypeAlias

import timm
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn
from torch.nn import functional as F

from didicm.diffusion import Features
from didicm.diffusion.solver import NO_LABEL
from didicm.errors import reason
from didicm.models.score import WIDTH, Condition, NoiseEmbedding, Parameterization, ScoreModel
from didicm.values import coerce

HIDDEN = 128
START = 0.002  # deviation of the weights on standardised features: nearly no answer, as logistic regression starts
HeadLayout: TypeAlias = Literal["residual", "linear"]
USUAL_FILE = "model.safetensors"  # of timm's networks on the hub


class Backbone(nn.Module):
    """A timm model without its classifier, then a linear layer; `frozen` trains only what comes after it.

    `standardize` gives that layer features of mean 0 and deviation 1 where the backbone is frozen: pretrained ones
    differ in scale, and from few images a layer learns little more than the largest, and keeps its own start.

    The backbone can also be a module of your own that makes features (B, num_features) of images.
    """

    backbone: Any  # timm's models share methods, but no class that has them
    backbone_name: str | None  # in timm; None for a module of the user's own
    fc: nn.Module
    recipe: dict[str, Any]  # how `create_model` made it
    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        num_classes: int = 1000,
        in_chans: int = 3,
        pretrained: bool = False,
        frozen: bool = False,
        drop_path_rate: float = 0.0,
        standardize: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(backbone, nn.Module):
            self.backbone, self.backbone_name = backbone, None
        else:
            own = {"drop_path_rate": drop_path_rate} if drop_path_rate else {}  # some know no such
            self.backbone = _from_timm(backbone, pretrained, in_chans=in_chans, num_classes=0, **own)
            self.backbone_name = backbone
        self.backbone.requires_grad_(not frozen)
        self.num_classes, self.in_chans, self.frozen = num_classes, in_chans, frozen
        self.num_features = self.head_hidden_size = _width(self.backbone)
        self.standardized = frozen and standardize
        self.norm = nn.BatchNorm1d(self.num_features, affine=False) if self.standardized else nn.Identity()
        self.fc = self._linear(num_classes)
        if self.standardized:
            self.zero_started = ("fc.weight",)  # for optimisers that scale a step with the weights' norm

    def train(self, mode: bool = True) -> "Backbone":
        """Change the mode; a frozen backbone keeps evaluating, so that its batch statistics do not move."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    @property
    def normalization(self) -> dict[str, Any]:
        """Mean and deviation of the images that timm's weights were trained with, if it says so."""
        config = getattr(self.backbone, "pretrained_cfg", None) or {}
        known = {name: tuple(config[name]) for name in ("mean", "std") if config.get(name)}
        return {name: values for name, values in known.items() if len(values) == self.in_chans}

    def forward_features(self, image: Tensor) -> Tensor:
        features: Tensor = getattr(self.backbone, "forward_features", self.backbone)(image)
        return features

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the backbone's features, and apply the linear layer: logits (B, K)."""
        if hasattr(self.backbone, "forward_head"):
            x = self.backbone.forward_head(x, pre_logits=True)
        return x if pre_logits else self.fc(self.norm(x))

    def embed(self, image: Tensor) -> Tensor:
        """Features (B, D) of images (B, C, H, W); features that were computed earlier pass."""
        return image if image.ndim == 2 else self.forward_head(self.forward_features(image), pre_logits=True)

    def get_classifier(self, name_only: bool = False) -> nn.Module | str:
        return "fc" if name_only else self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool and self.backbone_name is not None:
            self.backbone.reset_classifier(0, global_pool=global_pool)
            vars(self).pop("recipe", None)  # which has no word for it: the network is given again at loading
        self.num_classes = num_classes
        self.fc = self._linear(num_classes) if num_classes else nn.Identity()

    def _linear(self, num_classes: int) -> nn.Linear:
        layer = nn.Linear(self.num_features, num_classes)
        if self.standardized:
            nn.init.normal_(layer.weight, std=START)
            nn.init.zeros_(layer.bias)
        return layer

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)


class BackboneBaseline(Backbone):
    """The standard classifier: image (B, C, H, W) to logits (B, K)."""

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.norm(self.embed(image)))
        return logits


class BackboneScore(Backbone, ScoreModel):
    """A score network whose steps cost next to nothing.

    The image's features and logits are computed once; a step adds to the logits what a small residual head makes
    of the features, the noisy label and the noise. In layout `linear` it adds nothing where there is no label:
    such a network then is the standard classifier.
    """

    def __init__(
        self,
        backbone: str | nn.Module = "resnet18",
        num_classes: int = 1000,
        in_chans: int = 3,
        pretrained: bool = False,
        frozen: bool = False,
        standardize: bool = False,
        layout: HeadLayout = "residual",
        parameterization: Parameterization = "score",
        noise_embedding: NoiseEmbedding = "linear",
    ) -> None:
        super().__init__(backbone, num_classes, in_chans, pretrained, frozen, standardize=standardize)
        self.layout = coerce(layout, HeadLayout, "layout")
        self.predict(parameterization, num_classes)
        self.condition = Condition(num_classes, noise_embedding)
        self.project = nn.Linear(WIDTH, 2 * HIDDEN)
        self.reduce = nn.Sequential(nn.Linear(self.num_features, HIDDEN), nn.LayerNorm(HIDDEN))
        self.block = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.correct = nn.Linear(HIDDEN, num_classes)

    def encode(self, image: Tensor) -> Features:
        """Logits (B, K) and reduced features (B, HIDDEN)."""
        features = self.norm(self.embed(image))
        return self.fc(features), self.reduce(features)

    def outputs(self, features: Features, label: Tensor, total: Tensor) -> Tensor:
        logits, x = features
        scale, shift = self.project(F.silu(self.condition(label, total))).chunk(2, -1)
        x = torch.addcmul(x + shift, x, scale)
        x = x + self.block(x)
        correction: Tensor = self.correct(F.silu(x))
        if self.layout == "linear":
            correction = correction.masked_fill((label == NO_LABEL).unsqueeze(-1), 0.0)
        return logits + correction

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Start anew with another number of classes: the last layers and the label embedding."""
        self.predict(self.parameterization, num_classes)
        super().reset_classifier(num_classes, global_pool)
        self.condition.label = nn.Embedding(num_classes, WIDTH)
        self.correct = nn.Linear(HIDDEN, num_classes)


def _from_timm(name: str, pretrained: bool, **arguments: Any) -> nn.Module:
    # Only timm's own models: other names would fetch code or weights from elsewhere.
    if not isinstance(name, str) or ":" in name or "/" in name or not timm.is_model(name):
        raise ValueError(f"unknown backbone {name!r}: timm.list_models() has the names to choose from")
    if not pretrained:
        return timm.create_model(name, **arguments)
    _ask_hub(name)
    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # of the hub's client, of its HTTP library, and timm's own
        raise ValueError(
            f"pretrained weights of {name} are not available ({reason(error)}): give a file as model_args.weights"
        ) from error


def _ask_hub(name: str) -> None:
    """Tell at once where the hub would have to be asked and cannot be: downloads retry for a minute."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or not config.hf_hub_id:
        return
    place = config.hf_hub_id, config.hf_hub_filename or USUAL_FILE
    if isinstance(try_to_load_from_cache(*place), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(*place))
    except EntryNotFoundError:
        return  # it answers: timm knows the other names
    except Exception as error:  # its HTTP library's own kinds
        raise ValueError(
            f"the pretrained weights of {name} are not on this computer and the hub cannot be reached "
            f"({reason(error)}): connect to the network, or give a file as model_args.weights"
        ) from error


def _width(backbone: nn.Module) -> int:
    """The number of features that a backbone gives, which it has to say."""
    width = getattr(backbone, "head_hidden_size", None) or getattr(backbone, "num_features", None)
    if not isinstance(width, int):
        raise ValueError(f"{type(backbone).__name__} does not say how many features it has: set its num_features")
    return width

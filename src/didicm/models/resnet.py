"""ResNet trunks and the standard classifier on them, the matched baseline of DiDiRN.

The trunk's blocks return their two branches unmerged: ResNet adds them, DiDiRN adds its conditioning as well.
Both therefore have exactly the same convolutions.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from timm.layers.classifier import create_classifier
from timm.layers.drop import drop_path
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from didicm.values import coerce

StemKind: TypeAlias = Literal["resnet", "small", "tiny"]


class Architecture(NamedTuple):
    """Blocks of each stage, and their kind."""

    depths: tuple[int, ...]
    bottleneck: bool = False


ARCHITECTURES = {
    "8": Architecture((1, 1, 1)),  # for images of a few pixels: only two halvings
    "10": Architecture((1, 1, 1, 1)),
    "18": Architecture((2, 2, 2, 2)),
    "34": Architecture((3, 4, 6, 3)),
    "50": Architecture((3, 4, 6, 3), bottleneck=True),
    "101": Architecture((3, 4, 23, 3), bottleneck=True),
    "152": Architecture((3, 8, 36, 3), bottleneck=True),
}


class Stem(nn.Sequential):
    """First convolution: `resnet` quarters the image, `small` halves it (the released code), `tiny` keeps it."""

    def __init__(self, kind: StemKind, in_chans: int, channels: int) -> None:
        super().__init__()
        coerce(kind, StemKind, "stem")
        size, stride = (7, 2) if kind == "resnet" else (3, 1)
        self.conv = nn.Conv2d(in_chans, channels, size, stride, padding=size // 2, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)
        if kind != "tiny":
            self.pool = nn.MaxPool2d(3, 2, padding=1)


class Block(nn.Module):
    """Residual branch and skip of a basic or bottleneck block, returned as a pair."""

    conv1: nn.Conv2d
    conv2: nn.Conv2d
    conv3: nn.Conv2d  # of a bottleneck
    bn1: nn.BatchNorm2d
    bn2: nn.BatchNorm2d
    bn3: nn.BatchNorm2d

    def __init__(self, in_channels: int, width: int, out_channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            layers = [(in_channels, width, 1, 1), (width, width, 3, stride), (width, out_channels, 1, 1)]
        else:
            layers = [(in_channels, width, 3, stride), (width, out_channels, 3, 1)]
        for i, (inputs, outputs, size, step) in enumerate(layers, start=1):
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, size, step, padding=size // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(outputs))
        self.bottleneck = bottleneck
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.skip = nn.Sequential()
            self.skip.conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.skip.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        if self.bottleneck:
            residual = self.bn3(self.conv3(F.relu(residual, inplace=True)))
        return residual, self.skip(x)


class Trunk(nn.Module):
    """Stem, stages of blocks, pooling and the last linear layer, with timm's interface."""

    recipe: dict[str, Any]  # how `create_model` made it

    def __init__(
        self,
        architecture: Architecture,
        num_classes: int = 1000,
        in_chans: int = 3,
        stem: StemKind = "resnet",
        width: float = 1.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__()
        if width <= 0:
            raise ValueError(f"width must be positive, got {width}")
        self.num_classes, self.in_chans, self.grad_checkpointing = num_classes, in_chans, False
        self.stage_names = [f"layer{i}" for i in range(1, len(architecture.depths) + 1)]
        channels = max(8, round(64 * width / 8) * 8)
        self.stem = Stem(stem, in_chans, channels)
        self.block_channels: list[int] = []
        inputs = channels
        for i, (name, depth) in enumerate(zip(self.stage_names, architecture.depths, strict=True)):
            stage_width = channels * 2**i
            outputs = stage_width * (4 if architecture.bottleneck else 1)
            blocks = nn.ModuleList()
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(Block(inputs, stage_width, outputs, stride, architecture.bottleneck))
                inputs = outputs
            self.add_module(name, blocks)
            self.block_channels += [outputs] * depth
        self.num_features = self.head_hidden_size = inputs
        self.global_pool, self.fc = create_classifier(inputs, num_classes, pool_type=global_pool)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.init_residuals(0)  # each block starts as its skip, the usual start of a ResNet

    def init_residuals(self, scale: float) -> None:
        """Set the weight of the last batch norm of every block."""
        for block in self.blocks():
            nn.init.constant_((block.bn3 if block.bottleneck else block.bn2).weight, scale)

    def blocks(self) -> list[Block]:
        """All blocks in the order in which they run."""
        return [block for name in self.stage_names for block in getattr(self, name)]

    def run(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """Run a part of the network; with gradient checkpointing its activations are computed again, not kept."""
        again = self.grad_checkpointing and self.training and torch.is_grad_enabled()
        return checkpoint(part, *inputs, use_reentrant=False) if again else part(*inputs)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool (B, C, H, W) and apply the last linear layer."""
        x = self.global_pool(x)
        return x if pre_logits else self.fc(x)

    def get_classifier(self, name_only: bool = False) -> nn.Module | str:
        return "fc" if name_only else self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last linear layer for another number of classes, and the pooling if another is given."""
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        self.num_classes = num_classes
        self.global_pool, self.fc = create_classifier(self.num_features, num_classes, pool_type=pool)
        if hasattr(self, "recipe"):
            self.recipe["arguments"]["global_pool"] = pool

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training."""
        self.grad_checkpointing = enable


class ResNet(Trunk):
    """The standard classifier on the same trunk: image (B, C, H, W) to logits (B, K).

    `drop_path_rate` is stochastic depth as timm has it: the chance to skip the residual branch of the last block
    in training, which grows evenly from 0 at the first.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_classes: int = 1000,
        in_chans: int = 3,
        stem: StemKind = "resnet",
        width: float = 1.0,
        global_pool: str = "avg",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(architecture, num_classes, in_chans, stem, width, global_pool)
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"drop_path_rate must lie in [0, 1), got {drop_path_rate}")
        last = sum(architecture.depths) - 1
        self.drop_path_rates = [drop_path_rate * i / last for i in range(last + 1)]

    def forward_features(self, image: Tensor) -> Tensor:
        """Last feature map (B, C, H, W)."""
        x: Tensor = self.run(self.stem, image)
        for block, rate in zip(self.blocks(), self.drop_path_rates, strict=True):
            x = self.run(self._advance, x, block, rate)
        return x

    def forward(self, image: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(image))

    def _advance(self, x: Tensor, block: Block, rate: float) -> Tensor:
        residual, skip = block(x)
        return F.relu(drop_path(residual, rate, self.training) + skip, inplace=True)

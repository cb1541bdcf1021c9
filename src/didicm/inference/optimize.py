"""Make a trained classifier faster without changing what it says: folded batch norms, Winograd convolutions."""

import copy
import warnings
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from didicm.classifier import Classifier, Ensemble
from didicm.diffusion import ScoreFunction
from didicm.models import ScoreModel

TOLERANCE = 1e-4
TILE, OUT = 6, 4
# A filter of three taps at the points 0, 1, -1, 2, -2 and infinity, in units of 1 / 24.
FILTER = [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]

# Measured on one core of an AMD EPYC at 64 and 224 px; beyond these a direct convolution is as fast or faster.
LEAST_TILES = 16  # with fewer, reading the larger weights takes too long
MOST_WASTE = 1.4  # outputs computed for each one needed: tiles may stick out of the image
LEAST_CHANNELS = 128  # with fewer, the way to the points and back takes too long ...
LEAST_CHANNELS_COMPILED = 64  # ... unless it is compiled into single loops


def optimize_for_inference(classifier: Classifier, *, compile: bool = False) -> Classifier:
    """Return a copy for inference only: batch norms folded into convolutions, channels last, optionally compiled.

    Folding relies on the network listing a batch norm right after its convolution, as ResNets do. A network for
    which that changes the outputs is left unfolded, with a warning.

    On the CPU, wide 3 x 3 convolutions also get Winograd's algorithm, for which their weights take five times the
    memory. It gains most when compiled; the first call then takes up to a minute.
    """
    if isinstance(classifier, Ensemble):
        return Ensemble([optimize_for_inference(member, compile=compile) for member in classifier.members]).eval()
    original, fast = classifier.eval(), copy.deepcopy(classifier).eval().requires_grad_(False)
    _fold_batch_norms(fast.model)
    if not _agree(original.model, fast.model):
        warnings.warn("folding batch norms changes what this network says: left them unfolded", stacklevel=2)
        fast.model = copy.deepcopy(original.model).requires_grad_(False)
    fast.inference_only = True
    fast = fast.to(memory_format=torch.channels_last)
    for name, module in list(fast.model.named_modules()):
        if WinogradConv2d.suits(module):
            fast.model.set_submodule(name, WinogradConv2d(module))
    if compile:
        # A standard classifier asks a network of timm's kind in two halves, for its features.
        calls = ["forward_features", "forward_head"] if hasattr(fast.model, "get_classifier") else ["forward"]
        if isinstance(fast.model, ScoreFunction):
            calls = ["encode", "outputs" if isinstance(fast.model, ScoreModel) else "score"]
        for call in calls:
            setattr(fast.model, call, torch.compile(getattr(fast.model, call)))
    return fast


def _fold_batch_norms(model: nn.Module) -> None:
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    for (conv_name, conv), (norm_name, norm) in pairwise(leaves):
        # The exact type: subclasses of BatchNorm2d may do more, such as timm's with an activation.
        if (
            isinstance(conv, nn.Conv2d)
            and type(norm) is nn.BatchNorm2d
            and norm.num_features == conv.out_channels  # else it follows something else
            and norm.track_running_stats
        ):
            model.set_submodule(conv_name, fuse_conv_bn_eval(conv, norm))
            model.set_submodule(norm_name, nn.Identity())


@torch.no_grad()
def _agree(one: nn.Module, other: nn.Module) -> bool:
    weights = next(one.parameters())
    generator = torch.Generator().manual_seed(0)
    size = getattr(one, "default_cfg", {"input_size": [224]})["input_size"][-1]
    image = torch.randn(2, getattr(one, "in_chans", 3), size, size, generator=generator).to(weights)

    def answer(model: nn.Module) -> Tensor:
        if isinstance(model, ScoreFunction):
            label = torch.tensor([0, 1], device=image.device)
            return model.score(model.encode(image), label, image.new_tensor([0.1, 2.0]))
        logits: Tensor = model(image)
        return logits

    expected, got = answer(one), answer(other)
    return torch.allclose(got, expected, atol=TOLERANCE * expected.abs().max().clamp_min(1).item())


class WinogradConv2d(nn.Module):
    """3 x 3 convolutions with a quarter of the multiplications: Winograd's F(4 x 4, 3 x 3), for the CPU.

    Stands in for a convolution that `suits`, and leaves to it the inputs for which it is the faster one. The
    padded image is cut into tiles of 6 x 6 that overlap by two. Seen as polynomials and evaluated at six points
    per side, a tile and a filter convolve by multiplying point by point: 36 matrix products for all tiles
    together. Going back from the points, each tile gives 4 x 4 outputs. In float32 they differ from those of a
    direct convolution by about 1e-5 of the largest.
    """

    matrices: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.register_buffer("matrices", filters_to_points(conv.weight), persistent=False)

    @staticmethod
    def suits(module: nn.Module) -> bool:
        """Whether this can stand in for a module, and may pay."""
        return (
            type(module) is nn.Conv2d
            and module.kernel_size == (3, 3)
            and module.stride == module.padding == module.dilation == (1, 1)
            and module.groups == 1
            and module.padding_mode == "zeros"
            and min(module.in_channels, module.out_channels) >= LEAST_CHANNELS_COMPILED
            and _cpu_float32(module.weight)
        )

    def pays(self, x: Tensor) -> bool:
        """Whether this is accurate and faster than the direct convolution for an input (B, C, H, W)."""
        if not _cpu_float32(x) or torch.is_autocast_enabled("cpu"):
            return False
        batch, _, height, width = x.shape
        tiles = batch * _tiles(height) * _tiles(width)
        least = LEAST_CHANNELS_COMPILED if torch.compiler.is_compiling() else LEAST_CHANNELS
        wide = min(self.conv.in_channels, self.conv.out_channels) >= least
        return wide and tiles >= LEAST_TILES and tiles * OUT**2 <= MOST_WASTE * batch * height * width

    def forward(self, x: Tensor) -> Tensor:
        return self.winograd(x) if self.pays(x) else self.conv(x)

    def winograd(self, x: Tensor) -> Tensor:
        """Convolve (B, C, H, W) by way of the points."""
        batch, channels, height, width = x.shape
        rows, columns = _tiles(height), _tiles(width)
        x = F.pad(x, (1, OUT * columns - width + 1, 1, OUT * rows - height + 1)).permute(0, 2, 3, 1)
        x = torch.stack(to_points([x[:, i::OUT][:, :rows] for i in range(TILE)]))
        x = torch.stack(to_points([x[:, :, :, i::OUT][:, :, :, :columns] for i in range(TILE)]), dim=1)
        x = torch.bmm(x.reshape(TILE**2, -1, channels), self.matrices)
        x = torch.stack(from_points(x.reshape(TILE, TILE, batch, rows, columns, -1)), dim=3)
        x = torch.stack(from_points(x), dim=4)  # (B, rows, 4, columns, 4, C)
        if self.conv.bias is not None:
            x = x + self.conv.bias
        x = x.reshape(batch, OUT * rows, OUT * columns, -1)[:, :height, :width]
        return x.permute(0, 3, 1, 2)


def filters_to_points(weight: Tensor) -> Tensor:
    """Filters (O, I, 3, 3) to a matrix for each of the points, (36, I, O)."""
    transform = weight.new_tensor(FILTER, dtype=torch.float64) / 24
    points = torch.einsum("ri,cj,oxij->rcxo", transform, transform, weight.detach().double())
    return points.flatten(0, 1).to(weight.dtype).contiguous()


def to_points(x: list[Tensor]) -> list[Tensor]:
    """Six neighbours to their values at the six points."""
    even1, odd1 = torch.sub(x[4], x[2], alpha=4), torch.sub(x[3], x[1], alpha=4)
    even2, odd2 = x[4] - x[2], x[3] - x[1]
    return [
        torch.add(even2, x[0] - x[2], alpha=4),
        even1 + odd1,
        even1 - odd1,
        torch.add(even2, odd2, alpha=2),
        torch.sub(even2, odd2, alpha=2),
        torch.sub(x[5] - x[3], odd2, alpha=4),
    ]


def from_points(x: Tensor) -> list[Tensor]:
    """Values at the six points, (6, ...), to four neighbouring outputs."""
    even1, odd1 = x[1] + x[2], x[1] - x[2]
    even2, odd2 = x[3] + x[4], x[3] - x[4]
    return [
        x[0] + even1 + even2,
        torch.add(odd1, odd2, alpha=2),
        torch.add(even1, even2, alpha=4),
        torch.add(odd1, odd2, alpha=8) + x[5],
    ]


def _tiles(size: int) -> int:
    return -(-size // OUT)


def _cpu_float32(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32

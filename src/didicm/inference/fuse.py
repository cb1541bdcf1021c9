"""Make a trained classifier faster without changing what it says."""

import copy
import warnings
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from didicm.classifier import Classifier, Ensemble
from didicm.diffusion import ScoreFunction
from didicm.inference.winograd import WinogradConv2d
from didicm.models import ScoreModel

TOLERANCE = 1e-4


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
        if isinstance(conv, nn.Conv2d) and type(norm) is nn.BatchNorm2d:
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

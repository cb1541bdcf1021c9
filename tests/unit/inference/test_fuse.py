from functools import partial

import pytest
import torch
from torch import nn

from didicm import (
    DiffusionClassifier,
    Ensemble,
    Sampler,
    StandardClassifier,
    UserError,
    create_model,
    optimize_for_inference,
    save,
)
from didicm.inference.optimize import WinogradConv2d


def randomise_statistics(model):
    """Batch norms as after training: folding them then changes something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)


SMALL = {"num_classes": 5, "width": 0.25}
FEW = Sampler(steps=2)
CLASSIFIERS = {
    "paper": lambda: DiffusionClassifier(create_model("didirn18", **SMALL), sampler=FEW),
    "official": lambda: DiffusionClassifier(create_model("didirn18", layout="official", **SMALL), sampler=FEW),
    "resnet": lambda: DiffusionClassifier(create_model("didirn18", layout="resnet", **SMALL), sampler=FEW),
    "bottleneck": lambda: DiffusionClassifier(create_model("didirn50", **SMALL), sampler=FEW),
    "standard": lambda: StandardClassifier(create_model("didirn18_baseline", **SMALL)),
    "backbone": lambda: DiffusionClassifier(
        create_model("backbone_score", backbone="resnet10t", num_classes=5), sampler=FEW
    ),
    "ensemble": lambda: Ensemble([CLASSIFIERS["paper"](), CLASSIFIERS["standard"]()]),
    "mobilenet": lambda: StandardClassifier(
        create_model("backbone_baseline", backbone="mobilenetv3_small_050", num_classes=5)
    ),
}


def norms(model):
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_faster_says_the_same(kind):
    torch.manual_seed(0)
    classifier, image = CLASSIFIERS[kind]().eval(), torch.randn(3, 3, 40, 40)
    randomise_statistics(classifier.model)
    before = {name: x.clone() for name, x in classifier.state_dict().items()}
    fast = optimize_for_inference(classifier)
    assert torch.allclose(fast(image), classifier(image), atol=1e-4)
    assert all(torch.equal(x, before[name]) for name, x in classifier.state_dict().items())
    if kind != "mobilenet":  # timm fuses its norms with activations there, which stay
        assert norms(fast.model) == 0


@pytest.fixture
def winograd_calls(monkeypatch):
    calls, winograd = [], WinogradConv2d.winograd
    monkeypatch.setattr(WinogradConv2d, "winograd", lambda *args: calls.append(args) or winograd(*args))
    return calls


def test_wide_convolutions_say_the_same(winograd_calls):
    torch.manual_seed(0)
    model = create_model("didirn18", layout="official", num_classes=5, width=0.5)
    classifier = DiffusionClassifier(model, sampler=Sampler(steps=1)).eval()
    image = torch.randn(4, 3, 64, 64)
    randomise_statistics(model)
    fast = optimize_for_inference(classifier)
    assert torch.allclose(fast(image), classifier(image), atol=1e-4)
    assert len(winograd_calls) == 3  # the convolutions of stride 1 in the third stage
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(fast(image), classifier(image), atol=0.05)
    assert len(winograd_calls) == 3


@pytest.mark.slow
def test_compiled_says_the_same(winograd_calls, monkeypatch):
    # What is captured is ours; the C++ that would be made of it is PyTorch's, and takes minutes.
    torch._dynamo.reset()  # after other tests' batches it would take their number for a variable
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = create_model("didirn8", layout="official", **SMALL)
    classifier = DiffusionClassifier(model, sampler=Sampler(steps=1)).eval()
    randomise_statistics(model)
    fast, image = optimize_for_inference(classifier, compile=True), torch.randn(16, 3, 32, 32)
    assert torch.allclose(fast(image), classifier(image), atol=1e-4)
    assert winograd_calls  # in the third stage


def test_a_network_that_cannot_be_folded_stays_as_it_is():
    class Unusual(nn.Module):
        num_classes, in_chans = 5, 3

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)
            self.bn = nn.BatchNorm2d(5)  # listed after the convolution, but applied to something else

        def forward(self, image):
            return self.bn(self.conv(image).exp()).mean((2, 3))

    classifier, image = StandardClassifier(Unusual()).eval(), torch.randn(2, 3, 8, 8)
    randomise_statistics(classifier.model)
    with pytest.warns(UserWarning, match="left them unfolded"):
        fast = optimize_for_inference(classifier)
    assert torch.allclose(fast(image), classifier(image), atol=1e-5)


def test_norms_that_follow_no_convolution_stay_as_they_are():
    class Dense(nn.Module):
        num_classes, in_chans = 5, 3

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3, padding=1)
            self.bn = nn.BatchNorm2d(8)  # of the features so far, as in a DenseNet
            self.last = nn.Conv2d(8, 5, 3)
            self.own = nn.BatchNorm2d(5, track_running_stats=False)

        def forward(self, image):
            x = torch.cat([image, self.conv(image)], 1)
            return self.own(self.last(self.bn(x))).mean((2, 3)) + x[:, :5].mean((2, 3))

    classifier, image = StandardClassifier(Dense()).eval(), torch.randn(2, 3, 8, 8)
    fast = optimize_for_inference(classifier)
    assert norms(fast.model) == 2
    assert torch.allclose(fast(image), classifier(image), atol=1e-5)


def test_an_optimised_copy_is_not_for_saving(tmp_path):
    fast = optimize_for_inference(CLASSIFIERS["standard"]())
    for classifier in (fast, Ensemble([fast])):
        with pytest.raises(UserError, match="optimised copies"):
            save(classifier, tmp_path)
    assert list(tmp_path.iterdir()) == []

import math
import re

import pytest
import timm
import torch
from torch import nn

import didicm
from didicm.diffusion.solver import NO_LABEL, index_features
from didicm.models import Cost, ScoreModel, baseline_name, cost, create_model, list_models

SCORES = [name for name in list_models() if not name.endswith("_baseline")]
SMALL = {"num_classes": 7, "width": 0.125}
VARIANTS = [
    ("didirn8", {**SMALL, "stem": "tiny"}),
    ("didirn10", {**SMALL, "stem": "small", "parameterization": "posterior"}),
    ("didirn18", {**SMALL, "layout": "official", "noise_embedding": "log"}),
    ("didirn18", {**SMALL, "layout": "official", "stem": "resnet"}),
    ("didirn18", {**SMALL, "layout": "resnet", "parameterization": "posterior"}),
    ("didirn34", SMALL),
    ("didirn50", {**SMALL, "layout": "official"}),
    ("didirn50", {**SMALL, "stem": "small"}),
    ("backbone_score", {"num_classes": 7, "backbone": "resnet10t"}),
    ("backbone_score", {"num_classes": 7, "backbone": "test_resnet", "layout": "linear"}),
    (
        "backbone_score",
        {"num_classes": 7, "backbone": "test_vit", "parameterization": "posterior", "noise_embedding": "log"},
    ),
]
variants = pytest.mark.parametrize(
    ("name", "arguments"), VARIANTS, ids=lambda x: str(x) if isinstance(x, str) else ""
)


def inputs(batch=3, channels=3, size=32):
    torch.manual_seed(0)
    return torch.randn(batch, channels, size, size), torch.arange(batch) % 7, torch.linspace(0.1, 5, batch)


def awake(model):
    """Give weight to what begins with none: the last batch norm of a branch, and the condition of a block."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    if hasattr(model, "project"):
        nn.init.normal_(model.project.weight, std=0.1)
    return model


def size_of(arguments):
    return 160 if arguments.get("backbone") == "test_vit" else 32


@pytest.mark.parametrize("layout", ["paper", "official"])
@pytest.mark.parametrize(
    ("size", "millions"), [("18", 12.1), ("34", 22.5), ("50", 27.7), ("101", 49.0), ("152", 66.6)]
)
def test_parameter_counts_are_the_papers(layout, size, millions):
    """Table all_resnet; for DiDiRN-34 the paper prints 22.6 where its own code has 22.47."""
    with torch.device("meta"):
        model = create_model(f"didirn{size}", layout=layout)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("name", "arguments", "own"),
    [
        ("didirn10", {**SMALL, "layout": "resnet"}, set()),
        ("didirn50", {**SMALL, "layout": "resnet"}, set()),
        (
            "backbone_score",
            {"num_classes": 7, "backbone": "test_resnet", "layout": "linear"},
            {"reduce", "block", "correct"},
        ),
    ],
)
def test_without_a_label_some_layouts_are_the_standard_classifier(name, arguments, own):
    model = awake(create_model(name, **arguments)).eval()
    del arguments["layout"]
    baseline = create_model(f"{name.removesuffix('_score')}_baseline", **arguments).eval()
    missing, unexpected = baseline.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert {name.split(".")[0] for name in unexpected} == {"condition", "project", *own}
    image, label, total = inputs()
    assert torch.equal(model(image, torch.full_like(label, NO_LABEL), total), baseline(image))
    assert not torch.allclose(model(image, label, total), baseline(image), atol=1e-3)


@pytest.mark.parametrize("name", ["backbone_score", "backbone_baseline"])
def test_features_of_a_frozen_backbone_are_standardised(name):
    """What a network answers does not depend on the scale of its pretrained features, once it has seen a few."""
    arguments = {"backbone": "test_resnet", "num_classes": 7, "standardize": True}
    torch.manual_seed(0)
    model = awake(create_model(name, frozen=True, **arguments))
    features = torch.randn(500, model.num_features) * torch.logspace(-1, 2, model.num_features) + 3
    logits = (lambda x: model.encode(x)[0]) if name == "backbone_score" else model
    answers = []
    for x in (features, 10 * features - 5):
        model.norm.reset_running_stats()
        for _ in range(100):  # running averages come as near as a hundred batches bring them
            logits(x)
        answers.append(model.eval()(x) if name == "backbone_baseline" else model.eval().encode(x)[0])
        model.train()
    torch.testing.assert_close(*answers, rtol=1e-3, atol=1e-3)
    assert model.norm(features).std(0).sub(1).abs().max() < 0.01
    trained = create_model(name, **arguments)  # a backbone that learns keeps its own scale
    assert "norm.running_mean" not in trained.state_dict()
    assert model.fc.weight.std() < 0.5 * trained.fc.weight.std()
    assert model.zero_started == ("fc.weight",)
    assert not hasattr(trained, "zero_started")


def convolutions(model):
    return [
        (m.in_channels, m.out_channels, m.kernel_size, m.stride)
        for m in model.modules()
        if isinstance(m, nn.Conv2d)
    ]


@pytest.mark.parametrize(
    ("name", "stem"), [*((name, "resnet") for name in SCORES), ("didirn50", "small"), ("didirn18", "tiny")]
)
def test_the_baseline_differs_in_the_head_only(name, stem):
    arguments = {} if name == "backbone_score" else {"stem": stem}
    with torch.device("meta"):
        score, baseline = create_model(name, **arguments), create_model(baseline_name(name), **arguments)
    assert convolutions(score) == convolutions(baseline)
    # Of small images: there the head has the largest share. Without memory, PyTorch counts far more slowly.
    one, other = (cost(model.to_empty(device="cpu"), 64).total(1) for model in (score, baseline))
    assert math.isclose(one, other, rel_tol=0.03)


@pytest.mark.parametrize("size", ["18", "50"])
def test_the_baseline_is_timms_resnet_stochastic_depth_included(size):
    theirs = timm.create_model(f"resnet{size}", num_classes=7, drop_path_rate=0.4)
    ours = create_model(f"didirn{size}_baseline", num_classes=7, drop_path_rate=0.4)
    state = theirs.state_dict().values()
    ours.load_state_dict(dict(zip(ours.state_dict(), state, strict=True)))
    image = inputs(batch=4)[0]
    awake(ours), awake(theirs)
    for training in (True, False):
        logits = []
        for model in (ours.train(training), theirs.train(training)):
            torch.manual_seed(0)
            logits.append(model(image))
        assert torch.allclose(*logits, atol=1e-5)


def test_the_official_stem_costs_nearly_four_times_the_resnet():
    with torch.device("meta"):
        official, baseline = create_model("didirn50", layout="official"), create_model("didirn50_baseline")
    assert 3.5 < cost(official, 224).total(1) / cost(baseline, 224).total(1) < 4


@variants
def test_forward_backward_and_every_parameter_learns(name, arguments):
    model = awake(create_model(name, **arguments))
    log_score = model(*inputs(size=size_of(arguments)))
    assert log_score.shape == (3, 7)
    assert log_score.dtype == torch.float32
    (log_score * torch.randn(7)).sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@variants
def test_encoding_once_is_the_whole_forward(name, arguments):
    model = awake(create_model(name, **arguments)).eval()
    image, label, total = inputs(size=size_of(arguments))
    features = model.encode(image)
    assert torch.allclose(model.score(features, label, total), model(image, label, total), atol=1e-6)
    rows = torch.tensor([2, 0, 2])
    repeated = model.score(index_features(features, rows), label, total)
    assert torch.allclose(repeated, model(image[rows], label, total), atol=1e-5)


@pytest.mark.parametrize("name", ["didirn8", "didirn34"])
def test_a_new_network_sees_the_image_before_it_sees_the_condition(name):
    """Else each block adds noise to the image, and a deep trunk loses it."""
    model = create_model(name, **SMALL).eval()
    image, label, total = inputs()
    outputs = model.outputs(model.encode(image), label, total)
    assert torch.equal(outputs, model.outputs(model.encode(image), label.flip(0), 2 * total))
    assert outputs.std(0).mean() > 1e-3


@variants
def test_the_condition_matters(name, arguments):
    model = awake(create_model(name, **arguments)).eval()
    image, label, total = inputs(size=size_of(arguments))
    outputs = model.outputs(model.encode(image), label, total)
    assert not torch.allclose(
        outputs, model.outputs(model.encode(image), label + 1 - 2 * (label > 3).long(), total)
    )
    assert not torch.allclose(outputs, model.outputs(model.encode(image), label, total + 1))


@variants
def test_batch_of_one_odd_sizes_and_one_channel(name, arguments):
    model = create_model(name, in_chans=1, **arguments).eval()
    sizes = [(160, 160)] if arguments.get("backbone") == "test_vit" else [(32, 32), (17, 23), (7, 7)]
    for height, width in sizes:
        log_score = model(torch.randn(1, 1, height, width), torch.tensor([6]), torch.tensor([0.5]))
        assert log_score.shape == (1, 7)
        assert log_score.isfinite().all()


@variants
def test_half_precision_network_float32_scores(name, arguments):
    model = create_model(name, **arguments).eval()
    with torch.autocast("cpu", torch.bfloat16):
        log_score = model(*inputs(size=size_of(arguments)))
    assert log_score.dtype == torch.float32
    assert log_score.isfinite().all()


@pytest.mark.parametrize("layout", ["paper", "official", "resnet"])
@pytest.mark.parametrize("name", ["didirn10", "didirn10_baseline", "didirn50"])
def test_gradient_checkpointing_gives_the_same_gradients_and_keeps_less(name, layout):
    """To the last digit; of a block little more is kept than its input. ResNet blocks keep less anyway."""
    own = {"layout": layout} if "baseline" not in name else {"drop_path_rate": 0.2}
    model = create_model(name, **SMALL, **own)
    given = inputs()[: 3 if isinstance(model, ScoreModel) else 1]
    gradients, kept = [], []
    for enable in (False, True):
        saved = {}

        def remember(x, saved=saved):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        torch.manual_seed(0)
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
            loss = model(*given).square().sum()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for place, size in saved.items() if place not in weights))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert kept[0] > (2 if layout == "resnet" else 4 if name == "didirn50" else 2.5) * kept[1]


@pytest.mark.parametrize("name", [name for name in list_models() if not re.search("101|152", name)])  # as didirn50
def test_every_model_honours_timms_contract(name):
    own = {"backbone": "test_resnet"} if name.startswith("backbone") else {"width": 0.125}
    model = timm.create_model(name, num_classes=10, in_chans=1, **own)
    assert model.num_classes == 10
    assert model.default_cfg["input_size"] == (3, 224, 224)
    assert isinstance(model.get_classifier(), nn.Linear)
    assert model.get_classifier(name_only=True) == model.default_cfg["classifier"]
    model.set_grad_checkpointing(True)
    image = torch.zeros(2, 1, 64, 64)
    given = [image]
    if isinstance(model, ScoreModel) and name.startswith("didirn"):
        given += [torch.zeros(2, dtype=torch.long), torch.ones(2)]
    features = model.forward_features(*given)
    assert features.shape[:2] == (2, model.num_features)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    model.reset_classifier(5, global_pool="max")
    given = [image, torch.zeros(2, dtype=torch.long), torch.ones(2)][: 3 if isinstance(model, ScoreModel) else 1]
    assert model(*given).shape == (2, 5)
    with pytest.raises(TypeError, match="speed"):
        timm.create_model(name, speed=9)


def test_no_weights_exist_to_download():
    with pytest.raises(RuntimeError, match="pretrained"):
        timm.create_model("didirn18", pretrained=True)


def test_a_frozen_backbone_does_not_move():
    model = create_model("backbone_score", backbone="resnet10t", num_classes=7, frozen=True).train()
    before = {name: x.clone() for name, x in model.backbone.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(*inputs()).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in model.backbone.state_dict().items())
    assert model.fc.weight.grad is not None


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("didirn19", {}, "unknown model 'didirn19': did you mean didirn1"),
        ("didirn18", {"depth": 3}, "no argument 'depth': choose one of"),
        ("didirn18", {"widht": 3}, "no argument 'widht': did you mean width?"),
        ("didirn18", {"architecture": 3}, "no argument 'architecture'"),
        ("didirn18", {"stem": "big"}, "stem must be one of resnet, small, tiny"),
        ("didirn18", {"layout": "new"}, "layout must be"),
        ("didirn18", {"width": 0}, "width must be positive"),
        ("didirn18", {"width": "wide"}, "width must be a number"),
        ("didirn18", {"in_chans": 1.5}, "in_chans must be a whole number"),
        ("didirn8", {"global_pool": "min"}, "pool"),
        ("backbone_score", {"frozen": "x"}, "frozen must be true or false"),
        ("backbone_baseline", {"backbone": "vgg11", "drop_path_rate": 0.1}, "drop_path_rate"),
        ("didirn18", {"drop_path_rate": 0.1}, "no argument 'drop_path_rate'"),
        ("didirn18_baseline", {"drop_path_rate": 1.0}, "drop_path_rate must lie in"),
        ("didirn18", {"num_classes": 1}, "at least 2"),
        ("backbone_score", {"backbone": "resnet18x"}, "unknown backbone 'resnet18x'"),
        ("backbone_score", {"layout": "paper"}, "layout must be one of residual, linear"),
        ("backbone_score", {"backbone": "hf-hub:someone/something"}, "unknown backbone"),
    ],
)
def test_bad_requests_get_one_sentence(name, arguments, says):
    with pytest.raises(didicm.UserError, match=says):
        create_model(name, **arguments)


def test_numbers_that_yaml_takes_for_text_are_numbers():
    model = create_model("didirn8_baseline", width="1.25e-1", drop_path_rate="1e-1")
    assert model.num_features == 32
    assert model.recipe["arguments"] == {"width": 0.125, "drop_path_rate": 0.1}


def test_small_trunks_are_small():
    model = create_model("didirn8", width=0.25, stem="tiny", in_chans=1, num_classes=10)
    price = cost(model, 28)
    assert price.parameters < 200_000
    assert price.total(1) < 30e6
    assert price.total(8) == price.per_image + 8 * price.per_call


def test_a_network_of_ones_own_has_a_cost():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3 * 8 * 8, 5)

        def encode(self, image):
            return image.flatten(1)

        def score(self, features, label, total):
            return self.fc(features)

    assert cost(Own(), 8) == Cost(parameters=965, per_image=0, per_call=960)

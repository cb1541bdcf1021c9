"""Networks that start from weights of elsewhere: files of timm's, runs and models of ours, the hub."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from didicm import DiffusionClassifier, UserError, create_model, load, load_weights, save
from didicm.models import BackboneScore

TINY = "resnet10t"


def network(seed=1, name="backbone_score", **arguments):
    torch.manual_seed(seed)
    return create_model(name, **{"backbone": TINY, "num_classes": 5, **arguments})


@pytest.fixture(scope="module")
def timms():
    torch.manual_seed(0)
    return timm.create_model(TINY, num_classes=1000).eval()


@pytest.fixture(scope="module")
def written(timms, tmp_path_factory):
    """The same weights, as people store them."""
    folder, state = tmp_path_factory.mktemp("weights"), timms.state_dict()
    save_file(state, folder / "plain.safetensors")
    save_file({name: x for name, x in state.items() if name[:3] != "fc."}, folder / "headless.safetensors")
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": x for name, x in state.items()}}, folder / "ddp.pth")
    torch.save({f"model.{name}": x for name, x in state.items()}, folder / "lightning.ckpt")
    return folder


@pytest.mark.parametrize("name", ["plain.safetensors", "headless.safetensors", "ddp.pth", "lightning.ckpt"])
def test_a_timm_backbone_starts_from_a_file(name, written, timms):
    model = network().eval()
    load_weights(model, written / name)
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = model.forward_head(model.forward_features(image), pre_logits=True)
        assert torch.equal(features, timms.forward_head(timms.forward_features(image), pre_logits=True))


def test_colour_weights_serve_grey_images_as_timm_does_it(written, timms):
    model = network(in_chans=1)
    load_weights(model, written / "plain.safetensors")
    expected = timms.state_dict()["conv1.0.weight"].sum(1, keepdim=True)
    assert torch.allclose(model.backbone.conv1[0].weight, expected)


def test_older_names_are_converted_by_timm(tmp_path):
    """The name of the patch embedding in the weights of DeiT's authors."""
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    state = {name: x.clone() for name, x in vit.state_dict().items()}
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)  # as some of them store it
    torch.save({"model": state}, tmp_path / "deit.pth")
    model = network(backbone="vit_tiny_patch16_224")
    load_weights(model, tmp_path / "deit.pth")
    assert torch.equal(model.backbone.patch_embed.proj.weight, vit.patch_embed.proj.weight)


class Code:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def _without_end(state):
    state["model"] = state
    return {"state_dict": state}


def _other(state):
    return {name: x for name, x in state.items() if name != "layer1.0.conv1.weight"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other, "does not fit resnet10t: it lacks layer1.0.conv1.weight;"),
        (lambda state: {**state, "neck.weight": torch.zeros(3)}, "has an unknown neck.weight;"),
        (lambda state: {**state, "layer1.0.conv1.weight": torch.zeros(3)}, "mismatch for layer1.0.conv1.weight"),
        (
            lambda state: {"bn1.weight": torch.full((64,), torch.nan)},
            "bn1.weight holds numbers that are not finite",
        ),
        (lambda state: {"epoch": 3}, "holds no state dict"),
        (lambda state: [1, 2], "holds no state dict"),
        (lambda state: _without_end({}), "holds no state dict"),
    ],
)
def test_other_weights_are_refused_in_a_sentence(change, says, timms, tmp_path):
    torch.save(change(timms.state_dict()), tmp_path / "odd.pth")
    with pytest.raises(UserError, match=r"odd\.pth") as told:
        load_weights(network(), tmp_path / "odd.pth")
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_nothing_in_a_file_is_ever_run(tmp_path):
    torch.save({"state_dict": Code(tmp_path / "ran")}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match=r"evil\.pth cannot be read") as told:
        load_weights(network(), tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "arguments", "new"),
    [
        ("backbone_score", {"backbone": TINY}, {"fc", "correct", "condition"}),
        ("backbone_baseline", {"backbone": TINY}, {"fc"}),
        ("didirn8", {"width": 0.125}, {"fc", "condition"}),
        ("didirn8_baseline", {"width": 0.125}, {"fc"}),
    ],
)
def test_a_network_starts_from_a_model_directory(name, arguments, new, tmp_path, assert_same):
    from didicm import StandardClassifier

    torch.manual_seed(0)
    stored = create_model(name, num_classes=4, **arguments)
    save((StandardClassifier if "baseline" in name else DiffusionClassifier)(stored), tmp_path / "best")
    same, other = create_model(name, num_classes=4, **arguments), create_model(name, num_classes=6, **arguments)
    before = {key: x.clone() for key, x in other.state_dict().items()}
    load_weights(same, tmp_path)
    load_weights(other, tmp_path)
    assert_same(same.state_dict(), stored.state_dict())
    for key, x in other.state_dict().items():
        from_file = x.shape == stored.state_dict()[key].shape and torch.equal(x, stored.state_dict()[key])
        assert from_file or (torch.equal(x, before[key]) and key.split(".")[0] in new), key


def test_another_network_does_not_start_from_it(tmp_path):
    save(DiffusionClassifier(create_model("didirn8", width=0.125, num_classes=4)), tmp_path)
    with pytest.raises(UserError, match=r"does not fit didirn18: it lacks .* and \d+ more"):
        load_weights(create_model("didirn18", width=0.125, num_classes=4), tmp_path)
    with pytest.raises(UserError, match=r"its stem.conv.weight has shape \(8, .* not \(16,"):
        load_weights(create_model("didirn8", width=0.25, num_classes=4), tmp_path)
    with pytest.raises(UserError, match="only backbones start from a file"):
        load_weights(create_model("didirn8", width=0.25, num_classes=4), tmp_path / "model.safetensors")


class Patches(nn.Module):
    """A backbone as a user might write it."""

    num_features = 12

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 4, stride=4)

    def forward(self, image):
        return self.conv(image).mean((2, 3))


@pytest.mark.parametrize("make", [lambda own: BackboneScore(own, 5), lambda own: network(backbone=own)])
def test_a_module_of_the_users_own_is_a_backbone(make, tmp_path, assert_same):
    classifier = DiffusionClassifier(make(Patches()))
    image = torch.randn(3, 3, 16, 16)
    classifier.loss(image, torch.eye(5)[:3]).backward()
    assert classifier.model.backbone.conv.weight.grad is not None
    save(classifier, tmp_path)
    again = load(tmp_path, model=BackboneScore(Patches(), 5)).classifier
    assert_same(again.model.state_dict(), classifier.model.state_dict())
    assert torch.equal(again(image), classifier.eval()(image))


def test_it_has_to_say_how_many_features_it_gives():
    with pytest.raises(UserError, match="Sequential does not say how many features it has: set its num_features"):
        network(backbone=nn.Sequential(nn.Flatten()))


def test_without_a_hub_one_sentence_says_what_to_do(monkeypatch, tmp_path, fails):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what the client itself goes by
    flags = [
        "--recipe=finetune",
        "--data=fashion-mini",
        f"--model-args.backbone={TINY}",
        f"--out={tmp_path / 'run'}",
    ]
    for extra in ([], ["--dry-run"]):
        told = fails("train", *flags, *extra)
        assert f"the pretrained weights of {TINY} are not on this computer and the hub cannot be reached" in told
        assert "give a file as model_args.weights" in told
    assert not (tmp_path / "run" / "config.yaml").exists()

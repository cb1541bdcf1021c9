import argparse

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from didicm import UserError, load
from didicm.cli import import_official
from didicm.official import read_official


class ReleasedBlock(nn.Module):
    """A block as the released code names and orders its parts."""

    def __init__(self, inputs, width, expansion, stride):
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for i, (a, b, k, s) in enumerate(sizes, 1):
            setattr(self, f"conv{i}", nn.Conv2d(a, b, k, s, k // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(b))
        self.skip_connection = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip_connection = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(128, outputs))
        self.out_layers = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU())
        self.count = len(sizes)

    def forward(self, x, emb):
        out = x
        for i in range(1, self.count + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            if i < self.count:
                out = F.relu(out)
        return F.relu(self.out_layers(out + self.emb_layers(emb)[..., None, None]) + self.skip_connection(x))


class ReleasedNet(nn.Module):
    """The released network, rebuilt from its description: the oracle of the conversion."""

    def __init__(self, depths, expansion, num_classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        self.ff_emb = nn.Module()
        self.ff_emb.mlp = nn.Sequential(nn.Linear(256, 128), nn.SiLU(), nn.Linear(128, 128))
        self.label_embedder = nn.Embedding(num_classes, 128)
        inputs = 64
        for stage, depth in enumerate(depths):
            blocks = nn.ModuleList()
            for i in range(depth):
                blocks.append(ReleasedBlock(inputs, 64 * 2**stage, expansion, 2 if stage and not i else 1))
                inputs = 64 * 2**stage * expansion
            setattr(self, f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x, label, total):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        wave = 10_000 ** (-torch.arange(128) / 128)
        angle = total[:, None] * wave
        emb = self.ff_emb.mlp(torch.cat([angle.cos(), angle.sin()], 1)) + self.label_embedder(label)
        for stage in range(1, 5):
            for block in getattr(self, f"layer{stage}"):
                x = block(x, emb)
        out = self.fc(x.mean((2, 3)))
        return out * (1 - F.one_hot(label, out.shape[1]))


@pytest.fixture
def released():
    torch.manual_seed(0)
    net = ReleasedNet((2, 2, 2, 2), 1, 11).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return net


def write(path, net, ema=None, prefix="", args=None):
    state = {prefix + name: x for name, x in net.state_dict().items()}
    file = {"epoch": 3, "arch": "didirn18", "state_dict": state, "optimizer": {}, "version": 2, "metric": 71.5}
    if ema is not None:
        file["state_dict_ema"] = {prefix + name: x for name, x in ema.state_dict().items()}
    file["args"] = args or argparse.Namespace(input_size=[3, 112, 112], crop_pct=None, lr=3.5e-3)
    torch.save(file, path)
    return path


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_the_converted_network_says_what_the_released_one_does(released, prefix, tmp_path):
    classifier, training = read_official(write(tmp_path / "model.pth.tar", released, prefix=prefix))
    image, label, total = torch.randn(2, 3, 32, 32), torch.tensor([3, 10]), torch.tensor([0.01, 6.0])
    assert torch.allclose(classifier.eval().model(image, label, total), released(image, label, total), atol=1e-5)
    assert training["lr"] == 3.5e-3


@pytest.mark.parametrize(("depths", "name"), [((3, 4, 6, 3), "didirn50")])
def test_bottlenecks_are_recognised(depths, name, tmp_path):
    net = ReleasedNet(depths, 4, 5).eval()
    classifier, _ = read_official(write(tmp_path / "model.pth.tar", net))
    assert classifier.model.recipe["name"] == name
    image, label, total = torch.randn(1, 3, 32, 32), torch.tensor([3]), torch.tensor([0.5])
    assert torch.allclose(classifier.eval().model(image, label, total), net(image, label, total), atol=1e-4)


def test_averaged_weights_are_taken_when_there_are_any(released, tmp_path):
    ema = ReleasedNet((2, 2, 2, 2), 1, 11)
    path = write(tmp_path / "model.pth.tar", released, ema=ema)
    for weights, source in (("best", ema), ("ema", ema), ("model", released)):
        classifier, _ = read_official(path, weights)
        assert torch.equal(classifier.model.fc.weight, source.fc.weight)


def test_the_command_writes_a_model_directory(released, tmp_path, capsys):
    path = write(tmp_path / "model.pth.tar", released)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"class {i}" for i in range(11)) + "\n")
    import_official.main([str(path), "--out", str(tmp_path / "model"), "--class-names", str(names)])
    assert "with 11 classes" in capsys.readouterr().out
    checkpoint = load(tmp_path / "model")
    assert checkpoint.class_names[10] == "class 10"
    assert checkpoint.transform["size"] == 112
    assert checkpoint.classifier(torch.randn(2, 3, 32, 32)).shape == (2, 11)
    with pytest.raises(UserError, match="already holds a model"):
        import_official.main([str(path), "--out", str(tmp_path / "model")])


class Evil:
    def __reduce__(self):
        return (print, ("unpickled!",))


def test_bad_files_get_one_sentence_and_write_nothing(released, tmp_path, capsys):
    good = write(tmp_path / "good.pth.tar", released)
    (tmp_path / "short.pth.tar").write_bytes(good.read_bytes()[:5000])
    (tmp_path / "text.pth.tar").write_text("hello")
    torch.save({"state_dict": released.state_dict(), "args": Evil()}, tmp_path / "evil.pth.tar")
    torch.save([1, 2], tmp_path / "list.pth.tar")
    torch.save({"state_dict": {"fc.weight": torch.zeros(3, 3)}}, tmp_path / "other.pth.tar")
    torch.save({"model": {}}, tmp_path / "empty.pth.tar")
    for name, says in {
        "nowhere": "does not exist",
        "short": "damaged",
        "text": "damaged",
        "evil": "more than weights and plain values",
        "list": "holds a list",
        "other": "does not hold a DiDiRN",
        "empty": "holds no 'state_dict'",
    }.items():
        with pytest.raises(UserError, match=says) as error:
            import_official.main([str(tmp_path / f"{name}.pth.tar"), "--out", str(tmp_path / "out")])
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()
    assert "unpickled!" not in capsys.readouterr().out

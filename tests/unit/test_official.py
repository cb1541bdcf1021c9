import zipfile

import pytest
import torch
from torch import nn

from didicm import Sampler, UserError, load
from didicm.cli import import_official
from didicm.official import read_official
from tests.oracle.released import ReleasedNet, write_released

BASIC = (1, 1, 1, 1)  # the fewest blocks that are known: a file of each test holds them at full width


def make_released(depths):
    torch.manual_seed(0)
    net = ReleasedNet(depths, 1, 11).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return net


@pytest.fixture(scope="module")
def released():
    """A network that no test changes."""
    return make_released(BASIC)


@pytest.fixture(scope="module")
def good(released, tmp_path_factory):
    """Its file."""
    return write_released(tmp_path_factory.mktemp("released") / "model.pth.tar", released)


@pytest.mark.parametrize(
    ("prefix", "depths"),
    [("", (2, 2, 2, 2)), ("module.", BASIC), ("_orig_mod.", BASIC), ("module._orig_mod.", BASIC)],
)
def test_the_converted_network_says_what_the_released_one_does(prefix, depths, tmp_path):
    released = make_released(depths)
    classifier, training = read_official(write_released(tmp_path / "model.pth.tar", released, prefix=prefix))
    image, label, total = torch.randn(2, 3, 32, 32), torch.tensor([3, 10]), torch.tensor([0.01, 6.0])
    assert torch.allclose(classifier.eval().model(image, label, total), released(image, label, total), atol=1e-5)
    assert training["lr"] == 3.5e-3


@pytest.mark.parametrize(("depths", "name"), [((3, 4, 6, 3), "didirn50")])
def test_bottlenecks_are_recognised(depths, name, tmp_path):
    net = ReleasedNet(depths, 4, 5).eval()
    classifier, _ = read_official(write_released(tmp_path / "model.pth.tar", net))
    assert classifier.model.recipe["name"] == name
    image, label, total = torch.randn(1, 3, 32, 32), torch.tensor([3]), torch.tensor([0.5])
    assert torch.allclose(classifier.eval().model(image, label, total), net(image, label, total), atol=1e-4)


def test_so_many_classes_that_the_released_schedule_fails_are_one_sentence(tmp_path):
    path = write_released(tmp_path / "model.pth.tar", ReleasedNet(BASIC, 1, 1999))
    with pytest.raises(UserError, match="1999 classes, for which the released schedule does not end near uniform"):
        read_official(path)


def test_averaged_weights_are_taken_when_there_are_any(released, tmp_path):
    ema = ReleasedNet(BASIC, 1, 11)
    path = write_released(tmp_path / "model.pth.tar", released, ema=ema)
    for weights, source in (("best", ema), ("ema", ema), ("model", released)):
        classifier, _ = read_official(path, weights)
        assert torch.equal(classifier.model.fc.weight, source.fc.weight)


def test_the_command_writes_a_model_directory(good, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"class {i}" for i in range(11)) + "\n")
    import_official.main([str(good), "--out", str(tmp_path / "model"), "--class-names", str(names)])
    assert "with 11 classes" in capsys.readouterr().out
    checkpoint = load(tmp_path / "model")
    assert checkpoint.class_names[10] == "class 10"
    assert checkpoint.transform["size"] == 112
    assert checkpoint.classifier(torch.randn(2, 3, 32, 32)).shape == (2, 11)
    with pytest.raises(UserError, match=r"already holds config\.json"):
        import_official.main([str(good), "--out", str(tmp_path / "model")])


def test_it_samples_as_released_and_as_its_training_was_told(released, good, tmp_path, capsys):
    import_official.main([str(good), "--out", str(tmp_path / "usual")])
    assert "--sampler.solver exact" in capsys.readouterr().out
    usual = load(tmp_path / "usual").classifier.sampler
    expected = {"method": "cp", "steps": 8, "solver": "official", "floor": False, "select": "argmin"}
    assert usual.identity().items() >= expected.items()
    assert usual.changed(method="cl").identity().items() >= {"chains": 10, "average": "one-hot"}.items()
    assert usual.changed(solver="exact").identity() == Sampler().identity()
    told = {"diffusion_sampler": "cl", "diffusion_steps": 4, "diffusion_sampler_kwargs": {"N": 32}}
    classifier, _ = read_official(write_released(tmp_path / "told.pth.tar", released, args=told))
    assert classifier.sampler == Sampler("cl", 4, "official", chains=32, average="one-hot")
    for wrong, says in (
        ({"diffusion_noise": "geometric"}, "trained with geometric noise"),
        ({"diffusion_sampler_kwargs": {"mode": "best"}}, "samples in a way the released code does not: 'best'"),
        ({"diffusion_steps": 0}, "steps must be at least 1"),
    ):
        with pytest.raises(UserError, match=says):
            read_official(write_released(tmp_path / "wrong.pth.tar", released, args=wrong))


class Evil:
    def __reduce__(self):
        return (print, ("unpickled!",))


def test_bad_files_get_one_sentence_and_write_nothing(released, good, tmp_path, capsys):
    (tmp_path / "short.pth.tar").write_bytes(good.read_bytes()[:5000])
    (tmp_path / "text.pth.tar").write_text("hello")
    torch.save({"state_dict": released.state_dict(), "args": Evil()}, tmp_path / "evil.pth.tar")
    torch.save([1, 2], tmp_path / "list.pth.tar")
    torch.save({"state_dict": {"fc.weight": torch.zeros(3, 3)}}, tmp_path / "other.pth.tar")
    torch.save({"model": {}}, tmp_path / "empty.pth.tar")
    torch.save({"state_dict": [1, 2]}, tmp_path / "strange.pth.tar")
    torch.save({"state_dict": {1: "a", "fc.weight": None}}, tmp_path / "odd.pth.tar")
    broken = {name: x * torch.nan if name == "fc.weight" else x for name, x in released.state_dict().items()}
    torch.save({"state_dict": broken}, tmp_path / "broken.pth.tar")
    (tmp_path / "flipped.pth.tar").write_bytes(
        bytes(b ^ 1 for b in good.read_bytes()[:3000]) + good.read_bytes()[3000:]
    )
    with zipfile.ZipFile(tmp_path / "bomb.pth.tar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**25))
    for name, arguments in {"small": {"img_size": "small"}, "grey": {"mean": [[1]]}, "none": {"std": 7}}.items():
        write_released(tmp_path / f"{name}.pth.tar", released, args=arguments)
    for name, says in {
        "nowhere": "does not exist",
        "short": "damaged",
        "text": "damaged",
        "evil": "more than weights and plain values",
        "list": "holds a list",
        "other": "does not hold a DiDiRN",
        "empty": "holds no 'state_dict'",
        "strange": "does not hold a DiDiRN",
        "odd": "does not hold a DiDiRN",
        "broken": "not finite",
        "flipped": "damaged",
        "bomb": "damaged",
        "small": "images that cannot be reproduced",
        "grey": "images that cannot be reproduced",
        "none": "images that cannot be reproduced",
    }.items():
        with pytest.raises(UserError, match=says) as error:
            import_official.main([str(tmp_path / f"{name}.pth.tar"), "--out", str(tmp_path / "out")])
        assert "\n" not in str(error.value)
        assert "weights_only" not in str(error.value)
        assert not (tmp_path / "out").exists()
    assert "unpickled!" not in capsys.readouterr().out

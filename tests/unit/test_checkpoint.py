import json
import os
import pickle
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from didicm import (
    DiffusionClassifier,
    Ensemble,
    Sampler,
    StandardClassifier,
    UniformProcess,
    UserError,
    create_model,
    load,
    save,
)
from didicm.diffusion import Exponential, Geometric
from didicm.models import ScoreModel, list_models
from didicm.settings import read_config
from didicm.training.state import resume

SMALL = {"num_classes": 4, "width": 0.125}
NAMES = ["T-shirt", "große Hose", "猫", "dress"]
TRANSFORM = {
    "size": 28,
    "channels": 1,
    "mean": [0.5],
    "std": [0.25],
    "crop_pct": 0.875,
    "interpolation": "bicubic",
}


def classifiers():
    """What makes each of them."""
    score = partial(create_model, "didirn8", **SMALL, stem="tiny", in_chans=1, parameterization="posterior")
    baseline = partial(create_model, "didirn10_baseline", **SMALL)
    return {
        "default": lambda: DiffusionClassifier(create_model("didirn8", **SMALL)),
        "everything set": lambda: DiffusionClassifier(
            score(),
            UniformProcess(4, Exponential(-2.0, 0.01, 4)),
            Sampler("cl", steps=3, chains=5, solver="euler", average="one-hot", seed=3),
            draws_per_image=4,
            label_proposal=0.5,
            mask=0.5,
        ),
        "standard": lambda: StandardClassifier(baseline(), "binary-cross-entropy"),
        "marginal": lambda: StandardClassifier(
            baseline(), "marginal", UniformProcess(4, Geometric(1e-4, 30.0)), 2
        ),
        "ensemble": lambda: Ensemble(
            [
                DiffusionClassifier(create_model("didirn8", **SMALL)),
                Ensemble([StandardClassifier(create_model("didirn8_baseline", **SMALL))]),
            ]
        ),
    }


@pytest.mark.parametrize("kind", classifiers())
def test_what_is_saved_is_what_is_loaded(kind, tmp_path):
    classifier = classifiers()[kind]().eval()
    prior = {"images": [3, 1, 4], "balance": "sampling"}
    save(classifier, tmp_path / "model", class_names=NAMES, transform=TRANSFORM, training_prior=prior)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    loaded = load(tmp_path / "model")
    assert loaded.class_names == NAMES
    assert loaded.transform == TRANSFORM
    assert loaded.training_prior == prior
    again = loaded.classifier
    assert not again.training
    for key in (
        "process",
        "sampler",
        "objective",
        "draws_per_image",
        "label_proposal",
        "mask",
    ):
        assert getattr(again, key, None) == getattr(classifier, key, None)
    image = torch.randn(3, classifier.in_chans, 16, 16)
    assert torch.equal(again(image), classifier(image))


def test_a_model_and_a_run_that_name_an_option_of_the_past_are_read(tmp_path):
    save(classifiers()["everything set"](), tmp_path / "model", class_names=NAMES, transform=TRANSFORM)
    stored = tmp_path / "model" / "config.json"
    config = json.loads(stored.read_text())
    config |= {"stratified_time": True, "time_sampling": "squared"}  # mattered in training alone
    stored.write_text(json.dumps(config))
    assert load(tmp_path / "model").classifier.mask == 0.5
    stored = tmp_path / "config.yaml"
    stored.write_text("epochs: 7\nstratified_time: false\ntime_sampling: squared\n")
    assert read_config(stored).epochs == 7
    with pytest.raises(UserError, match="has time_sampling squared, which is no longer an option"):
        resume(tmp_path, read_config(stored))
    stored.write_text("epochs: 7\nstratified_time: false\ntime_sampling: uniform\n")
    assert resume(tmp_path, read_config(stored)).epochs == 7


@pytest.mark.parametrize("name", list_models())
def test_every_model_survives_a_checkpoint(name, tmp_path):
    arguments = {
        "num_classes": 4,
        **({"width": 0.125} if name.startswith("didirn") else {"backbone": "resnet10t"}),
    }
    model = create_model(name, **arguments)
    sampled = isinstance(model, ScoreModel)
    classifier = DiffusionClassifier(model, sampler=Sampler(steps=1)) if sampled else StandardClassifier(model)
    image = torch.randn(2, 3, 32, 32)
    save(classifier.eval(), tmp_path)
    assert torch.equal(load(tmp_path).classifier(image), classifier(image))


def test_a_model_with_a_new_head_is_saved_as_it_is_now(tmp_path):
    model = create_model("didirn8", **SMALL)
    model.reset_classifier(6)
    save(DiffusionClassifier(model), tmp_path)
    assert load(tmp_path).classifier.num_classes == 6


def trunk(**arguments):
    return create_model("didirn8_baseline", **SMALL, stem="tiny", **arguments)


@pytest.mark.parametrize(("made", "new"), [("max", None), ("avg", "max")])
def test_a_new_head_pools_as_before_or_as_it_is_told_and_returns_so(made, new, tmp_path):
    model, image = trunk(global_pool=made), torch.randn(2, 3, 8, 8)
    model.reset_classifier(6, new)
    assert model.global_pool.pool_type == "max"
    classifier = StandardClassifier(model).eval()
    save(classifier, tmp_path)
    assert torch.equal(load(tmp_path).classifier(image), classifier(image))


def test_a_backbone_that_pools_otherwise_is_given_again_at_loading(tmp_path):
    def make():
        model = create_model("backbone_baseline", backbone="resnet10t", num_classes=4)
        model.reset_classifier(6, "max")
        return model

    classifier, image = StandardClassifier(make()).eval(), torch.randn(2, 3, 64, 64)
    save(classifier, tmp_path)
    with pytest.raises(UserError, match="give that to load as model="):
        load(tmp_path)
    assert torch.equal(load(tmp_path, model=make()).classifier(image), classifier(image))


def test_networks_that_share_weights_are_saved(tmp_path):
    member, image = StandardClassifier(trunk()), torch.randn(2, 3, 8, 8)
    twice = Ensemble([member, member]).eval()
    save(twice, tmp_path)
    assert torch.equal(load(tmp_path).classifier(image), twice(image))


class Own(torch.nn.Module):
    """A network of the user's."""

    def __init__(self, num_classes=4):
        super().__init__()
        self.num_classes = num_classes
        self.fc = torch.nn.Linear(3, num_classes)

    def forward(self, image):
        return self.fc(image.mean((2, 3)))


def test_a_network_of_ones_own_is_brought_to_the_loading(tmp_path):
    """No code comes from files: the directory holds its weights only."""
    classifier, image = StandardClassifier(Own(), "marginal"), torch.randn(2, 3, 8, 8)
    save(classifier, tmp_path / "model", class_names=NAMES)
    assert torch.equal(load(tmp_path / "model", model=Own()).classifier(image), classifier(image))
    with pytest.raises(UserError, match="saved with a network of your own: give that to load as model="):
        load(tmp_path / "model")
    with pytest.raises(UserError, match="4 class names for 7 classes"):
        load(tmp_path / "model", model=Own(7))
    with pytest.raises(UserError, match="save its members one by one"):
        save(Ensemble([classifier]), tmp_path / "own")
    for kind in ("default", "ensemble"):
        save(classifiers()[kind](), tmp_path / kind)
        with pytest.raises(UserError, match="its config names the network to build: leave out model"):
            load(tmp_path / kind, model=Own())


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    classifier, image = classifiers()["default"]().eval(), torch.randn(2, 3, 28, 28)
    expected = classifier(image)
    classifier.model = torch.compile(classifier.model)
    save(classifier, tmp_path / "compiled")
    assert torch.equal(load(tmp_path / "compiled").classifier(image), expected)
    changed = classifiers()["default"]()
    changed.model.extra = torch.nn.Linear(3, 3)
    with pytest.raises(UserError, match=r"the one that create_model made: of extra\.bias it has shape"):
        save(changed, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()
    changed.model.recipe = None  # a network of one's own
    save(changed, tmp_path / "changed")
    again = load(tmp_path / "changed", model=changed.model).classifier
    assert torch.equal(again(image), changed.eval()(image))


def test_a_model_of_format_1_is_read(tmp_path):
    """As the first version wrote it, in its words."""
    model = create_model("didirn8", **SMALL, parameterization="posterior")
    classifier = DiffusionClassifier(model, sampler=Sampler("cl", steps=3), label_proposal=0.5).eval()
    save(classifier, tmp_path)
    config = {
        "format": 1,
        "kind": "diffusion",
        "model": {"name": "didirn8", "arguments": {**SMALL, "prediction": "posterior"}},
        "schedule": {"name": "log-linear", "eps": 0.001},
        "draws_per_image": 1,
        "redraw": 0.5,
        "sampler": {
            "method": "cl",
            "steps": 3,
            "solver": "exact",
            "query": "middle",
            "select": "argmin",
            "chains": 16,
            "average": "probs",
            "time": 0.5,
            "seed": 0,
        },
        "class_names": NAMES,
        "transform": None,
        "versions": {},
        "weights_sha256": json.loads((tmp_path / "config.json").read_text())["weights_sha256"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, image = load(tmp_path).classifier, torch.randn(2, 3, 16, 16)
    assert loaded.sampler == classifier.sampler
    assert loaded.label_proposal == 0.5
    assert torch.equal(loaded(image), classifier(image))
    del config["redraw"]  # older still
    config["sampler"]["query"] = "start"
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path).classifier
    assert (loaded.label_proposal, loaded.sampler.score_time) == (0.0, "start")


def test_a_baseline_of_format_1_is_read(tmp_path):
    classifier, image = classifiers()["standard"]().eval(), torch.randn(2, 3, 16, 16)
    save(classifier, tmp_path)
    edit(tmp_path, lambda config: config.update(format=1))
    edit(tmp_path, lambda config: config["model"].update(name="didirn10_plain"))
    assert torch.equal(load(tmp_path).classifier(image), classifier(image))


def test_a_run_is_loaded_from_its_best_model(tmp_path):
    save(classifiers()["default"](), tmp_path / "best", class_names=NAMES)
    assert load(tmp_path).class_names == NAMES


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        save(classifiers()["default"](), tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_the_config_is_readable(tmp_path):
    save(classifiers()["default"](), tmp_path, class_names=NAMES)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    assert "große Hose" in text
    config = json.loads(text)
    assert config["model"]["name"] == "didirn8"
    assert config["schedule"] == {"name": "log-linear", "eps": 0.001}
    assert config["sampler"]["steps"] == 8
    assert set(config["versions"]) == {"didicm", "torch", "timm"}


def test_a_sampler_changed_by_hand_is_used(tmp_path):
    save(classifiers()["default"](), tmp_path)
    edit(tmp_path, lambda config: config["sampler"].update(steps=3))
    assert load(tmp_path).classifier.sampler.steps == 3


def edit(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_instead(directory):
    (directory / "model.safetensors").write_bytes(pickle.dumps({"fc.weight": torch.zeros(3)}))


def rewrite(change):
    def damage(directory):
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return damage


def other_weights(directory):
    rewrite(lambda weights: weights["fc.bias"].add_(1))(directory)


HOSTILE = {
    "truncated weights": (truncate, "model.safetensors is damaged"),
    "a pickle": (pickle_instead, "model.safetensors is damaged or not a safetensors file"),
    "empty weights": (lambda d: (d / "model.safetensors").write_bytes(b""), "damaged"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    "wrong shape": (
        rewrite(lambda w: w.update({"fc.bias": torch.zeros(9)})),
        r"of fc.bias it has shape \(9,\), the model shape \(4,\)",
    ),
    "lacking weight": (rewrite(lambda w: w.pop("fc.bias")), "of fc.bias it has none, the model shape"),
    "extra weight": (
        rewrite(lambda w: w.update({"spy": torch.zeros(2)})),
        r"of spy it has shape \(2,\), the model none",
    ),
    "weights of another save": (other_weights, "does not belong to the config.json"),
    "no config": (lambda d: (d / "config.json").unlink(), "holds no config.json"),
    "no json": (lambda d: (d / "config.json").write_text("{"), "config.json is damaged"),
    "binary config": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is damaged"),
    "not a dict": (lambda d: (d / "config.json").write_text("[]"), "does not read"),
    "newer format": (lambda d: edit(d, lambda c: c.update(format=99)), "does not read"),
    "unknown key": (lambda d: edit(d, lambda c: c.update(hook="os.system")), "unknown key 'hook'"),
    "absolute path": (lambda d: edit(d, lambda c: c.update(weights="/etc/passwd")), "unknown key 'weights'"),
    "missing key": (lambda d: edit(d, lambda c: c.pop("model")), "'model' is missing"),
    "missing digest": (lambda d: edit(d, lambda c: c.pop("weights_sha256")), "'weights_sha256' is missing"),
    "an ensemble of nobody": (
        lambda d: (d / "config.json").write_text(
            json.dumps(
                {
                    "format": 2,
                    "kind": "ensemble",
                    "members": [],
                    "class_names": None,
                    "transform": None,
                    "weights_sha256": "",
                }
            )
        ),
        "needs members",
    ),
    "a list for a model": (lambda d: edit(d, lambda c: c.update(model=[])), "does not describe a model"),
    "unknown kind": (lambda d: edit(d, lambda c: c.update(kind="gan")), "kind must be"),
    "unknown model": (lambda d: edit(d, lambda c: c["model"].update(name="resnet18")), "unknown model 'resnet18'"),
    "model from elsewhere": (
        lambda d: edit(
            d, lambda c: c["model"].update(name="backbone_score", arguments={"backbone": "hf-hub:a/b"})
        ),
        "unknown backbone",
    ),
    "unknown argument": (lambda d: edit(d, lambda c: c["model"]["arguments"].update(x=1)), "no argument 'x'"),
    "unknown sampler key": (lambda d: edit(d, lambda c: c["sampler"].update(eta=1)), "eta"),
    "sampler of wrong type": (
        lambda d: edit(d, lambda c: c["sampler"].update(steps="8")),
        "steps must be a whole number, got '8'",
    ),
    "unknown schedule": (lambda d: edit(d, lambda c: c.update(schedule={"name": "x"})), "unknown schedule"),
    "too few names": (lambda d: edit(d, lambda c: c.update(class_names=["a"])), "1 class names for 4 classes"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_and_damaged_directories_get_one_sentence(kind, tmp_path):
    damage, says = HOSTILE[kind]
    save(classifiers()["default"](), tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=says) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_directory_and_a_file_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="neither a run nor a model directory"):
        load(tmp_path / "file")


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    classifier, image = classifiers()["default"]().eval(), torch.randn(1, 3, 16, 16)
    save(classifier, tmp_path)
    expected = load(tmp_path).classifier(image)

    def full_disk(weights, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("didicm.checkpoint.save_file", full_disk)
    with pytest.raises(UserError, match="No space left"):
        save(classifiers()["standard"](), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load(tmp_path).classifier(image), expected)


def test_wrong_number_of_class_names_is_refused(tmp_path):
    with pytest.raises(UserError, match="2 class names for 4 classes"):
        save(classifiers()["default"](), tmp_path / "x", class_names=["a", "b"])
    assert not (tmp_path / "x").exists()


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    """A folder laid out as the hub's cache stands in for the hub; the client is the real one, offline."""
    cache = tmp_path / "models--owner--name"
    save(classifiers()["default"](), cache / "snapshots" / ("0" * 40), class_names=NAMES)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load("hf://owner/name@main").class_names == NAMES
    with pytest.raises(UserError, match=r"^hf://owner/other cannot be fetched"):
        load("hf://owner/other")
    with pytest.raises(UserError, match="write hf://owner/name"):
        load("hf://nobody")

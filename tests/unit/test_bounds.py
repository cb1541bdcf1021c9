"""Files that nobody should have to trust: what is read is bounded, and every stored value is checked."""

import json
import os
import socket
import struct
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from didicm import Predictor, load
from didicm.cli.__main__ import main
from didicm.errors import UserError
from didicm.evaluation.calibration import Calibration, Conformal, load_calibration, save_calibration
from didicm.experiments.results import read_plan, read_results
from didicm.files import parse_json, parse_yaml, read_json, read_yaml, sha256

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "unfold"),
        ("a: &a [*a]", "unfold"),
        ("[" * 200_000, "nested more than"),
        ("- " * 60 + "1", "nested more than"),
        ("a: !!python/object/apply:os.system [exit]", "constructor"),
        ("a: !!set {b}", "a set"),
        ("a: !!int ''", "tag"),
        ("a: \ud800", "special characters"),
        ("n: " + "9" * 5000, "digits"),
    ],
)
def test_yaml_that_attacks_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parse_yaml(text)


def test_yaml_that_people_write_is_read():
    text = "base: &base {epochs: 3, when: 2024-01-01}\nother: {<<: *base, lr: 1.0}\nlist: [1, a, null, true]"
    base = {"epochs": 3, "when": "2024-01-01"}
    assert parse_yaml(text) == {"base": base, "other": {**base, "lr": 1.0}, "list": [1, "a", None, True]}
    assert parse_yaml("") is None


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 60 + "1" + "}" * 60, '"\\ud800"', "1" * 5000, ""])
def test_json_that_attacks_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)


def test_no_file_is_read_that_is_too_large_or_none(tmp_path):
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(2**30)
    os.mkfifo(tmp_path / "pipe")
    for read in (read_json, read_yaml):
        with pytest.raises(UserError, match=r"large .*1073741824 bytes.*: restore it"):
            read(large, "restore it")
        for other in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere"):
            with pytest.raises(UserError, match="restore it"):
                read(other, "restore it")


# Model directories


@pytest.fixture
def changed(save_model, tmp_path):
    """A model directory whose config.json has some values changed, by dotted names."""

    def make(changes, file="config.json"):
        folder = save_model(tmp_path / "model")
        if file == "calibration.json":
            rules = {"lac": Conformal("lac", 0.1, 0.8, 50), "aps": Conformal("aps", 0.1, 0.9, 50, True)}
            save_calibration(folder, Calibration(1.5, rules, {"size": 8}, {"data": "x", "images": 50}, {}))
        content = json.loads((folder / file).read_text())
        for name, value in changes.items():
            *parents, last = name.split("__")
            place = content
            for part in parents:
                place = place[part]
            place[last] = value
        (folder / file).write_text(json.dumps(content))
        return folder

    return make


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"class_names": "abc"}, "class_names must be a list"),
        ({"class_names": ["a", "b", 3]}, "class_names must be a list"),
        ({"class_names": ["a", "b", "a"]}, "class_names has 'a' twice"),
        ({"transform": []}, "transform must be"),
        ({"weights_sha256": 3}, "weights_sha256 must be text"),
        ({"model__arguments__num_classes": 10**9}, "not near uniform at t = 1 for 1000000000 classes"),
        ({"model__arguments__num_classes": -3}, "num_classes must be at least 2"),
        ({"model__arguments__width": 1e3}, "model.safetensors does not belong"),
        ({"model__arguments__width": "wide"}, "does not describe a model"),
        ({"model__arguments": [1]}, "model.arguments must be"),
        ({"model__name": {}}, "model.name must be text"),
        ({"schedule__eps": "small"}, "does not describe a model"),
        ({"draws_per_image": 0}, "draws_per_image must be"),
        ({"label_proposal": None}, "does not describe a model"),
        ({"sampler__steps": 0}, "steps must be"),
        ({"sampler__method": "magic"}, "method must be one of"),
        ({"members": []}, "unknown key 'members'"),
        ({"kind": ["diffusion"]}, "does not describe a model"),
        ({"format": {}}, "does not read"),
    ],
)
def test_wrong_values_of_a_model_directory_are_named(changes, says, changed):
    with pytest.raises(UserError, match=says) as told:
        load(changed(changes))
    assert "config.json" in str(told.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"transform__size": 10**9}, "transform.size must be at most 4096"),
        ({"transform__size": 2.5}, "transform.size must be a whole number"),
        ({"transform__mean": ["a"]}, "transform.mean must be"),
        ({"transform__std": [0]}, "transform.std must be at least 1e-06"),
        ({"transform__crop_pct": 1e-12}, "transform.crop_pct must be in"),
        ({"transform__interpolation": "magic"}, "transform.interpolation must be one of"),
        ({"transform__channels": 3, "transform__mean": [], "transform__std": []}, "3 channels and the network 1"),
        ({"transform__extra": 1}, "no key 'extra'"),
    ],
)
def test_wrong_values_of_a_transform_are_named(changes, says, changed):
    with pytest.raises(UserError, match=says) as told:
        Predictor.load(changed(changes))
    assert "config.json" in str(told.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"posterior": 3}, "cannot be used"),
        ({"fitted_on": []}, "fitted_on must be"),
        ({"conformal__lac__threshold": 7}, "conformal.threshold must be at most"),
        ({"conformal__lac__alpha": "x"}, "conformal.alpha must be a number"),
        ({"conformal__lac__method": "aps"}, "under lac a rule of method aps"),
        ({"conformal__lac": []}, "conformal: lac must be"),
        ({"conformal": None}, "cannot be used"),
    ],
)
def test_wrong_values_of_a_calibration_are_named(changes, says, changed):
    with pytest.raises(UserError, match=says) as told:
        load_calibration(changed(changes, "calibration.json"))
    assert "calibration.json" in str(told.value)


@pytest.mark.parametrize("kind", ["diffusion", "standard"])
def test_weights_that_are_not_finite_are_refused(kind, save_model, tmp_path, fails, write):
    folder, image = save_model(tmp_path / "model", kind), write(tmp_path / "a.png")
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["weights_sha256"] = sha256(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert "fc.weight holds numbers that are not finite" in fails("predict", folder, image)


def test_answers_that_are_not_finite_are_an_error(make_checkpoint, monkeypatch, capsys):
    for kind in ("diffusion", "standard"):
        with pytest.raises(FloatingPointError, match="non-finite"):
            make_checkpoint(kind).classifier(torch.full((1, 1, 8, 8), torch.inf))

    def broken(argv):
        raise FloatingPointError("the network returned non-finite logits")

    monkeypatch.setattr("didicm.cli.models.main", broken)
    assert main(["models"]) == 2
    assert capsys.readouterr().err == "didicm: the network returned non-finite logits\n"


def test_a_model_directory_starts_no_download(tmp_path, monkeypatch):
    from didicm import StandardClassifier, create_model, save

    model = create_model("backbone_baseline", backbone="resnet10t", num_classes=3)
    save(StandardClassifier(model), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["arguments"]["pretrained"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))

    def refuse(*arguments, **options):
        raise AssertionError("it reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load(tmp_path).classifier.num_classes == 3


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, struct.pack("<Q", 2**60), struct.pack("<Q", 4) + b"[[[[", b"PK\x03\x04" + bytes(60)],
)
def test_damaged_weights_are_one_sentence(header, save_model, tmp_path, fails, write):
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(header)
    assert "model.safetensors is damaged" in fails("predict", folder, write(tmp_path / "a.png"))


# Results


MEASURED = {
    "sampler": "1 call", "group": "", "settings": {}, "calls": 1, "multiply_adds": 9, "metrics": {"cls/Acc": 0.5}
}  # fmt: skip
RESULT = {
    "format": 2, "key": "a", "method": "standard", "condition": {}, "seed": 0, "num_train": 10, "num_held_out": 1,
    "num_test": 5, "num_classes": 3, "parameters": 7, "train_seconds": 1.0, "versions": {},
    "measurements": [MEASURED],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"versions": []}, "versions must be"),
        ({"condition": {"fraction": -7}}, "fraction must be"),
        ({"measurements": []}, "measurements is empty"),
        ({"measurements": [3]}, "is damaged"),
        (
            {"measurements": [{**MEASURED, "metrics": {"cls/Acc": "good"}}]},
            "cls/Acc must be a number",
        ),
        ({"measurements": [{**MEASURED, "posteriors": "../../secret"}]}, "in the study's folder"),
        ({"measurements": [{**MEASURED, "posteriors": "/etc/passwd"}]}, "in the study's folder"),
        ({"train_seconds": -5}, "train_seconds must be at least 0"),
        ({"extra": 1}, "extra"),
    ],
)
def test_wrong_values_of_results_are_named(change, says, tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps({**RESULT, **change}) + "\n")
    with pytest.raises(UserError, match=says) as told:
        read_results(tmp_path)
    assert f"line 1 of {tmp_path / 'results.jsonl'}" in str(told.value)
    (tmp_path / "results.jsonl").write_text(json.dumps(RESULT) + "\n")
    assert len(read_results(tmp_path)) == 1


@pytest.mark.parametrize("content", [[], 3, {"format": 2}, {"format": 2, "study": 3, "command": "", "data": "",
                                     "settings": {}, "runs": {}}])  # fmt: skip
def test_wrong_values_of_a_plan_are_named(content, tmp_path):
    for name in ("study.json", "plan.json"):
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(UserError, match=name):
            read_plan(tmp_path)
        (tmp_path / name).unlink()

import json

import pytest
import torch

from didicm import Predictor, StandardClassifier, UserError, calibrate, evaluate, save
from didicm.evaluation.calibration import (
    Calibration,
    Conformal,
    find_calibration,
    load_calibration,
    save_calibration,
)
from didicm.evaluation.stored import find_device, open_model, same_place

NAMES = ["ant", "bee", "cat"]


def test_classes_are_matched_by_name(save_model, make_folder, tmp_path):
    model = open_model(save_model(tmp_path / "model"))
    images, described = model.images(str(make_folder(tmp_path / "data", classes=("cat", "ant"), count=2)))
    assert images.labels.tolist() == [0, 0, 2, 2]
    assert images.class_names == NAMES
    assert described == f"all of {tmp_path / 'data'}"
    with pytest.raises(UserError, match="'dog'"):
        model.images(str(make_folder(tmp_path / "other", classes=("ant", "dog"))))


def test_without_class_names_the_number_of_classes_must_agree(save_model, make_folder, tmp_path):
    model = open_model(save_model(tmp_path / "model", names=None))
    assert model.class_names == ["0", "1", "2"]
    assert len(model.images(str(make_folder(tmp_path / "three", classes=NAMES)))[0]) == 18
    with pytest.raises(UserError, match="the data has 2 classes and the model, which stores no class names, 3"):
        model.images(str(make_folder(tmp_path / "two")))


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("standard", {"steps": 2, "method": "cp"}, "no sampler to set: leave out steps, sampler"),
        ("diffusion", {"chains": 2}, "sampler cp has no chains: leave it out or choose sampler cl"),
        ("diffusion", {"method": "readout", "steps": 2}, "sampler readout has no steps: .* cp or cl"),
        ("diffusion", {"speed": 2}, "no setting 'speed'"),
        ("diffusion", {"steps": 0}, "steps must be at least 1"),
    ],
)
def test_samplers_that_do_not_fit_get_one_sentence(kind, settings, says, save_model, tmp_path):
    with pytest.raises(UserError, match=says):
        open_model(save_model(tmp_path, kind), sampler=settings)


def test_a_model_without_a_transform_needs_a_size(save_model, tmp_path):
    save_model(tmp_path, transform=False)
    with pytest.raises(UserError, match="stores no transform"):
        open_model(tmp_path)
    assert open_model(tmp_path, size=12).transform.size == 12


def test_a_device_that_is_not_there_is_named():
    assert find_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="device warp cannot be used here"):
        find_device("warp")


def test_places_are_the_same_whatever_leads_there(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert same_place(str(tmp_path / "data"), f"{tmp_path}/link/")
    assert same_place("fashion-mini", "fashion-mini")
    assert not same_place(str(tmp_path), str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for uri in ("folder:data", "folder://data", "./data", f"folder://{tmp_path}/link"):
        assert same_place("data", uri)
    assert same_place("hf:owner/name", "hf://owner/name")
    assert same_place("wds:data", f"wds://{tmp_path}/link")
    assert not same_place("wds:data", "data")


@pytest.fixture
def calibrated(save_model, tmp_path):
    save_model(tmp_path)
    rules = {"lac": Conformal("lac", 0.1, 0.7, 20), "aps": Conformal("aps", 0.1, 0.9, 20)}
    posterior = open_model(tmp_path).posterior
    calibration = Calibration(1.5, rules, posterior, {"data": "x", "images": 20}, {})
    assert save_calibration(tmp_path, calibration) == tmp_path / "calibration.json"
    return tmp_path, calibration


def test_a_calibration_returns_as_it_was_saved(calibrated):
    folder, calibration = calibrated
    assert load_calibration(folder) == calibration
    found, sentence = find_calibration(folder, calibration.posterior)
    assert found == calibration
    assert "temperature 1.5 and conformal sets from 20 images of x" in sentence


def test_a_calibration_is_for_one_way_of_asking(calibrated):
    folder, _ = calibrated

    def find(**options):
        return find_calibration(folder, open_model(folder, **options).posterior)

    found, sentence = find(sampler={"steps": 2})
    assert found is None
    assert "left out: it was fitted with steps 8" in sentence
    assert find(size=16)[0] is None
    assert find(sampler={"seed": 3})[0] is not None
    (folder / "calibration.json").unlink()
    assert find()[1].startswith("not calibrated")


def test_a_calibration_of_version_010_is_understood(calibrated):
    folder, calibration = calibrated
    path = folder / "calibration.json"
    values = json.loads(path.read_text())
    values["posterior"]["query"] = {"midpoint": "middle"}[values["posterior"].pop("score_time")]
    path.write_text(json.dumps(values))
    assert load_calibration(folder) == calibration


def test_a_calibration_of_other_weights_is_refused(calibrated, make_checkpoint):
    folder, _ = calibrated
    other = make_checkpoint("diffusion").classifier
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    save(other, folder, class_names=NAMES)
    with pytest.raises(UserError, match=r"calibration.json belongs to other weights: calibrate again"):
        load_calibration(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: "{",
        lambda values: "[]",
        lambda values: json.dumps({**values, "format": 2}),
        lambda values: json.dumps({**values, "temperature": "warm"}),
        lambda values: json.dumps({**values, "temperature": -1.0}),
        lambda values: json.dumps({**values, "speed": 1}),
        lambda values: json.dumps({**values, "conformal": {"lac": {"alpha": 3}}}),
        lambda values: json.dumps({key: x for key, x in values.items() if key != "posterior"}),
    ],
)
def test_a_damaged_calibration_is_named(damage, calibrated):
    folder, _ = calibrated
    path = folder / "calibration.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(UserError, match=r"calibration.json .*: calibrate again, or leave the calibration out"):
        load_calibration(folder)


class Own(torch.nn.Module):
    """A network of the user's, for grey images."""

    def __init__(self, in_chans=1):
        super().__init__()
        self.num_classes, self.in_chans = 2, in_chans
        self.fc = torch.nn.Linear(8 * 8, 2)

    def forward(self, image):
        return self.fc(image.flatten(1))


def test_a_network_of_ones_own_is_measured_calibrated_and_used(make_folder, tmp_path, picture):
    data = make_folder(tmp_path / "data", count=20)
    transform = {"size": 8, "channels": 1, "mean": [0.5], "std": [0.5]}
    save(StandardClassifier(Own()), tmp_path / "own", class_names=["cat", "dog"], transform=transform)
    model = open_model(tmp_path / "own", model=Own())
    assert evaluate(model, data).multiply_adds == 2 * 8 * 8  # a path is as good as its text
    assert calibrate(model, data).path.exists()
    predictor = Predictor.load(tmp_path / "own", model=Own())
    assert predictor.calibration is not None
    assert predictor(picture()).probs.shape == (2,)
    with pytest.raises(UserError, match="1 channels and the network 3: set in_chans of your network"):
        open_model(tmp_path / "own", model=Own(in_chans=3))


def test_a_split_that_there_is_not_is_refused(save_model, make_folder, tmp_path):
    data = make_folder(tmp_path / "data")
    with pytest.raises(UserError, match="split must be one of val, train or null, got 'test'"):
        open_model(save_model(tmp_path / "model")).images(str(data), split="test")

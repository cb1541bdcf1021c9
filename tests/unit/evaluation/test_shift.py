"""`evaluate --shift`: the numbers are those of `evaluate --corruption`, from one pass over the images."""

import json

import pytest

from didicm.data.corruptions import SEVERITIES, SUITE
from didicm.data.folder import FolderSet
from didicm.evaluation.assess import evaluate, evaluate_shift
from didicm.evaluation.fitting import calibrate
from didicm.files import is_our_picture

QUICK = {"workers": 0, "batch_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_folder):
    place = tmp_path_factory.mktemp("images")
    return str(make_folder(place, classes=("ant", "bee", "cat"), count=40, size=(20, 16)))


@pytest.fixture(scope="module")
def model(tmp_path_factory, save_model, folder):
    """A calibrated model with an outlier score."""
    model = save_model(tmp_path_factory.mktemp("model"), "standard")
    calibrate(model, folder, fraction=0.6, **QUICK)
    return model


def test_every_row_is_what_evaluate_says_of_that_corruption(model, folder, monkeypatch):
    opened = []
    original = FolderSet.original
    monkeypatch.setattr(FolderSet, "original", lambda self, i: opened.append(i) or original(self, i))
    shift = evaluate_shift(model, folder, seed=3, bins=7, **QUICK)
    assert len(opened) <= shift.num_images + 16  # some are looked at before, to know how large they are
    assert list(shift.corruptions) == list(SUITE)
    assert all(len(levels) == len(SEVERITIES) for levels in shift.corruptions.values())
    asked = {"gaussian_noise:5": ("gaussian_noise", 5), "blur:1": ("blur", 1), None: None}
    for corruption, place in asked.items():
        alone = evaluate(model, folder, corruption=corruption, seed=3, bins=7, **QUICK)
        row = shift.clean if place is None else shift.corruptions[place[0]][place[1] - 1]
        for name in ("cls/Acc", "cls/NLL", "cal/ECE"):
            assert row[name] == pytest.approx(alone.metrics[name], abs=1e-6), (corruption, name)
        assert row["unlike"] == alone.unlike_training
    assert len(alone.labels) == shift.num_images == 48  # without those of the calibration
    mean = sum(levels[4]["cls/NLL"] for levels in shift.corruptions.values()) / len(SUITE)
    assert shift.mean[4]["cls/NLL"] == pytest.approx(mean)


def test_the_command_prints_tables_and_stores_numbers_and_a_plot(model, folder, tmp_path, works, fails):
    command = ["evaluate", model, "--data", folder, "--workers", 0, "--out", tmp_path / "out", "--shift"]
    shown = works(*command).out
    for word in (
        "accuracy, by severity",
        "NLL, in nats, by severity",
        "ECE, by",
        "flagged as unlike",
        "motion_blur",
    ):
        assert word in shown
    stored = json.loads((tmp_path / "out" / "shift.json").read_text())
    assert stored["num_images"] == 48
    for name, row in (("clean", stored["clean"]), ("jpeg:5", stored["corruptions"]["jpeg"][4])):
        alone = evaluate(model, folder, corruption=None if name == "clean" else name, **QUICK)
        assert row["cls/NLL"] == pytest.approx(alone.metrics["cls/NLL"], abs=1e-6)
    assert is_our_picture(tmp_path / "out" / "shift.png")
    assert "--shift corrupts the images itself" in fails(*command, "--corruption", "noise:3")
    (tmp_path / "out" / "shift.png").write_text("mine")
    assert "was not made by this command" in fails(*command)

"""A calibration that cannot mislead: what `calibrate` refuses, what it says, and what `evaluate` knows of it."""

import json
import re
import shutil
from base64 import b64encode
from hashlib import blake2b
from pathlib import Path

import pytest

from didicm.data import stratified_split
from didicm.errors import UserError
from didicm.evaluation import fitting, met_images
from didicm.evaluation.assess import evaluate
from didicm.evaluation.calibration import WEAK_PRIOR, Temperature, fit_temperature, load_calibration
from didicm.evaluation.fitting import calibrate
from didicm.evaluation.stored import open_model
from didicm.inference.predictor import Predictor

QUICK = {"workers": 0, "batch_size": 64}


@pytest.fixture
def images(tmp_path, make_folder):
    """Twenty images of each of three classes."""
    return str(make_folder(tmp_path / "images", classes=("ant", "bee", "cat"), count=20, size=(8, 8)))


@pytest.fixture
def model(tmp_path, save_model):
    return save_model(tmp_path / "model", training_prior={"images": [1, 1, 2], "balance": "none"})


def test_too_few_images_are_refused_before_the_work(model, images, tmp_path, make_folder):
    few = str(make_folder(tmp_path / "few", classes=("ant", "bee", "cat"), count=5, size=(8, 8)))
    for asked, says in (
        (
            {"data": few},
            "alpha 0.1 need at least 9 held-out images to fit on, and others to check, got 7: give more",
        ),
        (
            {"data": images, "alpha": 0.01},
            "need at least 99 held-out images to fit on, and others to check, got 30",
        ),
        (
            {"data": images, "alpha": 0.05, "per_class": True},
            "at least 19 held-out images of every class, such as ant, got 10: give more",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            calibrate(model, **asked, progress=lambda *_: pytest.fail("it went to work"), **QUICK)
    assert not (model / "calibration.json").exists()


def test_missing_classes_are_told_and_a_temperature_that_does_harm_is_not_taken(
    model, tmp_path, make_folder, monkeypatch
):
    two = str(make_folder(tmp_path / "two", classes=("ant", "bee"), count=20, size=(8, 8)))
    notes = calibrate(model, two, **QUICK).notes
    assert f"{two} has no image to fit on of class cat: of those the calibration knows nothing" in notes
    assert any(note.endswith("that takes 50 to fit and 19 others") for note in notes)
    monkeypatch.setattr(fitting, "fit_temperature", lambda *_: Temperature(0.05, None))
    made = calibrate(model, two, **QUICK)
    (note,) = [note for note in made.notes if "worse" in note]
    assert note.startswith("a temperature of 0.050 would make the NLL of the other images worse")
    assert "it stays 1" in note
    assert load_calibration(model).temperature == 1
    assert made.calibration.check["before"] == pytest.approx(made.calibration.check["after"])
    inside = made.calibration.conformal["lac"].sets(evaluate(model, two, calibrated=False, **QUICK).probs)
    assert inside.double().mean() < 1  # thresholds are those of the posterior as it is


def test_few_images_get_the_weak_prior_of_the_studies(model, images):
    found = evaluate(model, images, calibrated=False, **QUICK)
    fit, _ = stratified_split(found.labels.numpy(), 0.7, 0)
    weak, none = (fit_temperature(found.probs[fit], found.labels[fit], prior).value for prior in (WEAK_PRIOR, 0))
    assert abs(weak - 1) < abs(none - 1)
    made = calibrate(model, images, fraction=0.3, **QUICK).calibration
    assert made.temperature == pytest.approx(weak, rel=1e-6)


def test_a_calibration_from_more_images_is_replaced_only_if_that_is_said(model, images, tmp_path, make_folder):
    fewer = str(make_folder(tmp_path / "fewer", classes=("ant", "bee", "cat"), count=8, size=(8, 8)))
    calibrate(model, images, **QUICK)
    with pytest.raises(UserError, match="a calibration from 30 images, more than these 12: add --replace"):
        calibrate(model, fewer, **QUICK)
    assert load_calibration(model).fitted_on["images"] == 30
    calibrate(model, fewer, replace=True, **QUICK)
    calibrate(model, images, **QUICK)  # more images need no such word
    assert load_calibration(model).fitted_on["images"] == 30


def test_images_that_calibrated_are_left_out_of_an_evaluation(model, images, tmp_path):
    made = calibrate(model, images, **QUICK).calibration
    found = evaluate(model, images, **QUICK)
    assert len(found.labels) == 30
    assert found.notes == [
        "30 images are left out, as the calibration was fitted on them: --no-calibration measures all"
    ]
    assert found.metrics["cls/NLL"] == pytest.approx(made.check["after"]["cls/NLL"], rel=1e-5)
    (tmp_path / "link").symlink_to(images)
    assert set(evaluate(model, str(tmp_path / "link"), **QUICK).labels.bincount().tolist()) == {10}
    assert len(evaluate(model, images, calibrated=False, **QUICK).labels) == 60
    copied = evaluate(model, str(shutil.copytree(images, tmp_path / "copy")), **QUICK)
    assert (len(copied.labels), copied.notes) == (30, found.notes)  # the same images, whatever they are called

    path = model / "calibration.json"
    stored = json.loads(path.read_text())
    used = [
        name
        for name in evaluate(model, images, calibrated=False, **QUICK).image_names
        if name not in found.image_names
    ]
    by_name = b"".join(blake2b(name.encode(), digest_size=6).digest() for name in used)
    path.write_text(
        json.dumps(stored | {"fitted_on": stored["fitted_on"] | {"image_digests": b64encode(by_name).decode()}})
    )
    assert evaluate(model, images, **QUICK).notes == found.notes  # as they were remembered for a while
    path.write_text(json.dumps(stored))
    left = {name.removeprefix(f"{images}/") for name in found.image_names}
    for name in left:
        (tmp_path / "images" / name).unlink()
    (note,) = evaluate(model, images, **QUICK).notes
    assert "fitted on all of these images" in note
    del stored["fitted_on"]["image_digests"]  # as version 0.1.0 wrote it
    path.write_text(json.dumps(stored))
    (note,) = evaluate(model, images, **QUICK).notes
    assert note.startswith("the calibration was fitted on 30 images of the same data")
    stored["fitted_on"]["image_digests"] = 7
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="image_digests of the calibration are damaged: calibrate again"):
        evaluate(model, images, **QUICK)


def test_images_that_chose_the_best_weights_are_told(model, images, tmp_path, make_folder):
    run = tmp_path / "run"
    shutil.copytree(model, run / "best")
    shutil.copytree(model, run / "last")
    (run / "config.yaml").write_text(json.dumps({"data": images, "val_fraction": 0.4, "seed": 3}))
    told = "24 of the 24 images chose the weights in best/ among those of all epochs"
    assert evaluate(run, images, **QUICK).notes[0].startswith(told)
    assert evaluate(run, images, split="train", **QUICK).notes == []
    assert evaluate(run / "last", images, **QUICK).notes == []
    other = str(make_folder(tmp_path / "other", classes=("ant", "bee", "cat"), count=2, size=(9, 9)))
    assert evaluate(run, other, **QUICK).notes == []
    assert calibrate(run, images, **QUICK).notes[0].startswith(told)


def test_images_that_were_trained_on_are_told_by_their_bytes(model, images, tmp_path, make_folder, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(model, run / "last")
    config = {"data": images, "val_fraction": 0.4, "seed": 3}
    (run / "config.yaml").write_text(json.dumps(config))
    copies = tmp_path / "copies"
    for i, path in enumerate(sorted(Path(images).rglob("*.png"))):
        place = copies / path.parent.name / f"copy-{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    told = "36 of the 60 images, or copies of them, were trained on: these numbers are not of new images"
    assert evaluate(run / "last", str(copies), **QUICK).notes == [told]
    assert told in calibrate(run / "last", str(copies), **QUICK).notes
    (run / "last" / "calibration.json").unlink()
    assert evaluate(run / "last", images, **QUICK).notes == []
    (run / "config.yaml").write_text(json.dumps(config | {"fraction": 4}))
    assert evaluate(run / "last", str(copies), **QUICK).notes == [told.replace("36", "12")]
    for name in ("MOST_FILES", "MOST_BYTES"):
        with monkeypatch.context() as bounded:
            bounded.setattr(met_images, name, 10)
            assert evaluate(run / "last", str(copies), **QUICK).notes == []


def test_an_image_that_cannot_be_read_chose_nothing(model, images, tmp_path):
    """What calibrate counts are the images it was fitted and checked on."""
    shutil.copytree(model, tmp_path / "run" / "best")
    (tmp_path / "run" / "config.yaml").write_text(json.dumps({"data": images, "val_fraction": 0.4, "seed": 3}))
    held_out, _ = open_model(tmp_path / "run").images(images)
    Path(held_out.name(0)).write_bytes(b"")
    made = calibrate(tmp_path / "run", images, **QUICK)
    assert made.calibration.fitted_on["images"] + made.calibration.check["images"] == 23
    assert any(note.startswith("23 of the 23 images chose the weights") for note in made.notes)
    assert any(note.endswith("(it is empty)") for note in made.notes)


def test_few_groups_to_fit_on_are_told(model, images):
    made = calibrate(model, images, group_by=r"(\d)\.png$", **QUICK)
    (note,) = [note for note in made.notes if "group" in note]
    assert note.startswith("the images it was fitted on come from 5 groups, and alpha 0.1 asks for 9: sets of")
    many = calibrate(model, images, group_by=r"(\d+)\.png$", **QUICK)
    assert not any("group" in note for note in many.notes)


def test_the_table_of_the_training_is_known_by_any_name(model, images, tmp_path, monkeypatch):
    """Else the images of the training would be measured as if they were others."""
    table = Path(images) / "labels.csv"
    rows = [f"{name}/{i}.png,{name}" for name in ("ant", "bee", "cat") for i in range(10)]
    table.write_text("\n".join(["path,label", *rows]))
    shutil.copytree(model, tmp_path / "run" / "best")
    training = {"data": images, "labels": str(table), "val_fraction": 0.4, "seed": 3}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(training))
    monkeypatch.chdir(table.parent.parent)
    for labels in (None, str(table), "labels.csv", f"./{table.parent.name}/labels.csv"):
        held_out, described = open_model(tmp_path / "run").images(images, labels=labels)
        assert (len(held_out), described) == (12, f"held out from training on {images}")
    other = tmp_path / "other.csv"
    shutil.copy(table, other)
    assert len(open_model(tmp_path / "run").images(images, labels=str(other))[0]) == 30


def test_sets_per_class_are_stored_and_stay_under_another_prior(model, images, picture, works):
    shown = works("calibrate", model, "--data", images, "--workers", 0, "--per-class", "--alpha", 0.2).out
    assert re.search(r"LAC .* 0\.\d{4} to 0\.\d{4}", shown)
    assert len(json.loads((model / "calibration.json").read_text())["conformal"]["aps"]["class_thresholds"]) == 3
    plain, shifted = Predictor.load(model)(picture(0)), Predictor.load(model, prior="uniform")(picture(0))
    assert set(shifted.conformal_set) == set(plain.conformal_set)
    assert shifted.classes != plain.classes
    assert "sets that hold the truth" in works("evaluate", model, "--data", images, "--workers", 0).out
    path = f"{images}/ant/0.png"
    assert "for 80 % of images of every class: " in works("predict", model, path, "--prior", "uniform").out

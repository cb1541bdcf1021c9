"""Images of five channels through every command: arrays and TIFFs, from training to a server."""

import json

import numpy as np
import pytest

from didicm.cli.__main__ import main
from didicm.evaluation.assess import evaluate_shift
from didicm.inference.onnx import OnnxPredictor
from didicm.inference.predictor import Predictor
from didicm.serving.security import Limits
from didicm.serving.service import read_image
from tests.oracle.tiff import tiff_bytes

SIDE, CHANNELS = 12, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes that only the fifth channel tells apart: half of them arrays, half of them TIFFs."""
    place, random = tmp_path_factory.mktemp("bands"), np.random.default_rng(0)
    for k, name in enumerate(("dry", "wet")):
        for i in range(60):
            pixels = random.integers(0, 256, (SIDE, SIDE, CHANNELS), dtype=np.uint8)
            pixels[..., 4] = pixels[..., 4] // 4 + 150 * k
            file = place / name / f"{'array' if i % 2 else 'tiff'}" / f"{i}"
            file.parent.mkdir(parents=True, exist_ok=True)
            if i % 2:
                np.save(file.with_suffix(".npy"), pixels)
            else:
                file.with_suffix(".tif").write_bytes(tiff_bytes(pixels, planar=True, deflate=True))
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory, folder, train_flags):
    """A run that learnt it."""
    run = tmp_path_factory.mktemp("run") / "run"
    changes = {
        "data": folder,
        "fraction": 1,
        "epochs": 6,
        "image__size": SIDE,
        "val_fraction": 0.5,
        "batch_size": 20,
    }
    assert main(["train", *train_flags(run, method="standard", **changes)]) == 0
    return run


def test_the_fifth_channel_is_learnt_and_measured(run, folder, works, tmp_path):
    shown = works("evaluate", run, "--data", folder, "--workers", 0, "--out", tmp_path).out
    numbers = json.loads((tmp_path / "metrics.json").read_text())
    assert numbers["metrics"]["cls/Acc"] == 1, shown
    transform = json.loads((run / "best" / "config.json").read_text())["transform"]
    assert (transform["channels"], len(transform["mean"]), len(transform["std"])) == (5, 5, 5)
    works("calibrate", run, "--data", folder, "--workers", 0, "--alpha", 0.2)
    assert evaluate_shift(run, str(folder), batch_size=200).mean[4]["cls/Acc"] <= 1
    assert "5 channels" in works("doctor", folder, "--examples", tmp_path / "doctor.png").out


def test_one_image_many_images_and_an_exported_model_say_the_same(run, folder, works, tmp_path):
    names = sorted(str(path) for path in folder.rglob("*.*"))[::17]
    predictor = Predictor.load(run)
    expected = [prediction.classes for prediction in predictor(names)]
    assert {classes[0][0] for classes in expected} == {"dry", "wet"}
    works("predict", run, *names, "--out", tmp_path / "rows.jsonl", "--workers", 0)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [None] * len(names)
    told = [json.loads(line) for line in works("predict", run, *names, "--json").out.splitlines()]
    assert [entry["classes"][0]["name"] for entry in told] == [classes[0][0] for classes in expected]
    works("export", run, "--out", tmp_path / "model.onnx")
    exported = OnnxPredictor.load(tmp_path / "model.onnx")
    for prediction, classes in zip(exported(names), expected, strict=True):
        assert dict(prediction.classes) == pytest.approx(dict(classes), abs=1e-4)
    array = np.asarray(np.load(next(name for name in names if name.endswith("npy"))))
    assert dict(predictor(array).classes) == dict(predictor(next(n for n in names if n.endswith("npy"))).classes)


def test_a_server_reads_arrays_and_tiffs(run, folder):
    predictor = Predictor.load(run)
    for suffix in ("npy", "tif"):
        path = next(folder.rglob(f"*.{suffix}"))
        seen = read_image(predictor, path.read_bytes(), Limits())
        assert seen.equal(predictor.read(path))
    told = read_image(predictor, b"\x93NUMPY\x01\x00 nothing", Limits())
    assert "header of the array is damaged" in str(told)


def test_augmentation_for_colours_is_refused_before_the_work(folder, tmp_path, fails, train_flags):
    flags = train_flags(tmp_path / "run", data=folder, augment__color_jitter=0.4)
    assert "color_jitter" in fails("train", *flags)
    wrong = train_flags(tmp_path / "run", data=folder, image__channels=4)
    assert "it has 5 channels, and 4 are asked for" in fails("train", *wrong)

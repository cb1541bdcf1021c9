"""`didicm evaluate`, `calibrate` and `predict` on real runs, small enough to train in seconds."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import didicm
from didicm.cli.__main__ import main
from didicm.data import hold_out, open_data
from didicm.evaluation.diagnostics import ClassRow
from didicm.evaluation.intervals import bootstrap
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.store import load_posteriors
from tests.oracle.released import ReleasedNet, write_released

HELD_OUT = {"val_fraction": 0.4, "seed": 3}


@pytest.fixture(scope="session")
def diffusion_run(once, train_flags):
    """A diffusion classifier of fashion-mini, which has a validation split."""

    def make(out):
        assert main(["train", *train_flags(out / "run", epochs=6, fraction=0.4)]) == 0

    return once("diffusion", make) / "run"


@pytest.fixture(scope="session")
def folder(tmp_path_factory, make_folder):
    """Images of 3 classes, without a validation split."""
    return make_folder(tmp_path_factory.mktemp("images"), classes=("ant", "bee", "cat"), count=30, size=(16, 16))


@pytest.fixture(scope="session")
def standard_run(tmp_path_factory, folder, train_flags):
    """A standard classifier of a folder, which held out a part of it."""
    run = tmp_path_factory.mktemp("standard") / "run"
    changes = {"method": "standard", "data": folder, "fraction": 1, "batch_size": 18, "epochs": 1, **HELD_OUT}
    assert main(["train", *train_flags(run, **changes)]) == 0
    return run


def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_evaluate_measures_shows_and_stores(diffusion_run, tmp_path, works):
    run = copy(diffusion_run, tmp_path)
    shown = works("evaluate", run, "--data", "fashion-mini").out
    for word in ("cls/Acc", "accuracy", "cal/aECE", "multiply-adds", "images/s", "Ankle boot", "validation split"):
        assert word in shown
    folder = run / "evaluation" / "fashion-mini"
    assert str(folder) in shown
    stored, numbers = load_posteriors(folder / "posteriors.safetensors"), metrics(folder)
    assert stored.probs.shape == (1000, 10)
    assert stored.class_names[0] == "T-shirt/top"
    assert stored.image_names[3] == "fashion-mini/test[3]"
    assert stored.labels.tolist() == open_data("fashion-mini").val.labels.tolist()
    assert numbers["metrics"] == evaluate_probs(stored.probs, stored.labels)
    intervals = bootstrap(stored.probs, stored.labels)
    assert numbers["intervals"] == {name: list(interval) for name, interval in intervals.items()}
    assert numbers["nfe"] == 2
    assert numbers["posterior"]["steps"] == 2
    assert numbers["temperature"] is None
    best = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min((line for line in best if "val/cls/NLL" in line), key=lambda line: line["val/cls/NLL"])
    for name in ("cls/Acc", "cls/NLL"):  # as training measured them
        assert numbers["metrics"][name] == pytest.approx(best[f"val/{name}"], abs=2e-3)
    classes = json.loads((folder / "classes.json").read_text())
    assert [row["support"] for row in classes] == [100] * 10
    assert np.mean([row["recall"] for row in classes]) == pytest.approx(numbers["metrics"]["cls/Acc"])


def test_evaluate_asks_as_it_is_told(diffusion_run, tmp_path, works):
    common = ["evaluate", diffusion_run / "last", "--data", "fashion-mini", "--workers", 0]
    for k, (extra, nfe) in enumerate(
        [
            (
                [
                    "--sampler.steps",
                    2,
                    "--sampler.select",
                    "argmax",
                    "--sampler.solver",
                    "euler",
                    "--batch-size",
                    300,
                ],
                2,
            ),
            (["--sampler", "method=cl", "--sampler.steps", 1, "--sampler.chains", 3, "--seed", 1], 3),
            (["--sampler.method", "readout", "--size", 28, "--corruption", "noise:3", "--bins", 5], 1),
        ]
    ):
        works(*common, *extra, "--out", tmp_path / str(k))
        assert metrics(tmp_path / str(k))["nfe"] == nfe
    last = metrics(tmp_path / "2")
    assert last["corruption"] == "gaussian_noise:3"
    assert last["posterior"]["size"] == 28
    assert last["bins"] == 5
    stored = load_posteriors(tmp_path / "2" / "posteriors.safetensors")
    assert last["metrics"] == evaluate_probs(stored.probs, stored.labels, bins=5)
    low, high = last["intervals"]["cal/ECE"]
    assert low < last["metrics"]["cal/ECE"] < high  # of these five bins, not of the usual fifteen
    assert last["multiply_adds"] != metrics(tmp_path / "0")["multiply_adds"]


def test_evaluate_takes_the_images_that_training_held_out(standard_run, folder, tmp_path, works):
    shown = works("evaluate", standard_run, "--data", f"{folder}/", "--out", tmp_path / "x").out
    assert "36 images: held out from training" in shown
    data = hold_out(open_data(str(folder)), HELD_OUT["val_fraction"], HELD_OUT["seed"])
    stored = load_posteriors(tmp_path / "x" / "posteriors.safetensors")
    assert stored.image_names == [data.val.name(i) for i in range(36)]
    assert metrics(tmp_path / "x")["nfe"] == 1
    split = ("--split", "train", "--workers", 0)
    shown = works("evaluate", standard_run, "--data", folder, *split, "--out", tmp_path / "y").out
    assert "54 images: training split" in shown


def test_evaluate_other_data_whole_and_with_broken_files(standard_run, tmp_path, works, make_folder):
    other = make_folder(tmp_path / "other", classes=("cat", "bee"), count=4)
    (other / "cat" / "torn.jpg").write_bytes(b"torn")
    printed = works("evaluate", standard_run, "--data", other, "--out", tmp_path / "x").out
    assert "9 images: all of" in printed
    assert "skipped 1 unreadable image, the first:" in printed
    assert "torn.jpg" in printed
    classes = json.loads((tmp_path / "x" / "classes.json").read_text())
    assert classes[0]["name"] == "ant"
    assert classes[0]["recall"] is None  # no images of it
    assert metrics(tmp_path / "x")["num_images"] == 8


def test_many_classes_show_the_worst(diffusion_run, capsys):
    from rich.console import Console

    from didicm.cli.evaluate import class_table

    rows = [ClassRow(f"class {k}", 10, k / 100, 0.5, 0.5, 1.0) for k in range(30)]
    rows += [ClassRow("none", 0, float("nan"), float("nan"), float("nan"), float("nan"))]
    Console().print(class_table(rows))
    shown = capsys.readouterr().out
    assert "the 10 worst of 31 classes" in shown
    assert "class 9 " in shown
    assert "class 10" not in shown
    assert "none" not in shown


def test_evaluate_mistakes(diffusion_run, standard_run, folder, tmp_path, capsys, fails, make_folder):
    data = ["--data", "fashion-mini"]
    assert "nowhere does not exist" in fails("evaluate", tmp_path / "nowhere", *data)
    assert "neither a run nor a model" in fails("evaluate", tmp_path, *data)
    assert "'nowhere' does not exist" in fails("evaluate", diffusion_run, "--data", "nowhere")
    assert "'ant', 'bee', 'cat'" in fails("evaluate", diffusion_run, "--data", folder)
    error = fails("evaluate", standard_run, "--data", folder, "--sampler.steps", 2, "--sampler.method", "cp")
    assert "leave out steps, sampler" in error
    assert "sampler cp has no chains" in fails("evaluate", diffusion_run, *data, "--sampler.chains", 2)
    other = make_folder(tmp_path / "other", classes=("ant", "bee"))
    error = fails("evaluate", standard_run, "--data", other, "--split", "val")
    assert "has no validation split: leave out --split" in error
    assert "device warp" in fails("evaluate", diffusion_run, *data, "--device", "warp")
    (tmp_path / "file").touch()
    assert "give another --out" in fails("evaluate", diffusion_run, *data, "--out", tmp_path / "file" / "x")
    for flag, says in (
        (["--sampler.steps", "0"], "steps must be at least 1"),
        (["--workers", "-1"], "--workers must be at least 0"),
        (["--sampler.method", "dp"], "method must be one of cp, cl, readout"),
        (["--corruption", "fog:9"], "no corruption 'fog'"),
        (["--bins", "many"], "--bins must be a whole number"),
        (["--step", "2"], "didicm evaluate has no option --step"),
    ):
        assert says in fails("evaluate", diffusion_run, *data, *flag)


def test_calibrate_fits_reports_stores_and_is_used(diffusion_run, tmp_path, works):
    run = copy(diffusion_run, tmp_path)
    data = ("--data", "fashion-mini", "--workers", 0)
    shown = works("calibrate", run, *data, "--alpha", 0.2).out
    for word in ("temperature", "on the other 500 images", "NLL", "ECE", "LAC", "APS", "80 %", "calibration.json"):
        assert word in shown
    stored = json.loads((run / "best" / "calibration.json").read_text())
    assert stored["weights_sha256"] == json.loads((run / "best" / "config.json").read_text())["weights_sha256"]
    assert stored["fitted_on"]["data"] == "fashion-mini"
    assert stored["check"]["after"]["cls/NLL"] < stored["check"]["before"]["cls/NLL"] + 0.02
    for method in ("lac", "aps"):
        assert stored["conformal"][method]["n"] == 500
        assert 0.73 < stored["check"][method]["coverage"] < 0.87  # 0.8, and noise of 500 images on both sides
        assert 1 <= stored["check"][method]["mean_size"] <= 10

    shown = works("evaluate", run, *data, "--out", tmp_path / "with").out
    assert f"temperature {stored['temperature']:.3g}" in shown
    assert "note: 500 images are left out, as the calibration was fitted on them" in shown
    assert "note: 1000 of the 1000 images chose the weights in best/" in shown
    works("evaluate", run, *data, "--no-calibration", "--out", tmp_path / "without")
    fitted, plain = metrics(tmp_path / "with"), metrics(tmp_path / "without")
    assert fitted["temperature"] == stored["temperature"]
    assert (fitted["num_images"], plain["num_images"]) == (500, 1000)
    assert fitted["metrics"]["cls/NLL"] == pytest.approx(stored["check"]["after"]["cls/NLL"], rel=1e-4)
    assert fitted["conformal"]["lac"]["coverage"] == stored["check"]["lac"]["coverage"]
    assert plain["conformal"] == {}
    posteriors = load_posteriors(tmp_path / "with" / "posteriors.safetensors")
    assert fitted["metrics"] == evaluate_probs(posteriors.probs, posteriors.labels)
    shown = works("evaluate", run, *data, "--sampler.steps", 1, "--out", tmp_path / "other").out
    assert "left out: it was fitted with steps 2" in shown


def test_calibrate_takes_the_images_that_training_held_out(standard_run, folder, tmp_path, works):
    run = copy(standard_run, tmp_path)
    shown = works("calibrate", run, "--data", folder, "--fraction", 0.75).out
    assert "36 images: held out from training" in shown
    assert json.loads((run / "best" / "calibration.json").read_text())["fitted_on"]["images"] == 27


def test_calibrate_refuses_what_the_model_was_trained_on(
    diffusion_run, standard_run, folder, tmp_path, fails, works, make_folder
):
    run = copy(standard_run, tmp_path)
    error = fails("calibrate", diffusion_run, "--data", "fashion-mini", "--split", "train")
    assert "--split train is what the model was trained on" in error
    link = tmp_path / "link"
    link.symlink_to(folder)
    works("calibrate", run, "--data", link, "--workers", 0)  # the same folder: its held-out part
    for name in ("ant", "bee", "cat"):
        (tmp_path / "links").mkdir(exist_ok=True)
        (tmp_path / "links" / name).symlink_to(folder / name)
    error = fails("calibrate", run, "--data", tmp_path / "links")
    assert "trained on 54 of the 90 images" in error
    other = make_folder(tmp_path / "other", classes=("ant", "bee", "cat"), count=10)
    assert "a calibration from 18 images, more than these 15" in fails("calibrate", run, "--data", other)
    assert "30 images: all of" in works("calibrate", run, "--data", other, "--replace", "--workers", 0).out


def test_calibrate_mistakes(diffusion_run, standard_run, folder, tmp_path, fails):
    data = ["--data", "fashion-mini"]
    assert "alpha must lie between" in fails("calibrate", diffusion_run, *data, "--alpha", 1)
    assert "fraction must lie between" in fails("calibrate", diffusion_run, *data, "--fraction", 1)
    assert "on the hub" in fails("calibrate", "hf://owner/name", *data)
    assert "need at least 99 held-out images" in fails(
        "calibrate", copy(standard_run, tmp_path), "--data", folder, "--alpha", 0.01
    )
    assert not (tmp_path / "copy" / "best" / "calibration.json").exists()


def test_a_calibration_of_other_weights_is_refused(diffusion_run, tmp_path, fails, works, make_folder):
    model = shutil.copytree(diffusion_run / "best", tmp_path / "model")
    printed = works("calibrate", model, "--data", "fashion-mini", "--workers", 0).out
    assert "does not say what it was trained on" in printed
    weights = load_file(model / "model.safetensors")
    checkpoint = didicm.load(model)
    checkpoint.classifier.model.load_state_dict({name: x + 0.01 for name, x in weights.items()})
    didicm.save(checkpoint.classifier, model, class_names=checkpoint.class_names, transform=checkpoint.transform)
    says = "calibration.json belongs to other weights"
    assert says in fails("evaluate", model, "--data", "fashion-mini")
    image = make_folder(tmp_path / "images", classes=("a",), count=1)
    assert says in fails("predict", model, image)
    works("predict", model, image, "--no-calibration")
    save_file(weights, model / "model.safetensors")  # half of a copy
    assert "does not belong to the config.json" in fails("evaluate", model, "--data", "fashion-mini")


def test_predict_shows_a_table_an_image(diffusion_run, tmp_path, works):
    run = copy(diffusion_run, tmp_path)
    images = open_data("fashion-mini").val
    for i in range(3):
        images.load(i).save(tmp_path / f"{i}.png")
    shown = works("predict", run, tmp_path / "0.png", tmp_path / "1.png", "--top", 2)
    assert str(tmp_path / "0.png") in shown.out
    assert shown.out.count("entropy") == 2
    assert shown.out.count(" %") == 4
    assert "not calibrated" in shown.err
    works("calibrate", run, "--data", "fashion-mini", "--workers", 0)
    (tmp_path / "0.png").rename(tmp_path / "[red]0.png")
    shown = works("predict", run, tmp_path / "[red]0.png")
    assert str(tmp_path / "[red]0.png") in shown.out  # nothing that rich may read as colour
    assert "the set that holds the truth for 90 % of images" in shown.out
    assert "unlike" not in shown.out
    assert "temperature" in shown.err
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    shown = works("predict", run, tmp_path / "noise.png")
    assert "unlike the training images" in shown.out
    assert "% of images" not in shown.out


def test_predict_json_goes_on_after_unreadable_images(diffusion_run, tmp_path, capsys, make_folder):
    folder = make_folder(tmp_path / "images", classes=("a", "b"), count=2)
    (folder / "a" / "torn.jpg").write_bytes(b"torn")
    (folder / "b" / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nowhere.png").symlink_to("gone")
    arguments = [diffusion_run, folder, tmp_path / "nowhere.png", tmp_path / "empty", folder / "a" / "0.png"]
    capsys.readouterr()
    code = main(["predict", *map(str, arguments), "--json", "--top", "3", "--batch-size", "2"])
    assert code == 2
    printed = capsys.readouterr()
    told = [json.loads(line) for line in printed.out.splitlines()]
    lines = [line for line in told if "error" not in line]
    places = ("a/0.png", "a/1.png", "b/0.png", "b/1.png", "a/0.png")
    assert [line["image"] for line in lines] == [str(folder / place) for place in places]
    for line in lines:
        keys = {"image", "classes", "entropy", "outlier_score", "unlike_training", "conformal_set"}
        assert line.keys() == keys | {"conformal_claim"}
        assert len(line["classes"]) == 3
        assert line["classes"][0]["probability"] >= line["classes"][1]["probability"]
    assert lines[0]["classes"][0]["probability"] == pytest.approx(lines[4]["classes"][0]["probability"], abs=1e-5)
    unreadable = [folder / "a" / "torn.jpg", tmp_path / "nowhere.png", tmp_path / "empty"]
    assert [line["image"] for line in told if "error" in line] == [str(path) for path in unreadable]
    for path in unreadable:
        assert f"{path.name} cannot be read" in printed.err
    assert "notes.txt" not in printed.err


def test_predict_draws_trajectories(diffusion_run, tmp_path, monkeypatch, request, works, make_folder):
    folder = make_folder(tmp_path / "images", classes=("a",), count=2)
    picture = tmp_path / "new" / "t.png"
    shown = works("predict", diffusion_run, folder, "--trajectory", picture, "--sampler.steps", 4, "--json")
    assert f"trajectories: {picture}" in shown.err
    line = json.loads(shown.out.splitlines()[0])
    assert [step["time"] for step in line["trajectory"]] == [1, 0.75, 0.5, 0.25, 0]
    with Image.open(picture) as image:
        assert image.size[0] > 700
        assert len(image.convert("RGB").getcolors(2**24)) > 100
    request.getfixturevalue("unrendered")  # seen once, and slow
    monkeypatch.setattr("didicm.cli.predict.MOST_DRAWN", 1)
    shown = works(
        "predict", diffusion_run, folder, "--trajectory", tmp_path / "m.png", "--json", "--sampler.steps", 1
    )
    assert "the first 1 of 2 images" in shown.err


def test_predict_mistakes(diffusion_run, standard_run, tmp_path, fails, works, make_folder):
    image = make_folder(tmp_path / "images", classes=("a",), count=1)
    error = fails("predict", standard_run, image, "--trajectory", tmp_path / "t.png")
    assert "a standard classifier answers in one network call" in error
    assert "leave out steps" in fails("predict", standard_run, image, "--sampler.steps", 2)
    assert "must be a .png file" in fails("predict", diffusion_run, image, "--trajectory", "t.jpg")
    assert "does not exist" in fails("predict", tmp_path / "nowhere", image)
    assert not (tmp_path / "t.png").exists()
    works("predict", standard_run, image)


def test_a_checkpoint_of_the_released_code(tmp_path, folder, fails, works, make_folder):
    torch.manual_seed(0)
    net = ReleasedNet((1, 1, 1), 1, 3).eval()
    released = write_released(tmp_path / "model.pth.tar", net)
    names = tmp_path / "names.txt"
    names.write_text("cat\nbee\nant\n")
    works("import-official", released, "--out", tmp_path / "model", "--class-names", names)
    common = ["--data", folder, "--size", 16, "--sampler.steps", 2, "--workers", 0]
    works("evaluate", tmp_path / "model", *common)
    place = "-".join(folder.parts).strip("/-")
    stored = load_posteriors(tmp_path / "model" / "evaluation" / place / "posteriors.safetensors")
    assert stored.class_names == ["cat", "bee", "ant"]
    assert stored.labels.tolist() == [2] * 30 + [1] * 30 + [0] * 30
    works("calibrate", tmp_path / "model", *common)
    nameless = tmp_path / "nameless"
    works("import-official", released, "--out", nameless)
    works("evaluate", nameless, *common)
    two = make_folder(tmp_path / "two")
    assert "2 classes and the model" in fails("evaluate", nameless, "--data", two, "--size", 16)


def test_a_model_that_may_not_be_written_to(diffusion_run, tmp_path, fails, monkeypatch):
    model = shutil.copytree(diffusion_run / "best", tmp_path / "model")
    model.chmod(0o555)
    # Root may write anywhere, so the system is made to say what it says to others.
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK and allowed(path, mode))
    assert "is not writable" in fails("calibrate", model, "--data", "fashion-mini")
    assert "give another --out" in fails("evaluate", model, "--data", "fashion-mini")

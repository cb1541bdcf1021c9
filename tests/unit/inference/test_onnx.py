import csv
import json
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from didicm import Predictor, UserError
from didicm.cli.__main__ import main
from didicm.evaluation.calibration import Conformal
from didicm.evaluation.fitting import calibrate
from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.export import export
from didicm.inference.onnx import OnnxPredictor


@pytest.fixture
def predictor(onnx_model):
    return OnnxPredictor.load(onnx_model)


@pytest.mark.parametrize("conformal", ["lac", "aps"])
def test_it_says_what_pytorch_says(conformal, calibrated_model, onnx_model, tmp_path, picture, write):
    theirs = Predictor.load(calibrated_model, conformal=conformal)
    ours = OnnxPredictor.load(onnx_model, conformal=conformal)
    images = [
        write(tmp_path / "a.jpg", seed=1, size=(50, 41)),
        (write(tmp_path / "b.png", seed=2, mode="RGBA")).read_bytes(),
        picture(3, size=(12, 12)),
        np.asarray(picture(4, mode="L")),
    ]
    for one, other in zip(ours(images, batch_size=3), theirs(images), strict=True):
        np.testing.assert_allclose(one.probs, other.probs, atol=1e-5)
        assert [name for name, _ in one.classes] == [name for name, _ in other.classes]
        assert one.conformal_set == other.conformal_set
        assert one.entropy == pytest.approx(other.entropy, abs=1e-4)
    assert ours.rule == ConformalRule.from_dict(theirs.rule.to_dict())
    assert ours(images[0]).classes == ours(images[:1])[0].classes
    assert ours([]) == []


def test_mistakes_are_told_in_a_sentence(predictor, onnx_model, tmp_path, picture):
    with pytest.raises(UserError, match="cannot be read as an image"):
        predictor(b"text")
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        predictor([picture(0)], batch_size=0)
    with pytest.raises(UserError, match=r"nothing\.onnx is not a file"):
        OnnxPredictor.load(tmp_path / "nothing.onnx")
    with pytest.raises(UserError, match="device tpu cannot be used by this ONNX Runtime: try cpu"):
        OnnxPredictor.load(onnx_model, "tpu")
    with pytest.raises(UserError, match="no conformal sets 'raps'"):
        OnnxPredictor.load(onnx_model, conformal="raps")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(UserError, match=r"text\.onnx cannot be opened by ONNX Runtime"):
        OnnxPredictor.load(tmp_path / "text.onnx")


def test_what_needs_the_run_itself_says_so(onnx_model, tmp_path, fails):
    says = "model.onnx is an exported model, which only predicts and serves: give the run or model directory"
    assert says in fails("evaluate", onnx_model, "--data", tmp_path, "--out", tmp_path / "found")
    assert says in fails("calibrate", onnx_model, "--data", tmp_path)
    with pytest.raises(UserError, match=r"in Python open it by didicm\.OnnxPredictor\.load"):
        Predictor.load(onnx_model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"class_names": None}, "class_names"),
        ({"format": "99"}, "format"),
        ({"transform": "{"}, "not a model that didicm export wrote"),
    ],
)
def test_a_file_of_somebody_elses_is_refused(changes, says, onnx_model, tmp_path):
    import onnx

    model = onnx.load(onnx_model)
    entries = {entry.key: entry.value for entry in model.metadata_props} | changes
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {key: text for key, text in entries.items() if text is not None})
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(UserError, match=says):
        OnnxPredictor.load(tmp_path / "other.onnx")


def test_rules_on_arrays_are_those_on_tensors():
    import torch

    probs = torch.rand(50, 4).softmax(-1)
    for method in ("lac", "aps"):
        rule = Conformal(method, 0.2, 0.7, 30)
        assert np.array_equal(rule.contains(probs.numpy()), rule.sets(probs).numpy())


def test_predict_runs_without_pytorch(onnx_model, calibrated_model, tmp_path, write):
    """In a process of its own, where PyTorch would be missed."""
    folder = tmp_path / "photos"
    paths = [write(folder / f"{i}.jpg", seed=i, size=(40 + 9 * i, 50)) for i in range(3)]
    (folder / "x.png").write_text("no image")
    out = tmp_path / "rows.jsonl"
    code = (
        "import sys; sys.modules['torch'] = None; from didicm.cli.__main__ import main; "
        f"main(['predict', sys.argv[4], sys.argv[5], '--out', {str(out)!r}, '--batch-size=3', '--part-size=2']); "
        "code = main(sys.argv[1:]); assert sys.modules['torch'] is None; sys.exit(code)"
    )
    command = ["predict", "--json", "--batch-size=2", onnx_model, folder, "--conformal", "aps"]
    ran = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "x.png cannot be read as an image" in ran.stderr
    *lines, unreadable = [json.loads(line) for line in ran.stdout.splitlines()]
    rows = [json.loads(line) for line in out.read_text().splitlines()]  # of all images, the unreadable one too
    assert [row["image"] for row in rows] == [*map(str, paths), str(folder / "x.png")]
    assert [row["error"] is None for row in rows] == [True] * 3 + [False]
    assert unreadable == {"image": rows[-1]["image"], "error": rows[-1]["error"]}
    assert [row["nfe"] for row in rows] == [2, 2, 2, None]
    assert "2 network calls per image" in ran.stderr
    for row, line in zip(rows, lines, strict=False):
        assert [entry["name"] for entry in row["classes"]] == [entry["name"] for entry in line["classes"]]
        told = [entry["probability"] for entry in row["classes"]]
        np.testing.assert_allclose(told, [entry["probability"] for entry in line["classes"]], atol=1e-6)
    assert [line["image"] for line in lines] == [str(path) for path in paths]
    for line, theirs in zip(lines, Predictor.load(calibrated_model, conformal="aps")(paths), strict=True):
        assert [entry["name"] for entry in line["classes"]] == [name for name, _ in theirs.classes]
        told = [entry["probability"] for entry in line["classes"]]
        np.testing.assert_allclose(told, [p for _, p in theirs.classes], atol=1e-5)
        assert line["conformal_set"] == theirs.conformal_set


def test_killed_again_and_again_it_loses_and_repeats_no_row(onnx_model, tmp_path, write):
    """SIGKILL when a file is written but not yet in its place, and right after."""
    photos = [write(tmp_path / "photos" / f"{i}.png", seed=i) for i in range(3)]
    replace, moves = os.replace, []

    def killed(moment, out):
        def move(source, target):
            moves.append(target)
            if len(moves) == 2 and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if len(moves) == 2 and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = move
        command = ["predict", onnx_model, tmp_path / "photos", "--out", out, "--part-size", 1]
        sys.exit(main(list(map(str, command))))

    def ran(moment, out):
        process = get_context("fork").Process(target=killed, args=(moment, out))
        process.start()
        process.join()
        return process.exitcode

    assert ran("never", tmp_path / "whole.csv") == 0
    codes = [ran(moment, tmp_path / "rows.csv") for moment in ("before", "after", "before", "never")]
    assert codes == [-9, -9, -9, 0]
    assert (tmp_path / "rows.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    with open(tmp_path / "rows.csv", newline="") as file:
        assert [row["image"] for row in csv.DictReader(file)] == [str(path) for path in photos]


def test_predict_shows_a_table_and_knows_its_options(onnx_model, tmp_path, write, works, fails):
    photo = write(tmp_path / "photo.jpg")
    shown = works("predict", onnx_model, photo, "--top", 1)
    assert "entropy" in shown.out
    assert "holds the truth for 90 % of images" in shown.out
    assert "as exported, calibrated" in shown.err
    assert "needs IMAGES" in fails("predict", onnx_model)
    planned = works("predict", onnx_model, photo, "--dry-run", "--csv", "--part-size", 1000).out
    assert "measured on 1 image" in planned
    assert "a billion" in planned
    for flags in (
        ["--sampler.steps", 2],
        ["--no-calibration"],
        ["--optimize"],
        ["--size=64"],
        ["--engine", "ray"],
    ):
        said = fails("predict", onnx_model, photo, *flags)
        assert f"answers as it was exported: leave out {flags[0].partition('=')[0]}, or give the run" in said
    assert "has no option --stepz" in fails("predict", onnx_model, photo, "--stepz", 2)


def test_the_ten_lines_of_the_guide_say_the_same(onnx_model, tmp_path, write, monkeypatch, capsys):
    root = Path(__file__).parents[3]
    example = root / "examples" / "onnx_client.py"
    lines = example.read_text().partition("ImageOps\n\n")[2]
    assert lines.count("\n") == 10
    assert lines in (root / "docs" / "guides" / "export.md").read_text()
    for i, (size, mode) in enumerate([((50, 41), "RGB"), ((30, 80), "L"), ((12, 12), "RGB")]):
        photo = write(tmp_path / f"{i}.jpg", seed=i, size=size, mode=mode)
        monkeypatch.setattr(sys, "argv", ["onnx_client.py", str(onnx_model), str(photo)])
        runpy.run_path(str(example))
        told = [line.split(": ") for line in capsys.readouterr().out.splitlines()]
        expected = OnnxPredictor.load(onnx_model)(photo).classes
        assert told == [[name, f"{p:.6f}"] for name, p in expected]


def test_foreign_images_are_flagged_as_by_pytorch(tmp_path, save_model, make_folder, write, works):
    model = save_model(tmp_path / "model", "standard")
    folder = make_folder(tmp_path / "images", classes=("ant", "bee", "cat"), count=40, size=(20, 16))
    calibrate(model, str(folder), fraction=0.6)
    export(model, tmp_path / "model.onnx")
    theirs, ours = Predictor.load(model), OnnxPredictor.load(tmp_path / "model.onnx")
    fresh = [1000 * k + i for k in range(3) for i in (40, 41)]  # none of which is a threshold itself
    files = [write(tmp_path / "fresh" / f"{seed}.png", seed=seed, size=(20, 16)) for seed in fresh]
    files.append(tmp_path / "white.png")
    Image.new("L", (9, 9), 255).save(files[-1])
    expected, found = theirs(files), ours(files)
    for one, other in zip(found, expected, strict=True):
        assert one.outlier_score == pytest.approx(other.outlier_score, rel=1e-3)
        assert (one.unlike_training, one.conformal_set) == (other.unlike_training, other.conformal_set)
    assert {prediction.unlike_training for prediction in found} == {True, False}
    shown = works("predict", tmp_path / "model.onnx", files[-1]).out
    assert "unlike the training images" in shown
    assert "holds the truth" not in shown
    works(
        "predict", tmp_path / "model.onnx", *files, "--out", tmp_path / "rows.csv", "--shard", "1/1", "--all-probs"
    )
    with open(tmp_path / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["unlike_training"] == "true" for row in rows] == [p.unlike_training for p in found]
    assert [row["conformal_set"] == "" for row in rows] == [p.conformal_set is None for p in found]
    assert float(rows[0]["probability_of_bee"]) == pytest.approx(dict(found[0].classes)["bee"], abs=1e-6)
    (answer,) = ours.predict_batch([ours.read(files[-1])])
    assert (answer.unlike_training, answer.conformal_set) == (True, None)
    with pytest.raises(UserError, match="do not belong together"):
        OnnxPredictor.load(_without_threshold(tmp_path / "model.onnx"))


def _without_threshold(path):
    import onnx

    model = onnx.load(path)
    kept = {entry.key: entry.value for entry in model.metadata_props if entry.key != "outliers"}
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, kept)
    onnx.save(model, path.with_name("other.onnx"))
    return path.with_name("other.onnx")

"""A table of votes and groups, from training to calibration."""

import pytest

from didicm.cli.__main__ import main
from didicm.evaluation.assess import evaluate
from didicm.evaluation.fitting import calibrate
from didicm.evaluation.stored import open_model
from didicm.training.build import build


@pytest.fixture
def voted(tmp_path, write):
    """Forty grey images of ten patients with the votes of four raters, and the settings that name them."""
    lines = ["path,benign,malign,patient"]
    for i in range(40):
        write(tmp_path / "images" / f"{i}.png", seed=i, size=(8, 8), mode="L")
        lines.append(f"{i}.png,{i % 4},{4 - i % 4},p{i // 4}")
    (tmp_path / "votes.csv").write_text("\n".join(lines))
    return {
        "data": str(tmp_path / "images"),
        "labels": str(tmp_path / "votes.csv"),
        "group_by": "patient",
        "fraction": 1.0,
        "val_fraction": 0.4,
        "batch_size": 8,
    }


@pytest.mark.parametrize("command", [["doctor"], ["train", "--dry-run"], ["train"]], ids=" ".join)
def test_classes_that_come_from_columns_are_told(command, tmp_path, voted, train_flags, works, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the picture
    flags = [voted["data"], "--labels", voted["labels"], "--group-by", "patient"]
    if command[0] == "train":
        flags = train_flags(tmp_path / "run", **voted, epochs=1)
    told = f"classes from the columns of {voted['labels']}: benign, malign\n"
    assert works(*command, *flags).out.count(told) == 1


def patient(name):
    return int(name.rsplit("/", 1)[1].removesuffix(".png")) // 4


def test_patients_stay_on_one_side_from_training_to_calibration(tmp_path, tiny_config, voted, train, capsys):
    run = train(**voted)
    components = build(tiny_config(tmp_path / "other", **voted))
    trained = {patient(components.train.name(i)) for i in range(len(components.train))}
    assert components.train.targets.shape == (len(components.train), 2)
    model = open_model(run)
    images, described = model.images(voted["data"])  # the run knows its table
    assert described.startswith("held out from training")
    held = {patient(images.name(i)) for i in range(len(images))}
    assert trained | held == set(range(10))
    assert not trained & held
    made = calibrate(model, voted["data"], alpha=0.5)
    assert made.calibration.fitted_on["images"] % 4 == made.calibration.check["images"] % 4 == 0
    assert main(["evaluate", str(run), "--data", voted["data"], "--labels", voted["labels"]]) == 0
    left = made.calibration.check["images"]  # those that calibrated are left out
    assert f"{left} images: held out from training" in capsys.readouterr().out
    everything = evaluate(model, voted["data"], split="train", group_by=r"(\d+)\.png")
    assert len(everything.labels) == len(components.train)
    assert f"intervals are over {len(components.train)} groups, which are drawn whole" in everything.notes
    patients = evaluate(model, voted["data"], split="train")  # in groups as they were trained
    assert f"intervals are over {len(trained)} groups, which are drawn whole" in patients.notes
    assert patients.metrics == everything.metrics
    assert patients.intervals != everything.intervals
    alone = evaluate(model, voted["data"], split="train", group_by=r"(\.)png")
    assert any(note.startswith("all images are of one group") for note in alone.notes)
    assert alone.intervals["cls/NLL"] == (pytest.approx(alone.metrics["cls/NLL"]),) * 2


def test_a_table_of_others_is_measured_as_a_whole(tmp_path, voted, train):
    run = train(**voted)
    (tmp_path / "second.csv").write_text("path,label\n1.png,benign\n2.png,malign\n")
    found = evaluate(run, voted["data"], labels=str(tmp_path / "second.csv"))
    assert found.labels.tolist() == [0, 1]
    assert found.images.startswith("all of")


def test_grids_take_the_table_too(voted, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={voted[name]}" for name in ("data", "labels", "group_by")]
    small = ["batch_size=1", "model_args.width=0.125", "val_fraction=0.4"]
    flags += [part for setting in small for part in ("--set", setting)]
    assert main(["study", "stems-cpu", *flags, "--dry-run", "--seeds=1", f"--out={tmp_path / 'out'}"]) == 0
    assert main(["compare", *flags[:1], f"--labels={tmp_path / 'none.csv'}", f"--out={tmp_path / 'c'}"]) == 2
    assert "none.csv does not exist" in capsys.readouterr().err

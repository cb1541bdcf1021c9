"""Every study for ImageNet from end to end, on a folder that looks like it, with tiny networks in mixed precision.

Some have two trainings at a time; `make rehearsal` runs all of them so, with two processes per training as well.
"""

import json
import os

import pytest
import yaml

from didicm.experiments.spec import STUDIES

SETTINGS = {
    "model": "didirn8",
    "model_args.width": 0.125,
    "epochs": 1,
    "batch_size": 24,
    "augment.repeats": 1,
    "optimizer.warmup_epochs": 0,
    "run.accelerator": "cpu",
    "run.precision": "bf16-mixed",
}
SMALL = {"resolutions": [16], "fractions": [0.5]}  # conditions, which --set cannot change
GROUPS = {  # those that share networks together: processes per training, trainings at a time
    ("main", "efficiency", "selection"): (1, 1),
    ("released", "stems"): (1, 1),
    ("sizes",): (1, 1),
    ("schedules", "solvers"): (1, 1),
    ("objectives",): (1, 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_folder):
    """Folders train and val of the same WordNet-like names, with JPEG files of different shapes."""
    root = tmp_path_factory.mktemp("imagenet")
    names = [f"n{k:08d}" for k in range(8)]
    make_folder(root / "train", names, count=8, size=(50, 38), suffix="JPEG")
    make_folder(root / "val", names, count=3, size=(38, 50), suffix="JPEG")
    return root


def shrunk(name):
    """A study on small images; of five sizes two are left."""
    content = yaml.safe_load((STUDIES / f"{name}.yaml").read_text()) | SMALL
    for method in content["methods"]:
        if method.get("schedule", {}).get("name") == "exponential":
            method["schedule"]["a"] = -1.0  # for so few classes
    for curve in content.get("curves", {}).values():
        curve.pop("at", None)  # a condition of the whole study
    content["methods"] = [m for m in content["methods"] if m.get("size", 18) in (18, 50)]
    return content


def test_all_studies_for_imagenet_are_rehearsed():
    assert sorted(f"{name}-imagenet" for group in GROUPS for name in group) == sorted(
        path.stem for path in STUDIES.glob("*-imagenet.yaml")
    )


def holders(out, lock):
    """Numbers of the processes that held the trainings' folders."""
    return {json.loads(path.read_text())["pid"] for path in (out / "runs").glob(f"*/{lock}")}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
@pytest.mark.usefixtures("unrendered")
def test_studies_run_on_a_folder_like_imagenet(group, folder, tmp_path, works, request):
    asked = [request.config.getoption(name) for name in ("--devices", "--jobs")]
    if not any(asked):
        request.getfixturevalue("forked_workers")
    devices, jobs = (number or own for number, own in zip(asked, GROUPS[group], strict=True))
    settings = {**SETTINGS, "run.workers": 0 if devices == 1 else 2}
    if group == ("sizes",):  # whose methods have models of their own
        settings.pop("model")
    out = tmp_path / "out"
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    flags += [f"--data={folder}", f"--out={out}", f"--devices={devices}", f"--jobs={jobs}"]
    for name in group:
        path = tmp_path / f"{name}-imagenet.yaml"
        path.write_text(yaml.safe_dump(shrunk(path.stem), sort_keys=False))
        shown = works("study", path, *flags).out
        assert "report:" in shown
        assert (out / path.stem / "report.html").exists()
    if group == ("released", "stems"):  # two of the four were trained before
        assert len(list((out / "runs").iterdir())) == 6
    for path in (out / "runs").glob("*/config.yaml"):
        run = yaml.safe_load(path.read_text())["run"]
        assert (run["precision"], run["devices"]) == ("bf16-mixed", devices)
        assert run["workers"] == settings["run.workers"]
    runs, trainings = holders(out, ".lock"), holders(out, ".train.lock")
    if jobs == 1:
        assert runs == {os.getpid()}
    else:
        assert len(runs) > 1
    assert runs == trainings if devices == 1 else not runs & trainings  # torchrun's are processes of their own

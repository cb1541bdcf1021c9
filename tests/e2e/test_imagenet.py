"""Every study for ImageNet from end to end, on a folder that looks like it, with tiny networks.

Here with one process per training. `make rehearsal` runs the same with two, workers, and two trainings at a time.
"""

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
GROUPS = [  # those that share networks together
    ["main", "selection", "efficiency"],
    ["released", "stems"],
    ["sizes"],
    ["schedules", "solvers"],
    ["objectives"],
]


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


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_studies_run_on_a_folder_like_imagenet(group, folder, tmp_path, works, request, monkeypatch):
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda *_, **__: None
    )  # reports are looked at elsewhere
    devices, jobs = (request.config.getoption(name) for name in ("--devices", "--jobs"))
    settings = {**SETTINGS, "run.workers": 0 if devices == 1 else 2}
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    flags += [f"--data={folder}", f"--out={tmp_path / 'out'}", f"--devices={devices}", f"--jobs={jobs}"]
    for name in group:
        path = tmp_path / f"{name}-imagenet.yaml"
        path.write_text(yaml.safe_dump(shrunk(path.stem), sort_keys=False))
        shown = works("study", path, *flags).out
        assert "report:" in shown
        assert (tmp_path / "out" / path.stem / "report.html").exists()
    if group == ["released", "stems"]:  # two of the four were trained before
        assert len(list((tmp_path / "out" / "runs").iterdir())) == 6

"""`didicm study` on studies that are shrunk until they take seconds."""

import os
import signal
import subprocess
import sys
import time
from importlib.resources import files

import pytest
import yaml

SHRUNK = {
    "data": "fashion-mini",
    "resolutions": [16],
    "fractions": [0.05],
    "by_fraction": {},
    "settings": {
        "epochs": 2,
        "batch_size": 20,
        "model": "didirn8",
        "model_args": {"width": 0.125, "stem": "small"},
        "optimizer.warmup_epochs": 0,
        "image.channels": 1,
        "run.accelerator": "cpu",
        "run.precision": "32-true",
        "run.workers": 0,
    },
}


def shrink(name, folder, **changes):
    """A study that ships, on few small images and with a tiny network; all else is its own."""
    content = yaml.safe_load(files("didicm.experiments").joinpath("studies").joinpath(f"{name}.yaml").read_text())
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**content, **SHRUNK, **changes}, sort_keys=False))
    return str(path)


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "didicm.cli", "study", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def study(*arguments):
    process = start(*arguments)
    shown, trouble = process.communicate(timeout=300)
    return process.returncode, shown, trouble


def test_the_papers_main_study_runs_with_the_published_table_beside(tmp_path):
    out = tmp_path / "out"
    path = shrink("main-imagenet", tmp_path, fractions=[0.1])
    code, shown, trouble = study(path, f"--out={out}")
    assert code == 0, trouble
    assert "4/4" in shown
    for words in ("10 %, 16 px", "DiDiCM-CP, Strong Aug", "Published", "57.92", "tab:main_results", "report:"):
        assert words in shown
    folder = out / "main-imagenet"
    assert {"uncertainty", "gains", "trajectories"} <= {p.stem for p in (folder / "figures").iterdir()}
    tables = (folder / "tables.md").read_text()
    assert "| standard, Weak Aug | top-1 | 44.86 |" in tables
    ours = [line for line in tables.split("## Published")[0].splitlines() if "|" in line]
    assert len(ours) > 6
    assert not any("±" in line for line in ours)  # one seed has no interval

    # The selection study finds its networks trained.
    code, shown, trouble = study(shrink("selection-imagenet", tmp_path, fractions=[0.1]), f"--out={out}")
    assert code == 0, trouble
    assert len(list((out / "cells").iterdir())) == 4
    assert "By mean top-1, best first:" in shown
    assert "Published: argmin 71.7" in shown

    # Everything again, from what was stored; other readings of the same study are refused.
    (folder / "report.html").unlink()
    code, _, trouble = study(path, f"--out={out}", "--report-only")
    assert code == 0, trouble
    assert (folder / "report.html").exists()
    changed = shrink("main-imagenet", tmp_path, fractions=[0.1], readings={"2 steps": {"steps": 2}})
    code, _, trouble = study(changed, f"--out={out}")
    assert code == 2
    assert "readings are 8 steps" in trouble


@pytest.mark.parametrize("name", ["efficiency-cpu", "sizes-cpu", "solvers-cpu"])
def test_the_other_studies_run_too(name, tmp_path):
    changes = {}
    if name == "sizes-cpu":
        own = {size: {"column": size, "model": f"didirn{size}"} for size in (8, 10)}
        changes["contestants"] = {
            f"{line}, {size}": {"line": line, "method": method, **own[size]}
            for line, method in (("standard", "standard"), ("DiDiCM-CP", "diffusion"))
            for size in own
        }
    code, shown, trouble = study(shrink(name, tmp_path, **changes), f"--out={tmp_path / 'out'}", "--seeds=1")
    assert code == 0, trouble
    made = {path.stem for path in (tmp_path / "out" / name / "figures").iterdir()}
    own = {"efficiency-cpu": "calls", "sizes-cpu": "gains", "solvers-cpu": "steps"}
    assert own[name] in made
    assert "report:" in shown


def test_killed_on_a_cluster_and_run_again_ends_with_the_same_table(tmp_path):
    path = shrink("objectives-cpu", tmp_path, contestants={"cross-entropy": {"method": "standard"}, "score": {}})
    out = tmp_path / "out"
    code, whole, trouble = study(path, f"--out={tmp_path / 'whole'}", "--seeds=2")
    assert code == 0, trouble
    process = start(path, f"--out={out}", "--seeds=2", "--executor=local", "--jobs=2")
    deadline = time.monotonic() + 120
    while not list(out.glob("cells/*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)  # who watches is gone; the jobs may go on or not
    process.communicate()
    code, shown, trouble = study(path, f"--out={out}", "--seeds=2")
    assert code == 0, trouble
    rows = [line for line in whole.splitlines() if "│" in line and "cross-entropy" in line]
    assert rows
    assert rows[0] in shown
    assert len((out / "objectives-cpu" / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["magic"], "there is no study 'magic'"),
        (["main-imagenet"], "study main-imagenet needs --data"),
        (["main-imagenet", "--data=nowhere"], "nowhere"),
        (["main-cpu", "--report-only"], "holds no results.jsonl"),
        (["main-cpu", "--seeds=0"], "--seeds must be at least 1"),
        (["main-cpu", "--devices=0"], "--devices must be at least 1"),
        (["main-cpu", "--set=epoch=3"], "no setting 'epoch'"),
        (["main-cpu", "--set=optimizer.lr=fast"], "optimizer.lr must be a number, got 'fast'"),
        (["main-cpu", "--set=model_args.parameterization=posterior", "--set=epochs=many"], "epochs must be"),
        (["main-cpu", "--cluster=slurm_partition=gpu"], "--cluster is for --executor slurm"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says, tmp_path, capsys):
    from didicm.cli.__main__ import main as run_cli

    assert run_cli(["study", *arguments, f"--out={tmp_path / 'out'}"]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_a_name_the_studies_are_listed_and_a_dry_run_writes_nothing(tmp_path, capsys):
    from didicm.cli.__main__ import main as run_cli

    assert run_cli(["study"]) == 0
    assert "solvers-cpu" in capsys.readouterr().out
    assert run_cli(["study", "solvers-cpu", "--dry-run", f"--out={tmp_path / 'out'}"]) == 0
    assert "6 trainings" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_corrected_mistake_and_a_renamed_contestant_are_no_conflict(tmp_path, capsys):
    from didicm.cli.__main__ import main as run_cli

    def run(contestants, **changes):
        path = shrink("objectives-cpu", tmp_path, contestants=contestants, seeds=1, curves={}, **changes)
        code = run_cli(["study", path, f"--out={tmp_path / 'out'}"])
        return code, capsys.readouterr()

    code, shown = run({"a": {"method": "standard"}, "b": {"method": "standard"}})
    assert code == 2
    assert "a and b have the same settings" in shown.err
    assert run({"a": {"method": "standard"}})[0] == 0
    code, shown = run({"renamed": {"method": "standard"}})
    assert code == 0
    assert "renamed" in shown.out
    assert "│ a " not in shown.out
    # Another share of held-out images is another experiment, not another seed.
    code, shown = run({"renamed": {"method": "standard"}}, held_out=0.2)
    assert code == 2
    assert "held_out is 0.1, not 0.2" in shown.err

import os
import subprocess
import sys

import pytest

from didicm.cli.demo import LEVELS, NEXT

TINY = [
    "--data=fashion-mini",
    "--resolutions=7",
    "--fractions=0.05",
    "--epochs=1",
    "--steps=2",
    "--set=batch_size=20",
    "--set=model_args={width: 0.125, stem: small}",
]


def didicm(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "didicm.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_compare_runs_resumes_extends_and_reports(tmp_path):
    out = tmp_path / "out"
    methods = "--methods=standard,didicm-posterior"
    result = didicm("compare", *TINY, methods, f"--out={out}", "--seeds=1")
    assert result.returncode == 0, result.stderr
    for words in ("1/2  standard", "Test images", "Differences", "Cost", "report:", "2 network calls cost"):
        assert words in result.stdout
    assert (out / "report.html").stat().st_size > 10_000

    # One more method: what is done is not run again.
    result = didicm(
        "compare", *TINY, "--methods=standard,standard-smooth,didicm-posterior", f"--out={out}", "--seeds=1"
    )
    assert result.returncode == 0, result.stderr
    assert "3 trainings, 2 of them done before" in result.stdout
    assert len((out / "results.jsonl").read_text().splitlines()) == 3

    result = didicm("compare", f"--out={out}", "--report-only")
    assert result.returncode == 0, result.stderr
    assert "standard, smoothed labels" in result.stdout

    result = didicm("compare", *TINY, methods, f"--out={out}", "--set=optimizer.lr=0.1")
    assert result.returncode == 2
    assert "started with other settings (optimizer.lr is 0.005, not 0.1)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--report-only"], "holds no results.jsonl"),
        ([], "no --data"),
        (["--data=nowhere"], "nowhere"),
        (["--data=fashion-mini", "--recipe=huge"], "unknown recipe 'huge'"),
        (["--data=fashion-mini", "--resolutions=28,x"], "--resolutions needs values"),
        (["--data=fashion-mini", "--fractions=2"], "--fractions must lie in (0, 1]"),
        (["--data=fashion-mini", "--corruptions=fog:9"], "no corruption 'fog'"),
        (["--data=fashion-mini", "--methods=magic"], "--methods has no 'magic'"),
        (["--data=fashion-mini", "--seeds=0"], "--seeds must be at least 1"),
        (["--data=fashion-mini", "--set=epochs"], "--set needs NAME=VALUE"),
        (["--data=fashion-mini", "--set=epoch=3"], "no setting 'epoch'"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says, tmp_path, capsys):
    from didicm.cli.__main__ import main as run_cli

    assert run_cli(["compare", f"--out={tmp_path / 'out'}", *arguments]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    from didicm.cli.__main__ import main as run_cli

    (tmp_path / "thesis.txt").write_text("mine")
    assert run_cli(["compare", f"--out={tmp_path}", *TINY]) == 2
    assert "in use and holds no comparison" in capsys.readouterr().err


def test_the_demo_ends_with_table_verdict_report_and_next_commands(tmp_path, monkeypatch, capsys):
    import didicm.cli.demo as demo

    monkeypatch.setattr(demo, "LEVELS", dict.fromkeys(list(LEVELS)[-1:], 1))
    monkeypatch.setattr(demo.os, "cpu_count", lambda: 1)
    assert demo.main(["--out", str(tmp_path / "demo"), "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    for words in ("3/3", "Test images", "network calls cost", "report.html", NEXT):
        assert words in shown
    assert (tmp_path / "demo" / "report.html").exists()

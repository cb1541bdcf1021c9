import subprocess
import sys
import time
from importlib import metadata

import pytest
from PIL import Image

from didicm.cli.__main__ import COMMANDS


def didicm(*arguments):
    return subprocess.run(["didicm", *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def command_of_this_environment(monkeypatch):
    monkeypatch.setenv("PATH", sys.prefix + "/bin", prepend=":")


def test_version_and_help_answer_without_waiting_for_pytorch():
    assert didicm("--version").stdout.strip() == f"didicm {metadata.version('didicm')}"
    shown = didicm("--help").stdout
    for name, (description, _) in COMMANDS.items():
        assert name in shown
        assert description.split()[0] in shown
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from didicm.cli.__main__ import main; main(['--version'])"],
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0
    assert "torch" not in imported.stderr


def test_help_takes_under_a_second():
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        didicm("--help")
        best = min(best, time.perf_counter() - start)
    assert best < 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "invalid choice: 'trian'"),
        ([], "required: COMMAND"),
        (["--verbose", "demo"], "unrecognized arguments: --verbose"),
        (["demo", "--fast"], "--fast"),
        (["demo", "--solvers", "--classes", "3"], "--classes must be at least 10"),
    ],
)
def test_mistakes_are_told_in_a_sentence_with_exit_code_2(arguments, says):
    result = didicm(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_demo_draws_how_the_solvers_recover_the_posterior(tmp_path):
    picture = tmp_path / "new folder" / "solvers.png"
    result = didicm("demo", "--solvers", "--classes", "20", "--images", "4", "--out", str(picture))
    assert result.returncode == 0, result.stderr
    assert "exact, asked mid-step" in result.stdout
    assert Image.open(picture).size == (1560, 960)

import contextlib
import subprocess
import sys
from importlib import metadata

import pytest
from PIL import Image

from didicm.cli.__main__ import COMMANDS, main


def didicm(*arguments):
    return subprocess.run(["didicm", *arguments], capture_output=True, text=True)


@pytest.fixture(autouse=True)
def command_of_this_environment(monkeypatch):
    monkeypatch.setenv("PATH", sys.prefix + "/bin", prepend=":")


def test_version_and_help_answer_without_waiting_for_pytorch():
    assert didicm("--version").stdout.strip() == f"didicm {metadata.version('didicm')}"
    shown = didicm("--help").stdout
    for name, description in COMMANDS.items():
        assert f"  {name} " in shown
        assert description in shown
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from didicm.cli.__main__ import main; main(['--version'])"],
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0
    assert "torch" not in imported.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "there is no command 'trian': did you mean train?"),
        (["--verbose", "demo"], "there is no command '--verbose'"),
    ],
)
def test_mistakes_are_told_in_a_sentence_with_exit_code_2(arguments, says):
    result = didicm(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_command_explains_itself_and_names_an_unknown_option(capsys, fails):
    for name in COMMANDS:
        with contextlib.suppress(SystemExit):
            main([name, "--help"])
        assert f"usage: didicm {name}" in capsys.readouterr().out
        assert f"didicm {name} has no option --magic" in fails(name, "--magic", "1")
    for flag in ("--solvers", "--solvers=true"):
        assert "--classes must be at least 10" in fails("demo", flag, "--classes", "3")
    assert "did you mean --sampler.steps?" in fails("evaluate", "run", "--samplr.steps", "2")
    assert "--model-args" not in fails("train", "--optimizer.learning-rate", "1")  # which takes any name


def test_the_package_imports_without_pytorch():
    code = (
        "import sys, didicm; from didicm.data import to_channels; didicm.OnnxPredictor;"
        "assert 'torch' not in sys.modules;"
        "print(didicm.UniformProcess(3).num_classes)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "3", result.stderr


def test_everything_public_is_there():
    import didicm as package

    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        _ = package.magic


def test_demo_draws_how_the_solvers_recover_the_posterior(tmp_path, works):
    picture = tmp_path / "new folder" / "solvers.png"
    shown = works("demo", "--solvers", "--classes", 20, "--images", 4, "--out", picture).out
    assert "exact, midpoint" in shown
    assert Image.open(picture).size == (1920, 960)

"""Every command that writes: beside files that are not its own, on a full disk, with names that are attacks."""

import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from didicm.cli import demo
from didicm.cli.__main__ import main
from tests.oracle.released import ReleasedNet, write_released

pytestmark = pytest.mark.usefixtures("unrendered")

# What each command may write, in the folder it is run in, and how.
WRITES = {
    "doctor": (["doctor.png"], ["doctor", "images", "--examples", "doctor.png"]),
    "predict": (
        ["t.png"],
        ["predict", "model", "images/ant/0.png", "--trajectory", "t.png", "--sampler.steps", "1"],
    ),
    "evaluate": (
        ["out/posteriors.safetensors", "out/metrics.json", "out/classes.json"],
        ["evaluate", "model", "--data", "images", "--out", "out", "--workers", "0", "--sampler.steps", "1"],
    ),
    "calibrate": (
        ["model/calibration.json"],
        ["calibrate", "model", "--data", "images", "--workers", "0", "--sampler.steps", "1", "--alpha", "0.4"],
    ),
    "import": (["official/config.json"], ["import-official", "model.pth.tar", "--out", "official"]),
    "solvers": (["s.png"], ["demo", "--solvers", "--classes", "10", "--images", "1", "--out", "s.png"]),
}
OTHERS = {
    "train": ["train", "--recipe", "small", "--data", "images", "--out", "run", "--batch-size", "4"],
    "compare": ["compare", "--data", "images", "--out", "grid", "--seeds", "1", "--set", "batch_size=4"],
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A checkpoint of the released code."""
    torch.manual_seed(0)
    return write_released(tmp_path_factory.mktemp("released") / "x", ReleasedNet((2, 2, 2, 2), 1, 3).eval())


@pytest.fixture
def place(tmp_path, monkeypatch, save_model, make_folder, released):
    """A folder with a model, images and a released checkpoint, to run commands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "STEPS", [1, 2])
    save_model(tmp_path / "model")
    make_folder(tmp_path / "images", classes=("ant", "bee", "cat"), count=4, size=(8, 8))
    os.link(released, tmp_path / "model.pth.tar")
    return tmp_path


def contents(folder):
    """All that a user would miss."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.mark.parametrize("command", WRITES)
def test_a_command_replaces_its_own_files_and_no_others(command, place, fails, works):
    names, arguments = WRITES[command]
    for name in names:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("my thesis")
        before = contents(place)
        assert "--force" in fails(*arguments)
        assert contents(place) == before
        (place / name).rename(place / "thesis.txt")
        (place / name).symlink_to(place / "thesis.txt")
        assert "--force" in fails(*arguments)
    works(*arguments, "--force")
    assert (place / "thesis.txt").read_text() == "my thesis"
    assert not any((place / name).is_symlink() for name in names)
    if command != "import":  # a model that was imported looks like any other
        works(*arguments)


def test_a_folder_of_somebody_elses_is_no_run(place, fails):
    for out in ("run", "grid"):
        (place / out).mkdir()
        (place / out / "config.yaml").write_text("epochs: 3  # mine\n")
    before = contents(place)
    assert "run is not empty and holds no run: give another --out" in fails(*OTHERS["train"])
    assert "grid is not empty and holds no comparison" in fails(*OTHERS["compare"])
    assert contents(place) == before


ROWS = {
    f"rows in {out}": ["predict", "model", "images", "--out", out, "--workers", "0", "--sampler.steps", "1"]
    for out in ("rows.csv", "rows")
}


@pytest.mark.parametrize("command", [*WRITES, *OTHERS, *ROWS])
def test_on_a_full_disk_every_command_ends_with_one_sentence(command, place, capsys):
    arguments = {**OTHERS, **ROWS}.get(command) or WRITES[command][1]
    before = contents(place)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert main(arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = r"didicm: .* cannot be written \(.*File too large.*\): make room, then run the same command again"
    assert re.fullmatch(told, capsys.readouterr().err.splitlines()[-1])
    assert contents(place) == before
    assert not list(place.rglob(".saving-*"))


@pytest.mark.parametrize("command", sorted({*WRITES, *OTHERS} - {"calibrate"}))  # whose place holds the model
def test_a_place_that_cannot_be_written_to_is_one_sentence(command, place, capsys):
    arguments = OTHERS[command] if command in OTHERS else WRITES[command][1]
    (place / "file").touch()
    out = next(i for i, text in enumerate(arguments) if text in ("--out", "--examples", "--trajectory"))
    assert main([*arguments[: out + 1], f"file/{arguments[out + 1]}", *arguments[out + 2 :]]) == 2
    told = r"didicm: file\S* cannot be (written( to)?|created) \((Not a directory|File exists)\): give another .*"
    assert re.fullmatch(told, capsys.readouterr().err.splitlines()[-1])
    assert (place / "file").read_bytes() == b""


HOSTILE = ["\x1b]0;owned\x07[red]", "鳥 $x$ =1+1", "a\nb\u202e"]


@pytest.fixture
def hostile(tmp_path, save_model, write):
    """A model whose classes have hostile names, and a file that has one."""
    model = save_model(tmp_path / "model", names=HOSTILE)
    return model, write(tmp_path / "\x1b[2Jimage\n.png", size=(8, 8))


class Terminal(io.TextIOWrapper):
    """Takes bytes, in an encoding of its own."""

    def __init__(self, encoding):
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)

    @property
    def shown(self):
        return self.buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("how", [[], ["--json"], ["--trajectory", "t.png"]], ids=["table", "json", "picture"])
def test_hostile_names_are_shown_safely_on_any_terminal(how, encoding, hostile, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model, image = hostile
    (tmp_path / "\x1b[2Jtorn\n.png").write_bytes(b"torn")
    screen, errors = Terminal(encoding), Terminal(encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", errors)
    assert main(["predict", str(model), str(image), "\x1b[2Jtorn\n.png", "--sampler.steps=1", *how]) == 2
    monkeypatch.undo()
    assert not set("\x1b\x07\u202e") & set(screen.shown + errors.shown)
    assert "torn\\n.png cannot be read" in errors.shown
    if "--json" in how:
        line, torn = map(json.loads, screen.shown.splitlines())
        assert torn.keys() == {"image", "error"}
        assert {named["name"] for named in line["classes"]} == set(HOSTILE)
    else:
        assert "[red]" in screen.shown
        assert ("鳥 $x$" if encoding == "utf-8" else "\\u9ce5 $x$") in screen.shown


def test_a_reader_that_is_gone_ends_a_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for arguments in (["--help"], ["--version"]):
            command = [sys.executable, "-m", "didicm.cli", *arguments]
            ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
            assert (ended.returncode, ended.stderr) == (141, "")
    finally:
        os.close(writer)


def test_the_next_command_can_be_pasted(make_folder, tmp_path, works, monkeypatch):
    folder = make_folder(tmp_path / "it's $HOME; [red]", count=10)
    monkeypatch.chdir(tmp_path)
    shown = works("doctor", folder).out
    (line,) = [line for line in shown.splitlines() if line.startswith("Ready to train: ")]
    command = line.removeprefix("Ready to train: ")
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True).stdout
    assert str(folder) in words.splitlines()
    assert Path("doctor.png").is_file()

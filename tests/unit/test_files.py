"""Files on disks that fill up, under processes that are killed, and beside files that are somebody else's."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import save_file

from didicm.errors import UserError
from didicm.files import SOFTWARE, check_replaceable, clear_leftovers, is_our_picture, write_files

KILLED = """
import os, signal, sys
from didicm.files import write_files
write_files(sys.argv[1], {"a": "new", "b": lambda path: os.kill(os.getpid(), signal.SIGKILL)})
"""


@contextmanager
def room_for(size):
    """No file may grow beyond so many bytes, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def draw(path):
    figure = Figure()
    figure.subplots().plot([1, 2])
    figure.savefig(path, format="png", metadata=SOFTWARE)


CONTENTS = {
    "text": "x" * 5000,
    "bytes": b"x" * 5000,
    "tensors": lambda path: save_file({"x": torch.zeros(5000)}, path),
    "image": lambda path: Image.effect_noise((99, 99), 9).save(path, "PNG"),
    "figure": draw,
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(kind, tmp_path):
    write_files(tmp_path, {"a": "old", "b": "old"})
    full = r"cannot be written \(.*File too large.*\): make room, then run the same command again"
    with room_for(1000), pytest.raises(UserError, match=full) as error:
        write_files(tmp_path, {"a": "new", "b": CONTENTS[kind]})
    assert "\n" not in str(error.value)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}
    write_files(tmp_path, {"a": "new", "b": CONTENTS[kind]})
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("place", ["file/x", "/sys/didicm"])
def test_a_place_that_cannot_be_written_to_is_one_sentence(place, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="give another place to write to"):
        write_files(tmp_path / place, {"a": "new"})


def test_every_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(sorted(os.listdir(tmp_path))))
    write_files(tmp_path, {"a": "text", "b": lambda path: path.write_text("more")})
    assert len(synced) >= 2
    assert not any(name in names for names in synced for name in ("a", "b"))


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    write_files(tmp_path, {"a": "old"})
    for tidy in (lambda: write_files(tmp_path, {"c": "new"}), lambda: clear_leftovers(tmp_path)):
        killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path])
        assert killed.returncode == -signal.SIGKILL
        assert len(list(tmp_path.glob(".saving-*"))) == 1
        tidy()
        assert not list(tmp_path.glob(".saving-*"))
        assert (tmp_path / "a").read_text() == "old"


def test_what_another_process_is_writing_is_not_taken_for_a_leftover(tmp_path):
    context = multiprocessing.get_context("fork")
    begun, finish = context.Event(), context.Event()

    def slowly(path):
        begun.set()
        assert finish.wait(1200)
        path.write_text("whole")

    process = context.Process(target=write_files, args=(tmp_path, {"slow": slowly}))
    process.start()
    assert begun.wait(1200)
    write_files(tmp_path, {"a": "new"})
    clear_leftovers(tmp_path)
    assert len(list(tmp_path.glob(".saving-*"))) == 1
    finish.set()
    process.join()
    assert (tmp_path / "slow").read_text() == "whole"
    assert not list(tmp_path.glob(".saving-*"))


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "a").symlink_to(tmp_path / "thesis.txt")
    write_files(tmp_path, {"a": "new"})
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()


def test_only_what_a_command_made_may_be_replaced(tmp_path):
    def check(name, force=False):
        check_replaceable(tmp_path / name, is_our_picture, "--examples", force=force)

    write_files(tmp_path, {"ours.png": draw})
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    (tmp_path / "thesis.txt").write_text("Software\0didicm")
    (tmp_path / "link.png").symlink_to(tmp_path / "ours.png")
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("new.png", "ours.png", "nowhere/new.png"):
        check(name)
    for name in ("photo.png", "thesis.txt", "link.png", "dangling.png", "pipe.png", "folder.png"):
        with pytest.raises(UserError, match=r"not made by this command: give another --examples, or .*--force"):
            check(name)
        check(name, force=True)

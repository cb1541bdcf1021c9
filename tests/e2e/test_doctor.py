import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from didicm.cli.__main__ import main as run_cli


@pytest.fixture
def folder(tmp_path):
    """Two classes of twelve training images and one validation image, in a folder named like rich markup."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 1)):
        for name in ("cat", "dog"):
            place = tmp_path / "[red]" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(place / f"{i}.png")
    return tmp_path / "[red]"


def test_doctor_names_what_is_wrong_and_draws_examples(folder, tmp_path, capsys):
    (folder / "train" / "cat" / "broken.jpg").write_bytes(b"not an image")
    shutil.copy(folder / "train" / "cat" / "3.png", folder / "val" / "cat" / "copy.png")
    shutil.copy(folder / "train" / "cat" / "4.png", folder / "train" / "dog" / "twin.png")
    picture = tmp_path / "examples.png"
    assert run_cli(["doctor", str(folder), "--examples", str(picture)]) == 1
    printed = capsys.readouterr().out
    for words in (
        "looking at 26 images of train\n",
        f"{folder}/train/cat/broken.jpg cannot be read",
        f"also in validation: {folder}/train/cat/3.png = {folder}/val/cat/copy.png",
        f"under two classes: {folder}/train/cat/4.png = {folder}/train/dog/twin.png",
        "1 unreadable training image",
        "Fix these first, then look again.",
        str(picture),
    ):
        assert words in printed
    assert Image.open(picture).width > 100


def test_doctor_reports_when_nothing_can_be_read(folder, tmp_path, capsys):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    assert run_cli(["doctor", str(folder), "--examples", str(tmp_path / "x.png")]) == 1
    printed = capsys.readouterr().out
    assert "... and 16 more like this" in printed
    assert "24 unreadable training images" in printed
    assert not (tmp_path / "x.png").exists()


def test_doctor_is_content_with_good_data(tmp_path, capsys):
    assert run_cli(["doctor", "fashion-mini", "--examples", str(tmp_path / "x.png")]) == 0
    printed = capsys.readouterr().out
    assert "Ready to train: didicm train --recipe small --data fashion-mini --out runs/mine\n" in printed
    assert "scales images down" not in printed
    assert (tmp_path / "x.png").exists()


def test_the_training_that_doctor_names_is_that_of_these_images(tmp_path, capsys, make_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "photos", ("benign", "malign"), count=20, size=(80, 90))
    asked = ["--group-by", r"(\d)\.png", "--recipe", "few"]
    assert run_cli(["doctor", "photos", *asked]) == 0
    printed = capsys.readouterr().out
    assert "recipe few scales images down to 32 pixels: --image.size 64 shows more" in printed
    command = printed.splitlines()[-1].removeprefix("Ready to train: ")
    words = shlex.split(command)
    assert words[:6] == ["didicm", "train", "--recipe", "few", "--data", "photos"]
    assert words[words.index("--group-by") + 1] == r"(\d)\.png"
    assert run_cli([*words[1:], "--epochs", "1"]) == 0  # a batch of 50 would be more than there are


def test_doctor_names_what_it_cannot_find(tmp_path, capsys):
    assert run_cli(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run_cli(["doctor", "fashion-mini", "--recipe", "smal"]) == 2
    assert "did you mean small" in capsys.readouterr().err

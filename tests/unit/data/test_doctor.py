import io
import shutil

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from didicm.data import STRONG, EvalTransform, TrainTransform
from didicm.data.doctor import examine, render
from tests.unit.data.making import make_folder, write


def quiet():
    return Console(file=io.StringIO())


def printed(findings):
    console = Console(file=io.StringIO(), width=300)
    for part in render(findings):
        console.print(part)
    return console.file.getvalue()


@pytest.fixture
def sick(tmp_path):
    root = tmp_path / "[data]"
    make_folder(root / "train", ["ant", "bee"], count=12)
    make_folder(root / "val", ["ant", "bee"], count=0)
    write(root / "train" / "cat" / "0.png", seed=77, size=(90, 10), mode="L")
    (root / "train" / "yak").mkdir()
    (root / "train" / "ant" / "bad.png").write_bytes(b"")
    (root / "val" / "ant").mkdir(parents=True)
    Image.open(root / "train" / "ant" / "3.png").save(root / "val" / "ant" / "copy.bmp")
    shutil.copy(root / "train" / "bee" / "1.png", root / "train" / "ant" / "same.png")
    write(root / "val" / "ant" / "new.png", seed=5000)
    return root


def test_everything_is_found(sick):
    findings = examine(str(sick), console=quiet())
    train = findings.train
    assert train.images == 27
    assert train.counts == {"ant": 14, "bee": 12, "cat": 1, "yak": 0}
    assert (train.empty, train.tiny, train.imbalance) == (["yak"], ["cat"], 14)
    assert len(train.unreadable) == 1
    assert "bad.png" in train.unreadable[0]
    assert train.modes == {"RGB": 25, "L": 1}
    assert (train.widths, train.heights) == ((32, 32, 90), (10, 24, 24))
    assert [(a.split("/")[-1], b.split("/")[-1]) for a, b in findings.leaks] == [("3.png", "copy.bmp")]
    ((a, b),) = findings.contradictions
    assert {a.split("/")[-1], b.split("/")[-1]} == {"same.png", "1.png"}
    text = printed(findings)
    for words in (
        "bad.png",
        "copy.bmp",
        "yak",
        "cat",
        "Mend this first: 1 training images cannot be read",
        "[data]",
    ):
        assert words in text


def test_healthy_data_is_ready():
    findings = examine("fashion-mini", channels=1, console=quiet())
    assert findings.problems == []
    assert findings.verdict == "Ready to train: didicm train --recipe small --data fashion-mini --out runs/mine"
    assert "Ready to train" in printed(findings)


def test_one_class_is_a_problem_not_a_crash(tmp_path):
    findings = examine(str(make_folder(tmp_path, ["only"])), console=quiet())
    assert "fewer than two classes" in findings.verdict
    assert any("no validation split" in line for line in findings.advice)


def test_examples_show_the_transforms(tmp_path):
    make_folder(tmp_path / "data")
    transform = TrainTransform(STRONG, EvalTransform(size=24))
    paths = [tmp_path / "new" / f"{name}.png" for name in "ab"]
    for path in paths:
        assert (
            examine(str(tmp_path / "data"), transform=transform, examples=path, console=quiet()).examples == path
        )
    sheet = np.asarray(Image.open(paths[0]))
    assert np.array_equal(sheet, np.asarray(Image.open(paths[1])))  # the same seed, the same picture
    cells = [sheet[24 + row * 168 :, 8 + column * 168 :][:160, :160] for row in range(3) for column in range(5)]
    assert len({cell.tobytes() for cell in cells}) == 15
    assert all(cell.std() > 1 for cell in cells)


def test_progress_is_a_line_without_a_terminal(tmp_path):
    console = quiet()
    examine(str(make_folder(tmp_path)), console=console)
    assert console.file.getvalue() == "looking at 12 images of train\n"

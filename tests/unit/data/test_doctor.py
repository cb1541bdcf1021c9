import shutil

import numpy as np
import pytest
from PIL import Image

from didicm.data import Augment, EvalTransform, TrainTransform, doctor, folder, open_data
from didicm.data.doctor import examine, save_examples
from didicm.errors import UserError


@pytest.fixture
def sick(tmp_path, write, make_folder):
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
    findings = examine(open_data(str(sick), strict=False))
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
    assert [problem.split(";")[0] for problem in findings.problems] == [
        "1 unreadable training image to repair or remove",
        "no training images of yak",
        "1 validation image duplicated in training",
    ]


def test_copies_within_a_class_are_told(tmp_path, make_folder):
    make_folder(tmp_path / "train", ["ant", "bee"], count=12)
    shutil.copy(tmp_path / "train" / "ant" / "0.png", tmp_path / "train" / "ant" / "zz.png")
    told = f"1 image is a copy of another of its class, such as {tmp_path}/train/ant/zz.png; delete copies"
    findings = examine(open_data(str(tmp_path)))
    assert f"{told}, or the same image may come into both training and validation" in findings.advice
    make_folder(tmp_path / "val", ["ant", "bee"], count=0)
    Image.open(tmp_path / "train" / "bee" / "1.png").save(tmp_path / "train" / "bee" / "same.bmp")
    for name in ("new.png", "zz.png"):
        (tmp_path / "val" / "ant").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 24), "red").save(tmp_path / "val" / "ant" / name)
    findings = examine(open_data(str(tmp_path), strict=False))
    names = [(a.split("/")[-1], b.split("/")[-1]) for a, b in findings.copies]
    assert names == [("0.png", "zz.png"), ("1.png", "same.bmp"), ("new.png", "zz.png")]
    told = f"3 images are copies of others of their class, such as {tmp_path}/train/ant/zz.png; delete copies"
    assert told in findings.advice


def test_classes_that_differ_in_case_or_spaces_are_told(tmp_path, make_folder):
    findings = examine(open_data(str(make_folder(tmp_path, ["Ant ", "ant", "bee"]))))
    told = "the classes 'Ant ', 'ant' differ only in case or spaces; if they are one, rename them"
    assert [line for line in findings.advice if "differ" in line] == [told]


def test_healthy_data_is_ready():
    findings = examine(open_data("fashion-mini", channels=1))
    assert findings.problems == []


def test_one_class_is_a_problem_not_a_crash(tmp_path, make_folder):
    findings = examine(open_data(str(make_folder(tmp_path, ["only"])), strict=False))
    assert "fewer than two classes" in findings.problems[0]
    assert any("no validation split" in line for line in findings.advice)


def test_progress_passes_through_every_split(sick):
    seen = []

    def track(looks, split, count):
        for look in looks:
            seen.append(split)
            yield look
        assert seen.count(split) == count

    examine(open_data(str(sick), strict=False), track)
    assert (seen.count("train"), seen.count("val")) == (27, 2)


def test_examples_show_the_transforms(tmp_path, make_folder):
    make_folder(tmp_path / "data", count=3)
    (tmp_path / "data" / "dog" / "bad.png").write_bytes(b"")
    images = open_data(str(tmp_path / "data")).train
    strong = Augment(scale=(0.08, 1.0), hflip=0.5, auto_augment="rand-m7-mstd0.5-inc1")
    transform = TrainTransform(strong, EvalTransform(size=24))
    sheets = []
    for seed in (0, 0, 1):
        save_examples(images, transform, tmp_path / "new" / "examples.png", seed)
        sheets.append(np.asarray(Image.open(tmp_path / "new" / "examples.png")))
    assert np.array_equal(sheets[0], sheets[1])  # the same seed, the same picture
    assert not np.array_equal(sheets[0], sheets[2])
    cells = [
        sheets[0][24 + row * 168 :, 8 + column * 168 :][:160, :160] for row in range(3) for column in range(5)
    ]
    assert len({cell.tobytes() for cell in cells}) == 15
    assert all(cell.std() > 1 for cell in cells)
    with pytest.raises(UserError, match="cannot be written"):
        save_examples(images, transform, tmp_path / "new" / "examples.png" / "x.png")


def test_what_splits_lack_and_share_is_told(tmp_path, make_folder, monkeypatch):
    for module in (doctor, folder):  # as where pillow-heif is not installed
        monkeypatch.setattr(module, "EXTENSIONS", folder.EXTENSIONS - {".heic", ".heif"})
    make_folder(tmp_path / "train", ["ant", "bee"], count=2)
    make_folder(tmp_path / "val", ["ant"], count=30)
    (tmp_path / "train" / "IMG_1.HEIC").write_bytes(b"")
    (tmp_path / "train" / "notes.txt").write_text("not an image")
    findings = examine(open_data(str(tmp_path), group_by=r"(\d)\.png", strict=False))
    assert findings.shared_groups == ["0", "1"]
    assert "training and validation share the groups 0, 1; keep each on one side" in findings.problems
    assert "no validation images of bee; nothing is measured there" in findings.advice
    assert "the largest class has 16 times the images of the smallest" in findings.advice  # 32 of both splits to 2
    told = [line for line in findings.advice if ".heic" in line.lower()]
    assert len(told) == 1
    assert "1 .heic file not read, such as" in told[0]
    assert "pip install pillow-heif" in told[0]
    assert not any("notes.txt" in line for line in findings.advice)
    lines = findings.problems + findings.advice
    assert len(lines) == len(set(lines))


def test_what_is_hidden_is_neither_read_nor_told(tmp_path):
    for place in ("ant/0.npy", "bee/0.npy", "bee/.thumb.jpg", "bee/.old/1.psd"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "x", np.zeros((8, 8), np.uint8))
        (tmp_path / "x.npy").rename(tmp_path / place)
    for uri in (str(tmp_path), f"folder://{tmp_path}"):
        findings = examine(open_data(uri))
        assert (findings.train.images, findings.unused) == (2, {})


def test_values_that_are_lost_in_8_bits_are_told(tmp_path):
    rng = np.random.default_rng(0)
    for largest, told in ((4095, True), (65535, False)):  # 12 bits in files of 16, as scanners write them
        for name in ("ant", "bee"):
            place = tmp_path / str(largest) / name
            place.mkdir(parents=True)
            Image.fromarray(rng.integers(0, largest + 1, (9, 9)).astype(np.uint16)).save(place / "0.png")
        findings = examine(open_data(str(tmp_path / str(largest))))
        line = "no training image has a value above 16 of 255"
        assert any(note.startswith(line) for note in findings.advice) == told


def test_telephone_pictures_are_read_where_pillow_heif_is(tmp_path, make_folder, picture):
    heif = pytest.importorskip("pillow_heif")
    make_folder(tmp_path, ["ant", "bee"], count=1)
    heif.from_pillow(picture(5)).save(tmp_path / "ant" / "IMG_1.HEIC", quality=-1)
    data = open_data(str(tmp_path))
    findings = examine(data)
    assert (findings.train.images, findings.train.unreadable, findings.unused) == (3, [], {})

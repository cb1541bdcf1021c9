import io
import json
import tarfile

import numpy as np
import pytest

from didicm.data import DataError, UnreadableImageError, open_data


def write_shard(path, samples):
    """Samples are (key, {extension: bytes})."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def sample(png_bytes):
    def make(i, label):
        return f"a.b/{i:05d}", {"png": png_bytes(i), "cls": str(label).encode()}

    return make


@pytest.fixture
def shards(tmp_path, sample):
    for s in range(3):
        write_shard(tmp_path / f"train-{s:03d}.tar", [sample(10 * s + i, (s + i) % 2) for i in range(4)])
    return tmp_path


@pytest.mark.parametrize("pattern", ["train-{000..002}.tar", "train-*.tar", "", "train-{000,001,002}.tar"])
def test_patterns(shards, pattern, picture):
    data = open_data(f"wds://{shards / pattern}")
    assert data.train.labels.tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1]
    assert data.class_names == ["0", "1"]
    assert np.array_equal(np.asarray(data.train.load(6)), np.asarray(picture(12)))
    assert data.train.name(6) == f"{shards / 'train-001.tar'}:a.b/00012.png"


def test_validation_shards_and_class_names(shards, sample):
    write_shard(shards / "val-000.tar", [sample(i, 1) for i in range(3)])
    (shards / "classes.txt").write_text("ant\nbee\n")
    data = open_data(f"wds://{shards}")
    assert data.class_names == ["ant", "bee"]
    assert (len(data.train), data.val.labels.tolist()) == (12, [1, 1, 1])


def test_class_names_in_another_encoding_are_one_sentence(shards):
    (shards / "classes.txt").write_bytes("ant\nabeille à miel\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"classes.txt cannot be read .*; save it in UTF-8"):
        open_data(f"wds://{shards}")


def test_the_first_validation_split_is_used_alone(shards, sample):
    write_shard(shards / "test-000.tar", [sample(i, 0) for i in range(5)])
    write_shard(shards / "val" / "000.tar", [sample(i, 1) for i in range(2)])
    assert open_data(f"wds://{shards}").val.labels.tolist() == [1, 1]


def test_json_labels_and_timm_info(tmp_path, png_bytes):
    rows = [(f"{i}", {"json": json.dumps({"label": i % 3}).encode(), "jpg": png_bytes(i)}) for i in range(6)]
    write_shard(tmp_path / "train" / "0.tar", rows)
    write_shard(tmp_path / "validation" / "0.tar", rows[:3])
    (tmp_path / "_info.json").write_text(json.dumps({"class_names": ["x", "y", "z"]}))
    data = open_data(f"wds://{tmp_path}")
    assert data.class_names == ["x", "y", "z"]
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(data.val) == 3


def test_labels_may_be_names(tmp_path, sample):
    write_shard(tmp_path / "0.tar", [sample(0, "dog"), sample(1, "cat")])
    data = open_data(f"wds://{tmp_path}/0.tar")
    assert (data.class_names, data.train.labels.tolist()) == (["cat", "dog"], [1, 0])
    (tmp_path / "classes.txt").write_text("dog\nyak\ncat\n")
    data = open_data(f"wds://{tmp_path}/0.tar")
    assert (data.class_names, data.train.labels.tolist()) == (["dog", "yak", "cat"], [0, 2])


def test_broken_member_is_named(tmp_path, sample):
    write_shard(tmp_path / "0.tar", [sample(0, 0), ("bad", {"png": b"", "cls": b"1"})])
    images = open_data(f"wds://{tmp_path}/0.tar").train
    with pytest.raises(UnreadableImageError, match=r"0\.tar:bad\.png"):
        images.load(1)


def test_refusals(shards):
    def refused(pattern, words):
        with pytest.raises(DataError, match=words) as caught:
            open_data(f"wds://{shards}/{pattern}")
        assert "\n" not in str(caught.value)

    refused("no-*.tar", "matches no files")
    refused("train-{000..009}.tar", "train-003.tar of .* does not exist")
    (shards / "x.tar").write_text("no tar")
    refused("x.tar", "cannot be read as an uncompressed tar")
    write_shard(shards / "y.tar", [("0", {"png": b"1"})])
    refused("y.tar", "no label|no .cls")
    write_shard(shards / "z.tar", [("0", {"txt": b"1"})])
    refused("z.tar", "no samples")
    (shards / "classes.txt").write_text("only\n")
    refused("train-*.tar", "has the class '1'")

import numpy as np
import pytest

from didicm.data import ArraySet, Data, DataError, find_transform, open_data

FIND = {"size": None, "limit": 224, "channels": None, "crop_pct": 0.875, "interpolation": "bicubic"}


@pytest.mark.parametrize("slashes", ["", "//"])
def test_slashes_may_be_left_out(tmp_path, make_folder, slashes):
    make_folder(tmp_path, count=1)
    for scheme in ("folder", "timm"):
        assert len(open_data(f"{scheme}:{slashes}{tmp_path}").train) == 2
    for scheme in ("hf", "wds"):
        with pytest.raises(DataError, match=f"{scheme}://{tmp_path} holds no"):
            open_data(f"{scheme}:{slashes}{tmp_path}")


def test_a_scheme_takes_relative_paths(tmp_path, make_folder, monkeypatch):
    make_folder(tmp_path / "some" / "images", count=1)
    monkeypatch.chdir(tmp_path)
    assert len(open_data("timm://some/images").train) == 2


def test_channels_change_in_both_splits_without_a_second_scan(tmp_path, make_folder):
    make_folder(tmp_path / "train", ["a", "b"], count=2)
    make_folder(tmp_path / "val", ["b"], count=2)
    data = open_data(str(tmp_path))
    for folder in (tmp_path / "train" / "c", tmp_path / "val" / "c"):
        folder.mkdir()
    grey = data.with_channels(1)
    assert grey.class_names == ["a", "b"]
    assert (grey.train.load(0).mode, grey.val.load(0).mode) == ("L", "L")
    assert (data.train.load(0).mode, data.val.load(0).mode) == ("RGB", "RGB")
    assert grey.train.labels is data.train.labels


def test_size_and_colour_are_found_from_the_images(tmp_path, make_folder, write):
    make_folder(tmp_path)  # 32 x 24
    data = open_data(str(tmp_path))
    found = find_transform(data, **FIND)
    assert (found.size, found.channels, found.crop_pct) == (24, 3, 0.875)
    assert find_transform(data, **{**FIND, "limit": 16}).size == 16
    assert find_transform(data, **{**FIND, "size": 8, "channels": 1}).channels == 1
    for i in range(3):
        write(tmp_path / "cat" / f"{i}.png", mode="L")
        (tmp_path / "dog" / f"{i}.png").write_bytes(b"")
    for i in range(3, 6):
        write(tmp_path / "cat" / f"{i}.png", mode="L", size=(100, 90))
        write(tmp_path / "dog" / f"{i}.png", mode="L", size=(90, 100))
    found = find_transform(data, **FIND)
    assert (found.size, found.channels) == (90, 1)  # the median of what can be read


def test_nothing_readable_is_told():
    class Damaged(ArraySet):
        def original(self, i):
            raise OSError("damaged")

    images = Damaged(np.zeros((3, 2, 2), dtype=np.uint8), np.arange(3), ["a", "b", "c"])
    with pytest.raises(DataError, match="none of the 3 images tried can be read; run didicm doctor here"):
        find_transform(Data("here", images, None), **FIND)

import pickle
import tarfile

import numpy as np
import pytest

from didicm.data import DataError, open_data


def test_timm_folder_with_splits(tmp_path, picture, make_folder):
    make_folder(tmp_path / "train", count=3)
    make_folder(tmp_path / "val", ["dog"], count=2)
    data = open_data(f"timm://{tmp_path}")
    assert data.class_names == ["cat", "dog"]
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.val.labels.tolist() == [1, 1]
    assert np.array_equal(np.asarray(data.train.load(4)), np.asarray(picture(1001)))
    assert data.train.name(4).endswith("dog/1.png")


def test_timm_tar_file(tmp_path, make_folder):
    make_folder(tmp_path / "images", count=3)
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(tmp_path / "images", "images")
    data = open_data(f"timm://{tmp_path / 'images.tar'}")
    assert data.class_names == ["cat", "dog"]
    assert data.val is None
    images = pickle.loads(pickle.dumps(data.train))
    first = int(np.flatnonzero(images.labels == 1)[0])
    assert np.asarray(images.load(first)).shape == (24, 32, 3)


def test_torchvision_through_timm(tmp_path, make_folder):
    make_folder(tmp_path / "train", count=2)
    make_folder(tmp_path / "validation", count=1)
    data = open_data(f"timm://torch/image_folder:{tmp_path}", channels=1)
    assert (len(data.train), len(data.val)) == (4, 2)
    assert data.class_names == ["cat", "dog"]
    assert data.train.load(0).mode == "L"


@pytest.mark.parametrize("name", ["torch/nonsense", "torch/cifar10:/nowhere", "", "/nowhere/at/all"])
def test_refusals(name):
    with pytest.raises(DataError, match="timm://"):
        open_data(f"timm://{name}")

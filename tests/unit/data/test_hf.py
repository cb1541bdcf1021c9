import pickle
import sys

import numpy as np
import pytest

from didicm.data import DataError, UnreadableImageError, open_data

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def table(png_bytes):
    def make(count, first=0):
        label = datasets.ClassLabel(names=["ant", "bee"])
        rows = {
            "image": [{"bytes": png_bytes(first + i), "path": None} for i in range(count)],
            "label": [i % 2 for i in range(count)],
        }
        return datasets.Dataset.from_dict(
            rows, features=datasets.Features({"image": datasets.Image(), "label": label})
        )

    return make


def test_folder_with_train_and_test(tmp_path, picture, table):
    table(6).to_parquet(tmp_path / "train.parquet")
    table(4, first=100).to_parquet(tmp_path / "test.parquet")
    data = open_data(f"hf://{tmp_path}")
    assert (len(data.train), len(data.val)) == (6, 4)
    assert data.class_names == ["ant", "bee"]
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert np.array_equal(np.asarray(data.val.load(2)), np.asarray(picture(102)))
    again = pickle.loads(pickle.dumps(data.train))
    assert np.array_equal(np.asarray(again.load(5)), np.asarray(picture(5)))


def test_shards_of_a_split_as_the_hub_writes_them(tmp_path, table):
    (tmp_path / "data").mkdir()
    for i in range(2):
        table(3, first=10 * i).to_parquet(tmp_path / "data" / f"train-0000{i}-of-00002.parquet")
    table(2).to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")
    data = open_data(f"hf://{tmp_path}")
    assert (len(data.train), len(data.val)) == (6, 2)


def test_one_file_and_a_saved_set(tmp_path, table):
    table(4).to_parquet(tmp_path / "anything.parquet")
    assert len(open_data(f"hf://{tmp_path / 'anything.parquet'}").train) == 4
    table(4).save_to_disk(tmp_path / "saved")
    data = open_data(f"hf://{tmp_path / 'saved'}", channels=1)
    assert data.train.load(0).mode == "L"


@pytest.mark.parametrize(
    ("labels", "names"), [(["dog", "cat", "dog"], ["cat", "dog"]), ([10, 2, 10], ["2", "10"])]
)
def test_plain_columns_without_class_names(tmp_path, labels, names, picture, png_bytes):
    import pyarrow
    import pyarrow.parquet

    cells = [{"bytes": png_bytes(i), "path": None} for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells, "label": labels}), tmp_path / "train.parquet")
    data = open_data(f"hf://{tmp_path}")
    assert data.class_names == names
    assert data.train.labels.tolist() == [1, 0, 1]
    assert np.array_equal(np.asarray(data.train.load(1)), np.asarray(picture(1)))


def test_broken_cell_is_named(tmp_path, table):
    rows = table(2).cast_column("image", datasets.Image(decode=False))
    features = rows.features
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": b"junk", "path": None}, None], "label": [0, 1]}, features=features
    )
    rows.to_parquet(tmp_path / "train.parquet")
    images = open_data(f"hf://{tmp_path}").train
    for i in (0, 1):
        with pytest.raises(UnreadableImageError, match=rf"train\[{i}\]"):
            images.load(i)


def test_refusals(tmp_path, table):
    for uri, words in [
        (f"hf://{tmp_path}/none.parquet", "does not exist"),
        (f"hf://{tmp_path}", "holds no parquet files"),
    ]:
        with pytest.raises(DataError, match=words):
            open_data(uri)
    (tmp_path / "train.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        open_data(f"hf://{tmp_path}")
    table(2).rename_column("label", "klass").cast_column("klass", datasets.Value("int64")).to_parquet(
        tmp_path / "train.parquet"
    )
    with pytest.raises(DataError, match="no column 'label', only image, klass"):
        open_data(f"hf://{tmp_path}")


def test_images_without_labels_are_refused(tmp_path, table):
    rows = table(2)
    features = rows.features
    datasets.Dataset.from_dict({"image": rows["image"][:], "label": [-1, -1]}, features=features).to_parquet(
        tmp_path / "train.parquet"
    )
    with pytest.raises(DataError, match="without a label"):
        open_data(f"hf://{tmp_path}")


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        open_data("hf://cifar10")


def test_columns_of_labels_and_groups_by_name(tmp_path, table):
    rows = table(6).add_column("fine_label", list("abcabc")).add_column("site", list("xxyyzz"))
    rows.to_parquet(tmp_path / "train.parquet")
    uri = f"hf://{tmp_path / 'train.parquet'}"
    data = open_data(f"{uri}?label=fine_label", group_by="site")
    assert data.class_names == ["a", "b", "c"]
    assert data.train.groups.tolist() == list("xxyyzz")
    assert open_data(uri).class_names == ["ant", "bee"]
    with pytest.raises(DataError, match="has no column 'fine_labels': did you mean fine_label"):
        open_data(f"{uri}?label=fine_labels")
    with pytest.raises(DataError, match="must be label=COLUMN"):
        open_data(f"{uri}?split=test")

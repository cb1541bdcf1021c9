"""Tables of labels, votes, splits and groups beside a folder of images."""

import numpy as np
import pytest
import torch

from didicm.data import (
    Augment,
    DataError,
    EvalTransform,
    TrainTransform,
    hold_out,
    make_loader,
    open_data,
    relabel,
)
from didicm.data.sources import describe_votes

ROWS = ["a.png,cat", "sub/b.png,dog", "c.png,cat", "d.png,dog"]
SPLIT = ["train", "train", "test", "test"]


def beside(*columns):
    """The rows with more columns."""
    return [",".join(cells) for cells in zip(ROWS, *columns, strict=True)]


@pytest.fixture
def folder(tmp_path, write):
    """Images without class folders."""
    for seed, name in enumerate(("a.png", "sub/b.png", "c.png", "d.png")):
        write(tmp_path / "images" / name, seed=seed, size=(8, 8))
    return tmp_path / "images"


@pytest.fixture
def table(tmp_path):
    """Write lines as a table, with a mark of the byte order as some programs do."""

    def make(*lines, name="labels.csv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_labels_of_a_folder_without_class_folders(folder, table, picture, delimiter):
    file = table(*(line.replace(",", delimiter) for line in ["path,label", *ROWS]))
    data = open_data(str(folder), labels=file)
    assert data.class_names == ["cat", "dog"]
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.val is None
    assert data.train.targets is None
    assert np.array_equal(np.asarray(data.train.load(1)), np.asarray(picture(1, (8, 8))))
    assert data.train.name(1) == str(folder / "sub/b.png")


def test_splits_and_groups_of_a_table(folder, table):
    data = open_data(str(folder), labels=table("path,label,split,group", *beside(SPLIT, "xyzz")))
    assert [len(data.train), len(data.val)] == [2, 2]
    assert data.train.groups.tolist() == ["x", "y"]
    assert data.val.groups.tolist() == ["z", "z"]


def test_parquet_says_the_same(folder, table, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"path": ["a.png", "sub/b.png", "c.png"], "cat": [1, 0, 2], "dog": [3, 1, 2]}
    parquet.write_table(arrow.table(columns), tmp_path / "labels.parquet")
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    expected = open_data(str(folder), labels=table("path,cat,dog", *rows)).train
    found = open_data(str(folder), labels=str(tmp_path / "labels.parquet")).train
    assert np.array_equal(found.targets, expected.targets)
    assert np.array_equal(found.labels, expected.labels)


def test_votes_are_targets_and_their_majority_the_label(folder, table):
    file = table("path,dog,cat,fox", "a.png,1,3,0", "sub/b.png,2,2,0", "c.png,0,0.5,1.5", "d.png,4,0,0")
    images = open_data(str(folder), labels=file).train
    assert images.class_names == ["dog", "cat", "fox"]
    assert images.labels.tolist() == [1, 0, 2, 0]  # of a tie, the first
    expected = np.array([[0.25, 0.75, 0], [0.5, 0.5, 0], [0, 0.25, 0.75], [1, 0, 0]])
    assert np.allclose(images.targets, expected)
    turned = relabel(images.select(np.array([2, 0])), ["cat", "fox", "emu", "dog"])
    assert np.allclose(turned.targets, [[0.25, 0.75, 0, 0], [0.75, 0, 0, 0.25]])


def test_training_sees_the_votes_and_evaluation_the_majority(folder, table):
    file = table("path,dog,cat", "a.png,1,3", "sub/b.png,2,2", "c.png,0,5", "d.png,4,0")
    images = open_data(str(folder), labels=file).train
    transform = EvalTransform(8, 3, crop_pct=1.0)
    trained = make_loader(images, TrainTransform(Augment(), transform), 4, train=True, seed=0)
    [(_, target)] = trained
    assert torch.equal(target, torch.from_numpy(images.targets)[trained.index])
    [(_, label)] = make_loader(images, transform, 4, train=False, seed=0)
    assert label.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["a.png,cat", "c.png,dog"], "has no column 'path', only 'a.png', 'cat'; its first line names"),
        (["path,label"], "has no rows below its header"),
        (["path,label", "a.png,cat", "nowhere.png,dog"], "names nowhere.png, which is not in"),
        (["path,label", "a.png,cat", "./a.png,dog"], "names ./a.png twice"),
        (["path,label", "a.png,cat", "c.png,"], "has no label for c.png"),
        (["path,label", "a.png,cat", "c.png"], "line 3 of .* has 1 cells, but the first line names 2 columns"),
        (["path,label,label", "a.png,cat,dog"], "has two columns 'label'"),
        (["path", "a.png"], "has no column 'label' and no columns of votes"),
        (["path,cat,dog", "a.png,1,2", "c.png,-1,2"], "has '-1' for the votes .* for 'cat' on c.png"),
        (["path,cat,age", "a.png,1,old"], "'old' for the votes .* for 'age' on a.png; .* give it as --group-by"),
        (["path,cat,dog", "a.png,0,0"], "has no votes at all for a.png"),
        (["path,label,split", "a.png,cat,later"], "has the split 'later' for a.png; use train, val or test"),
        (["path,label,split", "a.png,cat,val"], "has no row whose split is train"),
        (["path,label,split", "a.png,cat,train", "c.png,dog,val"], "no training images of class dog"),
        (["path,label", "a.png,cat", "c.png,cat"], "has a single class"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(folder, table, lines, told):
    with pytest.raises(DataError, match=told) as caught:
        open_data(str(folder), labels=table(*lines))
    assert "\n" not in str(caught.value)


def test_a_table_that_is_missing_damaged_or_of_another_source(folder, table, tmp_path):
    with pytest.raises(DataError, match=r"nothing\.csv does not exist"):
        open_data(str(folder), labels=str(tmp_path / "nothing.csv"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read as parquet"):
        open_data(str(folder), labels=str(tmp_path / "broken.parquet"))
    with pytest.raises(DataError, match="fashion-mini has its own labels"):
        open_data("fashion-mini", labels=table("path,label", *ROWS))
    with pytest.raises(DataError, match="is not a folder"):
        open_data(str(tmp_path / "images" / "a.png"), labels=table("path,label", *ROWS))


def test_groups_by_column_and_by_expression(folder, table):
    file = table("path,label,who", *beside("abab"))
    assert open_data(str(folder), labels=file, group_by="who").train.groups.tolist() == list("abab")
    found = open_data(str(folder), labels=file, group_by=r"([a-z])\.png$").train.groups
    assert found.tolist() == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match=r"'scanner' is not a column here, .* does not match .*a.png"):
        open_data(str(folder), labels=file, group_by="scanner")
    with pytest.raises(DataError, match="neither a column nor a regular expression"):
        open_data(str(folder), labels=file, group_by="(")


def test_a_column_of_groups_is_no_column_of_votes(folder, table):
    file = table("path,cat,dog,who", "a.png,1,2,7", "c.png,3,0,8")
    images = open_data(str(folder), labels=file, group_by="who").train
    assert images.class_names == ["cat", "dog"]
    assert images.groups.tolist() == ["7", "8"]


def test_columns_that_are_taken_as_classes_are_told(folder, table):
    file = table("path,cat,split,year", "a.png,1,train,2019", "c.png,3,train,2019")
    assert describe_votes(str(folder), file, None) == [f"classes from the columns of {file}: cat, year"]
    assert describe_votes(str(folder), file, "year") == [f"classes from the columns of {file}: cat"]
    assert describe_votes(str(folder), table("path,label,year", "a.png,cat,2019"), None) == []
    assert describe_votes(str(folder), None, None) == []


def test_own_splits_must_not_share_a_group(folder, table):
    file = table("path,label,split,group", *beside(SPLIT, "xyyz"))
    with pytest.raises(DataError, match=r"1 groups of .*, such as 'y', are in training and validation"):
        open_data(str(folder), labels=file)
    assert open_data(str(folder), labels=file, strict=False).val.groups.tolist() == ["y", "z"]


def test_what_is_held_out_are_whole_groups(folder, table):
    file = table("path,label,group", *beside("xxyy"))
    data = hold_out(open_data(str(folder), labels=file), 0.5, seed=0)
    assert len(set(data.train.groups)) == len(set(data.val.groups)) == 1
    one = table("path,label,group", *beside("xxxx"))
    with pytest.raises(DataError, match="no group can be held out"):
        hold_out(open_data(str(folder), labels=one), 0.5, seed=0)


def test_a_table_may_lie_in_the_folder_and_be_named_from_there(folder, table):
    table("path,label", *ROWS, name="images/labels.csv")
    train = open_data(str(folder), labels="labels.csv").train
    assert train.labels.tolist() == [0, 1, 0, 1]

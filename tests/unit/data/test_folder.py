import os
import pickle
import time
import unicodedata

import numpy as np
import pytest
from PIL import Image

from didicm.data import DataError, UnreadableImageError, folder, hold_out, open_data


def refused(uri, *words):
    with pytest.raises(DataError) as caught:
        open_data(str(uri))
    message = str(caught.value)
    assert "\n" not in message
    for word in (*words, ";"):  # every refusal names the remedy after a semicolon
        assert word in message


def test_class_subfolders(tmp_path, make_folder):
    data = open_data(str(make_folder(tmp_path, ["b", "a10", "a2"], count=3)))
    assert data.class_names == ["a2", "a10", "b"]
    assert data.train.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert data.train.labels.dtype == np.int64
    assert data.val is None
    assert data.train.name(0) == str(tmp_path / "a2" / "0.png")
    assert data.train.load(0).size == (32, 24)


def test_one_channel(tmp_path, make_folder):
    assert open_data(str(make_folder(tmp_path)), channels=1).train.load(0).mode == "L"


@pytest.mark.parametrize("name", ["val", "valid", "validation", "eval", "evaluation", "test"])
@pytest.mark.parametrize("prefix", ["", "folder:"])
def test_train_and_validation_folders(tmp_path, name, prefix, make_folder):
    make_folder(tmp_path / "train", count=3)
    make_folder(tmp_path / name, count=2)
    data = open_data(prefix + str(tmp_path))
    assert (len(data.train), len(data.val)) == (6, 4)


def test_validation_goes_before_test(tmp_path, make_folder):
    for name, count in (("train", 4), ("validation", 3), ("test", 2)):
        make_folder(tmp_path / name, count=count)
    assert len(open_data(str(tmp_path)).val) == 6


def test_a_class_may_be_called_train(tmp_path, make_folder):
    data = open_data(str(make_folder(tmp_path, ["train", "bus", "test"])))
    assert data.class_names == ["bus", "test", "train"]
    assert data.val is None


def test_validation_may_lack_a_class_but_not_add_one(tmp_path, write, make_folder):
    make_folder(tmp_path / "train", ["ant", "bee", "cat"])
    make_folder(tmp_path / "val", ["cat", "bee"], count=1)
    data = open_data(str(tmp_path))
    assert [data.class_names[k] for k in data.val.labels] == ["bee", "cat"]
    write(tmp_path / "val" / "yak" / "0.png")
    refused(tmp_path, "validation split", "'yak'")


def test_nested_hidden_and_other_files(tmp_path, write, make_folder):
    make_folder(tmp_path, count=1)
    write(tmp_path / "cat" / "more" / "deep.JPG")
    write(tmp_path / "cat" / ".hidden.png")
    write(tmp_path / ".cache" / "x.png")
    write(tmp_path / "stray.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "folder.jpg").mkdir()
    data = open_data(str(tmp_path))
    assert [os.path.basename(data.train.name(i)) for i in range(len(data.train))] == ["0.png", "deep.JPG", "0.png"]


def test_symbolic_links_also_in_circles(tmp_path, write, make_folder):
    make_folder(tmp_path / "real", count=2)
    root = tmp_path / "data"
    root.mkdir()
    (root / "cat").symlink_to(tmp_path / "real" / "cat")
    write(root / "dog" / "0.png")
    (root / "dog" / "link.png").symlink_to(tmp_path / "real" / "dog" / "1.png")
    (root / "dog" / "round").symlink_to(root / "dog")
    assert open_data(str(root)).train.labels.tolist() == [0, 0, 1, 1]


def test_names_that_are_not_ascii(tmp_path, write):
    composed, decomposed = (unicodedata.normalize(form, "Äpfel 日本") for form in ("NFC", "NFD"))
    write(tmp_path / "train" / composed / "ö.png")
    write(tmp_path / "train" / "x" / "1.png")
    write(tmp_path / "val" / decomposed / "ö.png")  # as a Mac writes it
    data = open_data(str(tmp_path))
    assert data.class_names == ["x", composed]
    assert data.val.labels.tolist() == [1]
    assert data.train.load(1).size == (32, 24)


def test_a_name_that_is_not_even_utf8(tmp_path, make_folder):
    make_folder(tmp_path, count=1)
    odd = os.fsencode(str(tmp_path / "cat")) + b"/z\xff.png"
    os.rename(os.fsencode(str(tmp_path / "cat" / "0.png")), odd)
    data = open_data(str(tmp_path))
    data.train.load(0)
    data.train.name(0).encode("utf-8")


def test_zero_bytes_truncated_and_false_files_are_named(tmp_path, write, make_folder):
    make_folder(tmp_path, count=1)
    (tmp_path / "cat" / "1.png").write_bytes(b"")
    (tmp_path / "cat" / "2.jpg").write_text("<html>404</html>")
    whole = write(tmp_path / "cat" / "3.jpg", size=(200, 200)).read_bytes()
    (tmp_path / "cat" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / "4.png").symlink_to(tmp_path / "gone.png")
    images = open_data(str(tmp_path)).train
    images.load(0)
    for i in (1, 2, 3, 4):
        with pytest.raises(UnreadableImageError, match=str(tmp_path / "cat" / str(i))):
            images.load(i)


def test_missing_path(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    refused("", "does not exist")


def test_file_instead_of_folder(tmp_path, write):
    refused(write(tmp_path / "a.png"), "is a file")
    (tmp_path / "b.parquet").touch()
    refused(tmp_path / "b.parquet", "write hf://")


def test_empty_folder(tmp_path):
    refused(tmp_path, str(tmp_path), "is empty")


def test_images_without_class_folders(tmp_path, write):
    write(tmp_path / "a.png")
    refused(tmp_path, "one subfolder per class, or give a table of their labels with --labels TABLE")


def test_folders_without_images(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    refused(tmp_path, "hold no images; put the images of each class")
    (tmp_path / "cat" / "scan.dcm").write_bytes(b"\0" * 128 + b"DICM")
    refused(tmp_path, "hold no images of a type that is read", "scan.dcm", "save them as PNG")


def test_one_class(tmp_path, make_folder):
    refused(make_folder(tmp_path, ["only"]), "single class", "only")


def test_one_empty_class(tmp_path, make_folder):
    make_folder(tmp_path)
    (tmp_path / "yak").mkdir()
    refused(tmp_path, "no training images of class yak")
    assert open_data(str(tmp_path), strict=False).class_names == ["cat", "dog", "yak"]


def test_only_a_validation_folder(tmp_path, make_folder):
    make_folder(tmp_path / "val")
    refused(tmp_path, "no train folder", str(tmp_path / "val"))


def test_wrong_channels(tmp_path, make_folder):
    with pytest.raises(DataError, match="channels must be 1"):
        open_data(str(make_folder(tmp_path)), channels=33)


def test_hold_out_cuts_only_when_needed(tmp_path, make_folder):
    data = open_data(str(make_folder(tmp_path, count=10)))
    cut = hold_out(data, 0.2, seed=0)
    names = {cut.train.name(i) for i in range(len(cut.train))}, {cut.val.name(i) for i in range(len(cut.val))}
    assert [len(n) for n in names] == [16, 4]
    assert not names[0] & names[1]
    assert np.bincount(cut.val.labels).tolist() == [2, 2]
    assert hold_out(cut, 0.5, seed=1) is cut
    with pytest.raises(DataError, match="single image"):
        hold_out(open_data(str(make_folder(tmp_path / "few", count=1))), 0.5, seed=0)


def test_pickles_for_workers(tmp_path, make_folder):
    images = pickle.loads(pickle.dumps(open_data(str(make_folder(tmp_path))).train))
    assert isinstance(images.load(0), Image.Image)


def test_fashion_mini_ships_with_its_licence():
    data = open_data("fashion-mini", channels=1)
    assert (len(data.train), len(data.val), len(data.class_names)) == (2000, 1000, 10)
    assert np.bincount(data.train.labels).tolist() == [200] * 10
    assert data.train.load(7).size == (28, 28)
    assert data.val.name(3) == "fashion-mini/test[3]"
    import didicm.data.sources as sources

    assert "Zalando SE" in sources.FASHION_MINI.with_suffix(".LICENSE").read_text()


def settle():
    time.sleep(0.2)


def forget():
    """As another process would start."""
    folder._listings.clear()


def test_a_folder_is_listed_once_and_again_when_it_changes(tmp_path, make_folder, write, scans):
    root, kept = make_folder(tmp_path / "data"), tmp_path / "kept"
    (root / "dog" / "deep").mkdir()
    settle()
    first = open_data(str(root), index=kept).train
    assert scans == ["cat", "dog", "deep"]
    assert not kept.exists()  # nothing is written unless somebody made the folder
    folder.keep_listings(kept)
    for other_process in (False, True):
        if other_process:
            forget()
        again = open_data(str(root), index=kept).train
        assert [again.name(i) for i in range(len(again))] == [first.name(i) for i in range(len(first))]
        assert (again.class_names, again.labels.tolist()) == (first.class_names, first.labels.tolist())
        assert len(scans) == 3

    def changes(change):
        scans.clear()
        change()
        settle()
        forget()
        names = open_data(str(root), index=kept, strict=False).train.class_names
        assert scans
        scans.clear()
        forget()
        images = open_data(str(root), index=kept, strict=False).train
        assert not scans
        assert names == images.class_names
        return len(images)

    assert changes(lambda: write(root / "cat" / "new.png")) == 13
    assert changes(lambda: write(root / "dog" / "deep" / "new.png")) == 14
    assert changes((root / "dog" / "deep" / "new.png").unlink) == 13
    assert changes(lambda: (root / "owl").mkdir()) == 13
    stamp = (root / "cat").stat()

    def hide():
        write(root / "cat" / "hidden.png")
        os.utime(root / "cat", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as some tools that copy do

    assert changes(hide) == 14


def test_a_damaged_listing_is_made_again_and_a_fresh_folder_is_not_trusted(
    tmp_path, make_folder, scans, monkeypatch
):
    root, kept = make_folder(tmp_path / "data"), tmp_path / "kept"
    settle()
    open_data(str(root))
    folder.keep_listings(kept)
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    for content in (b"", whole[:50], whole[:-50]):
        file.write_bytes(content)
        forget()
        scans.clear()
        assert len(open_data(str(root), index=kept).train) == 12
        assert scans == ["cat", "dog"]
        assert file.read_bytes() == whole or len(file.read_bytes()) == len(whole)
    monkeypatch.setattr(folder, "SETTLED", 10**18)  # a change in the same tick of the clock would not show
    forget()
    file.unlink()
    for _ in range(2):
        scans.clear()
        open_data(str(root), index=kept)
        assert scans == ["cat", "dog"]
    assert not list(kept.iterdir())

"""Wrong labels on purpose."""

import numpy as np
import pytest

from didicm.data import ArraySet, DataError
from didicm.data.corruptions import noisy_labels, read_confusion

NAMES = ["ant", "bee", "cat", "dog"]


def make(count=20_000, names=NAMES):
    pixels = np.zeros((count, 1, 1), dtype=np.uint8)
    return ArraySet(pixels, np.arange(count) % len(names), names, channels=1)


@pytest.fixture
def confusion(tmp_path):
    def write(*lines):
        (tmp_path / "confusion.csv").write_text("\n".join(lines))
        return str(tmp_path / "confusion.csv")

    return write


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 1.0])
def test_so_many_labels_are_wrong_and_evenly_so(share):
    images = make()
    noisy = noisy_labels(images, share, seed=3)
    assert abs((noisy != images.labels).mean() - share) < 0.012
    wrong = noisy[(images.labels == 1) & (noisy != 1)]
    counts = np.bincount(wrong, minlength=4)
    assert counts[1] == 0
    assert np.all(np.abs(counts[[0, 2, 3]] - 5000 * share / 3) < 5 * np.sqrt(5000 * share / 3 + 1))


def test_noise_is_nested_seeded_and_leaves_its_input():
    images = make(500)
    before = images.labels.copy()
    low, high = (noisy_labels(images, share, seed=0) for share in (0.2, 0.5))
    wrong = low != images.labels
    assert np.array_equal(high[wrong], low[wrong])
    assert np.array_equal(images.labels, before)
    assert np.array_equal(noisy_labels(images, 0.2, seed=0), low)
    assert not np.array_equal(noisy_labels(images, 0.2, seed=1), low)


def test_a_confusion_matrix_says_who_is_taken_for_whom(confusion):
    file = confusion("label,bee,ant,cat", "cat,0,0,5", "ant,30,70,0", "bee,1,0,1", "dog,0,1,0")
    expected = np.array([[0.7, 0.3, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0], [1, 0, 0, 0]])
    images = make()
    noisy = noisy_labels(images, file, seed=0)
    found = np.zeros((4, 4))
    np.add.at(found, (images.labels, noisy), 1 / 5000)
    assert np.all(found[expected == 0] == 0)
    assert np.abs(found - expected).max() < 0.03


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["ant,bee", "1,2"], "has no column 'label'"),
        (["label,ant,wasp", "ant,1,0"], "has 'wasp', which is not a class of the data"),
        (["label,ant", "beee,1"], "has 'beee', which is not a class of the data: did you mean bee"),
        (["label,ant", "ant,1", "bee,1", "cat,0", "dog,1"], "does not say how 'cat' is labelled"),
        (["label,ant", "ant,-1"], "has '-1' for 'ant' labelled as 'ant'; it must be a number, 0 or more"),
    ],
)
def test_mistakes_in_a_confusion_matrix(confusion, lines, told):
    with pytest.raises(DataError, match=told):
        noisy_labels(make(4), confusion(*lines), seed=0)


def test_shares_sum_to_one(confusion, tmp_path):
    confusion("label,ant,bee", "ant,3,1", "bee,2,2")
    assert np.array_equal(read_confusion(tmp_path / "confusion.csv", NAMES[:2]), [[0.75, 0.25], [0.5, 0.5]])


def test_votes_have_noise_of_their_own():
    images = make(8)
    images.targets = np.full((8, 4), 0.25, dtype=np.float32)
    with pytest.raises(DataError, match="these images have votes"):
        noisy_labels(images, 0.1, seed=0)

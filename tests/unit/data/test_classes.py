import numpy as np
import pytest

from didicm.data import ArraySet, DataError, match, relabel
from didicm.data.classes import sort_names


def test_match_by_name():
    assert match(["dog", "ant"], ["ant", "bee", "dog"]).tolist() == [2, 0]
    assert match([], ["ant"]).tolist() == []


def test_unknown_class_is_named():
    with pytest.raises(DataError, match="'yak'"):
        match(["ant", "yak"], ["ant", "bee"])


def test_relabel_looks_only_at_classes_with_images():
    images = ArraySet(np.zeros((3, 2, 2), dtype=np.uint8), np.array([2, 0, 2]), ["dog", "yak", "ant"])
    new = relabel(images, ["ant", "bee", "dog"])
    assert new.labels.tolist() == [0, 2, 0]
    assert new.class_names == ["ant", "bee", "dog"]
    with pytest.raises(DataError, match="'dog'"):
        relabel(images, ["ant"])


def test_natural_order():
    assert sort_names(["a10", "b", "a2", "10", "9", "x²"]) == ["9", "10", "a2", "a10", "b", "x²"]

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from didicm.data import DataError, stratified_split, subset
from didicm.data.randomness import epoch_order, occurrences

label_lists = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(np.array)
fractions = st.floats(0.01, 1)
seeds = st.integers(0, 2**32)
some = settings(max_examples=40)  # each takes milliseconds, most of them to draw the labels


@some
@given(label_lists, fractions, fractions, seeds)
def test_subsets_are_nested(labels, a, b, seed):
    small, large = subset(labels, min(a, b), seed), subset(labels, max(a, b), seed)
    assert set(small) <= set(large)


@some
@given(label_lists, fractions, seeds)
def test_subset_keeps_the_share_of_every_class(labels, fraction, seed):
    kept = subset(labels, fraction, seed)
    assert np.all(np.diff(kept) > 0)
    for k, count in zip(*np.unique(labels, return_counts=True), strict=True):
        n = np.sum(labels[kept] == k)
        assert n >= 1
        assert n == 1 or abs(n - fraction * count) <= 0.5


@some
@given(label_lists, seeds)
def test_whole_subset_is_everything(labels, seed):
    assert subset(labels, 1.0, seed).tolist() == list(range(len(labels)))


def test_subset_depends_on_the_seed_and_on_nothing_else():
    labels = np.repeat(np.arange(4), 50)
    assert subset(labels, 0.25, 1).tolist() == subset(labels, 0.25, 1).tolist()
    assert subset(labels, 0.25, 1).tolist() != subset(labels, 0.25, 2).tolist()
    picked = subset(labels, 0.25, 1)
    choices = {tuple(picked[labels[picked] == k] - 50 * k) for k in range(4)}
    assert len(choices) > 1  # classes differ in theirs


@some
@given(label_lists, st.floats(0.01, 0.99), seeds)
def test_split_is_a_partition_that_trains_on_every_class(labels, fraction, seed):
    train, val = stratified_split(labels, fraction, seed)
    assert sorted([*train, *val]) == list(range(len(labels)))
    assert set(labels[train]) == set(labels)
    for k, count in zip(*np.unique(labels, return_counts=True), strict=True):
        held = np.sum(labels[val] == k)
        assert held < count
        assert held == count - 1 or abs(held - fraction * count) <= 1


@some
@given(st.integers(2, 40), st.integers(2, 9), seeds)
def test_many_small_classes_still_give_a_validation_split(classes, each, seed):
    labels = np.repeat(np.arange(classes), each)
    _, val = stratified_split(labels, 0.1, seed)
    assert len(val) == min(max(1, int(0.1 * len(labels) + 0.5)), classes * (each - 1))


@some
@given(st.integers(2, 9), st.integers(2, 9), seeds)
def test_a_whole_number_is_so_many_images_per_class(few, more, seed):
    labels = np.repeat(np.arange(3), [4, 8, 12])
    small, large = subset(labels, min(few, more), seed), subset(labels, max(few, more), seed)
    assert np.bincount(labels[small]).tolist() == [min(few, more, size) for size in (4, 8, 12)]
    assert set(small) <= set(large)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan")])
def test_impossible_fractions(fraction):
    with pytest.raises(DataError, match="fraction"):
        subset(np.zeros(3, dtype=int), fraction, 0)
    with pytest.raises(DataError, match="fraction"):
        stratified_split(np.zeros(3), fraction, 0)


def test_balanced_draws_classes_evenly():
    labels = np.repeat([0, 1, 2], [90, 9, 3])
    order = epoch_order(labels, 0, 0, balanced=True)
    assert np.bincount(labels[order]).tolist() == [34, 34, 34]
    shown = np.bincount(order, minlength=102)
    assert shown[:90].max() == 1
    assert set(shown[90:99]) <= {3, 4}
    assert set(shown[99:]) <= {11, 12}
    assert occurrences(np.array([5, 2, 5, 5, 2])).tolist() == [0, 0, 1, 2, 1]


def test_nothing_may_be_split():
    nothing = np.zeros(0, dtype=np.int64)
    assert [len(part) for part in (subset(nothing, 0.5, 0), *stratified_split(nothing, 0.5, 0))] == [0, 0, 0]

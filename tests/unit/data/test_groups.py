"""Splits that keep groups whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from didicm.data import stratified_split


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 6), st.floats(0.05, 0.9))
def test_no_group_is_parted_and_every_class_is_trained(seed, count, classes, fraction):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, count, 200).astype(str)
    labels = rng.integers(0, classes, 200)
    train, held = stratified_split(labels, fraction, seed, groups)
    assert sorted([*train, *held]) == list(range(200))
    assert not set(groups[train]) & set(groups[held])
    assert set(labels[train]) == set(labels)
    again = stratified_split(labels, fraction, seed, groups)
    assert np.array_equal(again[1], held)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
def test_small_groups_give_the_wanted_share_of_every_class(fraction):
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 400, 4000)
    labels = rng.choice(4, 4000, p=[0.6, 0.2, 0.15, 0.05])
    for seed in range(5):
        _, held = stratified_split(labels, fraction, seed, groups)
        shares = np.bincount(labels[held], minlength=4) / np.bincount(labels)
        assert np.abs(shares - fraction).max() < 0.02
        assert abs(len(held) / 4000 - fraction) < 0.005


def test_seeds_hold_out_other_groups():
    groups, labels = np.arange(600) // 10, np.arange(600) % 3
    held = {tuple(stratified_split(labels, 0.1, seed, groups)[1]) for seed in range(8)}
    assert len(held) == 8


def test_large_groups_give_the_nearest_that_is_possible():
    """Three patients with a third of the images each: one is held out, though a tenth was asked for."""
    _, held = stratified_split(np.arange(30) % 2, 0.1, 0, np.arange(30) // 10)
    assert len(held) == 10


def test_nothing_is_held_out_where_every_group_is_needed():
    train, held = stratified_split(np.array([0, 0, 1, 1]), 0.5, 0, np.array(["x", "x", "y", "y"]))
    assert (len(train), len(held)) == (4, 0)


def test_one_image_per_group_is_close_to_a_split_without():
    labels = np.arange(1000) % 100  # ten images per class
    _, held = stratified_split(labels, 0.1, 1, np.arange(1000))
    assert abs(len(held) - 100) <= 2
    assert np.bincount(labels[held], minlength=100).max() <= 2

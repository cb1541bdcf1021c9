import json

import pytest
import torch
from safetensors.torch import save_file

from didicm.errors import UserError
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.store import load_posteriors, save_posteriors
from tests.oracle.simulated import simulate

NAMES = ["cat", "Hündin", "名"]


@pytest.fixture
def stored(tmp_path):
    probs, labels = simulate(40, 3, seed=0)
    meta = {"data": "folder:x", "sampler": {"steps": 8}}
    return save_posteriors(tmp_path / "sub" / "p.safetensors", probs, labels, NAMES, meta=meta)


def test_everything_comes_back(tmp_path):
    for dtype in (torch.float32, torch.float64):
        probs, labels = simulate(40, 3, seed=0)
        probs = probs.to(dtype)
        images = [f"{i}.jpg" for i in range(40)]
        path = save_posteriors(
            tmp_path / "p.safetensors", probs.T.contiguous().T, labels, NAMES, images, {"a": [1]}
        )
        found = load_posteriors(path)
        assert torch.equal(found.probs, probs)
        assert found.probs.dtype == dtype
        assert torch.equal(found.labels, labels)
        assert (found.class_names, found.image_names, found.meta) == (NAMES, images, {"a": [1]})
        assert evaluate_probs(found.probs, found.labels) == evaluate_probs(probs, labels)


def test_names_of_images_are_optional(stored):
    found = load_posteriors(stored)
    assert found.image_names is None
    assert found.meta["sampler"] == {"steps": 8}
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


def test_an_interrupted_save_leaves_the_old_file(stored, monkeypatch):
    before = stored.read_bytes()

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("didicm.evaluation.store.save_file", fail)
    with pytest.raises(UserError, match="disk full"):
        save_posteriors(stored, *simulate(5, 3, seed=1), NAMES)
    assert stored.read_bytes() == before
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


@pytest.mark.parametrize("place", [3, 30, -1000, -300, -1])
def test_a_flipped_bit_anywhere_is_noticed(stored, place):
    content = bytearray(stored.read_bytes())
    content[place] ^= 1
    stored.write_bytes(content)
    _refused(stored)


@pytest.mark.parametrize("length", [0, 5, 200, -1])
def test_a_truncated_file_is_noticed(stored, length):
    stored.write_bytes(stored.read_bytes()[:length])
    _refused(stored)


@pytest.mark.parametrize(
    "change",
    [
        {"class_names": json.dumps(["a", "b"])},
        {"class_names": "not json"},
        {"class_names": "3"},
        {"image_names": json.dumps(["a"])},
        {"format": "something else"},
        {"meta": None},
    ],
)
def test_a_file_of_another_kind_is_refused(stored, change):
    found = load_posteriors(stored)
    strings = {
        "format": "didicm posteriors 1",
        "class_names": json.dumps(NAMES),
        "image_names": "null",
        "meta": "{}",
        **change,
    }
    strings = {key: value for key, value in strings.items() if value is not None}
    save_file({"probs": found.probs, "labels": found.labels}, stored, strings)
    _refused(stored)


def test_a_file_without_our_tensors_is_refused(stored):
    save_file({"weight": torch.zeros(3)}, stored)
    _refused(stored)
    save_file({"weight": torch.zeros(3)}, stored, {"format": "didicm posteriors 1"})
    _refused(stored)


def test_a_missing_file_is_one_sentence(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(UserError, match="is not a file"):
            load_posteriors(path)


def test_nothing_invalid_is_saved(tmp_path):
    probs, labels = simulate(4, 3, seed=0)
    for call, message in (
        (lambda path: save_posteriors(path, probs, labels, ["a"]), "1 class names for 3 classes"),
        (lambda path: save_posteriors(path, probs, labels, NAMES, ["a"]), "1 image names for 4 images"),
        (lambda path: save_posteriors(path, 2 * probs, labels, NAMES), "sum to 1"),
    ):
        with pytest.raises(UserError, match=message):
            call(tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def _refused(path):
    with pytest.raises(UserError, match=r"evaluate again$") as caught:
        load_posteriors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)

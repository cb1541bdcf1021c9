"""A frozen backbone's features are computed once, and nothing but the time tells."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from didicm import UserError
from didicm.data import ArraySet, FeatureSet, make_loader
from didicm.data.transforms import EvalTransform
from didicm.models import cost
from didicm.training import loop
from didicm.training.build import build, training_multiply_adds
from didicm.training.features import FEATURES
from didicm.training.state import load_state

FROZEN = {
    "model": "backbone_score",
    "model_args": {"backbone": "test_resnet", "frozen": True, "width": None, "stem": None},
    "image__size": 32, "image__channels": 3, "augment__pad": 0, "augment__hflip": 0,
    "epochs": 2, "optimizer__ema": 0.9,
}  # fmt: skip


@pytest.mark.parametrize("method", ["diffusion", "standard"])
def test_the_head_becomes_what_the_slow_way_makes_of_it(method, train, weights_of, assert_same, metrics_of):
    fast = train("fast", method=method, **FROZEN)
    slow = train("slow", method=method, feature_views=0, **FROZEN)
    assert_same(weights_of(fast), weights_of(slow), atol=1e-4)
    assert_same(weights_of(fast, "best"), weights_of(slow, "best"), atol=1e-4)
    one, other = (next(x for x in reversed(metrics_of(run)) if "cls/NLL" in str(x)) for run in (fast, slow))
    validated = {name: pytest.approx(value, abs=1e-3) for name, value in other.items() if "cls/" in name}
    assert validated
    assert validated.items() <= one.items()
    assert not (fast / FEATURES).exists()


def test_the_backbone_counts_once_per_view_and_never_backwards(tiny_config, tmp_path):
    def price(**changes):
        config = tiny_config(tmp_path, **{**FROZEN, "augment__hflip": 0.5, **changes})
        run = build(config)
        network = run.classifier.model.eval()
        with FlopCounterMode(display=False) as counted:
            network.embed(torch.zeros(1, 3, 32, 32))
        images = len(run.train) // config.batch_size * config.batch_size * config.epochs
        total = training_multiply_adds(config, run, cost(network, 32))
        return total, counted.get_total_flops() // 2, len(run.train), images

    kept, backbone, count, images = price(feature_views=3)
    (seen, *_), (thawed, *_) = price(feature_views=0), price(model_args__frozen=False)
    assert images > count
    assert kept - 3 * count * backbone == seen - images * backbone == thawed - 3 * images * backbone > 0
    assert price(feature_views=3, augment__hflip=0)[0] == kept - 2 * count * backbone  # all views are alike


def test_a_run_that_was_stopped_goes_on_bit_by_bit(train, tmp_path, weights_of, assert_same):
    views = {**FROZEN, "augment__hflip": 0.5, "augment__pad": 2, "feature_views": 3, "run__save_seconds": 0}
    whole = train("whole", **views)

    def stop(done, total):
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("stopped", on_step=stop, **views)
    stored = np.load(tmp_path / "stopped" / FEATURES / "train.npy", mmap_mode="r")
    assert stored.shape[0] == 3
    assert not np.array_equal(stored[0], stored[1])  # views are augmented
    before = (tmp_path / "stopped" / FEATURES / "train.npy").stat().st_mtime_ns
    resumed = train("stopped", on_step=lambda done, total: done == 7 and _same_file(tmp_path, before), **views)
    assert_same(weights_of(resumed), weights_of(whole))


def test_a_resumed_run_needs_its_first_weights_no_more(
    tiny_config, tmp_path, make_folder, weights_of, assert_same
):
    torch.manual_seed(3)
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "theirs.safetensors")
    for part, count in (("train", 12), ("val", 2)):
        make_folder(tmp_path / "data" / part, count=count)
    own = {"data": str(tmp_path / "data"), "fraction": 1.0, "batch_size": 10, "run__save_seconds": 0}
    own["model_args"] = {**FROZEN["model_args"], "weights": str(tmp_path / "theirs.safetensors")}
    whole, stopped = (tiny_config(tmp_path / name, **{**FROZEN, **own}) for name in ("whole", "stopped"))

    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    loop.train(whole)
    with pytest.raises(KeyboardInterrupt):
        loop.train(stopped, on_step=stop)
    (tmp_path / "theirs.safetensors").unlink()
    assert_same(weights_of(loop.train(stopped)), weights_of(tmp_path / "whole"))


def _same_file(folder, before):
    assert (folder / "stopped" / FEATURES / "train.npy").stat().st_mtime_ns == before


def test_every_epoch_shows_the_next_view(tmp_path):
    images = ArraySet(np.zeros((4, 8, 8), dtype=np.uint8), np.array([0, 1, 0, 1]), ["ant", "bee"], channels=1)
    features = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    features[:, 2] = np.nan  # an image that could not be read
    stored = FeatureSet(images, features)
    assert stored.labels.tolist() == [0, 1, 1]
    transform = EvalTransform(8, 1)
    for epoch in range(5):
        loader = make_loader(stored, transform, 3, train=True, seed=0, epoch=epoch)
        ((batch, label),) = loader
        assert torch.equal(label, torch.from_numpy(stored.labels)[loader.index])
        rows = np.array([0, 1, 3])[loader.index.numpy()]
        assert torch.equal(batch, torch.from_numpy(features[epoch % 3, rows]))
        assert list(loader.skipped.values()) == ["array[2] cannot be read as an image"]
    ((batch, _),) = make_loader(stored, transform, 3, train=False, seed=0, epoch=1)
    assert torch.equal(batch, torch.from_numpy(features[0, [0, 1, 3]]))
    assert isinstance(stored.load(2), Image.Image)


def test_images_that_cannot_be_read_are_left_out(train, tmp_path, make_folder):
    make_folder(tmp_path / "data" / "train", count=12)
    make_folder(tmp_path / "data" / "val", count=2)
    (tmp_path / "data" / "train" / "cat" / "3.png").write_bytes(b"no image")
    run = train(**{**FROZEN, "data": str(tmp_path / "data"), "fraction": 1.0, "batch_size": 10})
    progress, weights, _ = load_state(run)
    assert (progress.finished, progress.unreadable) == (True, 1)
    assert all(x.isfinite().all() for x in weights["model"].values())


def test_mixed_images_have_no_stored_features(tiny_config, tmp_path):
    with pytest.raises(UserError, match="mixup and cutmix mix images, not features"):
        build(tiny_config(tmp_path, **{**FROZEN, "augment__mixup": 0.2}))
    build(tiny_config(tmp_path, **{**FROZEN, "augment__mixup": 0.2, "feature_views": 0}))

import random
import re

import numpy as np
import pytest
import torch

from didicm.data import (
    ArraySet,
    Augment,
    Corruptions,
    DataError,
    EvalTransform,
    TrainTransform,
    make_loader,
    open_data,
    transforms,
)
from didicm.data.randomness import keys

EVAL = EvalTransform(size=16)
NONE, SMALL = Augment(), Augment(pad=2, hflip=0.5)
WEAK = Augment(scale=(0.08, 1.0), hflip=0.5, color_jitter=0.4)
STRONG = Augment(scale=(0.08, 1.0), hflip=0.5, auto_augment="rand-m7-mstd0.5-inc1", repeats=3)
FEW = Augment(pad=2, hflip=0.5, auto_augment="rand-m7-mstd0.5-inc1")


@pytest.fixture(scope="module")
def images(tmp_path_factory, make_folder):
    return open_data(str(make_folder(tmp_path_factory.mktemp("data"), ["a", "b", "c"], count=8))).train


def load(images, augment=WEAK, batch_size=4, *, train=True, seed=0, eval_transform=EVAL, **options):
    transform = TrainTransform(augment, eval_transform) if train else eval_transform
    loader = make_loader(images, transform, batch_size, train=train, seed=seed, **options)
    return [(image, label, loader.index) for image, label in loader]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def test_batches_have_the_promised_form(images):
    batches = load(images, batch_size=5)
    assert len(batches) == 4  # 24 images; the last four do not fill a batch
    for image, label, index in batches:
        assert (image.shape, image.dtype, label.dtype) == ((5, 3, 16, 16), torch.float32, torch.int64)
        assert label.tolist() == images.labels[index].tolist()
    assert len({i for _, _, index in batches for i in index.tolist()}) == 20


@pytest.mark.parametrize("augment", [WEAK, STRONG, SMALL, FEW], ids=["weak", "strong", "small", "few"])
def test_workers_and_memory_change_nothing(images, augment):
    expected = load(images, augment, in_memory=False)
    assert same(expected, load(images, augment, in_memory=False, workers=2))
    assert same(expected, load(images, augment, in_memory=True))


def test_resume_in_the_middle_continues_bit_by_bit(images):
    whole = load(images, epoch=3, in_memory=False)
    assert same(whole[4:], load(images, epoch=3, start_batch=4, in_memory=False, workers=1))
    loader = make_loader(images, TrainTransform(WEAK, EVAL), 4, train=True, seed=0, in_memory=False, workers=2)
    iterator = iter(loader)
    next(iterator)  # workers have begun on what follows; that must be forgotten
    loader.set_epoch(3, 2)
    assert len(loader) == 4
    assert same([b[:2] for b in whole[2:]], list(loader))
    assert list(make_loader(images, EVAL, 4, train=True, seed=0, start_batch=6)) == []


def test_seed_and_epoch_matter(images):
    first = load(images)
    assert not same(first, load(images, seed=1))
    assert not same(first, load(images, epoch=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_global_generators_are_left_alone(images, workers):
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    load(images, STRONG, workers=workers, in_memory=False)
    assert draw() == expected


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("train", [True, False])
def test_two_ranks_see_what_one_would(images, repeats, train):
    options = {"repeats": repeats, "train": train}
    one = load(images, batch_size=10, **options)
    two = [load(images, batch_size=5, rank=r, world_size=2, **options) for r in (0, 1)]
    for b, (image, label, _) in enumerate(one):
        for rank in (0, 1):
            assert torch.equal(image[rank::2], two[rank][b][0])
            assert torch.equal(label[rank::2], two[rank][b][1])


def test_a_rank_without_images_in_the_last_batch_ends_earlier(images):
    chosen = images.select(np.arange(9))
    assert [len(load(chosen, batch_size=4, train=False, rank=r, world_size=2)) for r in (0, 1)] == [2, 1]


def test_repeats_are_different_views_dealt_to_different_ranks(images):
    ranks = [load(images, batch_size=4, repeats=3, rank=r, world_size=3) for r in range(3)]
    assert len(ranks[0]) == 2  # the epoch is as long as without repeats
    for batches in zip(*ranks, strict=True):
        assert torch.equal(batches[0][2], batches[1][2])
        assert torch.equal(batches[0][2], batches[2][2])
        assert not torch.equal(batches[0][0], batches[1][0])


def test_evaluation_shows_every_image_once_in_order(images):
    for epoch in (0, 5):
        batches = load(images, batch_size=7, train=False, epoch=epoch)
        assert torch.cat([index for _, _, index in batches]).tolist() == list(range(24))
        assert len(batches[-1][1]) == 3
    assert torch.equal(batches[0][0][2], EVAL(images.load(2)))


def test_corruption_is_meant_at_the_size_the_network_sees(picture):
    """Before images are shrunk, it would be averaged away; those of the right size are corrupted as they are."""
    noise = Corruptions.parse("noise:3")
    for size, crop_pct, train in ((224, 1.0, False), (224, 0.875, False), (224, 1.0, True)):
        images = ArraySet([np.asarray(picture(i, (size, size))) for i in range(4)], np.arange(4) % 2, ["a", "b"])
        seen = EvalTransform(32, crop_pct=crop_pct)
        clean, corrupted = (
            torch.cat([b[0] for b in load(images, NONE, eval_transform=seen, train=train, **how)])
            for how in ({}, {"corruption": noise})
        )
        spread = (seen.restore(corrupted).float() - seen.restore(clean).float()).std() / 255
        assert 0.12 < spread < 0.2, (size, crop_pct)  # 0.18, less what black and white cut off
    small = ArraySet([np.asarray(picture(i, (20, 20))) for i in range(4)], np.arange(4) % 2, ["a", "b"])
    seen, key = EvalTransform(20, crop_pct=1.0), keys(0, np.arange(4))
    direct = [seen(noise(small.load(i), np.random.default_rng(int(key[i])))) for i in range(4)]
    assert torch.equal(load(small, train=False, eval_transform=seen, corruption=noise)[0][0], torch.stack(direct))


def test_an_image_is_decoded_once_for_several_corruptions(images, monkeypatch):
    several = [None, *map(Corruptions.parse, ("noise:5", "jpeg:2", "resolution:7"))]
    alone = [torch.cat([b[0] for b in load(images, train=False, corruption=one)]) for one in several]
    decoded = []
    original = type(images).original
    monkeypatch.setattr(type(images), "original", lambda self, i: decoded.append(i) or original(self, i))
    batches = load(images, train=False, batch_size=5, corruption=several, in_memory=False)
    assert sorted(decoded) == list(range(24))
    together = torch.cat([b[0] for b in batches]).unflatten(0, (24, 4))
    assert torch.equal(together, torch.stack(alone, 1))
    assert torch.cat([b[2] for b in batches]).tolist() == [i for i in range(24) for _ in several]


def test_corruption_is_fixed_at_evaluation_and_fresh_in_training(images):
    noise = Corruptions.parse("noise:5")

    def noisy(**options):
        return torch.cat([b[0] for b in load(images, NONE, corruption=noise, **options)])

    fixed = noisy(train=False, batch_size=5)
    assert torch.equal(fixed, noisy(train=False, batch_size=24, epoch=2, workers=1, in_memory=False))
    assert not torch.equal(fixed, noisy(train=False, seed=1))
    assert not torch.equal(fixed, torch.cat([b[0] for b in load(images, train=False)]))
    one_image = images.select(np.array([0]))
    drawn = [load(one_image, NONE, corruption=noise, batch_size=2, epoch=e)[0][0] for e in (0, 1)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_fewer_images_than_a_batch(images):
    ((image, _, index),) = load(images.select(np.arange(3)), batch_size=8)
    assert len(image) == 8
    assert sorted(np.bincount(index).tolist()) == [2, 3, 3]
    assert len({row.numpy().tobytes() for row in image}) == 8  # again, but augmented anew


def test_fast_path_is_taken_for_small_images_and_gives_the_same():
    data = open_data("fashion-mini", channels=1).train.select(np.arange(0, 2000, 10))
    eval_transform = EvalTransform(size=28, channels=1, crop_pct=1.0)
    loader = make_loader(data, TrainTransform(SMALL, eval_transform), 32, train=True, seed=0)
    assert loader.fast
    assert make_loader(data, eval_transform, 32, train=False, seed=0).fast
    assert not make_loader(data, TrainTransform(WEAK, eval_transform), 32, train=True, seed=0).fast
    assert same(
        load(data, SMALL, 32, eval_transform=eval_transform),
        load(data, SMALL, 32, eval_transform=eval_transform, in_memory=False),
    )


@pytest.mark.parametrize("augment", [SMALL, FEW], ids=["small", "few"])
def test_images_in_memory_are_resized_once(images, augment, monkeypatch):
    resized = []
    resize = transforms.resize_and_crop
    monkeypatch.setattr(transforms, "resize_and_crop", lambda *args: resized.append(args) or resize(*args))
    loader = make_loader(images, TrainTransform(augment, EVAL), 4, train=True, seed=0)
    assert loader.fast == (augment is SMALL)
    for epoch in range(2):
        loader.set_epoch(epoch)
        list(loader)
    assert len(resized) == len(images)
    load(images, augment, corruption=Corruptions.parse("noise:3"))  # each time another image
    assert len(resized) == 2 * len(images)


class TestUnreadable:
    @pytest.fixture
    def damaged(self, tmp_path, make_folder):
        make_folder(tmp_path, count=10)
        for i in (2, 5):
            (tmp_path / "cat" / f"{i}.png").write_bytes(b"")
        return open_data(str(tmp_path)).train

    @pytest.mark.parametrize(("workers", "in_memory"), [(0, False), (2, False), (0, True)])
    def test_replaced_by_another_of_the_class_and_named(self, damaged, workers, in_memory):
        options = {"train": True, "seed": 0, "workers": workers, "in_memory": in_memory}
        loader = make_loader(damaged, TrainTransform(WEAK, EVAL), 4, **options)
        batches = [(*b, loader.index) for b in loader]
        assert same(batches, load(damaged, in_memory=False))
        assert np.bincount(torch.cat([b[1] for b in batches])).tolist() == [10, 10]
        assert not {2, 5} & set(torch.cat([b[2] for b in batches]).tolist())
        assert sorted(loader.skipped) == [2, 5]
        assert all(damaged.name(i) in told for i, told in loader.skipped.items())
        list(loader)
        assert len(loader.skipped) == 2  # counted once

    def test_left_out_at_evaluation(self, damaged):
        loader = make_loader(damaged, EVAL, 4, train=False, seed=0)
        shown = [(label, loader.index) for _, label in loader]
        assert sum(len(label) for label, _ in shown) == 18
        assert torch.cat([index for _, index in shown]).tolist() == [i for i in range(20) if i not in (2, 5)]
        assert len(loader.skipped) == 2

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize(("train", "split"), [(True, "training"), (False, "evaluation")])
    def test_too_many_end_the_run_with_a_sentence(self, tmp_path, make_folder, workers, train, split):
        make_folder(tmp_path, count=30)
        for i in range(11):
            (tmp_path / "dog" / f"{i}.png").write_bytes(b"junk")
        images = open_data(str(tmp_path)).train
        transform = TrainTransform(WEAK, EVAL) if train else EVAL
        loader = make_loader(images, transform, 4, train=train, seed=0, workers=workers)
        message = ""
        try:  # not pytest.raises: it keeps the traceback, and that the worker, until the garbage collector comes
            list(loader)
        except DataError as error:
            message = str(error)
        assert re.fullmatch(rf"11 of 60 {split} images cannot be read, more than the 10 .*dog.*doctor.*", message)
        assert {images.name(i) for i in loader.skipped} == {str(tmp_path / "dog" / f"{i}.png") for i in range(11)}
        assert all(images.name(i) in told for i, told in loader.skipped.items())

    def test_one_in_a_hundred_is_allowed(self):
        class Damaged(ArraySet):
            def original(self, i):
                if i < self.bad:
                    raise OSError("damaged")
                return super().original(i)

        images = Damaged(np.zeros((1200, 4, 4), dtype=np.uint8), np.arange(1200) % 2, ["a", "b"], channels=1)
        eval_transform = EvalTransform(size=4, channels=1, crop_pct=1.0)
        images.bad = 12
        assert (
            sum(len(label) for _, label in make_loader(images, eval_transform, 100, train=False, seed=0)) == 1188
        )
        images.bad = 13
        with pytest.raises(DataError, match="13 of 1200"):
            list(make_loader(images, eval_transform, 100, train=False, seed=0))

    def test_a_class_without_any_readable_image(self, tmp_path, make_folder):
        make_folder(tmp_path, classes=("cat",), count=30)
        make_folder(tmp_path, classes=("dog",), count=3)
        for i in range(3):
            (tmp_path / "dog" / f"{i}.png").write_bytes(b"junk")
        with pytest.raises(DataError, match="no other image of the same class"):
            load(open_data(str(tmp_path)).train)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch size"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"repeats": 0}, "repeats"),
        ({"start_batch": 7}, "start_batch"),
    ],
)
def test_refusals(images, options, words):
    with pytest.raises(DataError, match=words):
        load(images, **options)


def test_no_images():
    empty = ArraySet(np.zeros((0, 4, 4), dtype=np.uint8), np.zeros(0), ["a", "b"])
    with pytest.raises(DataError, match="no images"):
        load(empty)


def test_other_devices_finish_there(images):
    # The meta device computes shapes only; that the transform runs on it shows that nothing is tied to the CPU.
    ((image, label, _), *_) = load(images, SMALL, eval_transform=EvalTransform(size=24), device="meta")
    assert (image.device.type, image.dtype, image.shape) == ("meta", torch.float32, (4, 3, 24, 24))
    assert label.device.type == "meta"


def test_a_worker_hands_over_no_tensor_but_images_and_labels(images):
    """Each costs the process that trains a file of shared memory to open."""
    loader = make_loader(images, TrainTransform(WEAK, EVAL), 4, train=True, seed=0, in_memory=False)
    batch = loader._batches[0, 0]
    assert [name for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)] == [
        "image",
        "label",
    ]

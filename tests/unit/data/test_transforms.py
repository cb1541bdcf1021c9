import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from didicm.data import Augment, EvalTransform, Mixer, TrainTransform, open_data, target_distribution
from didicm.data.randomness import keys, preserved
from didicm.data.transforms import to_tensor
from didicm.errors import UserError
from didicm.settings import load_recipe

# The paper's table `tab:aug`.
WEAK = Augment(scale=(0.08, 1.0), hflip=0.5, color_jitter=0.4)
MIXED = {"mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1}
STRONG = Augment(scale=(0.08, 1.0), hflip=0.5, auto_augment="rand-m7-mstd0.5-inc1", repeats=3, **MIXED)
NONE, SMALL = Augment(), Augment(pad=2, hflip=0.5)


def test_recipes_are_the_papers():
    for name, augment in (("weak", WEAK), ("strong", STRONG)):
        config = load_recipe(name)
        assert config.augment == augment
        assert (config.image.size, config.image.crop_pct) == (224, 0.875)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (224, 224), (50, 90), (1, 7), (301, 300)])
@pytest.mark.parametrize(("side", "crop_pct"), [(224, 0.875), (33, 1.0), (33, 0.95), (8, 0.3)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
def test_evaluation_is_timms_to_the_pixel(size, side, crop_pct, interpolation, picture):
    from timm.data.transforms_factory import transforms_imagenet_eval

    theirs = transforms_imagenet_eval(side, crop_pct=crop_pct, interpolation=interpolation, normalize=False)
    image = picture(0, size)
    ours = EvalTransform(side, crop_pct=crop_pct, interpolation=interpolation).prepare(image)
    assert torch.equal(to_tensor([ours])[0], theirs(image))


def test_evaluation_normalises_as_timm_does(picture):
    from timm.data.transforms_factory import transforms_imagenet_eval

    theirs = transforms_imagenet_eval(224, crop_pct=0.875, interpolation="bicubic")(picture(0, (90, 50)))
    assert torch.allclose(EvalTransform()(picture(0, (90, 50))), theirs, atol=1e-5)


def test_evaluation_converts_any_mode(picture):
    assert EvalTransform(size=16, channels=1)(picture(mode="RGBA")).shape == (1, 16, 16)
    assert EvalTransform(size=16)(picture(mode="L")).shape == (3, 16, 16)


def test_restore_undoes_finish(picture):
    eval_transform = EvalTransform(size=24, crop_pct=1.0)
    pixels = to_tensor([eval_transform.prepare(picture(i)) for i in range(3)])
    assert torch.equal(eval_transform.restore(eval_transform.finish(pixels)), pixels)


@pytest.mark.parametrize("augment", [WEAK, STRONG, SMALL, NONE], ids=["weak", "strong", "small", "none"])
@pytest.mark.parametrize("channels", [1, 3])
def test_training_views_are_a_function_of_the_key(augment, channels, picture):
    eval_transform = EvalTransform(size=20, channels=channels)
    transform = pickle.loads(pickle.dumps(TrainTransform(augment, eval_transform)))
    key = keys(0, np.arange(12))
    image = picture(0, (60, 40))

    def views():
        with preserved():
            return transform.finish(to_tensor([transform.prepare(image, int(k)) for k in key]), key)

    first = views()
    torch.rand(3)
    assert torch.equal(first, views())
    assert first.shape == (12, channels, 20, 20)
    assert first.dtype == torch.float32
    different = len({row.numpy().tobytes() for row in first})
    assert different == 1 if augment is NONE else different > 6


def test_none_is_the_evaluation_view(picture):
    eval_transform = EvalTransform(size=20)
    transform = TrainTransform(NONE, eval_transform)
    prepared = to_tensor([transform.prepare(picture(), 1)])
    assert torch.equal(transform.finish(prepared, keys(np.arange(1)))[0], eval_transform(picture()))


@pytest.mark.parametrize(("pad_mode", "as_torch"), [("black", "constant"), ("edge", "replicate")])
def test_small_shifts_by_at_most_pad_and_flips_half(pad_mode, as_torch):
    eval_transform = EvalTransform(size=8, channels=1, mean=(0.0,), std=(1 / 255,), crop_pct=1.0)
    images = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(4000, 1, 8, 8)
    transform = TrainTransform(replace(SMALL, pad_mode=pad_mode), eval_transform)
    out = transform.finish(images, keys(np.arange(4000))).round().to(torch.uint8)[:, 0]
    padded = torch.nn.functional.pad(images[0].float(), [2] * 4, mode=as_torch)[0].byte()
    wanted = {}
    for dy in range(5):
        for dx in range(5):
            crop = padded[dy : dy + 8, dx : dx + 8]
            wanted[crop.numpy().tobytes()] = (dy, dx, False)
            wanted[crop.flip(1).numpy().tobytes()] = (dy, dx, True)
    found = [wanted[row.numpy().tobytes()] for row in out]
    assert len(set(found)) == 50  # every shift, flipped or not
    assert np.mean([flipped for _, _, flipped in found]) == pytest.approx(0.5, abs=0.05)


def test_shrinking_keeps_the_crop_large_and_the_picture_the_same(tmp_path, write):
    transform = TrainTransform(WEAK, EvalTransform(size=28))
    factors = [transform.shrink((500, 375), int(k)) for k in keys(np.arange(200))]
    assert set(factors) == {1, 2, 4}  # the largest crop is 375 px: 375 / 4 is above 2 x 28, 375 / 8 is not
    assert TrainTransform(WEAK, EvalTransform(size=224)).shrink((500, 375), 0) == 1
    assert EvalTransform(size=28).shrink((5000, 3750)) == 1
    write(tmp_path / "a" / "0.jpg", size=(500, 375), quality=90)
    write(tmp_path / "b" / "0.jpg", size=(500, 375))
    images = open_data(str(tmp_path)).train
    small = images.load(0, lambda size: 4)
    assert small.size == (125, 94)
    eval_transform = EvalTransform(size=28, crop_pct=1.0)
    difference = (
        eval_transform.restore(eval_transform(small)[None]).int()
        - eval_transform.restore(eval_transform(images.load(0))[None]).int()
    )
    assert difference.abs().float().mean() < 1.5  # of 255


def test_shrinking_knows_how_a_photo_is_turned(tmp_path, write):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    for name in ("a", "b"):
        write(tmp_path / name / "0.jpg", size=(500, 375), exif=exif)
    asked = []
    image = open_data(str(tmp_path)).train.load(0, lambda size: asked.append(size) or 4)
    assert asked == [(375, 500)]
    assert image.size == (94, 125)


def test_transform_survives_json():
    transform = EvalTransform(size=56, channels=1, mean=(0.2,), std=(0.3,), crop_pct=0.9, interpolation="bilinear")
    description = json.loads(json.dumps(transform.to_dict()))
    assert set(description) == {"size", "channels", "mean", "std", "crop_pct", "interpolation"}
    assert EvalTransform.from_dict(description) == transform
    with pytest.raises(UserError, match="'sise': did you mean size"):
        EvalTransform.from_dict({**description, "sise": 3})


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (EvalTransform, {"size": 0}),
        (EvalTransform, {"channels": 2}),
        (EvalTransform, {"mean": (0.5,)}),
        (EvalTransform, {"std": (0.0, 1.0, 1.0)}),
        (EvalTransform, {"mean": (-1e30, 0.5, 0.5)}),  # the network would answer with NaN
        (EvalTransform, {"crop_pct": 0.0}),
        (EvalTransform, {"crop_pct": 1.5}),
        (EvalTransform, {"interpolation": "best"}),
        (Augment, {"scale": (0.5, 0.1)}),
        (Augment, {"scale": (0.5, 1.0), "pad": 2}),
        (Augment, {"ratio": (0.0, 1.0)}),
        (Augment, {"hflip": 1.5}),
        (Augment, {"label_smoothing": -0.1}),
        (Augment, {"repeats": 0}),
        (Augment, {"mixup": -1.0}),
        (Augment, {"auto_augment": "magic"}),
        (Augment, {"train_interpolation": "best"}),
    ],
)
def test_impossible_values(kind, bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        kind(**bad)


def batch(count=8, classes=5):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 12, 12, generator=generator), torch.randint(classes, (count,), generator=generator)


def test_smoothed_targets():
    target = target_distribution(torch.tensor([2, 0]), 4, 0.1)
    assert torch.allclose(target, torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]))
    assert torch.equal(target_distribution(torch.tensor([1]), 3), torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_targets_are_smoothed_distributions_for_any_batch(count):
    image, label = batch(count)
    for step in range(6):
        mixed, target = Mixer(STRONG, 5, seed=0)(image.clone(), label, step)
        assert mixed.shape == image.shape
        assert target.shape == (count, 5)
        assert torch.allclose(target.sum(-1), torch.ones(count))
        assert target.min() >= 0.1 / 5 - 1e-6


def test_smoothing_without_mixing():
    image, label = batch()
    mixed, target = Mixer(Augment(label_smoothing=0.2), 5, seed=0)(image, label, 0)
    assert torch.equal(mixed, image)
    assert torch.equal(target, target_distribution(label, 5, 0.2))
    assert torch.equal(Mixer(Augment(), 5, seed=0)(image, label, 0)[1], target_distribution(label, 5))


def test_mixup_weighs_images_and_targets_alike():
    image, label = batch()
    mixed, target = Mixer(Augment(mixup=1.0), 5, seed=3)(image.clone(), label, 1)
    hard = target_distribution(label, 5)
    # The share of the image's own label, read from a pair of different classes.
    row = int((label != label.flip(0)).nonzero()[0])
    share = target[row, label[row]]
    assert 0 < share < 1
    assert torch.allclose(mixed, share * image + (1 - share) * image.flip(0), atol=1e-6)
    assert torch.allclose(target, share * hard + (1 - share) * hard.flip(0), atol=1e-6)


def test_cutmix_share_is_the_area():
    image, label = batch()
    mixed, target = Mixer(Augment(cutmix=1.0), 5, seed=1)(image.clone(), label, 2)
    row = int((label != label.flip(0)).nonzero()[0])
    kept = (mixed[row] == image[row]).all(0).float().mean()
    assert 0 < kept < 1
    assert torch.allclose(target[row, label[row]], kept, atol=1e-6)


def test_a_step_is_a_pure_function_and_leaves_the_global_state():
    image, label = batch()

    def result(seed, step, rank=0):
        return torch.cat([part.flatten() for part in Mixer(STRONG, 5, seed, rank)(image.clone(), label, step)])

    np.random.seed(4)
    expected = np.random.rand(3)
    np.random.seed(4)
    first = result(0, 7)
    assert np.array_equal(np.random.rand(3), expected)
    assert torch.equal(first, result(0, 7))
    for other in (result(0, 8), result(1, 7), result(0, 7, rank=1)):
        assert not torch.equal(first, other)

"""Arrays and TIFFs of any number of channels: every layout gives the pixels that were written, or one sentence."""

import io
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from didicm.data import Augment, Corruptions, DataError, EvalTransform, TrainTransform, open_data, open_image
from didicm.data.corruptions import SUITE
from didicm.data.decode import own_channels, to_channels
from didicm.data.picture import Bands, from_pixels, viewable
from didicm.data.sources import find_transform
from didicm.errors import UserError
from tests.oracle.tiff import tiff_bytes


def noise(shape, kind=np.uint8, seed=0):
    random = np.random.default_rng(seed)
    return random.random(shape).astype(kind) if np.dtype(kind).kind == "f" else random.integers(
        0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True
    )  # fmt: skip


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def pixels_of(source, channels):
    with open_image(source) as image:
        return np.asarray(to_channels(image, channels))


WHOLE = list(product(("uint8", "uint16"), ("", "deflate", "predictor"), "<>"))


@pytest.mark.parametrize("layout", ["strips", "tiles", "planar", "planar tiles"])
@pytest.mark.parametrize(
    ("kind", "packing", "order"), [*WHOLE, ("float32", "", "<"), ("float32", "", ">"), ("float32", "deflate", "<")]
)
def test_a_tiff_of_many_channels_has_the_pixels_that_were_written(kind, layout, packing, order):
    pixels = noise((37, 41, 5), kind)
    how = {"planar": "planar" in layout, "tile": 16 if "tiles" in layout else None}
    data = tiff_bytes(pixels, order=order, deflate=bool(packing), predictor=packing == "predictor", **how)
    scale = {"uint8": 1, "uint16": 255 / 65535, "float32": 255}[kind]
    expected = np.clip(pixels * scale + (0.5 if kind != "uint8" else 0), 0, 255).astype(np.uint8)
    with open_image(data) as image:
        assert own_channels(image) == 5
    assert np.array_equal(pixels_of(data, 5), expected)


def test_a_tiff_that_pillow_reads_in_part_is_read_whole_when_it_is_asked_for(tmp_path):
    pixels = noise((20, 30, 4))
    (tmp_path / "x.tif").write_bytes(tiff_bytes(pixels, colours=2))
    assert np.array_equal(pixels_of(tmp_path / "x.tif", 4), pixels)
    assert np.array_equal(pixels_of(tmp_path / "x.tif", 3), pixels[..., :3])
    six = tiff_bytes(noise((20, 30, 6)), colours=2)
    with open_image(six) as image:
        assert own_channels(image) == 6
    with pytest.raises(UserError, match="it has 6 channels, and 5 are asked for"):
        pixels_of(six, 5)


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 1), (9, 7, 2), (9, 7, 3), (9, 7, 4), (9, 7, 32)])
@pytest.mark.parametrize("fortran", [False, True])
def test_an_array_has_the_pixels_that_were_saved(shape, fortran, tmp_path):
    array = noise(shape)
    np.save(tmp_path / "x.npy", np.asfortranarray(array) if fortran else array)
    channels = shape[2] if len(shape) == 3 else 1
    for source in (tmp_path / "x.npy", (tmp_path / "x.npy").read_bytes()):
        assert np.array_equal(pixels_of(source, channels).reshape(array.shape), array)


def test_deep_arrays_are_scaled_by_the_range_of_their_type():
    levels = np.array([0.0, 0.25, 1.0])
    wide = np.tile(levels[:, None, None], (1, 4, 5))
    for array in (wide, wide * 255, wide * 1.01, (wide * 65535).astype(np.uint16), wide > 0.9):
        found = pixels_of(npy(array), 5)[:, 0, 0]
        assert found.tolist() == [0, 0 if array.dtype == bool else 64, 255] or found[1] in (63, 64)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # on damaged tags
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (npy(np.zeros((4, 4, 33), np.uint8)), "at most 32 channels"),
        (npy(np.zeros((4,), np.uint8)), "not an image"),
        (npy(np.zeros((0, 4), np.uint8)), "not an image"),
        (npy(np.zeros((4, 4), complex)), "not an image"),
        (npy(np.array([["a"]])), "not an image"),
        (npy(np.array([[{}]]), allow_pickle=True), "not an image"),  # never unpickled
        (npy(np.full((4, 4, 5), np.nan)), "not numbers"),
        (npy(np.zeros((4, 4, 5), np.int64)), "an array of int64 is not an image: save uint8"),
        (npy(np.linspace(-0.4, 2.8, 16).reshape(4, 4)), "its values, from -0.4 to 2.8, have no known black"),
        (npy(np.linspace(-1, 1, 16).reshape(4, 4)), "its values, from -1 to 1, have"),
        (npy(np.linspace(0, 4095.0, 16).reshape(4, 4)), "its values, from 0 to 4095, have"),
        (npy(np.zeros((8, 8, 5), np.uint8))[:-1], "pixels are missing"),
        (npy(np.zeros((8, 8, 5), np.uint8)).replace(b"(8, 8, 5)", b"(8,8**9,5"), "header of the array is damaged"),
        (npy(np.zeros((4, 4), np.uint8)).replace(b"(4, 4)", b"(99999,99999)")[:200], "MB allowed"),
        (npy(np.zeros((4, 4), np.uint8)).replace(b"(4, 4)", b"(-4, -4)"), "not an image"),
        (b"\x93NUMPY\x03\x00" + b"x" * 90, "header of the array is damaged"),
        (tiff_bytes(noise((8, 8, 33))), "at most 32"),
        (tiff_bytes(noise((8, 8, 5), "float32"), deflate=True, predictor=True), "predictor 2 is not read"),
        (tiff_bytes(noise((8, 8, 5), "float32"), deflate=True, order=">"), "big-endian and compressed"),
        (tiff_bytes(noise((8, 8, 5)))[:-60], "tags are damaged|at most 32"),
        (tiff_bytes(noise((8, 8, 5)))[:6], "tags are damaged"),
    ],
)
def test_hostile_files_are_one_sentence(data, says):
    with pytest.raises(UserError, match=says):
        pixels_of(data, 5)


def test_all_channels_are_cropped_flipped_and_corrupted_alike():
    grey = noise((40, 50), seed=3)
    grey = np.asarray(Image.fromarray(grey).resize((50, 40)))
    image, same = from_pixels(np.stack([grey] * 5, axis=-1)), Image.fromarray(grey)
    seen = EvalTransform(16, 5, mean=(0.5,) * 5, std=(0.5,) * 5)
    alone = EvalTransform(16, 1)
    for augment in (Augment(), Augment(scale=(0.3, 1.0), hflip=0.5), Augment(pad=2, hflip=0.5)):
        for key in range(4):
            many = np.asarray(TrainTransform(augment, seen).prepare(image, key))
            one = np.asarray(TrainTransform(augment, alone).prepare(same, key))
            assert np.array_equal(many, np.stack([one] * 5, axis=-1))
    assert torch.equal(seen(image), alone(same).expand(5, -1, -1))
    for name in SUITE:
        corrupted = Corruptions.parse(f"{name}:4")(image, np.random.default_rng(1))
        assert isinstance(corrupted, Bands)
        assert corrupted.size == image.size
        if "noise" not in name:  # which is drawn for each channel
            one = np.asarray(Corruptions.parse(f"{name}:4")(same, np.random.default_rng(1)))
            assert np.abs(np.asarray(corrupted) - one[..., None].astype(float)).max() <= 1
    assert viewable(image).mode == "RGB"


def test_colour_augmentation_of_other_channels_is_refused():
    seen = EvalTransform(16, 5, mean=(0.5,) * 5, std=(0.5,) * 5)
    with pytest.raises(DataError, match="color_jitter and auto_augment are for grey and RGB images"):
        TrainTransform(Augment(color_jitter=0.4, auto_augment="rand-m7-mstd0.5-inc1"), seen)


def test_channels_mean_and_deviation_are_found_from_the_images(tmp_path):
    values = []
    for i in range(6):
        folder = tmp_path / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        array = noise((10, 12, 4), seed=i) // np.array([1, 2, 4, 300]).astype(np.uint16)
        values.append(array.astype(np.uint8))
        np.save(folder / f"{i}.npy", values[-1])
    data = open_data(str(tmp_path))
    seen = find_transform(data, None, 32, None, 1.0, "bicubic")
    assert (seen.size, seen.channels) == (10, 4)
    pixels = np.concatenate([x.reshape(-1, 4) for x in values]) / 255
    assert seen.mean == pytest.approx(pixels.mean(0), abs=1e-5)
    assert seen.std[:3] == pytest.approx(pixels.std(0)[:3], abs=1e-5)
    assert seen.std[3] == pytest.approx(1 / 255, abs=1e-5)  # a channel that is black everywhere


def test_arrays_beside_images_are_no_images(tmp_path, write):
    for name in ("a", "b"):
        write(tmp_path / name / "0.png")
        np.save(tmp_path / name / "0.npy", np.zeros(512))
    assert [open_data(str(tmp_path)).train.name(i)[-3:] for i in range(2)] == ["png", "png"]

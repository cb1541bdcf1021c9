from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from didicm.data import Corruptions, DataError, open_data
from didicm.data.corruptions import SUITE, reduce_resolution


@pytest.fixture(params=["fashion", "rgb"])
def images(request, picture):
    if request.param == "rgb":
        return [picture(i, (96, 64)) for i in range(8)]
    fashion = open_data("fashion-mini", channels=1).train
    return [fashion.load(i) for i in range(0, 2000, 100)]


def damage(images, corruption):
    pairs = [(x, corruption(x, np.random.default_rng(i))) for i, x in enumerate(images)]
    return np.mean([(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)) ** 2 for a, b in pairs])


@pytest.mark.parametrize("name", SUITE)
def test_damage_rises_with_severity(name, images):
    levels = [damage(images, Corruptions.parse(f"{name}:{severity}")) for severity in range(1, 6)]
    assert levels[0] > 1
    assert all(a < b for a, b in pairwise(levels)), levels


@pytest.mark.parametrize("name", SUITE)
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(7, 7), (7, 30), (61, 40)])
def test_any_size_and_mode(name, mode, size, picture):
    for severity in (1, 5):
        result = Corruptions.parse(f"{name}:{severity}")(picture(0, size, mode), np.random.default_rng(0))
        assert (result.mode, result.size) == (mode, size)


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "motion_blur", "occlusion"])
def test_randomness_comes_from_the_generator_alone(name, picture):
    image, corruption = picture(0, (40, 40)), Corruptions.parse(f"{name}:3")
    same = [corruption(image, np.random.default_rng(5)).tobytes() for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != corruption(image, np.random.default_rng(6)).tobytes()


def test_original_stays_as_it_was(picture):
    image = picture()
    before = image.tobytes()
    for name in SUITE:
        Corruptions.parse(f"{name}:5")(image, np.random.default_rng(0))
    assert image.tobytes() == before


def test_occlusion_covers_its_share():
    black = Image.new("L", (100, 100))
    for severity, share in enumerate(SUITE["occlusion"][1], 1):
        covered = (
            np.asarray(Corruptions.parse(f"occlusion:{severity}")(black, np.random.default_rng(severity))) > 0
        )
        assert covered.mean() == pytest.approx(share, abs=0.02)


def test_resolution(picture):
    image = picture(0, (100, 50))
    assert reduce_resolution(image, 25).size == (50, 25)
    assert reduce_resolution(image, 60) is image
    stripes = Image.fromarray(np.tile(np.array([0, 255], dtype=np.uint8), (8, 4)))
    assert set(np.asarray(reduce_resolution(stripes, 4)).ravel().tolist()) <= {127, 128}  # averaged, not aliased


def test_parsing():
    parsed = Corruptions.parse(" noise:3 + jpeg:2+resolution:56")
    assert str(parsed) == "gaussian_noise:3+jpeg:2+resolution:56"
    assert Corruptions.parse(str(parsed)) == parsed
    both = Corruptions.parse("contrast:5+brightness:5")(Image.new("L", (8, 8), 100), np.random.default_rng(0))
    assert both.getpixel((0, 0)) == pytest.approx(228, abs=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fog:1", "no corruption 'fog'; choose one of"),
        ("nois:3", "did you mean noise"),
        ("blur:6", "1 to 5, got 6"),
        ("blur:0", "1 to 5, got 0"),
        ("blur", "write name:severity"),
        ("", "write name:severity"),
        ("resolution:0", "at least 1"),
    ],
)
def test_refusals(text, words):
    with pytest.raises(DataError, match=words):
        Corruptions.parse(text)

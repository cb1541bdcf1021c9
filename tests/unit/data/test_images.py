import io
import pickle

import numpy as np
import pytest
from PIL import Image

from didicm.data.decode import open_image, own_channels, to_channels
from didicm.data.folder import Strings
from didicm.data.images import (
    ArraySet,
    DataError,
    MemorySet,
    UnreadableImageError,
    relabel,
    sort_names,
)


def stored(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return open_image(file.getvalue())


def pixel(image):
    return image.getpixel((0, 0))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"]
)
def test_every_mode_becomes_grey_or_rgb(mode, channels, picture):
    if mode == "I;16":
        image = Image.fromarray(np.arange(12, dtype=np.uint16).reshape(3, 4))
    elif mode == "PA":
        image = Image.new("PA", (4, 3))
    else:
        image = Image.new("LAB", (4, 3)) if mode == "LAB" else picture(size=(4, 3)).convert(mode)
    result = to_channels(image, channels)
    assert (result.mode, result.size) == ({1: "L", 3: "RGB"}[channels], (4, 3))


def test_transparency_is_laid_on_white():
    half_red = stored(Image.new("RGBA", (2, 2), (255, 0, 0, 128)))
    assert pixel(to_channels(half_red, 3)) == pytest.approx((255, 127, 127), abs=1)
    nothing = stored(Image.new("LA", (2, 2), (0, 0)))
    assert pixel(to_channels(nothing, 1)) == 255


def test_transparent_palette_entry_becomes_white():
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    assert pixel(to_channels(stored(palette), 3)) == (200, 100, 50)
    assert pixel(to_channels(stored(palette, transparency=1), 3)) == (255, 255, 255)


def test_transparent_colour_of_an_rgb_png_becomes_white():
    assert pixel(to_channels(stored(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3)), 3)) == (255,) * 3


def test_16_bit_grey_is_scaled_not_clipped():
    values = np.array([[0, 257 * 10, 32768, 65535]], dtype=np.uint16)
    for file_format in ("PNG", "TIFF"):
        result = to_channels(stored(Image.fromarray(values), file_format), 1)
        assert np.asarray(result).tolist() == [[0, 10, 128, 255]]


def test_16_bit_images_keep_their_relative_brightness():
    dark, bright = (Image.fromarray(np.full((2, 2), v, dtype=np.uint16)) for v in (4000, 8000))
    assert pixel(to_channels(bright, 1)) == pytest.approx(2 * pixel(to_channels(dark, 1)), abs=1)


def test_float_images_between_0_and_1():
    assert np.asarray(to_channels(Image.fromarray(np.array([[0, 0.5, 1]], dtype=np.float32)), 1)).tolist() == [
        [0, 128, 255]
    ]


def test_cmyk_jpeg_keeps_its_colour():
    red, green, blue = pixel(to_channels(stored(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), 3))
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(orientation):
    upright = Image.new("RGB", (16, 8), "black")
    upright.paste("white", (0, 0, 8, 4))  # the upper left quarter
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    turned = upright.transpose(back[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    result = to_channels(stored(turned, "JPEG", exif=exif, quality=95), 3)
    assert result.size == (16, 8)
    assert np.abs(np.asarray(result, dtype=int) - np.asarray(upright)).mean() < 5
    assert to_channels(result, 3).size == (16, 8)  # not turned a second time


def test_broken_bytes_name_the_image():
    class Broken(ArraySet):
        def original(self, i):
            return open_image(b"not an image")

    images = Broken([np.zeros((2, 2), dtype=np.uint8)], np.zeros(1), ["a"], origin="there")
    with pytest.raises(UnreadableImageError, match=r"there\[0\] cannot be read"):
        images.load(0)


def test_selection_takes_images_labels_and_names_along():
    images = ArraySet(np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2), np.arange(5), list("abcde"), channels=1)
    marked = images.select(images.labels == images.labels[2])
    assert [marked.name(i) for i in range(len(marked))] == [
        images.name(int(i)) for i in np.flatnonzero(images.labels == images.labels[2])
    ]
    chosen = images.select(np.array([3, 1]))
    assert chosen.labels.tolist() == [3, 1]
    assert np.asarray(chosen.load(0)).tolist() == [[12, 13], [14, 15]]
    assert chosen.name(1) == "array[1]"


@pytest.mark.parametrize(("channels", "own"), [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_arrays_with_one_to_four_channels_become_colour_images(channels, own):
    images = ArraySet(np.full((1, 4, 4, channels), 200, np.uint8), np.zeros(1), ["a"])
    assert own_channels(images.original(0)) == own
    assert images.load(0).mode == "RGB"


def test_arrays_of_many_channels_tell_how_many():
    images = ArraySet(np.full((1, 4, 4, 5), 200, np.uint8), np.zeros(1), ["a"])
    assert own_channels(images.original(0)) == 5
    assert images.with_channels(5).load(0).size == (4, 4)
    with pytest.raises(UnreadableImageError, match="it has 5 channels, and 3 are asked for"):
        images.load(0)


def test_grey_of_any_depth_is_one_channel():
    for pixels in (np.uint8(7), np.float32(0.5), np.int32(7), np.uint16(7)):
        assert own_channels(stored(Image.fromarray(np.full((4, 4), pixels)), "TIFF")) == 1
    big_endian = Image.frombytes("I;16B", (4, 4), np.full(16, 3000, ">u2").tobytes())
    assert own_channels(stored(big_endian, "TIFF")) == 1


def test_strings_hold_any_file_name():
    names = ["a", "", "größe/ü.png", "broken\udcff", "日本"]
    strings = pickle.loads(pickle.dumps(Strings.of(names)))
    assert [strings[i] for i in range(len(names))] == names


def test_channels_change_without_opening_again():
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 2, 2, 3) * 10
    images = ArraySet(pixels, np.arange(2), ["a", "b"])
    for source in (images, images.select(np.array([0, 1])), MemorySet(images)):
        grey = source.with_channels(1)
        assert (grey.load(1).mode, source.load(1).mode) == ("L", "RGB")
        assert grey.labels is source.labels
        colour = MemorySet(grey).with_channels(3)
        assert np.array_equal(np.asarray(colour.load(1)), pixels[1])
    with pytest.raises(DataError, match="channels"):
        images.with_channels(33)


def test_relabel_looks_only_at_classes_with_images():
    images = ArraySet(np.zeros((3, 2, 2), dtype=np.uint8), np.array([2, 0, 2]), ["dog", "yak", "ant"])
    new = relabel(images, ["ant", "bee", "dog"])
    assert new.labels.tolist() == [0, 2, 0]
    assert new.class_names == ["ant", "bee", "dog"]
    with pytest.raises(DataError, match="'dog'"):
        relabel(images, ["ant"])


def test_natural_order():
    assert sort_names(["a10", "b", "a2", "10", "9", "x²"]) == ["9", "10", "a2", "a10", "b", "x²"]

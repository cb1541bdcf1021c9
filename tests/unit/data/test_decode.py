"""Files that nobody should have to trust: no more than a list of formats is opened, in bounded memory."""

import io
import os
import socket
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features

from didicm.data import EvalTransform, decode, open_data, open_image, to_channels
from didicm.data.decode import resize_and_crop
from didicm.data.doctor import examine
from didicm.data.picture import MEMORY
from didicm.errors import UserError

BOUND = 300 * 2**20


def seen(content, size=224):
    return tuple(EvalTransform(size)(open_image(content)).shape)


def encoded(image, file_format, **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def png(width, height, depth=8, kind=2, lines=0):
    """A PNG of zeros that states any size: its pixels compress to nothing, and need not be there."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    row = 1 + (width * depth * {0: 1, 2: 3, 6: 4}[kind] + 7) // 8
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    data = zlib.compress(bytes(row * lines), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tiff_with_tile(side):
    """A tiny TIFF whose only tile has side x side pixels, of zeros that compress to nothing."""
    tile = zlib.compress(bytes(side * side), 1)
    tags = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(tile)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(tile)) + tile + struct.pack("<H", len(tags)) + entries + bytes(4)
    )


def gif_of_frames(count):
    frames = [Image.new("P", (64, 64), k % 256) for k in range(count)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


ACCEPTED = {
    "a thin png": lambda: png(1, 20_000, lines=20_000),
    "a flat png": lambda: png(2_000_000, 1, lines=1),
    "a thin 16-bit png": lambda: encoded(Image.fromarray(np.full((60_000, 2), 9, np.uint16)), "PNG"),
    "a large 16-bit png": lambda: png(3_300, 3_300, depth=16, kind=0, lines=3_300),
    "a large transparent png": lambda: png(2_850, 2_850, kind=6, lines=2_850),
    "a thin webp": lambda: encoded(Image.new("RGB", (3, 16_000)), "WEBP"),
    "a large webp": lambda: encoded(Image.new("RGBA", (1_800, 1_800)), "WEBP", lossless=True, method=0),
    "a large turned jpeg": lambda: encoded(Image.new("RGB", (2_850, 2_850)), "JPEG", exif=turned()),
    "a large progressive jpeg": lambda: encoded(Image.new("RGB", (2_500, 2_500)), "JPEG", progressive=True),
    "a thin tiff": lambda: encoded(Image.new("F", (2, 40_000)), "TIFF"),
    "a gif of many frames": lambda: gif_of_frames(500),
}
REFUSED = {
    "a png header": lambda: png(20_000, 4_000),
    "a png that is all header": lambda: png(2**31 - 1, 2**31 - 1),
    "a 16-bit png": lambda: png(8_000, 8_000, depth=16, kind=0),
    "a webp": lambda: encoded(Image.new("RGB", (4_200, 4_200)), "WEBP", lossless=True, method=0),
    "a turned jpeg": lambda: encoded(Image.new("RGB", (6_000, 6_000)), "JPEG", exif=turned()),
    "a tiff with a huge tile": lambda: tiff_with_tile(9_000),
}


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize("name", ACCEPTED)
def test_images_that_are_read_stay_within_300_mb(name, peak, tmp_path, monkeypatch):
    monkeypatch.setattr("didicm.data.picture.MEMORY", MEMORY // 4)  # a quarter is as informative, and faster
    (tmp_path / "image").write_bytes(ACCEPTED[name]())
    used, answer = peak(lambda: seen(tmp_path / "image"))
    assert answer == "(3, 224, 224)"
    assert used < BOUND - MEMORY + MEMORY // 4


@pytest.mark.parametrize("name", REFUSED)
def test_images_that_would_take_more_are_refused_before_decoding(name, peak, tmp_path):
    (tmp_path / "image").write_bytes(REFUSED[name]())
    used, answer = peak(lambda: seen(tmp_path / "image"))
    assert "make it smaller" in answer or "exceeds limit" in answer
    assert used < BOUND


def test_the_memory_that_is_counted_covers_the_memory_that_is_used(peak, tmp_path):
    for file_format, options in {"JPEG2000": {}, "AVIF": {"speed": 10}}.items():
        if file_format == "AVIF" and not features.check("avif"):
            continue
        (tmp_path / "image").write_bytes(encoded(Image.new("RGBA", (1_500, 1_500)), file_format, **options))
        used, answer = peak(lambda: seen(tmp_path / "image"))
        assert answer == "(3, 224, 224)"
        assert used < 1_500**2 * 32 + BOUND - MEMORY


def test_thin_images_are_cropped_before_they_are_resized(picture, monkeypatch):
    for size in ((6, 240), (400, 9)):
        image = picture(size=size)
        thin = np.asarray(resize_and_crop(image, 32, 0.875, "bilinear"), dtype=int)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "MAX_LOSS", np.inf)
            whole = np.asarray(resize_and_crop(image, 32, 0.875, "bilinear"), dtype=int)
        assert np.abs(thin - whole).max() <= 1  # rounding


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "I;16", "F", "CMYK", "1", "YCbCr"])
def test_conversion_by_parts_changes_nothing(mode, picture, monkeypatch):
    if mode == "I;16":
        image = Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (40, 50), dtype=np.uint16))
    else:
        image = picture(size=(50, 40)).convert(mode)
    whole = [to_channels(image, channels).tobytes() for channels in (1, 3)]
    monkeypatch.setattr("didicm.data.decode.TILE", 77)
    assert [to_channels(image, channels).tobytes() for channels in (1, 3)] == whole


def test_pixels_that_are_no_numbers_are_refused():
    values = np.zeros((4, 4), dtype=np.float32)
    values[1, 2] = np.nan
    with pytest.raises(UserError, match="not numbers"):
        to_channels(Image.fromarray(values), 3)


def test_a_tiff_without_some_of_its_rows_is_refused(picture):
    whole = encoded(picture(size=(32, 24)), "TIFF")
    rows = struct.pack("<HHI", 278, 4, 1) if whole[:2] == b"II" else b""
    at = whole.index(rows)
    open_image(whole)
    for kept in (1, 23):
        part = whole[:at] + rows + struct.pack("<I", kept) + whole[at + 12 :]
        with pytest.raises(UserError, match="pixels are missing"):
            open_image(part)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def test_only_raster_formats_are_opened_whatever_a_file_is_called(picture, tmp_path):
    others = {"EPS": EPS, "PCX": encoded(picture(), "PCX"), "ICO": encoded(picture(), "ICO"), "text": b"a" * 500}
    for name, content in others.items():
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(content)
        for source in (path, str(path), content):
            with pytest.raises(UserError, match="none of JPEG, PNG"):
                open_image(source)
    (tmp_path / "really.jpg").write_bytes(encoded(picture(), "PNG"))
    assert open_image(tmp_path / "really.jpg").format == "PNG"


def test_an_empty_file_is_told(tmp_path):
    (tmp_path / "x.png").touch()
    for source in (tmp_path / "x.png", b""):
        with pytest.raises(UserError, match="it is empty"):
            open_image(source)


def test_a_tga_file_is_known_by_its_end_or_its_name(picture, tmp_path):
    content = encoded(picture(), "TGA")
    assert open_image(content).format == "TGA"
    (tmp_path / "old.tga").write_bytes(content[:-26])
    assert open_image(tmp_path / "old.tga").format == "TGA"


@pytest.fixture
def strange_folder(tmp_path, make_folder):
    """Images, and between them things that only look like files."""
    folder = make_folder(tmp_path / "images")
    os.mkfifo(folder / "cat" / "pipe.jpg")
    (folder / "cat" / "zero.jpg").symlink_to("/dev/zero")
    (folder / "dog" / "gone.jpg").symlink_to("nowhere")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "dog" / "socket.jpg"))
    yield folder
    listener.close()


def test_pipes_devices_and_sockets_are_named_and_never_opened(strange_folder):
    found = examine(open_data(str(strange_folder)))
    told = "\n".join(found.train.unreadable)
    for name, what in (
        ("pipe", "a named pipe"),
        ("zero", "a device"),
        ("socket", "a socket"),
        ("gone", "No such"),
    ):
        assert any(f"{name}.jpg" in line and what in line for line in told.splitlines()), told
    assert len(found.train.unreadable) == 4

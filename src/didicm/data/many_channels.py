"""Files of any number of channels: numpy's `.npy` and TIFF with many bands; without PyTorch.

Values of more than 8 bits are scaled by the range of their type, as in grey images, one range for all channels.
"""

import io
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

from didicm.data.picture import (
    MEMORY,
    Bands,
    Picture,
    check_complete,
    check_memory,
    decoding_bytes,
    from_pixels,
    white_value,
)
from didicm.errors import UserError

MOST_CHANNELS = 32
NPY = b"\x93NUMPY"
TIFF = (b"II*\0", b"MM\0*")  # not BigTIFF, for files of more than 4 GB
WIDTH, LENGTH, BITS, COMPRESSION, COLOURS, OFFSETS, SAMPLES = 256, 257, 258, 259, 262, 273, 277
ROWS, COUNTS, PLANAR, ORIENTATION, PREDICTOR, FORMAT = 278, 279, 284, 274, 317, 339
TILE_WIDTH, TILE_LENGTH, TILE_OFFSETS, TILE_COUNTS = 322, 323, 324, 325
WHOLE = (WIDTH, LENGTH, SAMPLES, COMPRESSION, PLANAR, PREDICTOR, ORIENTATION, ROWS, TILE_WIDTH, TILE_LENGTH)
LOSSLESS = (1, 5, 8, 32773, 32946, 34925, 50000)  # compressions that know nothing of channels


def open_many(data: bytes | Path) -> Picture | None:
    """Open an array or a TIFF of many bands, decoded; None if it is neither."""
    head = data[:8] if isinstance(data, bytes) else _read(data, 8)
    if head[:6] == NPY:
        return _open_array(data)
    return open_bands(data) if head[:4] in TIFF else None


def _open_array(data: bytes | Path) -> Picture:
    """An array (H, W) or (H, W, C) of numbers. Numpy parses the header and no more: nothing is unpickled."""
    with io.BytesIO(data) if isinstance(data, bytes) else open(data, "rb") as file:
        shape, fortran, kind = _array_header(file)
        size = (shape[1], shape[0])
        values = int(np.prod(shape, dtype=object))
        check_memory(size, values * (kind.itemsize + 1) + 8 * shape[0] * shape[1])
        content = file.read(values * kind.itemsize)
    if len(content) < values * kind.itemsize:
        raise UserError("some of its pixels are missing")
    pixels = np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")
    return from_pixels(np.stack(list(_to_8_bits(np.moveaxis(np.atleast_3d(pixels), 2, 0))), axis=-1))


def _array_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, fortran, kind = readers[np.lib.format.read_magic(file)](file)
    except Exception as error:  # whatever the parser of a hostile header raises
        raise UserError("the header of the array is damaged") from error
    channels = shape[2] if len(shape) == 3 else 1
    whole = all(type(n) is int and n > 0 for n in shape)
    if len(shape) not in (2, 3) or not whole or channels > MOST_CHANNELS:
        raise UserError(
            f"an array of shape {shape} is not an image: save it as height x width x channels, with at most "
            f"{MOST_CHANNELS} channels"
        )
    if kind.kind not in "buif" or kind.itemsize > 8:
        raise UserError(f"an array of {kind} is not an image: save whole or floating-point numbers")
    return shape, fortran, kind


def open_bands(data: bytes | Path) -> Bands:
    """A TIFF of many bands, of which Pillow reads at most the first few.

    Pillow decodes the strips or tiles all the same, if another directory of tags tells it of grey images: one per
    band where bands are stored one after the other, else a single one that is as many times as wide.
    """
    content = data if isinstance(data, bytes) else _read(data, MEMORY + 1)
    tags = _tags(content)
    bands, width, height = tags.get(SAMPLES, 1), tags[WIDTH], tags[LENGTH]
    compression, predictor = tags.get(COMPRESSION, 1), tags.get(PREDICTOR, 1)
    if not 2 <= bands <= MOST_CHANNELS:
        raise UserError(f"it has {bands} channels: at most {MOST_CHANNELS} are read")
    if compression not in LOSSLESS or tags.get(ORIENTATION, 1) != 1:
        raise UserError(
            "a TIFF of many channels must be upright, and uncompressed or compressed by LZW or deflate"
        )
    check_memory((width, height), 3 * len(content) + 9 * bands * width * height)
    bits = set(_tuple(tags.get(BITS, 1)))
    kinds = set(_tuple(tags.get(FORMAT, 1)))
    if len(bits) != 1 or len(kinds) != 1:
        raise UserError("its channels are not all of one type: save them alike")
    common = {BITS: bits.pop(), FORMAT: kinds.pop(), COMPRESSION: compression, LENGTH: height}
    if (
        common[FORMAT] == 3 and compression != 1 and content[:2] == b"MM"
    ):  # Pillow takes their bytes in the wrong order
        raise UserError("its numbers are floating-point, big-endian and compressed: save them otherwise")
    common |= {tag: tags[tag] for tag in (ROWS, TILE_LENGTH) if tag in tags}
    places = (TILE_OFFSETS, TILE_COUNTS) if TILE_OFFSETS in tags else (OFFSETS, COUNTS)
    parts = {tag: _tuple(tags[tag]) for tag in places}
    if tags.get(PLANAR, 1) == 2:
        common |= {WIDTH: width, PREDICTOR: predictor} | _kept(tags, TILE_WIDTH)
        each = len(parts[places[0]]) // bands
        own = ({tag: x[each * i : each * (i + 1)] for tag, x in parts.items()} for i in range(bands))
        return Bands([Image.fromarray(x) for x in _to_8_bits([_decode(content, common | part) for part in own])])
    if predictor not in (1, 2) or (predictor == 2 and common[FORMAT] != 1):
        raise UserError(f"TIFF's predictor {predictor} is not read: save it with another compression")
    # Differences of neighbours are those of the same band, which only we know of.
    wide = common | {tag: bands * n for tag, n in ({WIDTH: width} | _kept(tags, TILE_WIDTH)).items()} | parts
    pixels = _decode(content, wide).reshape(height, width, bands)
    if predictor == 2:
        step = tags.get(TILE_WIDTH, width)
        for left in range(0, width, step):
            part = pixels[:, left : left + step]
            np.add.accumulate(part, axis=1, dtype=part.dtype, out=part)
    return Bands([Image.fromarray(x) for x in _to_8_bits(np.moveaxis(pixels, 2, 0))])


def samples(image: Image.Image) -> int:
    """How many channels a file that Pillow opened has, of which it may show fewer."""
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(SAMPLES, 0)) or len(image.getbands())


def _tags(content: bytes) -> dict[int, Any]:
    directory = TiffImagePlugin.ImageFileDirectory_v2(content[:8])
    file = io.BytesIO(content)
    file.seek(directory.next)
    try:
        directory.load(file)
        tags = {tag: directory[tag] for tag in directory}
        found = {tag: tags[tag] for tag in WHOLE if tag in tags}
        if not all(type(n) is int and n > 0 for n in found.values()) or not {WIDTH, LENGTH} <= found.keys():
            raise ValueError
    except Exception as error:  # whatever a hostile directory makes the parser raise
        raise UserError("its tags are damaged") from error
    return tags


def _decode(content: bytes, tags: dict[int, Any]) -> np.ndarray:
    """Pixels (H, W) of a file with another directory of tags, for a grey image."""
    order = "<" if content[:2] == b"II" else ">"
    tags = dict(sorted({**tags, COLOURS: 1, SAMPLES: 1}.items()))
    place = len(content) + len(content) % 2
    lists, end = b"", place + 2 + 12 * len(tags) + 4
    entries = struct.pack(f"{order}H", len(tags))
    for tag, value in tags.items():
        values = _tuple(value)
        packed = struct.pack(f"{order}{len(values)}L", *values)
        where = packed if len(values) == 1 else struct.pack(f"{order}L", end + len(lists))
        lists += packed if len(values) > 1 else b""
        entries += struct.pack(f"{order}HHL", tag, 4, len(values)) + where
    head = content[:4] + struct.pack(f"{order}L", place)
    file = io.BytesIO(b"".join([head, content[8:], b"\0" * (place - len(content)), entries, b"\0" * 4, lists]))
    image = Image.open(file, formats=["TIFF"])
    check_complete(image)
    check_memory(image.size, decoding_bytes(image))
    pixels = np.array(image)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _to_8_bits(planes: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Channels (H, W) scaled to 0..255 by the range of their type."""
    planes = list(planes)
    if planes[0].dtype == np.uint8:
        yield from planes
        return
    highest, kind = np.max([plane.max() for plane in planes]), planes[0].dtype.kind
    white = 1.0 if kind == "b" else white_value(highest, floating=kind == "f")
    for plane in planes:
        yield np.clip(plane * (255 / white) + 0.5, 0, 255).astype(np.uint8)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _kept(tags: dict[int, Any], tag: int) -> dict[int, Any]:
    return {tag: tags[tag]} if tag in tags else {}


def _read(path: Path, most: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(most)

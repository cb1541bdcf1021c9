"""Images of any number of channels, files that Pillow has no mode for, and what memory decoding one may take.

These are numpy's `.npy` and TIFF of many bands. Values of more than 8 bits are scaled by the range of their type,
as in grey images, one range for all channels. Without PyTorch: exported models read images by the same code.
"""

import io
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageFilter, TiffImagePlugin

from didicm.errors import UserError

MEMORY = 256 * 2**20  # bytes that decoding one image may take
DECODERS = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JPEG2000": 24}  # bytes per pixel that they hold beside the image
MOST_CHANNELS = 32
# Floating-point values up to the first are 0..1, from the second on 0..255; between them they are standardised.
OVERSHOOT, DIMMEST = 1.5, 8
NPY = b"\x93NUMPY"
TIFF = (b"II*\0", b"MM\0*")  # not BigTIFF, for files of more than 4 GB
# Tags of TIFF.
WIDTH, LENGTH, BITS, COMPRESSION, COLOURS, OFFSETS, SAMPLES = 256, 257, 258, 259, 262, 273, 277
ROWS, COUNTS, PLANAR, ORIENTATION, PREDICTOR, FORMAT = 278, 279, 284, 274, 317, 339
TILE_WIDTH, TILE_LENGTH, TILE_OFFSETS, TILE_COUNTS = 322, 323, 324, 325
WHOLE = (WIDTH, LENGTH, SAMPLES, COMPRESSION, PLANAR, PREDICTOR, ORIENTATION, ROWS, TILE_WIDTH, TILE_LENGTH)
LOSSLESS = (1, 5, 8, 32773, 32946, 34925, 50000)  # compressions that know nothing of channels
Box: TypeAlias = tuple[float, float, float, float]


class Bands:
    """An 8-bit image as one grey image per channel, with as much of Pillow's interface as is needed of it."""

    def __init__(self, planes: Sequence[Image.Image]) -> None:
        self.planes = list(planes)

    @property
    def size(self) -> tuple[int, int]:
        return self.planes[0].size

    @property
    def width(self) -> int:
        return self.size[0]

    @property
    def height(self) -> int:
        return self.size[1]

    @property
    def mode(self) -> str:
        return f"{len(self.planes)} channels"

    def each(self, change: Callable[[Image.Image], Image.Image]) -> "Bands":
        """The same change to every channel."""
        return Bands([change(plane) for plane in self.planes])

    def resize(self, size: tuple[int, int], resample: Image.Resampling, box: Box | None = None) -> "Bands":
        return self.each(lambda plane: plane.resize(size, resample, box))

    def crop(self, box: tuple[int, int, int, int]) -> "Bands":
        return self.each(lambda plane: plane.crop(box))

    def filter(self, kernel: ImageFilter.Filter) -> "Bands":
        return self.each(lambda plane: plane.filter(kernel))

    def load(self) -> None:
        """Nothing: it is decoded when it is opened."""

    def close(self) -> None:
        """Nothing: no file is open."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Pixels (H, W, C)."""
        pixels = np.stack([np.asarray(plane) for plane in self.planes], axis=-1)
        return pixels.astype(dtype or np.uint8, copy=False)

    def __enter__(self) -> "Bands":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Picture: TypeAlias = Image.Image | Bands  # an image of any number of channels


def from_pixels(pixels: np.ndarray) -> Picture:
    """An image of 8-bit pixels (H, W) or (H, W, C)."""
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3):
        return Bands([Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(pixels, 2, 0)])
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def from_array(pixels: np.ndarray) -> Picture:
    """An image given as pixels: a second or fourth channel is transparency, unless as many are asked for."""
    return Image.fromarray(pixels) if pixels.shape[2:] in ((2,), (4,)) else from_pixels(pixels)


def each_plane(image: Picture, change: Callable[[Image.Image], Image.Image]) -> Picture:
    """Change an image, or every channel of one that Pillow has no mode for."""
    return image.each(change) if isinstance(image, Bands) else change(image)


def viewable(image: Picture) -> Image.Image:
    """What people can look at: of many channels the first three, of two the first."""
    if isinstance(image, Image.Image):
        return image
    return Image.merge("RGB", image.planes[:3]) if len(image.planes) > 2 else image.planes[0]


def check_memory(size: tuple[int, int], needed: int) -> None:
    """Refuse an image of this width and height that would take too many bytes."""
    if needed > MEMORY:
        raise UserError(
            f"its {size[0]} x {size[1]} pixels would take {needed >> 20} MB to decode, "
            f"more than the {MEMORY >> 20} MB allowed: make it smaller"
        )


def check_complete(image: Image.Image) -> None:
    """Refuse a TIFF without some of its strips: Pillow would show what lies in memory there."""
    parts = [tile[1] for tile in getattr(image, "tile", [])]
    there = sum((right - left) * (bottom - top) for left, top, right, bottom in parts)
    if image.format == "TIFF" and there < image.width * image.height:
        raise UserError("some of its pixels are missing")


def decoding_bytes(image: Image.Image) -> int:
    """Memory for an image, its decoder, and what it is converted to."""
    pixels, own = image.width * image.height, stored_bytes(image)
    decoder = DECODERS.get(str(image.format), 0)
    if image.info.get("progressive"):  # a JPEG whose coefficients are all held
        decoder = 2 * len(image.getbands())
    tags = getattr(image, "tag_v2", {})  # of a TIFF, whose tiles may be larger than the image
    tile: int = tags.get(TILE_WIDTH, 0) * tags.get(TILE_LENGTH, 0) * 4
    converted = 4 * pixels if image.mode != "RGB" else 0
    return own + decoder * pixels + tile + converted


def white_value(planes: Iterable[np.ndarray], *, floating: bool) -> float:
    """The value that stands for white in channels or parts (H, W) of an image of more than 8 bits."""
    ends = [(plane.min(), plane.max()) for plane in planes]
    lowest, highest = np.min([low for low, _ in ends]), np.max([high for _, high in ends])
    if np.isnan(highest):
        raise UserError("some of its pixels are not numbers")
    if not floating:
        white, fits = 65535.0 if highest <= 65535 else 2.0**31 - 1, lowest >= 0
    else:  # by convention 0..1; some programs write 0..255, and resizing may overshoot either
        white = 1.0 if highest <= OVERSHOOT else 255.0
        fits = lowest >= -max(1, highest) / 2 and not OVERSHOOT < highest < DIMMEST
    if not fits or highest > OVERSHOOT * white:
        raise UserError(
            f"its values, from {lowest:g} to {highest:g}, have no known black and white: save 8-bit pixels, or "
            "floating-point numbers from 0 to 1"
        )
    return white


def stored_bytes(image: Image.Image) -> int:
    """Memory that an image takes as Pillow keeps it."""
    per_pixel = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    return per_pixel * image.width * image.height


def open_many(data: bytes | Path) -> Picture | None:
    """Open an array or a TIFF of many bands, decoded; None if it is neither."""
    head = _read(data, 6)
    if head == NPY:
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
    if kind.newbyteorder("=") not in (bool, np.uint8, np.uint16, np.float16, np.float32, np.float64):
        raise UserError(f"an array of {kind} is not an image: save uint8, uint16, or floats from 0 to 1")
    return shape, fortran, kind


def open_bands(data: bytes | Path) -> Bands:
    """A TIFF of many bands, of which Pillow reads at most the first few.

    Pillow decodes the strips or tiles all the same, if another directory of tags tells it of grey images: one per
    band where bands are stored one after the other, else a single one that is as many times as wide.
    """
    content = _read(data, MEMORY + 1)
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
    bits, kinds = (set(_tuple(tags.get(tag, 1))) for tag in (BITS, FORMAT))
    if len(bits) != 1 or len(kinds) != 1:
        raise UserError("its channels are not all of one type: save them alike")
    common = {BITS: bits.pop(), FORMAT: kinds.pop(), COMPRESSION: compression, LENGTH: height}
    # Pillow takes their bytes in the wrong order.
    if common[FORMAT] == 3 and compression != 1 and content[:2] == b"MM":
        raise UserError("its numbers are floating-point, big-endian and compressed: save them otherwise")
    common |= {tag: tags[tag] for tag in (ROWS, TILE_LENGTH) if tag in tags}
    widths = {tag: tags[tag] for tag in (WIDTH, TILE_WIDTH) if tag in tags}
    places = (TILE_OFFSETS, TILE_COUNTS) if TILE_OFFSETS in tags else (OFFSETS, COUNTS)
    parts = {tag: _tuple(tags[tag]) for tag in places}
    if tags.get(PLANAR, 1) == 2:
        common |= {PREDICTOR: predictor} | widths
        each = len(parts[places[0]]) // bands
        own = ({tag: x[each * i : each * (i + 1)] for tag, x in parts.items()} for i in range(bands))
        return Bands([Image.fromarray(x) for x in _to_8_bits([_decode(content, common | part) for part in own])])
    if predictor not in (1, 2) or (predictor == 2 and common[FORMAT] != 1):
        raise UserError(f"TIFF's predictor {predictor} is not read: save it with another compression")
    # Differences of neighbours are those of the same band, which only we know of.
    wide = common | {tag: bands * n for tag, n in widths.items()} | parts
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
    try:
        directory = TiffImagePlugin.ImageFileDirectory_v2(content[:8])
        file = io.BytesIO(content)
        file.seek(directory.next)
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
    kind = planes[0].dtype.kind
    white = 1.0 if kind == "b" else white_value(planes, floating=kind == "f")
    for plane in planes:
        yield np.clip(plane * (255 / white) + 0.5, 0, 255).astype(np.uint8)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _read(data: bytes | Path, most: int) -> bytes:
    with io.BytesIO(data) if isinstance(data, bytes) else open(data, "rb") as file:
        return file.read(most)

"""From any file to an upright 8-bit image: which formats are opened, and what memory they may take.

Without PyTorch: exported models read their images by the same code.
"""

import io
import math
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from didicm.data.picture import (
    DECODERS,
    MEMORY,
    ORIENTATION,
    Bands,
    Picture,
    check_complete,
    check_memory,
    decoding_bytes,
    open_bands,
    open_many,
    samples,
    stored_bytes,
    white_value,
)
from didicm.errors import UserError

MODES = {1: "L", 3: "RGB"}
# What is opened, decided by content and not by name. Others are no photographs or do more than decode: PostScript
# would start Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")
TGA_END = b"TRUEVISION-XFILE.\0"  # a TGA file has no mark at its start, and none at all in the first version
MAX_LOSS = 32  # pixels that are resized for each one that is kept
TILE = 2**18  # pixels that are converted at a time
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}

# Pillow warns at 89 million pixels; what we allow depends on the format and is below that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def open_image(source: str | Path | bytes) -> Picture:
    """Open a file or the bytes of one; the pixels are decoded later, except of files that Pillow cannot read."""
    formats = image_formats()
    if isinstance(source, bytes):
        held, named_tga = len(source), source.endswith(TGA_END)
    else:
        status = os.stat(source)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise UserError(f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}, not a file")
        held, named_tga = status.st_size, str(source).lower().endswith(".tga")
    if not held:
        raise UserError("it is empty")
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        image = Image.open(file, formats=[*formats, "TGA"] if named_tga else formats)
    except UnidentifiedImageError:
        if (found := open_many(source if isinstance(source, bytes) else Path(source))) is None:
            raise UserError(f"it is none of {', '.join(formats)} or NPY") from None
        return found
    try:
        check_complete(image)
        check_memory(image.size, decoding_bytes(image) + (2 * held if image.format in DECODERS else 0))
    except UserError:
        image.close()
        raise
    return image


def own_channels(image: Picture) -> int:
    """How many channels an image has by itself: 1 (grey), 3 (colour), or all that Pillow has no mode for.

    A fourth one may be transparency, and counts only if it is asked for.
    """
    if isinstance(image, Bands):
        return len(image.planes)
    if (count := samples(image)) > 4:
        return count
    return 1 if image.mode in ("L", "1", "LA") or _is_deep(image) else 3


def to_channels(image: Picture, channels: int) -> Picture:
    """Turn any image into an upright 8-bit one of 1 (`L`), 3 (`RGB`) or as many channels as it has.

    Transparency is laid on white. 16-bit grey is scaled, not clipped; by the range of the format and not of
    the image, so that two images keep their relative brightness.
    """
    if channels not in MODES or isinstance(image, Bands):
        return _to_bands(image, channels)
    # A swap of axes must come first: it reads the tag that a conversion may lose.
    if image.getexif().get(ORIENTATION, 1) != 1:
        check_memory(image.size, 2 * stored_bytes(image))
        image = ImageOps.exif_transpose(image)
    if image.mode == MODES[channels] and not image.has_transparency_data:
        image.load()
        return image
    white = 255.0
    if _is_deep(image):
        white = white_value((np.asarray(tile) for _, tile in tiles(image)), floating=image.mode == "F")
    converted = Image.new(MODES[channels], image.size)
    for place, tile in tiles(image):
        converted.paste(_convert(tile, channels, white), place)
    return converted


def resize_and_crop(image: Picture, size: int, crop_pct: float, interpolation: str) -> Picture:
    """Resize the shorter side to size / crop_pct and cut out the square in the centre, as timm does."""
    resample = Image.Resampling[interpolation.upper()]
    shorter, least = math.floor(size / crop_pct), min(image.size)
    width, height = (int(shorter * side / least) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    if width * height < MAX_LOSS * size**2:
        return image.resize((width, height), resample).crop((left, top, left + size, top + size))
    # Of a thin image only what is kept: the whole might not fit into memory. It differs by rounding.
    x, y = image.width / width, image.height / height
    return image.resize((size, size), resample, (x * left, y * top, x * (left + size), y * (top + size)))


def tiles(image: Image.Image) -> Iterator[tuple[tuple[int, int], Image.Image]]:
    """An image in parts, each with its place: what is done to pixels one by one needs no more memory than that."""
    width = min(image.width, TILE)
    height = TILE // max(1, width)
    for top, left in product(range(0, image.height, height), range(0, image.width, max(1, width))):
        right, bottom = min(left + width, image.width), min(top + height, image.height)
        yield (left, top), image.crop((left, top, right, bottom))


def _to_bands(image: Picture, channels: int) -> Bands:
    """All channels of an image that has so many."""
    count = len(image.planes) if isinstance(image, Bands) else max(samples(image), len(image.getbands()))
    if count != channels:
        raise UserError(f"it has {count} channels, and {channels} are asked for")
    if isinstance(image, Bands):
        return image
    if isinstance(image, TiffImageFile) and image.fp is not None:
        image.fp.seek(0)
        return open_bands(image.fp.read(MEMORY + 1))
    return Bands(ImageOps.exif_transpose(image).split())  # transparency, or a fourth ink, as a channel


def _convert(image: Image.Image, channels: int, white: float) -> Image.Image:
    if _is_deep(image):
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray(np.clip(values * (255 / white) + 0.5, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    if image.mode not in ("L", "1", "RGB"):
        image = image.convert("RGB")  # only to RGB can every mode (palette, CMYK, LAB, ...) go
    return image.convert(MODES[channels])


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("F", "I") or image.mode.startswith("I;16")


@cache
def image_formats() -> list[str]:
    """What this Pillow has of `FORMATS`; HEIF, as telephones write it, comes with the package pillow-heif."""
    Image.init()
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    return [name for name in FORMATS if name in Image.OPEN]

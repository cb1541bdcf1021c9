"""What memory decoding one image may take, judged before its pixels are decoded; without PyTorch."""

from PIL import Image

from didicm.errors import UserError

MEMORY = 256 * 2**20  # bytes that decoding one image may take
DECODERS = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JPEG2000": 24}  # bytes per pixel that they hold beside the image
TILE_WIDTH, TILE_LENGTH = 0x0142, 0x0143  # tags of TIFF


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


def stored_bytes(image: Image.Image) -> int:
    """Memory that an image takes as Pillow keeps it."""
    per_pixel = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    return per_pixel * image.width * image.height

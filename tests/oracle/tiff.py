"""TIFF files of many channels, from the format's description: strips or tiles, interleaved or by channel."""

import struct
import zlib
from itertools import product

import numpy as np


def tiff_bytes(pixels, *, order="<", planar=False, tile=None, deflate=False, predictor=False, colours=1):
    """Pixels (H, W, C) as a file; `tile` is a side in pixels, a multiple of 16."""
    height, width, channels = pixels.shape
    pixels = pixels.astype(pixels.dtype.newbyteorder(order))
    layers = [pixels[..., c : c + 1] for c in range(channels)] if planar else [pixels]
    step = (tile, tile) if tile else (7, width)  # rows per strip that do not divide most heights
    parts = []
    for layer, top, left in product(layers, range(0, height, step[0]), range(0, width, step[1])):
        part = layer[top : top + step[0], left : left + step[1]]
        if tile:
            missing = [(0, side - have) for side, have in zip(step, part.shape[:2], strict=True)]
            part = np.pad(part, [*missing, (0, 0)])
        if predictor:
            first = np.zeros_like(part[:, :1])
            part = (part - np.concatenate([first, part[:, :-1]], axis=1)).astype(pixels.dtype)
        parts.append(zlib.compress(part.tobytes()) if deflate else part.tobytes())
    offsets = np.cumsum([8, *map(len, parts)]).tolist()
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    tags = {
        256: width,
        257: height,
        258: [8 * pixels.dtype.itemsize] * channels,
        259: 8 if deflate else 1,
        262: colours,
        277: channels,
        284: 2 if planar else 1,
        317: 2 if predictor else 1,
        338: [0] * (channels - (3 if colours == 2 else 1)),
        339: [kind] * channels,
        **({322: tile, 323: tile, 324: offsets[:-1]} if tile else {273: offsets[:-1], 278: 7}),
        325 if tile else 279: [len(part) for part in parts],
    }
    place = offsets[-1]
    entries, lists = struct.pack(f"{order}H", len(tags)), b""
    end = place + 2 + 12 * len(tags) + 4
    for tag, value in sorted(tags.items()):
        values = value if isinstance(value, list) else [value]
        packed = struct.pack(f"{order}{len(values)}L", *values)
        where = packed if len(values) == 1 else struct.pack(f"{order}L", end + len(lists))
        lists += packed if len(values) > 1 else b""
        entries += struct.pack(f"{order}HHL", tag, 4, len(values)) + where
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}L", place)
    return b"".join([head, *parts, entries, b"\0" * 4, lists])

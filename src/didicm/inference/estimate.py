"""What a large prediction would take, from a few hundred images: time, files and bytes."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from didicm.data.listing import NO_IMAGES, ImageRef
from didicm.errors import UserError
from didicm.inference.parts import BulkSettings
from didicm.inference.rows import Rows, RowWriter, join_rows

T = TypeVar("T")
SAMPLE = 256  # images that are measured


@dataclass(frozen=True)
class Estimate:
    """Measured costs of an image, and what follows for many."""

    images: int  # that were measured
    unreadable: int
    decoding: float  # seconds per image, of one worker
    network: float  # seconds per image, of the device; all cores of a CPU
    row: float  # bytes
    cores: int  # that decoding and network share; 0 where the network has a GPU
    part_size: int

    def seconds(self, images: float, workers: int, devices: int = 1) -> float:
        """Time for so many images on so many devices, each with its own `workers`, or decoding itself without."""
        if not workers:
            each = self.decoding + self.network
        else:
            each = max(self.network, self.decoding / workers)
            if self.cores:  # what both need in sum, shared by all cores
                each = max(each, self.network + self.decoding / self.cores)
        return images * each / devices

    def files(self, images: int) -> int:
        """Parts of a folder."""
        return -(-images // self.part_size)

    def bytes(self, images: int) -> float:
        """Size of all rows."""
        return images * self.row


def estimate(
    images: Iterable[ImageRef],
    writer: RowWriter,
    settings: BulkSettings,
    *,
    decode: Callable[[Sequence[ImageRef]], T],
    predict: Callable[[Sequence[ImageRef], T], Rows],
    on_cpu: bool,
) -> Estimate:
    """Decode, predict and write the first few hundred images, each step by itself; nothing is kept."""
    sample = list(islice(images, SAMPLE))
    if not sample:
        raise UserError(NO_IMAGES)
    size = min(settings.batch_size, -(-len(sample) // 2))  # at least two batches: the first one warms up
    rows, decoding, network, timed = [], 0.0, 0.0, 0
    for start in range(0, len(sample), size):
        batch = sample[start : start + size]
        begun = time.perf_counter()
        seen = decode(batch)
        decoded = time.perf_counter()
        rows.append(predict(batch, seen))
        if start or len(sample) == 1:
            decoding, network = decoding + decoded - begun, network + time.perf_counter() - decoded
            timed += len(batch)
    joined = join_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        writer.write(Path(folder) / "rows", joined)
        written = (Path(folder) / "rows").stat().st_size
    return Estimate(
        images=len(sample),
        unreadable=sum(error is not None for error in joined.errors),
        decoding=decoding / timed,
        network=network / timed,
        row=written / len(sample),
        cores=(os.cpu_count() or 1) if on_cpu else 0,
        part_size=settings.part_size,
    )

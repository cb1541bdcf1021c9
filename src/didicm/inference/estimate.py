"""What a large prediction would take, from a few hundred images: time, files and bytes."""

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from didicm.data.listing import ImageRef
from didicm.errors import UserError
from didicm.inference.bulk import BulkSettings, Decoder, predict_batch
from didicm.inference.predictor import Predictor
from didicm.inference.rows import RowWriter, join_rows

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
    predictor: Predictor, images: Iterable[ImageRef], writer: RowWriter, settings: BulkSettings
) -> Estimate:
    """Decode, predict and write the first few hundred images, each step by itself; nothing is kept."""
    sample = list(islice(images, SAMPLE))
    if not sample:
        raise UserError("there are no images: name some files, folders or patterns")
    size = min(settings.batch_size, -(-len(sample) // 2))  # at least two batches: the first one warms up
    decoder, rows, decoding, network, timed = Decoder(predictor.model.transform), [], 0.0, 0.0, 0
    for start in range(0, len(sample), size):
        begun = time.perf_counter()
        batch = decoder[0, False, sample[start : start + size]]
        decoded = time.perf_counter()
        rows.append(predict_batch(predictor, batch, settings))
        if start or len(sample) == 1:
            decoding, network = decoding + decoded - begun, network + time.perf_counter() - decoded
            timed += len(batch.names)
    joined = join_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        writer.write(Path(folder) / "rows", joined)
        written = (Path(folder) / "rows").stat().st_size
    on_cpu = predictor.model.device.type == "cpu"
    return Estimate(
        images=len(sample),
        unreadable=sum(error is not None for error in joined.errors),
        decoding=decoding / timed,
        network=network / timed,
        row=written / len(sample),
        cores=(os.cpu_count() or torch.get_num_threads()) if on_cpu else 0,
        part_size=settings.part_size,
    )

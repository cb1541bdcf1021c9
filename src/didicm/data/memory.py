"""Small sets of images, decoded once and kept."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from didicm.data.images import ArraySet, ImageSet, Shrink, UnreadableImageError

SMALL_BYTES = 128 * 2**20


class MemorySet(ArraySet):
    """Another set's images, decoded. What could not be read stays unreadable, with the same message."""

    def __init__(self, source: ImageSet) -> None:
        images: list[np.ndarray] = []
        self._failed: dict[int, str] = {}
        for i in range(len(source)):
            try:
                images.append(np.array(source.load(i)))
            except UnreadableImageError as error:
                self._failed[i] = str(error)
                images.append(np.zeros((0, 0), dtype=np.uint8))
        super().__init__(images, source.labels, source.class_names, channels=source.channels, origin=source)

    def load(self, i: int, shrink: Shrink | None = None) -> Image.Image:
        if i in self._failed:
            raise UnreadableImageError(self._failed[i])
        return Image.fromarray(self.images[i])

    def stacked(self) -> Tensor | None:
        """All images as one tensor (N, C, H, W), uint8; None if sizes differ or one could not be read."""
        if self._failed or len({image.shape for image in self.images}) != 1:
            return None
        stack = torch.from_numpy(np.stack(self.images))
        return stack.view(*stack.shape[:3], -1).permute(0, 3, 1, 2).contiguous()


def is_small(source: ImageSet, limit: int = SMALL_BYTES, tries: int = 16) -> bool:
    """Whether all images, decoded, fit in `limit` bytes, judged by a few of them."""
    sizes = []
    for i in np.unique(np.linspace(0, len(source) - 1, tries).astype(int)):
        try:
            width, height = source.load(i).size
        except UnreadableImageError:
            continue
        sizes.append(width * height * source.channels)
    return bool(sizes) and float(np.mean(sizes)) * len(source) <= limit

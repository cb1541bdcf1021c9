"""Images by the features that a frozen backbone makes of them, which are computed once."""

import numpy as np

from didicm.data.bands import Picture
from didicm.data.images import ImageSet


class FeatureSet(ImageSet):
    """Images with stored features (views, N, D) of one or several views of each; a loader hands out those.

    Rows of NaN stand for images that could not be read, which are left out.
    """

    def __init__(self, images: ImageSet, features: np.ndarray) -> None:
        readable = ~np.isnan(features[0, :, 0])
        self.unreadable = [images.name(int(i)) for i in np.flatnonzero(~readable)]
        self._images, self._features, self._rows = images, features, np.flatnonzero(readable)
        self.labels, self.class_names, self.channels = images.labels[readable], images.class_names, images.channels
        self.targets = None if images.targets is None else images.targets[readable]
        self.groups = None if images.groups is None else images.groups[readable]

    def name(self, i: int) -> str:
        return self._images.name(int(self._rows[i]))

    def original(self, i: int) -> Picture:
        return self._images.original(int(self._rows[i]))

    def features(self, index: np.ndarray, view: np.ndarray | int) -> np.ndarray:
        """Features (B, D) of images (B,), each of the view of that number, counted round and round."""
        chosen: np.ndarray = self._features[view % len(self._features), self._rows[index]]
        return chosen

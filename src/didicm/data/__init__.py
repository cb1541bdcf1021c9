"""From a URI to batches of images and labels: sources, subsets, corruption, augmentation, loading."""

from didicm.data.corruptions import Corruptions
from didicm.data.images import (
    ArraySet,
    DataError,
    ImageSet,
    UnreadableImageError,
    is_small,
    open_image,
    readable,
    relabel,
    to_channels,
)
from didicm.data.loader import Loader, make_loader
from didicm.data.randomness import stratified_split, subset
from didicm.data.sources import Data, find_transform, hold_out, open_data
from didicm.data.transforms import Augment, EvalTransform, Mixer, TrainTransform, target_distribution

__all__ = [
    "ArraySet", "Augment", "Corruptions", "Data", "DataError", "EvalTransform", "ImageSet", "Loader", "Mixer",
    "TrainTransform", "UnreadableImageError", "find_transform", "hold_out", "is_small", "make_loader", "open_data",
    "open_image", "readable", "relabel", "stratified_split", "subset", "target_distribution", "to_channels",
]  # fmt: skip

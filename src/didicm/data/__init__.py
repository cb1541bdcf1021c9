"""From a URI to batches of images and labels: sources, subsets, corruption, augmentation, loading."""

from didicm.data.classes import match, relabel
from didicm.data.corruptions import Corruption, Corruptions
from didicm.data.images import ArraySet, DataError, ImageSet, UnreadableImageError, to_channels
from didicm.data.loader import Loader, Skipped, make_loader
from didicm.data.mixing import Mixer, target_distribution
from didicm.data.sources import Data, hold_out, open_data
from didicm.data.splits import stratified_split, subset
from didicm.data.transforms import (
    NONE,
    RECIPES,
    SMALL,
    STRONG,
    WEAK,
    Augment,
    EvalTransform,
    TrainTransform,
    transform_from_dict,
    transform_to_dict,
)

__all__ = [
    "NONE",
    "RECIPES",
    "SMALL",
    "STRONG",
    "WEAK",
    "ArraySet",
    "Augment",
    "Corruption",
    "Corruptions",
    "Data",
    "DataError",
    "EvalTransform",
    "ImageSet",
    "Loader",
    "Mixer",
    "Skipped",
    "TrainTransform",
    "UnreadableImageError",
    "hold_out",
    "make_loader",
    "match",
    "open_data",
    "relabel",
    "stratified_split",
    "subset",
    "target_distribution",
    "to_channels",
    "transform_from_dict",
    "transform_to_dict",
]

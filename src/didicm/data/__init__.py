"""From a URI to batches of images and labels: sources, subsets, corruption, augmentation, loading.

Names are imported when they are first used: `decode` and `images` do without PyTorch.
"""

from typing import TYPE_CHECKING

from didicm.lazy import import_on_use

if TYPE_CHECKING:
    from didicm.data.corruptions import Corruptions as Corruptions
    from didicm.data.decode import open_image as open_image
    from didicm.data.decode import to_channels as to_channels
    from didicm.data.images import ArraySet as ArraySet
    from didicm.data.images import DataError as DataError
    from didicm.data.images import FeatureSet as FeatureSet
    from didicm.data.images import ImageSet as ImageSet
    from didicm.data.images import UnreadableImageError as UnreadableImageError
    from didicm.data.images import readable as readable
    from didicm.data.images import relabel as relabel
    from didicm.data.loader import Loader as Loader
    from didicm.data.loader import make_loader as make_loader
    from didicm.data.randomness import stratified_split as stratified_split
    from didicm.data.randomness import subset as subset
    from didicm.data.sources import Data as Data
    from didicm.data.sources import find_transform as find_transform
    from didicm.data.sources import hold_out as hold_out
    from didicm.data.sources import open_data as open_data
    from didicm.data.transforms import Augment as Augment
    from didicm.data.transforms import EvalTransform as EvalTransform
    from didicm.data.transforms import Mixer as Mixer
    from didicm.data.transforms import TrainTransform as TrainTransform
    from didicm.data.transforms import target_distribution as target_distribution

_NAMES = {
    "corruptions": ["Corruptions"],
    "decode": ["open_image", "to_channels"],
    "images": ["ArraySet", "DataError", "FeatureSet", "ImageSet", "UnreadableImageError", "readable", "relabel"],
    "loader": ["Loader", "make_loader"],
    "randomness": ["stratified_split", "subset"],
    "sources": ["Data", "find_transform", "hold_out", "open_data"],
    "transforms": ["Augment", "EvalTransform", "Mixer", "TrainTransform", "target_distribution"],
}
__all__ = sorted(name for names in _NAMES.values() for name in names)
__getattr__ = import_on_use(__name__, _NAMES)

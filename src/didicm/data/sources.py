"""From a URI to labelled images.

path/to/folder    class subfolders, or `train/` and `val/` (or validation, test, eval) with class subfolders
hf:NAME           a parquet file, a folder of them, or a data set on the Hugging Face hub
wds:PATTERN       WebDataset shards: `shards/train-{000..009}.tar`, a glob, or a folder of shards
timm:NAME[:ROOT]  whatever timm opens with random access: `timm:torch/cifar10:/data`, a tar file, ...
fashion-mini      3,000 small images that ship with this package
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from didicm.data.classes import relabel
from didicm.data.folder import FolderSet, open_folder
from didicm.data.images import MODES, ArraySet, DataError, ImageSet
from didicm.data.splits import stratified_split

FASHION_MINI = Path(__file__).with_name("fashion_mini.npz")


@dataclass(frozen=True)
class Data:
    """What a URI holds. Both splits number their classes alike."""

    train: ImageSet
    val: ImageSet | None

    @property
    def class_names(self) -> list[str]:
        """Class names, by label."""
        return self.train.class_names


def open_data(uri: str, *, channels: int = 3, strict: bool = True) -> Data:
    """Open the images that `uri` names, as described at the top of this file.

    Args:
        uri: where the images are.
        channels: 1 for grey, 3 for RGB; every image is converted.
        strict: refuse classes without images and sets with a single class; the doctor looks at those too.
    """
    if channels not in MODES:
        raise DataError(f"channels must be 1 (grey) or 3 (RGB), got {channels}")
    scheme, colon, rest = uri.partition(":")
    if uri == "fashion-mini":
        train, val = _open_fashion_mini(channels)
    elif colon and scheme == "hf":
        from didicm.data.hf import open_hub

        train, val = open_hub(rest, channels)
    elif colon and scheme == "wds":
        from didicm.data.webdataset import open_shards

        train, val = open_shards(rest, channels)
    elif colon and scheme == "timm":
        from didicm.data.timm_reader import open_reader

        train, val = open_reader(rest, channels)
    else:
        train, val = open_folder(rest if colon and scheme == "folder" else uri, channels)
    if val is not None:
        val = _same_classes(val, train, uri)
    if strict:
        _check(train, uri)
    return Data(train, val)


def hold_out(data: Data, fraction: float, seed: int) -> Data:
    """Cut a stratified validation split from the training images, unless there is one."""
    if data.val is not None:
        return data
    train, val = stratified_split(data.train.labels, fraction, seed)
    if not len(val):
        raise DataError(
            "every class has a single image, so none can be held out; add images or a validation split"
        )
    return replace(data, train=data.train.select(train), val=data.train.select(val))


def _open_fashion_mini(channels: int) -> tuple[ImageSet, ImageSet]:
    with np.load(FASHION_MINI, allow_pickle=False) as file:
        names = [str(name) for name in file["class_names"]]
        train, test = (
            ArraySet(file[f"x_{s}"], file[f"y_{s}"], names, channels=channels, origin=f"fashion-mini/{s}")
            for s in ("train", "test")
        )
    return train, test


def _same_classes(val: ImageSet, train: ImageSet, uri: str) -> ImageSet:
    """Number the classes of the validation split as the training split does."""
    if val.class_names == train.class_names:
        return val
    try:
        return relabel(val, train.class_names)
    except DataError as error:
        raise DataError(f"the validation split of {uri} does not fit its training split: {error}") from None


def _check(train: ImageSet, uri: str) -> None:
    if not len(train):
        raise DataError(f"{uri} holds no images")
    if len(train.class_names) < 2:
        only = ", ".join(train.class_names)
        raise DataError(f"{uri} has a single class ({only}); a classifier needs at least two")
    counts = np.bincount(train.labels, minlength=len(train.class_names))
    empty = [train.class_names[k] for k in np.flatnonzero(counts == 0)]
    if empty and isinstance(train, FolderSet):  # others may list classes that they do not use
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise DataError(f"{uri} has no training images of class {shown}; add images or remove the class")

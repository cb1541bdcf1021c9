"""From a URI to labelled images.

path/to/folder     class subfolders, or `train/` and `val/` (or validation, test, eval) with class subfolders
hf://NAME          a parquet file, a folder of them, or a data set on the Hugging Face hub; `?label=NAME` says
                   which column holds the labels
wds://PATTERN      WebDataset shards: `shards/train-{000..009}.tar`, a glob, or a folder of shards
timm://NAME[:ROOT] whatever timm opens with random access: `timm://torch/cifar10:/data`, a tar file, ...
fashion-mini       3,000 small images that ship with this package

The slashes may be left out.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from didicm.data.decode import own_channels
from didicm.data.folder import FolderSet, open_folder
from didicm.data.images import ArraySet, DataError, ImageSet, UnreadableImageError, relabel, some
from didicm.data.libraries import open_hub, open_reader
from didicm.data.randomness import stratified_split
from didicm.data.table import GROUP, PATH, find_table, open_table, read_columns, vote_columns
from didicm.data.transforms import MEAN, EvalTransform, Interpolation
from didicm.data.webdataset import open_shards
from didicm.text import readable

FASHION_MINI = Path(__file__).with_name("fashion_mini.npz")
FOLDER = "folder"  # the scheme of what has none
OPENERS = {"hf": open_hub, "wds": open_shards, "timm": open_reader}
LOOK_AT = 50  # images that are looked at to find their size and colour
MEASURED = 500  # images that the mean and deviation of unusual channels are found from


@dataclass(frozen=True)
class Data:
    """What a URI holds. Both splits number their classes alike."""

    uri: str
    train: ImageSet
    val: ImageSet | None

    @property
    def class_names(self) -> list[str]:
        """Class names, by label."""
        return self.train.class_names

    def with_channels(self, channels: int) -> "Data":
        """The same images, decoded to 1 (grey), 3 (RGB) or all of their channels; nothing is opened again."""
        val = self.val.with_channels(channels) if self.val is not None else None
        return replace(self, train=self.train.with_channels(channels), val=val)


def open_data(
    uri: str | Path,
    *,
    labels: str | None = None,
    group_by: str | None = None,
    channels: int = 3,
    strict: bool = True,
    index: Path | None = None,
) -> Data:
    """Open the images that `uri` names, as described at the top of this file.

    `labels` is a table of what the images of a folder show (`table.open_table`), `group_by` a column or a regular
    expression that tells which images stay on one side of every split (`find_groups`); a table's column
    `group` does so by itself. Every image is converted to 1 (grey) or 3 (RGB) `channels`, or has so many.
    `strict` refuses classes without images, sets with a single class and splits that share groups; the doctor
    looks at those too. The listing of a large folder is read from the folder `index` where another process kept it
    there (`folder.keep_listings`) and nothing has changed since.
    """
    uri = os.fspath(uri)
    scheme, place = split_uri(uri)
    if labels is not None:
        if uri == "fashion-mini" or scheme != FOLDER:
            raise DataError(f"{uri} has its own labels; a table of labels goes with a folder of images")
        train, val = open_table(place, labels, group_by)
        group_by = group_by or (GROUP if train.column(GROUP) is not None else None)
    elif uri == "fashion-mini":
        train, val = _open_fashion_mini()
    elif scheme == FOLDER:
        train, val = open_folder(place, index)
    else:
        train, val = OPENERS[scheme](place)
    if group_by is not None:
        for images in filter(None, (train, val)):
            images.groups = find_groups(images, group_by)
    if val is not None and val.class_names != train.class_names:
        try:
            val = relabel(val, train.class_names)
        except DataError as error:
            raise DataError(f"the validation split of {uri} does not fit its training split: {error}") from None
    if strict:
        # Sources of other kinds may list classes that they do not use.
        _check(train, val, uri, all_used=labels is not None or isinstance(train, FolderSet))
    return Data(uri, train, val).with_channels(channels)


def describe_votes(uri: str, labels: str | None, group_by: str | None) -> list[str]:
    """Say which columns of a table of votes are taken as classes: one that was forgotten there would be one."""
    if labels is None:
        return []
    columns = read_columns(find_table(Path(split_uri(uri)[1]).expanduser(), labels), PATH)
    names = ", ".join(map(readable, vote_columns(columns, group_by)))
    return [f"classes from the columns of {readable(labels)}: {names}"] if names else []


def split_uri(uri: str) -> tuple[str, str]:
    """The scheme of a URI, which a plain path lacks, and what follows it."""
    scheme, colon, place = uri.partition(":")
    known = colon and scheme in (FOLDER, *OPENERS)
    return (scheme, place.removeprefix("//")) if known else (FOLDER, uri)


def find_groups(images: ImageSet, by: str) -> np.ndarray:
    """The group (N,) of each image: the value of a column, or what a regular expression finds in its name.

    Of an expression with parentheses, what they enclose counts.
    """
    column = images.column(by)
    if column is not None:
        empty = next((i for i, value in enumerate(column) if str(value) in ("", "None")), None)
        if empty is not None:
            raise DataError(f"{images.name(empty)} has no value in the column {by!r} of groups; fill it in")
        return np.array([str(value) for value in column])
    try:
        pattern = re.compile(by)
    except re.error as error:
        raise DataError(f"group_by {by!r} is neither a column nor a regular expression ({error})") from None
    found = [pattern.search(images.name(i)) for i in range(len(images))]
    if None in found:
        name = images.name(found.index(None))
        raise DataError(
            f"group_by {by!r} is not a column here, and as a regular expression it does not match {name}"
        )
    return np.array([" ".join(part or "" for part in match.groups()) or match[0] for match in found if match])


def shared_groups(train: ImageSet, val: ImageSet | None) -> list[str]:
    """Groups with images in both splits."""
    if val is None or train.groups is None or val.groups is None:
        return []
    return [str(group) for group in np.intersect1d(train.groups, val.groups)]


def hold_out(data: Data, fraction: float, seed: int) -> Data:
    """Cut a stratified validation split from the training images, unless there is one."""
    if data.val is not None:
        return data
    train, val = stratified_split(data.train.labels, fraction, seed, data.train.groups)
    if not len(val) and data.train.groups is not None:
        raise DataError(
            "no group can be held out, as every group has all training images of some class; add groups or a "
            "validation split"
        )
    if not len(val):
        raise DataError("every class has a single image, none can be held out; add images or a validation split")
    return replace(data, train=data.train.select(train), val=data.train.select(val))


def find_transform(
    data: Data, size: int | None, limit: int, channels: int | None, crop_pct: float, interpolation: Interpolation
) -> EvalTransform:
    """What the network sees: size (at most `limit`) and colour come from some images where they are not given."""
    if size is None or channels is None:
        looked = np.linspace(0, len(data.train) - 1, min(LOOK_AT, len(data.train)), dtype=int)
        images = []
        for i in looked:
            with suppress(Exception):  # a broken file can raise nearly anything; training names and counts it
                image = data.train.original(int(i))
                images.append((min(image.size), own_channels(image)))
        if not images:
            raise DataError(f"none of the {len(looked)} images tried can be read; run didicm doctor {data.uri}")
        size = size or min(limit, int(np.median([side for side, _ in images])))
        channels = channels or max(count for _, count in images)
    usual = {} if channels in MEAN else _statistics(data.train.with_channels(channels))
    return EvalTransform(size, channels, **usual, crop_pct=crop_pct, interpolation=interpolation)


def _statistics(images: ImageSet) -> dict[str, tuple[float, ...]]:
    """Mean and standard deviation of each channel, of white, over some of the images."""
    count, total, squares = 0, np.zeros(images.channels), np.zeros(images.channels)
    told: DataError | None = None
    for i in np.linspace(0, len(images) - 1, min(MEASURED, len(images)), dtype=int):
        try:
            pixels = np.asarray(images.load(int(i))).reshape(-1, images.channels) / 255
        except UnreadableImageError as error:
            told = error
            continue
        count += len(pixels)
        total += pixels.sum(axis=0)
        squares += np.square(pixels).sum(axis=0)
    if not count:
        raise told or DataError("there are no images to find the mean of")
    mean = total / count
    spread = np.sqrt(np.maximum(squares / count - mean**2, 0)).clip(min=1 / 255)  # a channel may be constant
    return {"mean": tuple(mean.round(6).tolist()), "std": tuple(spread.round(6).tolist())}


def _open_fashion_mini() -> tuple[ImageSet, ImageSet | None]:
    with np.load(FASHION_MINI, allow_pickle=False) as file:
        names = [str(name) for name in file["class_names"]]
        return (
            ArraySet(file["x_train"], file["y_train"], names, origin="fashion-mini/train"),
            ArraySet(file["x_test"], file["y_test"], names, origin="fashion-mini/test"),
        )


def _check(train: ImageSet, val: ImageSet | None, uri: str, *, all_used: bool) -> None:
    if not len(train):
        raise DataError(f"{uri} holds no images; check the address")
    if len(train.class_names) < 2:
        raise DataError(f"{uri} has a single class ({train.class_names[0]}); a classifier needs at least two")
    empty = [train.class_names[k] for k in np.flatnonzero(train.class_counts == 0)]
    if empty and all_used:
        raise DataError(f"{uri} has no training images of class {some(empty)}; add images or remove the class")
    if shared := shared_groups(train, val):
        raise DataError(
            f"{len(shared)} groups of {uri}, such as {readable(shared[0])!r}, are in training and validation; "
            "move each to one side, or leave the splits out and one is made"
        )

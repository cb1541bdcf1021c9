"""Whatever timm opens with random access: torchvision's data sets, image tar files, its own readers."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from didicm.data.images import DataError, ImageSet


class ReaderSet(ImageSet):
    """A map-style data set made by timm."""

    def __init__(self, dataset: Any, origin: str, channels: int) -> None:
        self._dataset = dataset
        self._reader = getattr(dataset, "reader", None)
        self._origin = origin
        self.channels = channels
        self.labels = np.asarray(_labels(dataset), dtype=np.int64)
        count = int(self.labels.max(initial=-1)) + 1
        owner = self._reader or dataset
        index = getattr(owner, "class_to_idx", None) or getattr(owner, "class_name_to_idx", None) or {}
        names = {k: str(name) for name, k in index.items()}
        self.class_names = [names.get(k, str(k)) for k in range(max(count, max(names, default=-1) + 1))]

    def name(self, i: int) -> str:
        if self._reader is not None:
            return f"{self._origin}/{self._reader.filename(int(i))}"
        return f"{self._origin}[{i}]"

    def original(self, i: int) -> Image.Image:
        if self._reader is not None:
            file = self._reader[int(i)][0]
            return Image.open(file)
        return self._dataset[int(i)][0]


def open_reader(name: str, channels: int) -> tuple[ImageSet, ImageSet | None]:
    """Open `NAME` or `NAME:ROOT` as `timm.data.create_dataset` does; a bare path is timm's folder or tar."""
    uri = f"timm:{name}"
    name, _, root = name.partition(":")
    if not root and Path(name).expanduser().exists():
        name, root = "", name
    root = str(Path(root).expanduser()) if root else None
    if not name and root is None:
        raise DataError(f"{uri} does not exist; write timm:NAME, timm:NAME:ROOT or timm:PATH")
    train = _create(name, root, "train", uri)
    try:
        val = _create(name, root, "validation", uri)
    except DataError:
        return ReaderSet(train, uri, channels), None
    # Without a split of that name, timm opens the whole again.
    same = _place(train) is not None and _place(train) == _place(val)
    return ReaderSet(train, uri, channels), None if same else ReaderSet(val, uri, channels)


def _create(name: str, root: str | None, split: str, uri: str) -> Any:
    from timm.data import create_dataset
    from torch.utils.data import IterableDataset

    try:
        dataset = create_dataset(name, root=root, split=split)
    except Exception as error:  # timm asserts, its readers raise what they like
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"timm could not open {uri} ({reason}); check its name and root") from error
    reader = getattr(dataset, "reader", None)
    if hasattr(reader, "cache_tarfiles"):
        reader.cache_tarfiles = False  # an open file is shared with forked workers, and so is its position
    if isinstance(dataset, IterableDataset):
        raise DataError(f"{uri} is a stream, and training needs random access; use hf: or wds: instead")
    return dataset


def _place(dataset: Any) -> str | None:
    return getattr(getattr(dataset, "reader", None), "root", None) if not hasattr(dataset, "train") else None


def _labels(dataset: Any) -> Any:
    """Labels without decoding, where the data set has a list of them."""
    reader = getattr(dataset, "reader", None)
    for owner, attribute in ((dataset, "targets"), (reader, "targets")):
        found = getattr(owner, attribute, None)
        if found is not None:
            return found
    for owner in (reader, dataset):
        samples = getattr(owner, "samples", None)
        if samples is not None and len(samples) and isinstance(samples[0], tuple):
            return [sample[1] for sample in samples]
    if hasattr(reader, "label_key"):  # Hugging Face
        return reader.dataset[reader.label_key][:]
    return [dataset[i][1] for i in range(len(dataset))]

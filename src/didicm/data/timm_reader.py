"""Whatever timm opens with random access: torchvision's data sets, image tar files, its own readers."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from didicm.data.decode import open_image, to_channels
from didicm.data.images import DataError, ImageSet
from didicm.data.picture import Picture
from didicm.errors import reason


class ReaderSet(ImageSet):
    """A map-style data set made by timm."""

    def __init__(self, name: str, root: str, split: str, uri: str) -> None:
        from timm.data.dataset_factory import create_dataset
        from torch.utils.data import IterableDataset

        try:
            dataset: Any = create_dataset(name, root=str(Path(root).expanduser()) if root else None, split=split)
        except Exception as error:  # timm asserts, its readers raise what they like
            raise DataError(f"timm cannot open {uri} ({reason(error)}); check its name and root") from error
        if isinstance(dataset, IterableDataset):
            raise DataError(f"{uri} is a stream, and training needs random access; use hf:// or wds:// instead")
        reader: Any = getattr(dataset, "reader", None)
        if hasattr(reader, "cache_tarfiles"):
            reader.cache_tarfiles = False  # an open file is shared with forked workers, and so is its position
        if hasattr(dataset, "loader"):  # torchvision's folders; it would open what we do not
            dataset.loader = _load_rgb
        self._dataset, self._reader, self._origin = dataset, reader, uri
        self.root = getattr(reader, "root", None)
        self.labels = np.asarray(_labels(dataset, reader), dtype=np.int64)
        owner = reader or dataset
        index = getattr(owner, "class_to_idx", None) or getattr(owner, "class_name_to_idx", None) or {}
        names = {k: str(name) for name, k in index.items()}
        last = max([int(self.labels.max(initial=-1)), *names])
        self.class_names = [names.get(k, str(k)) for k in range(last + 1)]

    def name(self, i: int) -> str:
        if self._reader is None:
            return f"{self._origin}[{i}]"
        return f"{self._origin}/{self._reader.filename(int(i))}"

    def original(self, i: int) -> Picture:
        if self._reader is not None:
            path = self._reader.samples[int(i)][0] if hasattr(self._reader, "samples") else None
            return open_image(path if isinstance(path, str) else self._reader[int(i)][0].read())
        image: Image.Image = self._dataset[int(i)][0]
        return image


def open_reader(name: str) -> tuple[ImageSet, ImageSet | None]:
    """Open `NAME` or `NAME:ROOT` as `timm.data.create_dataset` does; a bare path is timm's folder or tar."""
    uri = f"timm://{name}"
    name, _, root = name.partition(":")
    if not root and Path(name).expanduser().exists():
        name, root = "", name
    if not name and not root:
        raise DataError(f"{uri} does not exist; write timm://NAME, timm://NAME:ROOT or timm://PATH")
    train = ReaderSet(name, root, "train", uri)
    try:
        val = ReaderSet(name, root, "validation", uri)
    except DataError:
        return train, None
    # Without a split of that name, timm opens the whole again.
    same = train.root is not None and train.root == val.root
    return train, None if same else val


def _load_rgb(path: str) -> Picture:
    return to_channels(open_image(path), 3)


def _labels(dataset: Any, reader: Any) -> Any:
    """Labels without decoding, where the data set has a list of them."""
    for owner in (dataset, reader):
        if getattr(owner, "targets", None) is not None:
            return owner.targets
    for owner in (reader, dataset):
        samples = getattr(owner, "samples", None)
        if samples is not None and len(samples) and isinstance(samples[0], tuple):
            return [sample[1] for sample in samples]
    if hasattr(reader, "label_key"):  # Hugging Face
        return reader.dataset[reader.label_key][:]
    return [dataset[i][1] for i in range(len(dataset))]

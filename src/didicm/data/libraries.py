"""Data sets of other libraries: Hugging Face's, and whatever timm opens with random access."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from didicm.data.decode import open_image, to_channels
from didicm.data.folder import by_split, find_splits
from didicm.data.images import DataError, ImageSet, names_and_labels
from didicm.data.listing import open_cell
from didicm.data.picture import Picture
from didicm.errors import did_you_mean, reason


class HubSet(ImageSet):
    """One split of a data set with an image and a label column."""

    def __init__(self, rows: Any, origin: str, label: str | None = None) -> None:
        datasets = import_module("datasets")
        self._image = _column(rows, origin, ("image", "img"), datasets.Image)
        if label is not None and label not in rows.features:
            raise DataError(f"{origin} has no column {label!r}: {did_you_mean(label, rows.features)}")
        label = label or _column(rows, origin, ("label", "labels"), datasets.ClassLabel)
        # Left encoded: we decode the bytes ourselves, as from any other source.
        self._rows = rows.cast_column(self._image, datasets.Image(decode=False)).select_columns(self._image)
        self._all, self._origin = rows, origin
        values = rows.with_format("numpy", columns=[label])[label][:]
        feature = rows.features[label]
        if isinstance(feature, datasets.ClassLabel):
            self.class_names, self.labels = list(feature.names), np.asarray(values, dtype=np.int64)
        else:
            self.class_names, self.labels = names_and_labels([str(v) for v in values])
        if self.labels.min(initial=0) < 0 or "None" in self.class_names or "-1" in self.class_names:
            raise DataError(f"{origin} has images without a label; use a split that has them")

    def name(self, i: int) -> str:
        return f"{self._origin}[{i}]"

    def column(self, name: str) -> Sequence[Any] | None:
        return list(self._all.select_columns(name)[name]) if name in self._all.features else None

    def original(self, i: int) -> Picture:
        return open_cell(self._rows[int(i)][self._image])


def open_hub(name: str) -> tuple[ImageSet, ImageSet | None]:
    """Open the training and, if there is one, the validation split of local parquet, a saved set or the hub."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise DataError("hf:// needs the package datasets; install it with: pip install datasets") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, _, query = name.partition("?")
    if query and not query.startswith("label="):
        raise DataError(f"hf://{name}?{query}: what follows the question mark must be label=COLUMN")
    label = query.removeprefix("label=") or None
    uri = f"hf://{name}"
    path = Path(name).expanduser()
    if path.exists():
        splits = _load_local(datasets, path, uri)
    elif name.startswith(("/", ".", "~")) or name.endswith(".parquet") or not name:
        raise DataError(f"{name!r} does not exist; give a parquet file, a folder of them, or a name on the hub")
    else:
        try:
            splits = datasets.load_dataset(name)
        except Exception as error:  # the hub's client raises many kinds, all meaning that it did not work
            raise DataError(
                f"{uri} is not a file here and cannot be loaded from the hub ({reason(error)}); check the name"
            ) from error
    train, val = find_splits(splits)
    if train is None:
        raise DataError(f"{uri} has no train split, only {', '.join(map(str, splits))}; name its file instead")
    opened = [HubSet(splits[split], f"{uri}/{split}", label) for split in (train, val) if split]
    return opened[0], opened[1] if val else None


def _load_local(datasets: ModuleType, path: Path, uri: str) -> Any:
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        saved = datasets.load_from_disk(str(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    found = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not found:
        raise DataError(f"{uri} holds no parquet files; give a folder with train.parquet (and test.parquet)")
    files = {"train": [str(found[0])]} if len(found) == 1 else by_split(found, path)
    try:
        return datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # pyarrow's and datasets' own kinds
        why = reason(error.__cause__ or error)
        raise DataError(f"{uri} cannot be read as parquet ({why}); write the file again") from error


def _column(rows: Any, origin: str, names: tuple[str, ...], kind: type) -> str:
    by_kind = [str(column) for column, feature in rows.features.items() if isinstance(feature, kind)]
    if found := [name for name in names if name in rows.features] + by_kind:
        return found[0]
    raise DataError(f"{origin} has no column {names[0]!r}, only {', '.join(rows.features)}; rename the right one")


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

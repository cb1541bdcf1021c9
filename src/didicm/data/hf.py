"""Hugging Face data sets: local parquet files, a saved data set, or a name on the hub."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from didicm.data.decode import open_image
from didicm.data.folder import by_split, find_splits
from didicm.data.images import DataError, ImageSet, names_and_labels
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
        cell = self._rows[int(i)][self._image]
        if cell is None:
            raise ValueError("the cell is empty")
        return open_image(cell["bytes"] if cell["bytes"] is not None else cell["path"])


def open_hub(name: str) -> tuple[ImageSet, ImageSet | None]:
    """Open the training and, if there is one, the validation split of a data set."""
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

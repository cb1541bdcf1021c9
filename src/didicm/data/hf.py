"""Hugging Face data sets: local parquet files, a saved data set, or a name on the hub."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from didicm.data.classes import sort_names
from didicm.data.folder import TRAIN_NAMES, VAL_NAMES
from didicm.data.images import DataError, ImageSet, open_image


class HubSet(ImageSet):
    """One split of a data set with an image and a label column."""

    def __init__(self, rows: Any, origin: str, channels: int) -> None:
        import datasets

        self._image = _column(rows, origin, ("image", "img"), datasets.Image)
        label = _column(rows, origin, ("label", "labels"), datasets.ClassLabel)
        # Left encoded: we decode the bytes ourselves, as from any other source.
        self._rows = rows.cast_column(self._image, datasets.Image(decode=False)).select_columns(self._image)
        self._origin = origin
        self.channels = channels
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

    def original(self, i: int) -> Image.Image:
        cell = self._rows[int(i)][self._image]
        if cell is None:
            raise ValueError("the cell is empty")
        return open_image(cell["bytes"] if cell["bytes"] is not None else cell["path"])


def names_and_labels(values: list[str]) -> tuple[list[str], np.ndarray]:
    """Class names and labels from what stands in a label column; numbers become names too."""
    names = sort_names(set(values))
    index = {name: k for k, name in enumerate(names)}
    return names, np.array([index[v] for v in values], dtype=np.int64)


def open_hub(name: str, channels: int) -> tuple[ImageSet, ImageSet | None]:
    """Open the training and, if there is one, the validation split of a data set."""
    try:
        import datasets
    except ImportError:
        raise DataError("hf: needs the package datasets; install it with: pip install datasets") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    uri = f"hf:{name}"
    path = Path(name).expanduser()
    if path.exists():
        splits = _load_local(path, uri)
    elif name.startswith(("/", ".", "~")) or name.endswith(".parquet") or not name:
        raise DataError(f"{name!r} does not exist; give a parquet file, a folder of them, or a name on the hub")
    else:
        try:
            splits = datasets.load_dataset(name)
        except Exception as error:  # the hub's client raises many kinds, all meaning that it did not work
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{uri} is no file here and could not be loaded from the hub: {reason}") from error
    train = next((s for s in TRAIN_NAMES if s in splits), None)
    val = next((s for s in VAL_NAMES if s in splits), None)
    if train is None:
        raise DataError(f"{uri} has no train split, only {', '.join(map(str, splits))}; name its file instead")
    return (
        HubSet(splits[train], f"{uri}/{train}", channels),
        HubSet(splits[val], f"{uri}/{val}", channels) if val else None,
    )


def _load_local(path: Path, uri: str) -> Any:
    import datasets

    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        saved = datasets.load_from_disk(str(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    found = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not found:
        raise DataError(f"{uri} holds no parquet files; give a folder with train.parquet (and test.parquet)")
    files: dict[str, list[str]] = {}
    for file in found:
        files.setdefault("train" if len(found) == 1 else _split_of(file, path), []).append(str(file))
    try:
        return datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # pyarrow's and datasets' own kinds
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(f"{uri} cannot be read as parquet ({reason}); write the file again") from error


def _split_of(file: Path, root: Path) -> str:
    """`train.parquet`, `data/train-00000-of-00002.parquet` and `train/0.parquet` are all of split train."""
    for part in reversed(file.relative_to(root).with_suffix("").parts):
        word = part.replace("_", "-").split("-")[0].lower()
        if word in TRAIN_NAMES + VAL_NAMES:
            return word
    return "train"


def _column(rows: Any, origin: str, names: tuple[str, ...], kind: type) -> str:
    by_kind = [column for column, feature in rows.features.items() if isinstance(feature, kind)]
    for column in (*names, *by_kind):
        if column in rows.features:
            return column
    raise DataError(f"{origin} has no column {names[0]!r}, only {', '.join(rows.features)}; rename the right one")

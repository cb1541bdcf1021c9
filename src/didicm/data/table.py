"""A table beside a folder of images: what each shows by one or several raters, its split, its group."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from didicm.data.folder import TRAIN_NAMES, VAL_NAMES, PathSet, Strings, find_splits
from didicm.data.images import DataError, ImageSet, names_and_labels, normalise, some
from didicm.data.listing import open_parquet
from didicm.errors import reason
from didicm.text import readable

PATH, LABEL, SPLIT, GROUP = "path", "label", "split", "group"
EXAMPLE = "its first line names the columns, such as path,label"

Columns = Mapping[str, Sequence[str]]  # by name, one value per row


class TableSet(PathSet):
    """Images that a table names, by their paths below a folder."""

    def __init__(self, root: Path, columns: Columns, class_names: list[str], labels: np.ndarray) -> None:
        self.root, self.columns = root, columns
        self.class_names, self.labels = class_names, labels
        self._paths = Strings.of(columns[PATH])

    def column(self, name: str) -> Sequence[str] | None:
        return self.columns.get(name)


def open_table(folder: str, file: str, group_by: str | None = None) -> tuple[ImageSet, ImageSet | None]:
    """Open the images below `folder` that the table `file` names, by its column `split` where it has one.

    Without a column `label`, every column but path, split, group and `group_by` holds the votes for a class.
    """
    root = Path(folder).expanduser()
    columns = read_columns(find_table(root, file), PATH)
    if not root.is_dir():
        raise DataError(f"{readable(folder)!r} is not a folder; a table of labels goes with a folder of images")
    _check_paths(root, columns, file)
    targets = None
    if LABEL in columns:
        _check_filled(columns, LABEL, file)
        class_names, labels = names_and_labels([normalise(value) for value in columns[LABEL]])
    else:
        class_names = vote_columns(columns, group_by)
        votes = _votes(columns, class_names, file)
        labels, targets = votes.argmax(axis=1), (votes / votes.sum(axis=1, keepdims=True)).astype(np.float32)
    images = TableSet(root, columns, class_names, labels.astype(np.int64))
    images.targets = targets
    rows = _rows_by_split(columns, file)
    train, val = find_splits(rows)
    if train is None:
        raise DataError(f"{readable(file)} has no row whose split is train; add some, or leave the column out")
    return images.select(rows[train]), images.select(rows[val]) if val else None


def vote_columns(columns: Columns, group_by: str | None) -> list[str]:
    """The columns that are taken as classes; none where a column `label` names them."""
    return [] if LABEL in columns else [name for name in columns if name not in (PATH, SPLIT, GROUP, group_by)]


def find_table(folder: Path, file: str) -> Path:
    """Where a table is: it may lie in the folder of the images, too, and be named from there."""
    place = Path(file).expanduser()
    return place if place.exists() or not (folder / place).exists() else folder / place


def read_columns(file: Path, needed: str) -> Columns:
    """The columns of a CSV (comma, semicolon or tab) or parquet file, as text; one of them must be there."""
    where = readable(str(file))
    if not file.is_file():
        raise DataError(f"the table {where} does not exist; give a CSV or parquet file")
    try:
        columns = _read_parquet(file) if file.suffix.lower() == ".parquet" else _read_csv(file)
    except DataError:
        raise
    except Exception as error:  # csv's, pyarrow's and decoding's own kinds
        raise DataError(f"{where} cannot be read as a table ({reason(error)}); write it again") from error
    if needed not in columns:
        found = some([repr(readable(name)) for name in columns])
        raise DataError(f"{where} has no column {needed!r}, only {found}; {EXAMPLE}")
    if not columns[needed]:
        raise DataError(f"{where} has no rows below its header; add some")
    return columns


def read_number(cell: str, where: str, place: str) -> float:
    """A number of 0 or more; else one sentence that names its place in the table."""
    try:
        number = float(cell)
    except ValueError:
        number = np.nan
    if not 0 <= number < np.inf:
        raise DataError(f"{where} has {readable(cell)!r} for {place}; it must be a number, 0 or more")
    return number


def _read_csv(file: Path) -> Columns:
    with open(file, encoding="utf-8-sig", newline="") as lines:
        header = lines.readline()
        delimiter = max(",;\t", key=header.count)
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{readable(str(file))} has two columns {twice[0]!r}; rename one of them")
        rows = csv.reader(lines, delimiter=delimiter)
        columns: dict[str, list[str]] = {name: [] for name in names}
        for row in filter(None, rows):
            if len(row) != len(names):
                raise DataError(
                    f"line {rows.line_num + 1} of {readable(str(file))} has {len(row)} cells, "
                    f"but the first line names {len(names)} columns; correct it"
                )
            for name, cell in zip(names, row, strict=True):
                columns[name].append(cell.strip())
    return columns


def _read_parquet(file: Path) -> Columns:
    table = open_parquet(str(file)).read()
    return {
        str(name): ["" if cell is None else str(cell) for cell in table.column(name).to_pylist()]
        for name in table.column_names
    }


def _check_paths(root: Path, columns: Columns, file: str) -> None:
    """Every row names a file of its own."""
    _check_filled(columns, PATH, file)
    seen: set[str] = set()
    for path in columns[PATH]:
        place = os.path.normpath(path)
        if place in seen:
            raise DataError(f"{readable(file)} names {readable(path)} twice; keep one row per image")
        if not os.path.exists(os.path.join(root, path)):
            raise DataError(
                f"{readable(file)} names {readable(path)}, which is not in {readable(str(root))}; paths are meant "
                "from that folder on"
            )
        seen.add(place)


def _check_filled(columns: Columns, name: str, file: str) -> None:
    if "" in columns[name]:
        row = columns[name].index("")
        which = f"row {row + 1}" if name == PATH else readable(columns[PATH][row])
        raise DataError(f"{readable(file)} has no {name} for {which}; fill it in or remove the row")


def _votes(columns: Columns, class_names: Sequence[str], file: str) -> np.ndarray:
    """Votes (N, K) of the raters, none of them negative and some for every image."""
    where = readable(file)
    if not class_names:
        raise DataError(f"{where} has no column 'label' and no columns of votes; {EXAMPLE}")
    votes = np.empty((len(columns[PATH]), len(class_names)))
    for k, name in enumerate(class_names):
        for row, cell in enumerate(columns[name]):
            place = (
                f"the votes (there is no column 'label') for {readable(name)!r} on {readable(columns[PATH][row])}"
            )
            try:
                votes[row, k] = read_number(cell, where, place)
            except DataError as error:
                remedy = "if it is no class, remove the column or give it as --group-by"
                raise DataError(f"{error}; {remedy}") from None
    silent = np.flatnonzero(votes.sum(axis=1) == 0)
    if len(silent):
        path = readable(columns[PATH][silent[0]])
        raise DataError(f"{where} has no votes at all for {path}; add one or remove the row")
    return votes


def _rows_by_split(columns: Columns, file: str) -> dict[str, np.ndarray]:
    if SPLIT not in columns:
        return {TRAIN_NAMES[0]: np.arange(len(columns[PATH]))}
    splits = [value.lower() for value in columns[SPLIT]]
    unknown = next((i for i, split in enumerate(splits) if split not in TRAIN_NAMES + VAL_NAMES), None)
    if unknown is not None:
        raise DataError(
            f"{readable(file)} has the split {readable(columns[SPLIT][unknown])!r} for "
            f"{readable(columns[PATH][unknown])}; use train, val or test"
        )
    return {split: np.flatnonzero(np.array(splits) == split) for split in set(splits)}

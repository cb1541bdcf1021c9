"""The listing of a large folder, kept as long as nothing in it changes: in this process, and in a file for others.

To list a million files may take minutes on a shared disk; to ask a thousand folders when they last changed takes a
second. A folder changes when a file comes, goes or gets another name, which its modification time tells, and the
time of its status even where that was set back. What a file holds is no part of the listing.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from didicm.files import write_files

FORMAT = 1
LARGE = 10_000  # images; fewer are listed in no time
SETTLED = 2 * 10**9  # nanoseconds: the clocks of some file systems tick so slowly


class Strings:
    """Many strings in one block of memory.

    A list would be copied into every worker: reading a string touches its reference count, and with it a
    page that was shared. With a million paths that adds up.
    """

    def __init__(self, block: np.ndarray, ends: np.ndarray) -> None:
        self.block, self.ends = block, ends

    @classmethod
    def of(cls, strings: Sequence[str]) -> "Strings":
        """Join strings."""
        encoded = [s.encode("utf-8", "surrogateescape") for s in strings]
        ends = np.cumsum([0] + [len(s) for s in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> str:
        return self.block[self.ends[i] : self.ends[i + 1]].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class FolderListing:
    """Images below class folders, and the folders they were found in, as paths from the root."""

    class_names: Strings
    labels: np.ndarray  # (N,), int64
    paths: Strings  # N
    folders: Strings  # all that were read, the root among them
    changes: np.ndarray  # (folders, 2), int64: when each had last changed before it was read
    begun: int  # when the listing was, in nanoseconds

    def is_settled(self) -> bool:
        """Whether every later change will show."""
        return bool(self.changes.max() + SETTLED < self.begun)

    def is_current(self, root: Path) -> bool:
        """Whether nothing has changed since."""
        try:
            return all(
                np.array_equal(last_change(os.path.join(root, folder)), before)
                for folder, before in zip(self.folders, self.changes, strict=True)
            )
        except OSError:  # one is gone
            return False


def last_change(folder: str | Path) -> tuple[int, int]:
    """When files last came, went or were renamed in a folder: its own time, and that of its status."""
    status = os.stat(folder)
    return status.st_mtime_ns, status.st_ctime_ns


_listings: dict[str, FolderListing] = {}  # of this process, by root


def list_once(root: Path, index: Path | None, scan: Callable[[Path], FolderListing]) -> FolderListing:
    """Scan a folder, unless this process did, or another that kept its listing in folder `index`."""
    where = os.path.abspath(root)
    found = _listings.pop(where, None) or (None if index is None else _read(_file(index, where)))
    if found is None or not found.is_current(root):
        found = scan(root)
        if index is not None and index.is_dir() and found.is_settled():
            _write(_file(index, where), found)
    if found.is_settled():
        _listings[where] = found
    return found


def keep_listings(index: Path) -> None:
    """Make the folder that keeps this process's listings of large folders for others, if there are any."""
    for where, listing in _listings.items():
        if len(listing.paths) >= LARGE and not _file(index, where).exists():
            _write(_file(index, where), listing)


def _file(index: Path, where: str) -> Path:
    return index / f"{hashlib.sha256(os.fsencode(where)).hexdigest()[:16]}.npz"


def _write(file: Path, listing: FolderListing) -> None:
    arrays: dict[str, np.ndarray] = {"format": np.array(FORMAT)}
    for name, value in vars(listing).items():
        if isinstance(value, Strings):
            arrays |= {f"{name}.block": value.block, f"{name}.ends": value.ends}
        else:
            arrays[name] = np.asarray(value)

    def write(path: Path) -> None:
        with open(path, "wb") as handle:
            np.savez(handle, **arrays)  # type: ignore[arg-type]

    write_files(file.parent, {file.name: write})


def _read(file: Path) -> FolderListing | None:
    """What `_write` wrote; None if that is damaged or of another version, as it can be made again."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if arrays["format"] != FORMAT:
                return None
            strings = {
                name: Strings(arrays[f"{name}.block"], arrays[f"{name}.ends"])
                for name in ("class_names", "paths", "folders")
            }
            return FolderListing(
                labels=arrays["labels"], changes=arrays["changes"], begun=int(arrays["begun"]), **strings
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None

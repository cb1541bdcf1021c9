"""The results of a grid on disk: one line a finished cell.

Any number of processes may work on one grid. Whatever looks at results and claims together does so under one file
lock, which the system frees when its holder dies.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from didicm.errors import UserError
from didicm.experiments.claims import Claims

RESULTS, CLAIMS, LOCK = "results.jsonl", "claims", ".lock"


class Results:
    """The results file of a grid, and the claims on its cells.

    Args:
        folder: where the results are.
        trainings: where the trained models are, if several grids share them; the claims are there as well.
    """

    def __init__(self, folder: str | Path, trainings: str | Path | None = None) -> None:
        self.folder, self.trainings = Path(folder), Path(trainings or folder)
        self.path = self.folder / RESULTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claims = Claims(self.trainings / CLAIMS)
        except OSError as error:
            raise UserError(f"{folder} cannot be written to ({error.strerror}): give another --out") from error
        self._lock = FileLock(str(self.trainings / LOCK))
        with self._lock:
            self._repair()

    def read(self) -> dict[str, dict[str, Any]]:
        """Finished cells by their key, in the order in which they were finished."""
        with self._lock:
            return self._read()

    def append(self, record: dict[str, Any]) -> None:
        """Add a finished cell, and give up the claim on it; on disk when this returns."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with self._lock:
            self._repair()
            if record["key"] not in self._read():
                with open(self.path, "ab") as file:
                    file.write(line.encode())
                    file.flush()
                    os.fsync(file.fileno())
            self.release(record["key"])

    def claim(self, keys: Iterable[str]) -> str | None:
        """Take the first cell that is neither done nor somebody's; None if there is none."""
        with self._lock:
            done = self._read()
            return next((key for key in keys if key not in done and self._claims.take(key)), None)

    def report(self, key: str, share: float) -> None:
        """Tell everybody how far a cell of ours is."""
        self._claims.report(key, share)

    def shares(self) -> dict[str, float]:
        """How far the cells are that anybody runs."""
        return self._claims.shares()

    def release(self, key: str) -> None:
        """Give up a claim."""
        self._claims.release(key)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        records = {}
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                record = json.loads(line)
                records.setdefault(record["key"], record)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"line {number} of {self.path} is damaged ({error}): delete that line") from error
        return records

    def _repair(self) -> None:
        """Cut off a last line that a crash or a full disk left unfinished."""
        if not self.path.exists():
            return
        text = self.path.read_bytes()
        kept = text[: text.rfind(b"\n") + 1]
        if len(kept) < len(text):
            os.truncate(self.path, len(kept))

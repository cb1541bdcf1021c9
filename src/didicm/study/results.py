"""The results of a grid on disk: one line a finished cell, and claims on those that are being run.

Any number of processes may work on one grid. Whatever looks at results and claims together does so under one file
lock, which the system frees when its holder dies. A claim of a process that is no more is taken over.
"""

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from didicm.errors import UserError

RESULTS, CLAIMS, LOCK = "results.jsonl", "claims", ".lock"


class Results:
    """The results file of a grid, and its claims."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / RESULTS
        self._claims = self.folder / CLAIMS
        try:
            self._claims.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written to ({error.strerror}): give another --out") from error
        self._lock = FileLock(str(self.folder / LOCK))
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
            return next((key for key in keys if key not in done and self._take(key)), None)

    def release(self, key: str) -> None:
        """Give up a claim."""
        (self._claims / key).unlink(missing_ok=True)

    def _take(self, key: str) -> bool:
        path = self._claims / key
        if path.exists() and not _alive(path):
            path.unlink()
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            pid = os.getpid()
            json.dump({"host": socket.gethostname(), "pid": pid, "started": _started(pid)}, file)
        return True

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


def _alive(path: Path) -> bool:
    """Whether the owner of a claim may still be running; of another host we cannot know, and leave it."""
    try:
        claim = json.loads(path.read_text(encoding="utf-8"))
        host, pid, started = claim["host"], int(claim["pid"]), claim["started"]
    except (ValueError, KeyError, TypeError, OSError):
        return False  # torn by a crash: claims are written under the lock, which is ours
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return started == _started(pid)


def _started(pid: int) -> str | None:
    """When a process began, where the system tells: another one may have got its number since."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return "gone" if status[0] == "Z" else status[19]

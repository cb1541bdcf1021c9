"""Claims on cells that are being run, so that no two processes, on whatever machines, run the same one.

A claim is a small file that its owner writes anew every second, with the share of the work that is done. It can be
taken over when its owner is no more: at once on the same machine, where the system tells; elsewhere when it has
been silent for minutes.
"""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

BEAT = 1.0  # seconds between signs of life
SILENT = 300.0  # seconds after which a claim from another machine counts as given up


class Claims:
    """Claims in a folder; callers take them under a lock that all processes share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._held: dict[str, float] = {}
        self._guard = threading.Lock()  # between the owner and its heart
        self._heart: threading.Thread | None = None

    def take(self, key: str) -> bool:
        """Claim a cell unless somebody has it."""
        if (self._folder / key).exists() and self._in_use(key):
            return False
        with self._guard:
            self._held[key] = 0.0
            self._write(key)
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, daemon=True)
            self._heart.start()
        return True

    def report(self, key: str, share: float) -> None:
        """Say how far a cell of ours is; the next sign of life carries it."""
        if key in self._held:
            self._held[key] = share

    def release(self, key: str) -> None:
        """Give up a claim."""
        with self._guard:
            if self._held.pop(key, None) is not None and self._is_ours(key):
                (self._folder / key).unlink(missing_ok=True)

    def shares(self) -> dict[str, float]:
        """How far the cells are that anybody runs."""
        found = {path.name: self._read(path.name) for path in self._folder.iterdir() if path.suffix != ".part"}
        return {key: float(claim.get("share", 0)) for key, claim in found.items() if claim}

    def _in_use(self, key: str) -> bool:
        """Whether the owner of a claim may still be running."""
        claim = self._read(key)
        if claim is None:
            return False  # torn by a crash or just released
        if claim["host"] == socket.gethostname() and (alive := _alive(claim["pid"], claim["started"])) is not None:
            return alive
        clock = self._folder.with_suffix(".clock")
        clock.touch()  # the time of the machine that keeps the files: ours may differ
        try:
            return clock.stat().st_mtime - (self._folder / key).stat().st_mtime < SILENT
        except FileNotFoundError:
            return False

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            claim = json.loads((self._folder / key).read_text(encoding="utf-8"))
            return {**claim, "host": claim["host"], "pid": int(claim["pid"]), "started": claim["started"]}
        except (ValueError, KeyError, TypeError, OSError):
            return None

    def _is_ours(self, key: str) -> bool:
        """Whether nobody took the claim over while we were suspended."""
        claim, pid = self._read(key), os.getpid()
        return claim is not None and (claim["host"], claim["pid"]) == (socket.gethostname(), pid)

    def _write(self, key: str) -> None:
        pid = os.getpid()
        claim = {"host": socket.gethostname(), "pid": pid, "started": _started(pid), "share": self._held[key]}
        part = self._folder / f"{key}.{pid}.part"
        part.write_text(json.dumps(claim), encoding="utf-8")
        os.replace(part, self._folder / key)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT):
            with self._guard:
                for key in self._held:
                    try:
                        if self._is_ours(key):
                            self._write(key)
                    except OSError:  # a full or absent disk: the training itself will tell
                        continue


def _alive(pid: int, started: str | None) -> bool | None:
    """Whether a process of this machine runs; None where the system does not tell which one has its number now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's, perhaps a later one
    now = _started(pid)
    return None if started is None or now is None else started == now


def _started(pid: int) -> str | None:
    """When a process began, where the system tells: another one may have got its number since."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return "gone" if status[0] == "Z" else status[19]

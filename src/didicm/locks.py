"""One process at a time in a folder: a lock that the system frees however its holder ends, and who that is.

The system knows the holder by its open file, not by a number: containers with one host name are told apart.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from didicm.errors import UserError, reason

LOCK = ".lock"

_open: set[int] = set()


class HeldError(UserError):
    """Another process has the folder."""


@contextmanager
def held(folder: Path, name: str = LOCK, *, wait: bool = False, command: str = "") -> Iterator[None]:
    """Hold a folder against other processes; where one has it, wait until it is free, or say who that is."""
    place = folder / name
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}): give another --out") from error
    with _closed(handle):
        try:
            free = lock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            with suppress(OSError):
                place.unlink()
                folder.rmdir() if made else None
            remedy = "give an --out on a file system with locks"
            raise UserError(f"files in {folder} cannot be locked ({reason(error)}): {remedy}") from error
        if not free:
            raise HeldError(f"{folder} is in use by {_holder(handle)}: wait for it, or give another --out")
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(handle, 0)
            os.write(handle, _about_us(command).encode())
        yield


def lock(handle: int, how: int) -> bool:
    """Lock an open file or folder, `how` as in fcntl; False if another process is in the way."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    return True


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A folder as something to lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with _closed(handle):
        yield handle


@contextmanager
def _closed(handle: int) -> Iterator[None]:
    _open.add(handle)
    try:
        yield
    finally:
        _open.discard(handle)
        os.close(handle)


def _forget() -> None:
    """A forked process shares our locks, and would keep them after our end."""
    for handle in _open:
        os.close(handle)
    _open.clear()


os.register_at_fork(after_in_child=_forget)


def _about_us(command: str) -> str:
    since = time.strftime("%Y-%m-%d %H:%M")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command})


def _holder(handle: int) -> str:
    try:
        about = json.loads(os.pread(handle, 2**16, 0))
        command = f" ({about['command']})" if about["command"] else ""
        return f"pid {about['pid']} on {about['host']} since {about['since']}{command}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just starting
        return "another process"

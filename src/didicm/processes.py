"""One process at a time in a folder, how a process is asked to stop and leaves without loss, and its cores.

The system frees a lock however its holder ends, and knows the holder by its open file, not by a number: containers
with one host name are told apart. To stop, a terminal sends SIGINT, a scheduler SIGTERM, SLURM its warning as
SIGUSR1 or SIGUSR2. Systemd and SLURM tell every process of a job at once, so one that serves another waits until
that one ends it.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from didicm.errors import UserError, reason

LOCK = ".lock"

_open: set[int] = set()
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def usable_cores() -> int:
    """Cores that this process may run on: a scheduler or taskset may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
                if made:
                    folder.rmdir()
            remedy = "give an --out on a file system with locks"
            raise UserError(f"files in {folder} cannot be locked ({reason(error)}): {remedy}") from error
        if not free:
            raise HeldError(f"{folder} is in use by {_holder(handle)}: wait for it, or give another --out")
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(handle, 0)
            about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M")}
            os.write(handle, json.dumps({**about, "command": command}).encode())
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


def _holder(handle: int) -> str:
    try:
        about = json.loads(os.pread(handle, 2**16, 0))
        command = f" ({about['command']})" if about["command"] else ""
        return f"pid {about['pid']} on {about['host']} since {about['since']}{command}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just starting
        return "another process"


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """A list that any of these signals fills, so that a step is finished and saved first.

    Leave by KeyboardInterrupt then: a handler that was there before, such as submitit's, has its turn.
    """
    stop: list[int] = []

    def note(number: int, frame: object) -> None:
        # Ctrl-C twice means at once; but torchrun passes on what its processes were sent already.
        if number == signal.SIGINT and number in stop and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        stop.append(number)

    with _handled(note) as before:
        try:
            yield stop
        except KeyboardInterrupt:
            for number in dict.fromkeys(stop):
                signal.signal(number, before[number])
                if callable(before[number]):
                    signal.raise_signal(number)
            raise


@contextmanager
def interrupted() -> Iterator[None]:
    """Take any of these signals as Ctrl-C, once: a second one must not disturb the way out."""
    stop: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if not stop:
            stop.append(number)
            raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def shielded() -> Iterator[None]:
    """Hold these signals back; processes that are started meanwhile are born with them held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_alone(worker: int = 0) -> None:
    """In a process that was started `shielded`: stop when the parent says so, and not when anybody else does."""
    parent = multiprocessing.parent_process()
    if parent is not None and hasattr(signal, "sigwaitinfo"):  # macOS lacks it
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        threading.Thread(target=_wait_for, args=(parent.pid,), daemon=True).start()


def _wait_for(sender: int) -> None:
    while signal.sigwaitinfo(STOPPING).si_pid != sender:
        pass
    os._exit(0)


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Handle these signals, but those that are ignored on purpose; only the main thread can."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        wanted = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield before
    finally:
        for number, own in before.items():
            signal.signal(number, own)

"""How a process is asked to stop, and how it leaves without losing anything.

A terminal sends SIGINT, a scheduler SIGTERM, SLURM its warning as SIGUSR1 or SIGUSR2. Systemd and SLURM tell every
process of a job at once, so one that serves another waits until that one ends it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")  # Windows lacks the last two
STOPPING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


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
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
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

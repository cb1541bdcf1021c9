"""The one display of progress: a bar on a terminal, a line now and then elsewhere, the time left in both."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from didicm.text import readable

QUIET = 10.0  # seconds without a line, where there is no bar


class ProgressDisplay:
    """Shows how much of `total` is done, in any unit; use it as a context."""

    def __init__(self, console: Console, total: float, done: int = 0, *, seconds: float = QUIET) -> None:
        self.console = console
        self._total, self._start, self._done = total, float(done), float(done)
        self._began = self._last = time.monotonic()
        self._seconds = seconds
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                BarColumn(30),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "ProgressDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, text: str = "", *, total: float | None = None) -> None:
        """Note how much is done; `text` says what is going on."""
        self._done, self._total = done, self._total if total is None else total
        line = f"{readable(text)}{self.left}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, description=line)
        elif time.monotonic() - self._last >= self._seconds:
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        self._last = time.monotonic()
        self.console.print(readable(line), highlight=False, markup=False, soft_wrap=True)

    @property
    def left(self) -> str:
        """Time left at the pace since the start, as in `  3 min 20 s left`; empty while nothing is known."""
        worked, rest = self._done - self._start, self._total - self._done
        if worked <= 0 or rest <= 0:
            return ""
        return f"  {duration((time.monotonic() - self._began) * rest / worked)} left"


def duration(seconds: float) -> str:
    """Seconds in words, as in 1 h 05 min."""
    if 0 < seconds < 1:
        return "under 1 s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 2400:
        return f"{hours // 24:,} days"
    if hours >= 48:
        return f"{hours // 24:,} days {hours % 24:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

"""Progress over a whole grid: a bar on a terminal, plain lines elsewhere, and the time left in both."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from didicm.training.tracking import duration

QUIET = 20.0  # seconds without a line, where there is no bar


class GridProgress:
    """Shows how far a grid is; `weights` say how much work each cell is, in any unit."""

    def __init__(self, console: Console, names: dict[str, str], weights: dict[str, float], done: set[str]) -> None:
        self._console, self._names, self._weights = console, names, weights
        self._share = {key: 1.0 for key in done if key in names}
        self._at_start = self._work()
        self._began = self._last = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                BarColumn(bar_width=30),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, redirect_stdout=False, transient=True)
            self._task = self._bar.add_task(self._line(None), total=sum(weights.values()))
            self._bar.start()
        elif len(self._share) < len(names):
            console.print(
                f"{len(names)} trainings, {len(self._share)} of them done before", highlight=False, markup=False
            )

    def update(self, key: str, share: float) -> None:
        """Note how far a running cell is."""
        self._share[key] = min(share, 0.999)
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._work(), description=self._line(key))
        elif now - self._last > QUIET:
            self._last = now
            self._console.print(self._line(key), highlight=False, markup=False)

    def finish(self, key: str, record: dict[str, Any] | None) -> None:
        """Note a finished cell, ours or another process's."""
        self._share[key] = 1.0
        self._last = time.monotonic()
        if record is not None:
            metrics = record["readings"][0]["metrics"]
            numbers = f"top-1 {100 * metrics['cls/Acc']:.1f} %  NLL {metrics['cls/NLL']:.3f}"
            self._console.print(
                f"{self._count()}  {self._names[key]}: {numbers}{self._left()}", highlight=False, markup=False
            )
        if self._bar is not None:
            self._bar.update(self._task, completed=self._work(), description=self._line(None))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, key: str | None) -> str:
        return f"{self._count()}  {self._names[key] if key else 'trainings'}{self._left()}"

    def _count(self) -> str:
        return f"{sum(share == 1 for share in self._share.values())}/{len(self._names)}"

    def _left(self) -> str:
        worked = self._work() - self._at_start
        rest = sum(self._weights.values()) - self._work()
        if worked <= 0 or rest <= 0:
            return ""
        return f"  {duration((time.monotonic() - self._began) * rest / worked)} left"

    def _work(self) -> float:
        return sum(self._weights[key] * share for key, share in self._share.items())

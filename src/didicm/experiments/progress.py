"""How far the runs of a study are, whoever carries them out: read from their folders, shown in one display."""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console

from didicm.experiments.execute import read_share
from didicm.experiments.results import RunResult
from didicm.experiments.spec import Run
from didicm.progress import ProgressDisplay

POLL = 1.0  # seconds between looks at the folders
QUIET = 20.0  # seconds without a line, where there is no bar


class StudyProgress:
    """Shows the share of the work that is done; use it as a context."""

    def __init__(
        self, console: Console, runs: Mapping[str, Run], done: Iterable[str], folders: Mapping[str, Path]
    ):
        self._runs, self._folders = runs, folders
        self._work = {key: _work(run) for key, run in runs.items()}
        self._done = set(done)
        self._display = ProgressDisplay(console, sum(self._work.values()), int(self._worked()), seconds=QUIET)
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "StudyProgress":
        self._display.__enter__()
        if not self._display.console.is_terminal:
            self._display.print(f"{len(self._runs)} trainings, {len(self._done)} of them done before")
        self._watcher.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._watcher.join()
        self._display.__exit__(kind, error, trace)

    def finish(self, result: RunResult) -> None:
        """Note a finished run, and print what came out."""
        metrics = result.measurements[0].metrics
        numbers = f"top-1 {100 * metrics['cls/Acc']:.1f} %  NLL {metrics['cls/NLL']:.3f}"
        with self._guard:
            self._done.add(result.key)
            self._display.update(self._worked(), self._count())
            self._display.print(f"{self._count()}  {self._runs[result.key]}: {numbers}{self._display.left}")

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            with self._guard:
                shares = {key: read_share(path) for key, path in self._folders.items() if key not in self._done}
                running = next((f"  {self._runs[key]}" for key, share in shares.items() if 0 < share < 1), "")
                self._display.update(self._worked(shares), self._count() + running)

    def _worked(self, shares: Mapping[str, float] | None = None) -> float:
        whole = sum(self._work[key] for key in self._done)
        return whole + sum(self._work[key] * share for key, share in (shares or {}).items())

    def _count(self) -> str:
        return f"{len(self._done)}/{len(self._runs)}"


def _work(run: Run) -> float:
    """Rough work of a run: images seen times what an image costs."""
    config = run.config
    size = config.image.size or config.image.limit
    draws = config.draws_per_image if config.method == "diffusion" else 1
    return config.epochs * config.fraction * (size**2 + 200) * (1 + draws)

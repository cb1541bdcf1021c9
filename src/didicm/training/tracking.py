"""The numbers of a run, on the screen and on disk: metrics.jsonl always, TensorBoard and W&B by setting."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from didicm.files import write_files, writing
from didicm.progress import ProgressDisplay
from didicm.settings import RunConfig
from didicm.text import SafeConsole, count

METRICS = "metrics.jsonl"
NAMED = 5  # unreadable images that are named

Writer = Callable[[int, Mapping[str, float]], object]


class Tracker:
    """Writes a run's numbers; epochs count from 1. Only the first process has one that is not `silent`."""

    def __init__(
        self, folder: Path, config: RunConfig, total_steps: int, start: int, console: Console, *, silent: bool
    ) -> None:
        self._folder, self._total, self._silent = folder, total_steps, silent
        self._log_seconds = config.log_seconds
        self._console = SafeConsole(quiet=True) if silent else console
        self._display = ProgressDisplay(self._console, total_steps, start, seconds=float("inf"))
        self._writers: list[Writer] = []
        self._named: set[str] = set()
        self._text = ""
        self._logged, self._clock, self._elsewhere = start, time.monotonic(), 0.0
        self._until_the_end = ExitStack()
        if silent:
            return
        forget_after(folder, start)
        with writing(folder / METRICS):
            file = open(folder / METRICS, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed in __exit__)
        self._file = self._until_the_end.enter_context(file)
        if config.tensorboard:
            self._writers.append(_tensorboard(folder, self._until_the_end))
        if config.wandb:
            self._writers.append(_wandb(folder, config.wandb, self._until_the_end))

    def __enter__(self) -> "Tracker":
        self._until_the_end.enter_context(self._display)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._until_the_end.__exit__(kind, error, trace)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Time that is no training, such as validation: it does not count in images per second."""
        begun = time.monotonic()
        yield
        self._elsewhere += time.monotonic() - begun

    @property
    def due(self) -> bool:
        """Whether it is time to write a step down: the next one should come with its numbers."""
        return not self._silent and time.monotonic() - self._clock >= self._log_seconds

    def step(self, step: int, epoch: int, batch_size: int, numbers: Mapping[str, float] | None) -> None:
        """Note a finished step, whose numbers may not have been read; now and then write it down."""
        if self._silent:
            return
        if numbers is not None:
            self._text = f"epoch {epoch}  loss {numbers['loss']:.4f}"
            if skipped := numbers["skipped_steps"]:
                self._text += f"  {count(skipped, 'step')} skipped"
        self._display.update(step, self._text)
        if numbers is None or (not self.due and step < self._total):
            return
        passed = time.monotonic() - self._clock
        speed = (step - self._logged) * batch_size / max(passed - self._elsewhere, 1e-9)
        self._logged, self._clock, self._elsewhere = step, time.monotonic(), 0.0
        self.write(step, {"epoch": epoch, **numbers, "images_per_second": speed})
        if not self._console.is_terminal:
            self._display.print(
                f"step {step}/{self._total}  {self._text}  lr {numbers['lr']:.2g}  {speed:.0f} images/s"
                + self._display.left
            )

    def validating(self, step: int, epoch: int) -> Callable[[int, int], None]:
        """Progress of a validation, for the display."""
        return lambda done, total: self._display.update(step, f"epoch {epoch}  validating {done}/{total} images")

    def validation(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of a validation."""
        if self._silent:
            return
        self.write(step, {"epoch": epoch, **{f"val/{name}": value for name, value in metrics.items()}})
        self._display.print(
            f"epoch {epoch}: accuracy {100 * metrics['cls/Acc']:.1f} %  "
            f"top-5 {100 * metrics['cls/Acc5']:.1f} %  NLL {metrics['cls/NLL']:.3f}  "
            f"ECE {100 * metrics['cal/ECE']:.1f} %"
        )

    def unreadable(self, kind: str, reasons: Collection[str]) -> None:
        """Name images that could not be read, each once and not too many, and count the others."""
        new = [told for told in reasons if told not in self._named]
        named = max(0, NAMED - len(self._named))
        for told in new[:named]:
            self._display.print(f"left out: {told}")
        if new[named:]:
            self._display.print(f"left out: {count(len(reasons), f'{kind} image')} so far")
        self._named.update(new)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, and tell the other writers; only the first process does."""
        if self._silent:
            return
        with writing(self._folder / METRICS):
            self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        for write in self._writers:
            write(step, {name: value for name, value in numbers.items() if isinstance(value, (int, float))})


def forget_after(folder: Path, step: int) -> None:
    """Drop lines of steps that a resumed run will take again, and a last line torn by a crash."""
    path = folder / METRICS
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    write_files(folder, {METRICS: "".join(kept)})


def _tensorboard(folder: Path, until_the_end: ExitStack) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    writer = until_the_end.enter_context(SummaryWriter(str(folder / "tensorboard")))

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(folder: Path, project: str, until_the_end: ExitStack) -> Writer:
    import wandb

    place = folder.resolve()  # tells runs apart whose folders have the same name
    own = {"name": place.name, "id": hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}
    run = wandb.init(project=project, dir=str(folder), resume="allow", **own)
    # Else the next run of this process would be logged as this one.
    until_the_end.push(lambda kind, *_: run.finish(exit_code=int(kind is not None)))
    return lambda step, numbers: run.log(dict(numbers), step=step)

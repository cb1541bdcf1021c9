"""Progress on the screen and numbers on disk: a bar on a terminal, plain lines elsewhere, metrics.jsonl always."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from didicm.errors import UserError
from didicm.files import write_files
from didicm.settings import RunConfig

METRICS = "metrics.jsonl"


class Tracker:
    """Writes the run's numbers; made on the first process only, the others have a silent one."""

    def __init__(self, folder: Path, config: RunConfig, total_steps: int, start: int, silent: bool) -> None:
        self.silent = silent
        self.console = Console(quiet=silent, soft_wrap=True)
        self._folder, self._total = folder, total_steps
        self._log_seconds = config.log_seconds
        self._last_log = self._started = time.monotonic()
        self._first_step = start
        self._since = (self._started, start)
        self._writers: list[Any] = []
        self._bar: Progress | None = None
        if silent:
            return
        forget_after(folder, start)
        self._file = open(folder / METRICS, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed in close)
        if config.tensorboard:
            self._writers.append(_tensorboard(folder))
        if config.wandb:
            self._writers.append(_wandb(folder, config.wandb))
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
            self._task = self._bar.add_task("training", total=total_steps, completed=start)
            self._bar.start()

    def step(self, step: int, epoch: int, batch_size: int, numbers: dict[str, float]) -> None:
        """Note a finished step; now and then write it down."""
        if self.silent:
            return
        if self._bar is not None:
            shown = f"epoch {epoch + 1}  loss {numbers['loss']:.4f}"
            self._bar.update(self._task, completed=step, description=shown)
        now = time.monotonic()
        if now - self._last_log < self._log_seconds and step < self._total:
            return
        before, at = self._since
        speed = (step - at) * batch_size / max(now - before, 1e-9)
        self._last_log, self._since = now, (now, step)
        self.write(step, {"epoch": epoch, **numbers, "images_per_second": speed})
        if self._bar is None:
            left = (now - self._started) / max(step - self._first_step, 1) * (self._total - step)
            self.console.print(
                f"step {step}/{self._total}  epoch {epoch + 1}  loss {numbers['loss']:.4f}  "
                f"lr {numbers['lr']:.2g}  {speed:.0f} images/s  {duration(left)} left",
                highlight=False,
            )

    def validation(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Note the metrics of a validation."""
        if self.silent:
            return
        self.write(step, {"epoch": epoch, **{f"val/{name}": value for name, value in metrics.items()}})
        self.console.print(
            f"epoch {epoch + 1}: accuracy {100 * metrics['cls/Acc']:.1f} %  "
            f"top-5 {100 * metrics['cls/Acc5']:.1f} %  NLL {metrics['cls/NLL']:.3f}  "
            f"ECE {100 * metrics['cal/ECE']:.1f} %",
            highlight=False,
        )

    def write(self, step: int, numbers: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, and tell the other writers."""
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        for write in self._writers:
            write(step, {name: value for name, value in numbers.items() if isinstance(value, (int, float))})

    def close(self) -> None:
        """Stop the bar and close the files."""
        if self.silent:
            return
        if self._bar is not None:
            self._bar.stop()
        self._file.close()


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
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    write_files(folder, {METRICS: lambda p: p.write_text("".join(kept), encoding="utf-8")})


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("run.tensorboard needs TensorBoard: pip install 'didicm[tensorboard]'") from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(folder: Path, project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError("run.wandb needs Weights & Biases: pip install 'didicm[wandb]'") from error
    run = wandb.init(project=project, dir=str(folder), name=folder.name, id=folder.name, resume="allow")
    return lambda step, numbers: run.log(numbers, step=step)


def duration(seconds: float) -> str:
    """Seconds in words, as in 1 h 05 min."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
    )

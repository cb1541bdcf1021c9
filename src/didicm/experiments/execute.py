"""One run of a study, from its folder alone: train or resume its network, measure it, keep what a report needs."""

import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

import numpy as np
from rich.console import Console

from didicm.checkpoint import load
from didicm.classifier import Ensemble
from didicm.data import ImageSet, stratified_split
from didicm.errors import UserError, reason
from didicm.experiments.measure import measure, trial_of
from didicm.experiments.results import Record, RunResult, Trial
from didicm.experiments.spec import MEASURED, Run
from didicm.files import read_json, to_json, write_files
from didicm.processes import STOPPING, held
from didicm.settings import TrainConfig
from didicm.text import SafeConsole
from didicm.training.build import INDEX, RunComponents, build, check_batches
from didicm.training.loop import DivergedError, train
from didicm.training.state import BEST, LAST, STATE, has_state, keep

RUNS = "runs"  # folder of trainings, which studies share
# Files of a run's folder: what is to be done, as long as it is, what came out, and how far it is.
RUN, RESULT, PROGRESS = "run.json", "result.json", "progress"
TRAINED, ERROR, LOG = "trained.json", "error.txt", "train.log"  # of a training
SHORT = 10_000  # steps
MISTAKES = UserError, OSError, FloatingPointError  # told in a sentence; the latter: answers that are not finite


def write_run(out: Path, trainings: Path, run: Run) -> Path:
    """Make the folder that `execute` takes: where what is measured in this study goes, and how to get it."""
    folder = out / MEASURED / run.key
    config = replace(run.config, out=str((trainings / RUNS / run.key).absolute()))
    text = to_json(replace(run, config=config).to_dict())
    if not (folder / RUN).exists() or (folder / RUN).read_text(encoding="utf-8") != text:
        (folder / RESULT).unlink(missing_ok=True)
        write_files(folder, {RUN: text})
    return folder


def read_run(folder: Path) -> Run:
    """What `write_run` wrote."""
    return Run.from_dict(read_json(folder / RUN, "run the study again"))


def read_result(folder: Path) -> Record:
    """What `execute` found."""
    kind = RunResult if read_run(folder).trial is None else Trial
    return kind.from_dict(read_json(folder / RESULT, "delete it and run the study again"))


def read_share(folder: Path) -> float:
    """How much of a run's training is done."""
    try:
        return float((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0


def close_run(folder: Path) -> None:
    """Mark a run as done, once its result is stored elsewhere: a job that is still queued for it finds no work."""
    for name in (RUN, RESULT, PROGRESS):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):  # a trial leaves nothing to look at
        folder.rmdir()


def execute(folder: Path) -> None:
    """Carry out a run and write its result into its folder, unless it is there."""
    if not (folder / RUN).exists():
        return
    run = read_run(folder)
    try:
        # A job left over from a killed owner may be at it: then we wait, and find the run done.
        with held(Path(run.config.out), wait=True):
            if (folder / RUN).exists() and not (folder / RESULT).exists():
                with open(Path(run.config.out) / LOG, "a", encoding="utf-8") as log:
                    if run.config.run.devices == 1:
                        _train_and_measure(run, folder, SafeConsole(file=log, soft_wrap=True))
                    else:
                        _in_processes(run, folder, log)
    except MISTAKES as error:
        raise UserError(f"{run}: {reason(error)}") from error


def prepare(run: Run, index: Path | None = None) -> tuple[RunComponents, ImageSet]:
    """Components whose validation images are cut from the training images, and the test images.

    So nothing is ever chosen or fitted on test images, whether or not the data has a split of its own for them.
    With label noise the test images alone are labelled right: nobody has better labels to fit a temperature on.
    A trial of a search has no test images at all.
    """
    if index is None and run.config.out:
        index = Path(run.config.out).parents[1] / INDEX  # of the grid, see `write_run`
    components = build(run.config, index)
    test = components.val if run.trial is None else components.val.select(np.arange(0))
    if run.held_out:
        train = components.train
        kept, held = stratified_split(train.labels, run.held_out, run.config.image_seed, train.groups)
        components = replace(components, train=train.select(kept), val=train.select(held))
    devices = run.config.run.devices
    check_batches(run.config, components, devices if isinstance(devices, int) else 1)
    return components, test


def _train_and_measure(run: Run, folder: Path, console: Console | None = None) -> None:
    """All of a run, in this process or with others of its kind, one per device."""
    components, test = prepare(run)
    result: Record | None
    try:
        seconds = _train_or_resume(run, components, folder, console)
        result = measure(run, components, test, seconds, folder)
    except (DivergedError, FloatingPointError):  # in training, or in what it answers
        if run.trial is None:
            raise
        result = trial_of(run, components)  # like any other: such settings are not chosen
    if result is not None and _is_first():
        write_files(folder, {RESULT: to_json(result.to_dict())})


def _train_or_resume(run: Run, components: RunComponents, folder: Path, console: Console | None) -> float | None:
    """Train or resume, unless that is done; seconds, unless it was resumed."""
    training = Path(run.config.out)
    if (training / TRAINED).exists():
        seconds: float | None = read_json(training / TRAINED, "delete it; the training is then finished again")
        return seconds
    resumed = any(has_state(Path(config.out)) for config in run.members)
    begun = time.monotonic()
    for i, config in enumerate(run.members):
        own = components
        if len(run.members) > 1:  # a network of its own, on the same images
            member, _ = prepare(replace(run, config=config), components.index)
            own = replace(components, classifier=member.classifier)
        _train(config, own, folder, (i, len(run.members)), console)
    seconds = None if resumed else time.monotonic() - begun
    if _is_first():
        if len(run.members) > 1:  # their ensemble, where a single training keeps its last model
            members = [load(Path(config.out) / LAST).classifier for config in run.members]
            keep(components, Ensemble(members), training / LAST)
        write_files(training, {TRAINED: to_json(seconds)})
        for config in run.members:  # only a resumed training needs them
            for path in ((Path(config.out) / STATE).parent, Path(config.out) / BEST):
                shutil.rmtree(path, ignore_errors=True)
    return seconds


def _train(
    config: TrainConfig, components: RunComponents, folder: Path, part: tuple[int, int], console: Console | None
) -> None:
    """Train; how far that is, as this part of several, goes to `folder`, once per second at most."""
    number, parts = part
    written = -math.inf
    if config.epochs * len(components.train) <= SHORT * config.batch_size:
        # Log every step: enough to tell whether the loss was still falling at the end.
        config = replace(config, run=replace(config.run, log_seconds=0.0))

    def on_step(done: int, total: int) -> None:
        nonlocal written
        if time.monotonic() - written >= 1 and _is_first():
            write_files(folder, {PROGRESS: f"{(number + done / total) / parts:.5f}"})
            written = time.monotonic()

    train(config, components=components, on_step=on_step, console=console)


def _is_first() -> bool:
    """Whether this is the process that writes, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _in_processes(run: Run, folder: Path, log: IO[str]) -> None:
    """One process per device, through torchrun."""
    training = Path(run.config.out)
    (training / ERROR).unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={run.config.run.devices}", "-m", __spec__.name, str(folder)]
    # In a session of their own: Ctrl-C reaches them once, through us. The pipe ends when we do.
    told = ",".join(number.name for number in STOPPING)  # torchrun would not live through a warning of SLURM's
    environment = {**os.environ, "PET_SIGNALS_TO_HANDLE": told}
    with Popen(command, stdin=PIPE, stdout=log, stderr=log, start_new_session=True, env=environment) as torchrun:
        try:
            code = torchrun.wait()
        except BaseException:
            torchrun.terminate()  # which it passes on: the training is saved
            raise
    if (training / ERROR).exists():
        raise UserError((training / ERROR).read_text(encoding="utf-8"))
    if code:
        raise UserError(f"training or measuring ended with exit code {code}: see {training / LOG}")


def main(folder: Path) -> int:
    """Carry out a run as one of several processes."""
    run = read_run(folder)
    try:
        _train_and_measure(run, folder)
    except MISTAKES as error:
        if _is_first():
            write_files(run.config.out, {ERROR: reason(error)})
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def stop_at_end_of(parent: int) -> None:
    """Save and stop when our parent is gone, which ends this pipe or handle: nobody else would stop us."""

    def watch() -> None:
        wait([parent])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    stop_at_end_of(sys.stdin.fileno())
    sys.exit(main(Path(sys.argv[1])))

"""Where runs are carried out: in this process, in worker processes, on Ray, or on a cluster through submitit.

An executor takes the folders of runs and yields each when its run is done; at most `jobs` are carried out at once.
"""

import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from rich.console import Console

from didicm.errors import UserError, did_you_mean
from didicm.experiments.clusters import run_on_ray, submitit_executor
from didicm.experiments.execute import execute, read_run, stop_at_end_of
from didicm.processes import interrupted
from didicm.settings import RunConfig

ExecutorName: TypeAlias = Literal["local", "ray", "slurm", "submitit-local"]
Executor: TypeAlias = Callable[[Sequence[Path]], Generator[Path, None, None]]


def make_executor(
    name: str, jobs: int, config: RunConfig, options: Mapping[str, Any], logs: Path, console: Console
) -> Executor:
    """An executor by its name; what cannot work is told before anything is started.

    `config` says which devices a run gets, `logs` is where submitit's jobs print; the rest is as in `run_study`.
    """
    if name not in get_args(ExecutorName):
        raise UserError(f"there is no executor {name!r}: {did_you_mean(name, get_args(ExecutorName))}")
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    devices = 1 if config.devices == "auto" else config.devices
    if name == "local":
        if options:
            raise UserError("--cluster is for --executor slurm or ray")
        shares = gpu_shares(jobs, devices, _visible_gpus(config))
        return _run_here if jobs == 1 else partial(_run_in_processes, shares)
    package, extra = ("ray", "ray") if name == "ray" else ("submitit", "slurm")
    if importlib.util.find_spec(package) is None:
        raise UserError(f'--executor {name} needs {package}: pip install "didicm[{extra}]"')
    if name == "ray":
        return partial(run_on_ray, jobs, devices, config, options)
    return submitit_executor(name, jobs, devices, config, options, logs, console)


def _run_here(folders: Sequence[Path]) -> Generator[Path, None, None]:
    for folder in folders:
        execute(folder)
        yield folder


# Worker processes


def gpu_shares(jobs: int, devices: int, gpus: Sequence[str]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each job, so that no two share a GPU; None where there are no GPUs."""
    if jobs == 1 or not gpus:
        return [None] * jobs
    if jobs * devices > len(gpus):
        each = f" with {devices} devices each" if devices > 1 else ""
        needed = f"{jobs} jobs{each} need {jobs * devices} GPUs and {len(gpus)} are visible"
        raise UserError(f"{needed}: give --jobs {max(1, len(gpus) // devices)}")
    return [",".join(gpus[i * devices : (i + 1) * devices]) for i in range(jobs)]


def _visible_gpus(config: RunConfig) -> list[str]:
    count = 0 if config.accelerator == "cpu" else torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def _run_in_processes(shares: Sequence[str | None], folders: Sequence[Path]) -> Generator[Path, None, None]:
    """Worker processes, each with its own devices; all are stopped, their trainings saved, when one fails."""
    context = multiprocessing.get_context("spawn")  # a forked PyTorch can hang
    threads = max(1, torch.get_num_threads() // len(shares))
    waiting = list(folders)
    running, workers = dict[Any, Path](), dict[Any, BaseProcess]()  # by the worker's pipe
    try:
        for gpus in shares[: len(folders)]:
            ours, theirs = context.Pipe()
            # Not daemonic: data loading has workers of its own.
            workers[ours] = context.Process(target=_work, args=(theirs, gpus, threads), daemon=False)
            workers[ours].start()
            theirs.close()  # so that the pipe ends when the worker does
        idle = list(workers)
        while waiting or running:
            while waiting and idle:
                pipe = idle.pop()
                running[pipe] = waiting.pop(0)
                pipe.send(running[pipe])
            ready: Any
            for ready in wait(list(running)):
                folder = running.pop(ready)
                try:
                    error = ready.recv()
                except EOFError:
                    raise _died(workers[ready], folder) from None
                if error is not None:
                    raise UserError(error)
                idle.append(ready)
                yield folder
    finally:
        for worker in workers.values():
            worker.terminate()  # trainings take this as a wish to save and stop
        for worker in workers.values():
            worker.join()


def _died(worker: BaseProcess, folder: Path) -> UserError:
    worker.join()
    code = worker.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return UserError(
        f"{read_run(folder)}: its process {how}; if memory was short, run the same command again with fewer --jobs"
    )


def _work(pipe: Connection, gpus: str | None, threads: int) -> None:
    """Carry out the runs that the pipe names, in a process of its own."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # nothing has asked for CUDA yet
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    stop_at_end_of(parent.sentinel)
    try:
        with interrupted():
            while True:
                folder = pipe.recv()
                try:
                    execute(folder)
                    pipe.send(None)
                except UserError as error:
                    pipe.send(str(error))
    except (KeyboardInterrupt, EOFError):
        pass

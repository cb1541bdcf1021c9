"""Where runs are carried out: in this process, in worker processes, on Ray, or on a cluster through submitit.

An executor takes the folders of runs and yields each when its run is done; at most `jobs` are carried out at once.
"""

import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from rich.console import Console

from didicm.errors import UserError, did_you_mean, reason
from didicm.experiments.execute import RESULT, execute, read_run, stop_at_end_of
from didicm.inference.on_ray import ray_session
from didicm.processes import HeldError, held, interrupted
from didicm.settings import RunConfig
from didicm.text import count
from didicm.training.devices import check_accelerator

ExecutorName: TypeAlias = Literal["local", "ray", "slurm", "submitit-local"]
Finished: TypeAlias = Generator[Path, None, None]
Executor: TypeAlias = Callable[[Sequence[Path]], Finished]

POLL = 0.5  # seconds between looks at jobs
DAY = 24 * 60  # minutes that a job asks for, unless it is told otherwise


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
        check_accelerator(config.accelerator)
        shares = gpu_shares(jobs, devices, _visible_gpus(config))
        return _run_here if jobs == 1 else partial(_run_in_processes, shares)
    package, extra = ("ray", "ray") if name == "ray" else ("submitit", "slurm")
    if importlib.util.find_spec(package) is None:
        raise UserError(f'--executor {name} needs {package}: pip install "didicm[{extra}]"')
    if name == "ray":
        return partial(_run_on_ray, jobs, devices, config, options)
    return _submitit_executor(name, jobs, devices, config, options, logs, console)


def _run_here(folders: Sequence[Path]) -> Finished:
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
    found = 0 if config.accelerator == "cpu" else torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:found] if named else [str(i) for i in range(found)]


def _run_in_processes(shares: Sequence[str | None], folders: Sequence[Path]) -> Finished:
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
                    workers[ready].join()
                    code = workers[ready].exitcode or 0
                    killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
                    how = killed or f"ended with exit code {code}"
                    remedy = "if memory was short, run the same command again with fewer --jobs"
                    raise UserError(f"{read_run(folder)}: its process {how}; {remedy}") from None
                if error is not None:
                    raise UserError(error)
                idle.append(ready)
                yield folder
    finally:
        for worker in workers.values():
            worker.terminate()  # trainings take this as a wish to save and stop
        for worker in workers.values():
            worker.join()


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


# Ray


def _run_on_ray(
    jobs: int, devices: int, config: RunConfig, options: Mapping[str, Any], folders: Sequence[Path]
) -> Finished:
    """One task per run, on the cluster that RAY_ADDRESS names, or on this machine."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ray_session("--executor ray") as ray:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler would not let trainings be saved
        nodes = [node["Resources"] for node in ray.nodes()]
        asked: dict[str, Any] = {"num_cpus": devices, "num_gpus": 0, "max_retries": 0}
        if config.accelerator != "cpu" and any(node.get("GPU", 0) for node in nodes):
            asked |= {"num_cpus": devices * max(1, config.workers), "num_gpus": devices}
        asked["num_cpus"] = min(asked["num_cpus"], max(node.get("CPU", 1) for node in nodes))
        try:
            task = ray.remote(_execute_in).options(**{**asked, **options})
        except (TypeError, ValueError) as error:
            raise _unusable("ray", error) from error
        waiting, running = list(folders), dict[Any, Path]()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    folder = waiting.pop(0)
                    running[task.remote(Path.cwd(), folder.absolute())] = folder
                (done,), _ = ray.wait(list(running), num_returns=1)
                folder = running.pop(done)
                try:
                    ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise UserError(str(error.cause)) if isinstance(error.cause, UserError) else error from error
                except ray.exceptions.RayError as error:
                    raise UserError(
                        f"{read_run(folder)}: its task failed ({reason(error)}): run it again"
                    ) from error
                yield folder
        finally:
            for reference in running:
                ray.cancel(reference)  # as Ctrl-C: the training is saved
            if running:
                ray.wait(list(running), num_returns=len(running))


def _execute_in(directory: Path, folder: Path) -> None:
    """Carry out a run where the command was given: its data may be named relative to that."""
    os.chdir(directory)
    execute(folder)


# SLURM


class Job:
    """What a job of the cluster does; when it is pre-empted or out of time, submitit queues it again."""

    def __call__(self, folder: Path) -> None:
        execute(folder)
        print(f"done: {folder.name}", flush=True)

    def checkpoint(self, folder: Path) -> Any:
        """Start over: the training goes on from its last saved state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


def _submitit_executor(
    name: str, jobs: int, devices: int, config: RunConfig, options: Mapping[str, Any], logs: Path, console: Console
) -> Executor:
    """An executor on SLURM, or with submitit's local jobs; wrong options are told here."""
    import submitit

    if name != "slurm" and jobs > 1 and _visible_gpus(config):  # each of submitit's local jobs gets the first ones
        raise UserError(f"--executor {name} gives all jobs the same GPUs: give --jobs 1, or --executor local")
    asked = {"name": "didicm", "timeout_min": DAY, "slurm_array_parallelism": jobs, "cpus_per_task": devices}
    if config.accelerator != "cpu":
        asked |= {"gpus_per_node": devices, "cpus_per_task": devices * max(1, config.workers)}
    try:
        executor = submitit.AutoExecutor(logs.absolute(), cluster="slurm" if name == "slurm" else "local")
        executor.update_parameters(**{**asked, **options})
    except Exception as error:  # submitit's own, and whatever it lets through of the cluster's
        raise _unusable(name, error) from error
    # SLURM limits an array by itself; local jobs know no limit, so they are submitted as others end.
    return partial(_run_through_submitit, executor, None if name == "slurm" else jobs, console)


def _run_through_submitit(
    executor: Any, room_for: int | None, console: Console, folders: Sequence[Path]
) -> Finished:
    """One array job; its tasks go on when this process ends, and what they do then is not submitted again."""
    waiting, running = list(folders), dict[Path, Any]()
    while waiting or running:
        room = len(waiting) if room_for is None else room_for - len(running)
        if free := [folder for folder in waiting if not is_running(folder)][:room]:
            try:
                submitted = executor.map_array(Job(), [folder.absolute() for folder in free])
            except Exception as error:  # as above
                raise _unusable(executor.cluster, error) from error
            waiting = [folder for folder in waiting if folder not in free]
            running |= dict(zip(free, submitted, strict=True))
            numbers = ", ".join(job.job_id for job in submitted)
            submission = f"submitted {count(len(free), 'job')}, which go on if this command stops: {numbers}"
            console.print(f"{submission}; logs: {executor.folder}")
        for folder in [*waiting, *running]:
            job = running.get(folder)
            ended = job is not None and job.done()  # before the look at the result, which it may just have written
            if (folder / RESULT).exists():
                running.pop(folder, None)
                waiting = [other for other in waiting if other != folder]
                yield folder
            elif job is not None and ended:
                # What the job's error says; submitit lists the logs after the traceback.
                trace = str(job.exception() or "it left no result").partition("\nYou can check full logs")[0]
                why = trace.strip("-\n ").splitlines()[-1].removeprefix(f"{UserError.__module__}.UserError: ")
                raise UserError(f"job {job.job_id} failed ({why}): see {job.paths.stderr}")
        time.sleep(POLL)


def is_running(folder: Path) -> bool:
    """Whether a job that an earlier command submitted is at this run."""
    try:
        with held(Path(read_run(folder).config.out)):
            return False
    except HeldError:
        return True


def _unusable(name: str, error: Exception) -> UserError:
    return UserError(f"--executor {name} does not work with these options ({reason(error)}): see --cluster")

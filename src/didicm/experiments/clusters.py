"""Runs on other machines: as tasks of Ray, or as an array job of SLURM through submitit."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from didicm.errors import UserError, reason
from didicm.experiments.execute import RESULT, execute, read_run
from didicm.inference.on_ray import ray_session
from didicm.processes import HeldError, held
from didicm.settings import RunConfig
from didicm.text import count

POLL = 0.5  # seconds between looks at jobs
DAY = 24 * 60  # minutes that a job asks for, unless it is told otherwise


def run_on_ray(
    jobs: int, devices: int, config: RunConfig, options: Mapping[str, Any], folders: Sequence[Path]
) -> Generator[Path, None, None]:
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


class Job:
    """What a job of the cluster does; when it is pre-empted or out of time, submitit queues it again."""

    def __call__(self, folder: Path) -> None:
        execute(folder)
        print(f"done: {folder.name}", flush=True)

    def checkpoint(self, folder: Path) -> Any:
        """Start over: the training goes on from its last saved state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


def submitit_executor(
    name: str, jobs: int, devices: int, config: RunConfig, options: Mapping[str, Any], logs: Path, console: Console
) -> Callable[[Sequence[Path]], Generator[Path, None, None]]:
    """An executor on SLURM, or with submitit's local jobs; wrong options are told here."""
    import submitit

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
) -> Generator[Path, None, None]:
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
                why = _last_words(job.exception())
                raise UserError(f"job {job.job_id} failed ({why}): see {job.paths.stderr}")
        time.sleep(POLL)


def is_running(folder: Path) -> bool:
    """Whether a job that an earlier command submitted is at this run."""
    try:
        with held(Path(read_run(folder).config.out)):
            return False
    except HeldError:
        return True


def _last_words(error: Exception | None) -> str:
    """What a job's error says; submitit lists the logs after the traceback."""
    trace = str(error or "it left no result").partition("\nYou can check full logs")[0].strip("-\n ")
    return trace.splitlines()[-1].removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")


def _unusable(name: str, error: Exception) -> UserError:
    return UserError(f"--executor {name} does not work with these options ({reason(error)}): see --cluster")

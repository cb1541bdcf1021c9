"""Spread a grid over the machines of a cluster with submitit: every job works off what nobody else has claimed."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments.cells import Cell
from didicm.experiments.results import Results
from didicm.experiments.work import News, work_off
from didicm.settings import TrainConfig

JOBS = "jobs"  # folder of what the jobs print
DAY = 24 * 60


class Job:
    """What a job of the cluster does; when it is pre-empted or out of time, submitit queues it again."""

    def __init__(self, base: TrainConfig, cells: dict[str, Cell], folder: str, trainings: str) -> None:
        self.base, self.cells, self.folder, self.trainings = base, cells, folder, trainings

    def __call__(self) -> None:
        """Work off the grid, and say in the job's log what was done."""
        print(f"{len(self.cells)} trainings, on {torch.get_num_threads()} threads", flush=True)
        # Not to hold a machine for what others run: should one of them die, the same command submits it again.
        work_off(self.base, self.cells, Results(self.folder, self.trainings), self._tell, wait=False)

    def checkpoint(self) -> Any:
        """Start over: what is done is skipped, and a training goes on from its last saved state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _tell(self, key: str, news: News) -> None:
        if isinstance(news, dict):
            print(f"done: {self.cells[key]}", flush=True)


def submit(
    cluster: str,
    jobs: int,
    options: Mapping[str, Any],
    base: TrainConfig,
    cells: dict[str, Cell],
    results: Results,
    console: Console,
) -> Callable[[], bool]:
    """Submit so many jobs; returns what tells whether any of them is queued or running."""
    if importlib.util.find_spec("submitit") is None:
        raise UserError('--executor needs submitit: pip install "didicm[slurm]"')
    import submitit

    logs = results.folder.absolute() / JOBS
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(**{"name": "didicm", "timeout_min": DAY, **_devices(base), **options})
        job = Job(base, cells, str(results.folder.absolute()), str(results.trainings.absolute()))
        with executor.batch():
            submitted = [executor.submit(job) for _ in range(jobs)]
    except Exception as error:  # submitit's own, and whatever it lets through of the cluster's
        reason = " ".join(str(error).split())
        raise UserError(f"--executor {cluster} cannot be used so ({reason}): see --cluster") from error
    numbers = ", ".join(job.job_id for job in submitted)
    console.print(f"submitted {jobs} jobs: {numbers}; they go on if you stop this, and print to {logs}")

    def running() -> bool:
        if any(not job.done() for job in submitted):
            return True
        for job in submitted:
            error = job.exception()
            if error is not None and not cells.keys() <= results.read().keys():
                last = str(error).strip().splitlines()[-1]
                raise UserError(f"job {job.job_id} failed ({last}): see {job.paths.stderr}")
        return False

    return running


def _devices(base: TrainConfig) -> dict[str, Any]:
    devices = 1 if base.run.devices == "auto" else int(base.run.devices)
    if base.run.accelerator == "cpu":
        return {"cpus_per_task": devices}
    return {"gpus_per_node": devices, "cpus_per_task": devices * max(1, base.run.workers)}

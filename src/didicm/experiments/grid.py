"""Run a grid of cells: resumable cell by cell, with any number of processes, here or on a cluster, at once."""

import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments.cells import Cell
from didicm.experiments.cluster import submit
from didicm.experiments.progress import GridProgress
from didicm.experiments.results import Results
from didicm.experiments.train_cell import prepare
from didicm.experiments.work import POLL, News, work_off
from didicm.settings import TrainConfig


def run_grid(
    base: TrainConfig,
    cells: Sequence[Cell],
    out: str | Path,
    *,
    trainings: str | Path | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    cluster_options: Mapping[str, Any] | None = None,
    console: Console | None = None,
    check: bool = True,
) -> list[dict[str, Any]]:
    """Run the cells that are not done yet; returns the lines of the results, in the order of the cells.

    Args:
        base: settings that the cells override.
        cells: what to run.
        out: the folder of results and posteriors.
        trainings: the folder of models, if several grids share them.
        jobs: processes to share the work; on this machine the cores are split among them.
        cluster: `slurm` to submit the jobs to a cluster, or `local` to let submitit start them here.
        cluster_options: what to ask of the cluster for each job, by submitit's names.
        console: where to show progress.
        check: build everything once before anything is trained.
    """
    results, by_key = Results(out, trainings), index_cells(base, cells)
    done = results.read()
    left = [key for key in by_key if key not in done]
    if left:
        if check:
            check_cells(base, [by_key[key] for key in left])
        console = console or Console(file=sys.stdout, soft_wrap=True)
        names = {key: str(cell) for key, cell in by_key.items()}
        weights = {key: _work(cell, base) for key, cell in by_key.items()}
        progress = GridProgress(console, names, weights, set(done))
        jobs = min(jobs, len(left))
        try:
            if cluster is not None:
                running = submit(cluster, jobs, cluster_options or {}, base, by_key, results, console)
                _watch(results, by_key, progress, running)
            elif jobs > 1:
                _run_in_processes(base, by_key, results, jobs, progress)
            else:
                work_off(base, by_key, results, lambda key, news: _show(progress, key, news))
        finally:
            progress.close()
        done = results.read()
    if not by_key.keys() <= done.keys():
        raise UserError(f"{len(by_key.keys() - done.keys())} trainings are not done: run the same command again")
    return [done[key] for key in by_key]


def check_cells(base: TrainConfig, cells: Sequence[Cell]) -> None:
    """Build every method and setting once: a mistake shows now and not after hours."""
    for cell in {(cell.method, cell.setting): cell for cell in cells}.values():
        try:
            prepare(cell.config(base), cell.held_out)
        except UserError as error:
            raise UserError(f"{cell.setting}: {error}") from error


def index_cells(base: TrainConfig, cells: Sequence[Cell]) -> dict[str, Cell]:
    """Cells by their key; two contestants that would be the same training are a mistake."""
    by_key: dict[str, Cell] = {}
    for cell in cells:
        same = by_key.setdefault(cell.key(base), cell)
        if same.method != cell.method:
            raise UserError(f"{same.method} and {cell.method} have the same settings: leave one of them out")
    return by_key


def _show(progress: GridProgress, key: str, news: News) -> None:
    if isinstance(news, float):
        progress.update(key, news)
    else:
        progress.finish(key, news)


def _watch(
    results: Results, cells: Mapping[str, Cell], progress: GridProgress, running: Callable[[], bool]
) -> None:
    """Show how far other processes are, until all is done or none of them runs."""
    known = set(results.read())
    while True:
        last = not running()
        done = results.read()
        for key in done.keys() & cells.keys() - known:
            known.add(key)
            progress.finish(key, done[key])
        for key, share in results.shares().items():
            if key in cells and key not in known:
                progress.update(key, share)
        if last or cells.keys() <= done.keys():
            return
        time.sleep(POLL)


def _run_in_processes(
    base: TrainConfig, cells: dict[str, Cell], results: Results, jobs: int, progress: GridProgress
) -> None:
    """Let several processes work off the grid; this one only shows how far they are."""
    context = multiprocessing.get_context("spawn")  # a forked PyTorch can hang
    trouble = context.Queue()
    threads = max(1, torch.get_num_threads() // jobs)
    arguments = (base, cells, results.folder, results.trainings, trouble, threads, os.getpid())
    workers = [context.Process(target=_work_in_process, args=arguments, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()

    def running() -> bool:
        try:
            raise UserError(trouble.get_nowait())
        except queue.Empty:
            return any(worker.is_alive() for worker in workers)

    try:
        _watch(results, cells, progress, running)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()  # trainings take this as a wish to save and stop
        for worker in workers:
            worker.join()
    if not cells.keys() <= results.read().keys():
        running()
        raise UserError("a process of the grid died, perhaps for lack of memory: run it again, with fewer --jobs")


def _work_in_process(
    base: TrainConfig, cells: dict[str, Cell], out: Path, trainings: Path, trouble: Any, threads: int, parent: int
) -> None:
    torch.set_num_threads(threads)

    def tell(key: str, news: News) -> None:
        if os.getppid() != parent:  # it was killed, so nobody would ever stop us
            os._exit(1)

    try:
        work_off(base, cells, Results(out, trainings), tell)
    except UserError as error:
        trouble.put(str(error))
    except KeyboardInterrupt:
        pass


def _work(cell: Cell, base: TrainConfig) -> float:
    """Rough work of a cell: images seen times what an image costs."""
    config = cell.config(base)
    size = config.image.size or config.image.limit
    draws = config.draws_per_image if config.method == "diffusion" else 1
    return config.epochs * config.fraction * (size**2 + 200) * (1 + draws)

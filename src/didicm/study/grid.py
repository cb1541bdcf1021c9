"""Run a grid of cells: resumable cell by cell, with any number of processes, here or elsewhere, at once."""

import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from didicm.errors import UserError
from didicm.study.cells import Cell
from didicm.study.measure import forget_training, prepare, run_cell
from didicm.study.progress import GridProgress
from didicm.study.results import Results
from didicm.training.config import TrainConfig

POLL = 0.5  # seconds between looks at what other processes do

Event = tuple[str, Any]  # a cell's key, and its share, its record, or what went wrong


def run_grid(
    base: TrainConfig, cells: Sequence[Cell], out: str | Path, *, jobs: int = 1, console: Console | None = None
) -> list[dict[str, Any]]:
    """Run the cells that are not done yet; returns the lines of the results, in the order of the cells.

    Args:
        base: settings that the cells override.
        cells: what to run.
        out: the folder of results, posteriors and models.
        jobs: processes to share the work; the cores are split among them.
        console: where to show progress.
    """
    results, by_key = Results(out), {cell.key(base): cell for cell in cells}
    done = results.read()
    left = [key for key in by_key if key not in done]
    if left:
        check_cells(base, [by_key[key] for key in left])
        console = console or Console(file=sys.stdout, soft_wrap=True)
        names = {key: str(cell) for key, cell in by_key.items()}
        weights = {key: _work(cell, base) for key, cell in by_key.items()}
        progress = GridProgress(console, names, weights, set(done))
        try:
            if jobs > 1 and len(left) > 1:
                _run_in_processes(base, by_key, Path(out), min(jobs, len(left)), progress)
            else:
                _work_off(base, by_key, Path(out), lambda event: _show(event, progress))
        finally:
            progress.close()
        done = results.read()
    return [done[key] for key in by_key]


def check_cells(base: TrainConfig, cells: Sequence[Cell]) -> None:
    """Build every method and setting once: a mistake shows now and not after hours."""
    for cell in {(cell.method, cell.setting): cell for cell in cells}.values():
        try:
            prepare(cell.config(base))
        except UserError as error:
            raise UserError(f"{cell.setting}: {error}") from error


def _work_off(base: TrainConfig, cells: dict[str, Cell], out: Path, tell: Callable[[Event], None]) -> None:
    """Run cells until all are done, by us or by others; wait for the last ones that others run."""
    results = Results(out)
    others: set[str] = set(results.read())
    while True:
        key = results.claim(cells)
        if key is None:
            done = results.read()
            for finished in done.keys() & cells.keys() - others:
                others.add(finished)
                tell((finished, None))
            if cells.keys() <= done.keys():
                return
            time.sleep(POLL)  # a claim that its owner dies with becomes ours
            continue
        others.add(key)
        try:
            record = run_cell(cells[key], base, out, lambda share, key=key: tell((key, share)))
            results.append(record)
        except UserError as error:
            raise UserError(f"{cells[key]}: {error}") from error
        finally:
            results.release(key)
        forget_training(cells[key], base, out)
        tell((key, record))


def _show(event: Event, progress: GridProgress) -> None:
    key, value = event
    if isinstance(value, float):
        progress.update(key, value)
    else:
        progress.finish(key, value)


def _run_in_processes(
    base: TrainConfig, cells: dict[str, Cell], out: Path, jobs: int, progress: GridProgress
) -> None:
    """Let several processes work off the grid; this one only shows how far they are."""
    context = multiprocessing.get_context("spawn")  # a forked PyTorch can hang
    events = context.Queue()
    threads = max(1, torch.get_num_threads() // jobs)
    arguments = (base, cells, out, events, threads, os.getpid())
    workers = [context.Process(target=_work_in_process, args=arguments, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    trouble: str | None = None
    try:
        while any(worker.is_alive() for worker in workers) or not events.empty():
            try:
                key, value = events.get(timeout=POLL)
            except queue.Empty:
                continue
            if key == "trouble":
                trouble = trouble or value
                _stop(workers)
            elif value is not None:  # else another of our workers has told it
                _show((key, value), progress)
    finally:
        _stop(workers)
    if trouble is not None:
        raise UserError(trouble)
    if any(worker.exitcode for worker in workers) and not cells.keys() <= Results(out).read().keys():
        raise UserError("a process of the grid died, perhaps for lack of memory: run it again, with fewer --jobs")


def _stop(workers: list[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()  # trainings take this as a wish to save and stop
    for worker in workers:
        worker.join()


def _work_in_process(
    base: TrainConfig, cells: dict[str, Cell], out: Path, events: Any, threads: int, parent: int
) -> None:
    torch.set_num_threads(threads)

    def tell(event: Event) -> None:
        if os.getppid() != parent:  # it was killed, so nobody would ever stop us
            os._exit(1)
        events.put(event)

    try:
        _work_off(base, cells, out, tell)
    except UserError as error:
        events.put(("trouble", str(error)))
    except KeyboardInterrupt:
        pass


def _work(cell: Cell, base: TrainConfig) -> float:
    """Rough work of a cell: images seen times what an image costs."""
    config = cell.config(base)
    size = config.image.size or config.image.limit
    return config.epochs * config.fraction * (size**2 + 200) * config.draws_per_image

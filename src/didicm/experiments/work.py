"""What every process does that works on a grid: claim a cell, run it, note the result."""

import time
from collections.abc import Callable
from typing import Any

from didicm.errors import UserError
from didicm.experiments.cells import Cell
from didicm.experiments.measure import run_cell
from didicm.experiments.results import Results
from didicm.settings import TrainConfig

POLL = 0.5  # seconds between looks at what other processes do

News = float | dict[str, Any] | None  # of a cell: its share, or its record unless another process ran it
Tell = Callable[[str, News], None]


def work_off(base: TrainConfig, cells: dict[str, Cell], results: Results, tell: Tell, wait: bool = True) -> None:
    """Run cells until all are done, by us or by others; `wait` for the last ones that others run."""
    known = set(results.read())
    while True:
        key = results.claim(cells)
        if key is None:
            done = results.read()
            for finished in done.keys() & cells.keys() - known:
                known.add(finished)
                tell(finished, None)
            if cells.keys() <= done.keys() or not wait:
                return
            time.sleep(POLL)  # a claim that its owner dies with becomes ours
            continue
        known.add(key)

        def on_step(share: float, key: str = key) -> None:
            results.report(key, share)
            tell(key, share)

        try:
            record = run_cell(cells[key], base, results.folder, results.trainings, on_step)
            results.append(record)
        except UserError as error:
            raise UserError(f"{cells[key]}: {error}") from error
        finally:
            results.release(key)
        tell(key, record)

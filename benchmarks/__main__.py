"""Run the benchmarks: `python -m benchmarks [suite ...]`; exits with 1 when a bound is broken."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Result

SUITES = ["diffusion", "networks", "exported", "loading", "training", "bulk"]
ALONE = ["load"]  # wants the machine for itself: only when named
FOLDER = Path(__file__).parent / "results"


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SUITES + ALONE]
    if unknown:
        print(f"unknown suite {unknown[0]!r}: choose from {', '.join(SUITES + ALONE)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    held = True
    for name in names or SUITES:
        print(f"==> {name}", flush=True)
        results = importlib.import_module(f"benchmarks.{name}").run()
        show(name, results)
        rows = [{**asdict(result), "holds": result.holds} for result in results]
        (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n")
        held = held and all(result.holds for result in results)
    print(f"stored in {FOLDER}")
    return 0 if held else 1


def show(name: str, results: list[Result]) -> None:
    table = Table("what", "measured", "bound", "", title=name, title_justify="left")
    for result in results:
        bound = ""
        if result.bound is not None:
            bound = f"{'at least' if result.at_least else 'at most'} {result.bound:,g} {result.unit}"
        mark = "" if result.bound is None else "ok" if result.holds else "BROKEN"
        value = f"{result.value:,.0f}" if result.value >= 1000 else f"{result.value:.3g}"
        table.add_row(result.name, f"{value} {result.unit}", bound, mark)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run the benchmarks: `python -m benchmarks [--write] [suite ...]`; exits with 1 when a bound is broken.

`python -m benchmarks --check` measures nothing: it exits with 1 when docs/speed.md is not what was stored.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import page
from benchmarks.measure import Result

ALONE = ["load"]  # wants the machine for itself: only when named
SUITES = [name for name in page.SECTIONS if name not in ALONE]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES + ALONE)}")
    parser.add_argument("--write", action="store_true", help="put what is measured into docs/speed.md")
    parser.add_argument("--check", action="store_true", help="only compare docs/speed.md with what was stored")
    args = parser.parse_args()
    if args.check:
        return int(page.PAGE.read_text(encoding="utf-8") != page.page(page.read()))
    if unknown := [name for name in args.suites if name not in SUITES + ALONE]:
        parser.error(f"unknown suite {unknown[0]!r}: choose from {', '.join(SUITES + ALONE)}")
    torch.set_num_threads(1)
    held = True
    for name in args.suites or SUITES:
        print(f"==> {name}", flush=True)
        results = importlib.import_module(f"benchmarks.{name}").run()
        show(name, results)
        if args.write:
            page.write({name: results})
        held = held and all(result.holds for result in results)
    return 0 if held else 1


def show(name: str, results: Sequence[Result]) -> None:
    table = Table("what", "measured", "bound", "", title=name, title_justify="left")
    for result in results:
        mark = "" if result.bound is None else "ok" if result.holds else "BROKEN"
        table.add_row(result.name, result.value_text, result.bound_text, mark)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())

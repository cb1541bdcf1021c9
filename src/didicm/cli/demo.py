"""`didicm demo`: a standard classifier against DiDiCM on images that tell less and less, in under five minutes."""

import argparse
import os
import shlex
from pathlib import Path

from rich.console import Console

from didicm.cli.compare import conclude, run, show
from didicm.experiments import METHODS, Cell, Setting, write_report
from didicm.settings import load_recipe, override

# Chosen by measurement on 2 cores. The epochs are many, as in the paper: few images are seen over and over.
LEVELS = {Setting(14, 0.25): 100, Setting(10, 0.125): 200, Setting(7, 0.05): 500}  # and their epochs
CONTESTANTS = {name: METHODS[name] for name in ("standard", "standard-smooth", "didicm-score")}
SETTINGS = {"data": "fashion-mini", "batch_size": 50, "image.channels": 1}
NOTE = (
    "Where there are fewer images there are more epochs. In training, DiDiCM draws several noisy labels for every "
    "image, so its training takes longer: see Cost."
)
NEXT = """
Next, on your own images (a folder with one subfolder a class):
  didicm doctor DIR
  didicm train --recipe small --data DIR --out runs/mine
  didicm compare --data DIR --out runs/compare"""


def main(argv: list[str]) -> int:
    """Run the comparison, or with --solvers the demonstration of the solvers without training."""
    if "--solvers" in argv:
        from didicm.report.solvers import main as solvers

        solvers([argument for argument in argv if argument != "--solvers"])
        return 0
    parser = argparse.ArgumentParser(prog="didicm demo", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for results and report (default demo)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default 3)")
    parser.add_argument(
        "--solvers", action="store_true", help="instead: how each solver recovers a known posterior"
    )
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")

    console = Console(soft_wrap=True)
    base = override(load_recipe("small"), SETTINGS)
    cells = [
        Cell(method, setting, seed, {**overrides, "epochs": epochs})
        for seed in range(arguments.seeds)
        for setting, epochs in LEVELS.items()
        for method, overrides in CONTESTANTS.items()
    ]
    console.print(
        f"Small pictures of clothes, in {len(LEVELS)} levels of uncertainty: fewer pixels, fewer images to learn "
        f"from.\n{len(cells)} trainings, on {os.cpu_count()} cores; Ctrl-C stops, the same command goes on.\n",
        highlight=False,
    )
    command = shlex.join(["didicm", "demo", "--out", str(arguments.out), "--seeds", str(arguments.seeds)])
    jobs = min(os.cpu_count() or 1, 4)
    plan = {"title": "DiDiCM against a standard classifier: the demo", "command": command, "note": NOTE}
    run(base, cells, arguments.out, plan, console, jobs=jobs)
    report = write_report(arguments.out)
    show(report.tables[0], console)
    conclude(report, arguments.out, console)
    console.print(NEXT, highlight=False)
    return 0

"""`didicm demo`: a standard classifier against DiDiCM on less and less informative images, in minutes."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from didicm.cli.compare import show_report
from didicm.cli.flags import parse
from didicm.experiments.run import run_study
from didicm.experiments.spec import Condition
from didicm.experiments.study_file import compare_study
from didicm.report.html import write_report
from didicm.text import SafeConsole, quoted
from didicm.values import Few

# Chosen by measurement on 2 cores. The epochs are many, as in the paper: few images are seen over and over.
LEVELS = {Condition(14, 0.25): 100, Condition(10, 0.125): 200, Condition(7, 0.05): 500}  # and their epochs
# Without masks, which over so many epochs overfit as a standard classifier does.
METHODS = ("standard", "standard-smooth", "didicm-score")
SETTINGS = {"batch_size": 50, "image.channels": 1, "draws_per_image": 2}
NOTE = (
    "Where there are fewer images there are more epochs. In training, DiDiCM draws several noisy labels for every "
    "image, so its training takes longer: see Cost."
)
NEXT = """
Next, on your own images (a folder with one subfolder per class):
  didicm doctor DIR
  didicm train --recipe small --data DIR --out runs/mine
  didicm compare --data DIR --out runs/compare"""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `didicm demo`.

    Args:
        out: folder for results and report
        seeds: trainings per method and condition
        solvers: instead, show how each solver recovers a known posterior
    """

    out: Path = Path("demo")
    seeds: Few = 3
    solvers: bool = False


def main(argv: list[str]) -> int:
    """Run the comparison, or with --solvers the demonstration of the solvers without training."""
    if "--solvers" in argv:
        from didicm.cli.solvers import main as solvers

        solvers([argument for argument in argv if argument != "--solvers"])
        return 0
    text = "Compare a standard classifier with DiDiCM on less and less informative images, in under five minutes."
    options = parse(argv, DemoOptions, command="demo", description=text)
    console = SafeConsole(soft_wrap=True, highlight=False)
    study = replace(
        compare_study(methods=METHODS, seeds=options.seeds, settings=SETTINGS),
        title="DiDiCM against a standard classifier: the demo",
        conditions=tuple(LEVELS),
        by_fraction={condition.fraction: {"epochs": epochs} for condition, epochs in LEVELS.items()},
        note=NOTE,
    )
    trainings = len(LEVELS) * len(METHODS) * options.seeds
    console.print(
        f"Small images of clothes, at {len(LEVELS)} levels of uncertainty: fewer pixels, fewer training images.\n"
        f"{trainings} trainings, on {os.cpu_count()} cores; Ctrl-C stops; run the same command again to resume.\n"
    )
    command = f"didicm demo --out {quoted(options.out)} --seeds {options.seeds}"
    jobs = min(os.cpu_count() or 1, 4)
    run_study(study, options.out, data="fashion-mini", jobs=jobs, command=command, console=console)
    show_report(write_report(options.out), console, tables=1)
    console.print(NEXT)
    return 0

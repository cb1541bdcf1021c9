"""`didicm study`: the paper's studies and ours, from YAML files, with the published numbers beside ours."""

import argparse
import shlex
from collections import Counter
from pathlib import Path

from rich.console import Console

from didicm.cli.compare import add_common, common_settings, conclude, how_to_run, run, show
from didicm.errors import UserError
from didicm.experiments import Cell, write_report
from didicm.experiments.definition import Study, load_study, studies, to_plan
from didicm.experiments.grid import check_cells
from didicm.experiments.results import RESULTS
from didicm.settings import TrainConfig


def main(argv: list[str]) -> int:
    """Run what is left of the study, then print and write what it shows; without a name, list the studies."""
    arguments = make_parser().parse_args(argv)
    console = Console(soft_wrap=True)
    if arguments.name is None:
        for name in studies():
            console.print(f"{name:22}{load_study(name).question}", highlight=False, markup=False)
        return 0
    study = load_study(arguments.name)
    out = arguments.out / study.name
    if arguments.report_only:
        if not (out / RESULTS).is_file():
            raise UserError(f"{out} holds no {RESULTS}: run the study first")
    else:
        data = arguments.data or study.data
        if data is None:
            raise UserError(f"study {study.name} needs --data: say where the images are")
        settings = common_settings(arguments)
        base = study.base(data, settings)
        cells = study.cells(arguments.seeds or study.seeds, settings)
        if arguments.dry_run:
            describe(study, base, cells, out, console)
            return 0
        plan = {"title": study.title, "name": arguments.name, "command": "didicm study " + shlex.join(argv)}
        plan["study"] = to_plan(study)
        run(base, cells, out, plan, console, trainings=arguments.out, **how_to_run(arguments))
    report = write_report(out)
    for table in report.tables:
        show(table, console)
    conclude(report, out, console)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="didicm study",
        description="Run a study: the paper's main, selection, sizes and efficiency, or our solvers, schedules "
        "and objectives, on ImageNet as in the paper (-imagenet) or in minutes (-cpu). Run it again to resume. "
        "Studies in the same --out share the networks that they have in common.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", help="one of the studies, or a YAML file; without it they are listed")
    parser.add_argument("--data", help="where the images are (default: the study's, if it has any)")
    parser.add_argument(
        "--out", type=Path, default=Path("studies"), help="folder of studies and models (default studies)"
    )
    parser.add_argument("--seeds", type=int, help="trainings of each kind (default: the study's)")
    add_common(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and check it")
    return parser


def describe(study: Study, base: TrainConfig, cells: list[Cell], out: Path, console: Console) -> None:
    """What would be done."""
    check_cells(base, cells)
    console.print(f"{study.title}\n{study.question}\n", highlight=False, markup=False)
    seeds = len({cell.seed for cell in cells})
    counted = Counter((cell.method, cell.config(base).model, cell.config(base).epochs) for cell in cells)
    for (method, model, epochs), count in counted.items():
        settings = f"{count // seeds} setting{'s' if count > seeds else ''}"
        console.print(
            f"  {method}: {model}, {epochs} epochs, {settings} x {seeds} seeds", highlight=False, markup=False
        )
    names = ", ".join(reading.name for reading in cells[0].readings)
    console.print(f"\n{len(cells)} trainings; DiDiCM is read as: {names}", highlight=False, markup=False)
    console.print(f"results would be in {out}; nothing was written (--dry-run)", highlight=False, markup=False)

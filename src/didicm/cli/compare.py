"""`didicm compare`: is DiDiCM better than a standard classifier on these images, and at what cost?"""

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from didicm.data import Corruptions
from didicm.errors import UserError
from didicm.experiments import METHODS, Cell, Setting, make_cells, run_grid, write_report
from didicm.experiments.grid import check_cells, index_cells
from didicm.experiments.plan import conflicts, extend, make_plan, read_plan, write_plan
from didicm.experiments.results import RESULTS
from didicm.report.html import Report
from didicm.report.table import Table
from didicm.settings import TrainConfig, flatten, load_recipe, override, recipes

T = TypeVar("T")


def main(argv: list[str]) -> int:
    """Run what is left of the grid, then print and write what it shows."""
    arguments = make_parser().parse_args(argv)
    console = Console(soft_wrap=True)
    if arguments.report_only:
        if not (arguments.out / RESULTS).is_file():
            raise UserError(f"--out {arguments.out} holds no {RESULTS}: run the comparison first, with --data")
    else:
        if not arguments.data:
            raise UserError("no --data: say where the images are")
        base = load_base(arguments)
        methods = choose_methods(arguments.methods, arguments.recipe, base, own_settings(arguments))
        cells = make_cells(methods, settings_from(arguments), range(arguments.seeds))
        plan = {"title": "DiDiCM against a standard classifier", "command": "didicm compare " + shlex.join(argv)}
        run(base, cells, arguments.out, plan, console, **how_to_run(arguments))
    report = write_report(arguments.out)
    for table in report.tables:
        show(table, console)
    conclude(report, arguments.out, console)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="didicm compare",
        description="Train DiDiCM and standard classifiers on the same trunk, over a grid of uncertainty and "
        "seeds, and say which is better at what cost. Run it again on the same --out to resume or to add cells.",
        allow_abbrev=False,
    )
    parser.add_argument("--data", help="where the images are: a folder, hf://..., wds://..., timm://... or fashion-mini")
    parser.add_argument("--out", type=Path, required=True, help="folder of results, models and report.html")
    parser.add_argument("--recipe", default="small", help=f"settings of all trainings: {', '.join(recipes())}")
    parser.add_argument("--resolutions", help="pixels the networks see, such as 28,14,7 (default: the recipe's)")
    parser.add_argument("--fractions", default="1", help="of the training images, such as 1,0.5,0.25 (default 1)")
    parser.add_argument(
        "--corruptions", default="none", help="of all images, such as none,noise:3,blur:2+jpeg:4 (default none)"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default all)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default 3)")
    parser.add_argument("--epochs", type=int, help="of every training (default: the recipe's)")
    parser.add_argument("--steps", type=int, help="of DiDiCM's sampler (default: the recipe's, 8)")
    add_common(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """Flags that all grids share: settings, where and by how many the trainings are run, and --report-only."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting of didicm train, for all trainings",
    )
    parser.add_argument("--report-only", action="store_true", help="make tables, figures and report again")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes or cluster jobs to share the work (default 1)"
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="processors of each training, such as GPUs (default 1)"
    )
    parser.add_argument(
        "--executor",
        choices=["here", "slurm", "local"],
        default="here",
        help="where the jobs run: on this machine, or submitted to a SLURM cluster through submitit; local lets "
        "submitit start them on this machine, to try it out (default here)",
    )
    parser.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what each job asks of the cluster, by submitit's names, such as slurm_partition=gpu",
    )


def how_to_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same as arguments of `run_grid`."""
    cluster = None if arguments.executor == "here" else arguments.executor
    if arguments.cluster and cluster is None:
        raise UserError("--cluster is for --executor slurm")
    options = dict(_setting("--cluster", text) for text in arguments.cluster)
    return {"jobs": arguments.jobs, "cluster": cluster, "cluster_options": options}


def common_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of all trainings from --set and --devices."""
    for name in ("seeds", "jobs", "devices"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")
    return {**dict(_setting("--set", text) for text in arguments.set), "run.devices": arguments.devices}


def load_base(arguments: argparse.Namespace) -> TrainConfig:
    """Settings that all trainings share."""
    return override(load_recipe(arguments.recipe), {**own_settings(arguments), "data": arguments.data})


def own_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the user asked for, for all trainings."""
    short = {"epochs": arguments.epochs, "sampler.steps": arguments.steps}
    return {**common_settings(arguments), **{name: value for name, value in short.items() if value is not None}}


def choose_methods(
    names: str, recipe: str, base: TrainConfig, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The contestants; the standard ones follow the recipe's own file for them, where it has one."""
    chosen = _list("--methods", names, str)
    for name in chosen:
        if name not in METHODS:
            raise UserError(f"--methods has no {name!r}: choose from {', '.join(METHODS)}")
    if base.augment.label_smoothing and "standard" in chosen:
        chosen = [name for name in chosen if name != "standard-smooth"]  # the recipe smooths all of them
    ours, theirs = flatten(load_recipe(recipe)), flatten(load_recipe(recipe, "standard"))
    special = {name: value for name, value in theirs.items() if value != ours[name]}
    return {
        name: {**(special if name.startswith("standard") else {}), **settings, **METHODS[name]} for name in chosen
    }


def settings_from(arguments: argparse.Namespace) -> list[Setting]:
    """The grid of uncertainty."""
    sizes = _list("--resolutions", arguments.resolutions, int) if arguments.resolutions else [None]
    fractions = _list("--fractions", arguments.fractions, float)
    spoilt = [None if name == "none" else name for name in _list("--corruptions", arguments.corruptions, str)]
    for name in spoilt:
        if name is not None:
            Corruptions.parse(name)
    for value in fractions:
        if not 0 < value <= 1:
            raise UserError(f"--fractions must lie in (0, 1], got {value:g}")
    if any(size is not None and size < 1 for size in sizes):
        raise UserError(f"--resolutions must be at least 1, got {min(sizes)}")
    return [Setting(*values) for values in product(sizes, fractions, spoilt)]


def run(
    base: TrainConfig,
    cells: Sequence[Cell],
    out: Path,
    about: dict[str, Any],
    console: Console,
    **how: Any,
) -> None:
    """Note what was asked for, and run the grid; a folder keeps to one set of settings.

    Args:
        base: settings that the cells override.
        cells: what to run.
        out: the folder of results.
        about: what the report tells of the comparison: title, command, note, study.
        console: where to show progress.
        how: further arguments of `run_grid`.
    """
    plan, stored = make_plan(base, index_cells(base, cells), about), read_plan(out)
    done = (out / RESULTS).is_file() and (out / RESULTS).stat().st_size > 0
    if stored and done and (changed := conflicts(stored, plan)):
        raise UserError(
            f"{out} was started with other settings ({'; '.join(changed)}): give them again, or another --out"
        )
    if not stored and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is in use and holds no comparison: give another folder")
    if not done:  # a mistake shows before anything is written
        check_cells(base, cells)
    # A comparison may grow; a study is what its file says.
    write_plan(out, extend(stored, plan) if stored and done and "study" not in plan else plan)
    try:
        run_grid(base, cells, out, console=console, check=done, **how)
    except KeyboardInterrupt:
        console.print(f"stopped; what is done is in {out}: the same command goes on from there", markup=False)
        raise


def show(table: Table, console: Console) -> None:
    """Print a table as wide as the terminal; a file or a pipe has room for all of it."""
    wide = console if console.is_terminal else Console(width=160)
    wide.print()
    wide.print(table.to_rich(wide.width))


def conclude(report: Report, out: Path, console: Console) -> None:
    """Print the verdict and where things are."""
    console.print()
    for sentence in report.verdict:
        console.print(sentence, highlight=False, markup=False)
    places = f"\nreport: {os.path.abspath(report.path)}\nnumbers: {out / RESULTS}"
    console.print(places, highlight=False, markup=False)


def _setting(flag: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{flag} needs NAME=VALUE, as in --set batch_size=32, got {text!r}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"{flag} {name}: {value!r} cannot be read ({error})") from error


def _list(flag: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"{flag} needs values with commas between them, got {text!r}") from error
    if not values:
        raise UserError(f"{flag} is empty: give at least one value")
    return list(dict.fromkeys(values))

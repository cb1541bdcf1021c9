"""`didicm study`: the paper's studies and ours, from YAML files, with the published numbers beside ours."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.cli.compare import StudyOptions, show_report
from didicm.cli.flags import parse
from didicm.experiments.forecast import forecast
from didicm.experiments.run import plan_runs, run_study
from didicm.experiments.spec import Run, Study
from didicm.experiments.study_file import list_studies, load_study
from didicm.experiments.tune import trials_of
from didicm.report.html import write_report
from didicm.text import SafeConsole, quoted
from didicm.values import Few, Positive


@dataclass(frozen=True)
class NamedStudyOptions(StudyOptions):
    """Options of `didicm study`.

    Args:
        name: one of the studies, or a YAML file; without it they are listed
        data: where the images are; by default where the study says
        out: folder of studies and models
        seeds: trainings of each kind; by default as many as the study says
        dry_run: check everything, and say what would be trained and what that would take
        tflops: what one device sustains in training, for the hours of --dry-run
    """

    name: str = ""
    data: str | None = None
    out: Path = Path("studies")
    seeds: Few | None = None
    dry_run: bool = False
    tflops: Positive = 50.0


def main(argv: list[str]) -> int:
    """Run what is left of the study, then print and write what it shows; without a name, list the studies."""
    text = (
        f"Run a study from a YAML file, or one of these: {', '.join(list_studies())}. Those on ImageNet are as in "
        "the paper, those for the CPU take minutes to hours; without a name, the question of each is listed. "
        "Run it again to resume. Studies in the same --out share the networks that they have in common."
    )
    options = parse(argv, NamedStudyOptions, command="study", description=text, positional=["name"])
    console = SafeConsole(soft_wrap=True, highlight=False)
    if not options.name:
        for name in list_studies():
            console.print(f"{name:22}{load_study(name).question}", markup=False)
        return 0
    study = load_study(options.name)
    if options.tune is not None:
        study = replace(study, tune=options.tune)
    out = options.out / study.name
    asked: dict[str, Any] = {"data": options.data, "seeds": options.seeds, "settings": options.settings}
    if options.dry_run:
        runs, _ = plan_runs(study, **asked)
        _describe(study, runs, options.tflops, out, console)
        return 0
    if not options.report_only:
        asked |= {
            "trainings": options.out,
            "command": "didicm study " + " ".join(map(quoted, argv)),
            **options.execution,
        }
        run_study(study, out, console=console, **asked)
    show_report(write_report(out), console)
    return 0


def _describe(study: Study, runs: Mapping[str, Run], tflops: float, out: Path, console: Console) -> None:
    """What would be done, and what it would take."""
    trials = trials_of(runs, study.tune)
    costs = forecast({**runs, **trials})
    kinds = {(str(run.method), run.condition): (run, costs[key]) for key, run in runs.items()}
    seeds = len({run.seed for run in runs.values()})
    columns = ("method", "condition", "epochs", "M parameters", "M multiply-adds", "hours", "memory, MB")
    table = Table(*columns, box=None, pad_edge=False)
    for run, need in kinds.values():
        counts = f"{need.parameters / 1e6:.2f}", f"{need.multiply_adds / 1e6:,.1f}"
        takes = _hours(need.hours(tflops)), f"{need.memory / 1e6:,.0f}"
        table.add_row(str(run.method), str(run.condition), str(run.config.epochs), *counts, *takes)
    console.print(f"{study.title}\n{study.question}\n", markup=False)
    (console if console.is_terminal else SafeConsole(width=160)).print(table)
    names = ", ".join(spec.name for spec in study.samplers) or "as in its recipe"
    first = next(iter(runs.values())).config.run
    hours, disk = (
        sum(values) for values in zip(*((c.hours(tflops), c.disk) for c in costs.values()), strict=True)
    )
    search = f"{len(trials)} trials of the search, {study.tune} of each kind, then " if trials else ""
    length = ", if the search keeps these epochs" if trials else ""
    console.print(
        f"\n{search}{len(runs)} trainings: {len(kinds)} kinds, {seeds} of each; DiDiCM is sampled with: {names}\n"
        "multiply-adds: of one image's posterior, by the first sampler; hours: of one training and its measuring "
        f"on one device at {tflops:g} TFLOP/s (--tflops); memory: of a training, per device ({first.precision})\n"
        f"in all {_hours(hours)} device-hours and {disk / 1e9:,.2f} GB on disk{length}\n"
        f"results would be in {out}; nothing was written (--dry-run)",
        markup=False,
    )


def _hours(value: float) -> str:
    return f"{value:,.1f}" if value >= 0.1 else f"{value:.2g}"

"""`didicm study`: the paper's studies and ours, from YAML files, with the published numbers beside ours."""

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from didicm.cli.compare import StudyOptions, show_report
from didicm.cli.flags import parse
from didicm.experiments.run import check_runs, plan_runs, run_study
from didicm.experiments.spec import Run, Study
from didicm.experiments.study_file import list_studies, load_study
from didicm.report.html import write_report
from didicm.values import Natural


@dataclass(frozen=True)
class NamedStudyOptions(StudyOptions):
    """Options of `didicm study`.

    Args:
        name: one of the studies, or a YAML file; without it they are listed
        data: where the images are; by default where the study says
        out: folder of studies and models
        seeds: trainings of each kind; by default as many as the study says
        dry_run: say what would be trained, and check it
    """

    name: str = ""
    data: str | None = None
    out: Path = Path("studies")
    seeds: Natural | None = None
    dry_run: bool = False


def main(argv: list[str]) -> int:
    """Run what is left of the study, then print and write what it shows; without a name, list the studies."""
    text = (
        "Run a study: the paper's main, selection, sizes and efficiency, or our solvers, schedules and "
        "objectives, on ImageNet as in the paper (-imagenet) or in minutes (-cpu). Run it again to resume. "
        "Studies in the same --out share the networks that they have in common."
    )
    options = parse(argv, NamedStudyOptions, command="study", description=text, positional=["name"])
    console = Console(soft_wrap=True, highlight=False)
    if not options.name:
        for name in list_studies():
            console.print(f"{name:22}{load_study(name).question}", markup=False)
        return 0
    study = load_study(options.name)
    out = options.out / study.name
    asked: dict[str, Any] = {"data": options.data, "seeds": options.seeds, "settings": options.settings}
    if options.dry_run:
        runs, _ = plan_runs(study, **asked)
        check_runs(runs)
        _describe(study, runs, out, console)
        return 0
    if not options.report_only:
        asked |= {"trainings": options.out, "command": "didicm study " + shlex.join(argv), **options.execution}
        run_study(study, out, console=console, **asked)
    show_report(write_report(out), console)
    return 0


def _describe(study: Study, runs: Mapping[str, Run], out: Path, console: Console) -> None:
    """What would be done."""
    console.print(f"{study.title}\n{study.question}\n", markup=False)
    seeds = len({run.seed for run in runs.values()})
    counted = Counter((str(run.method), run.config.model, run.config.epochs) for run in runs.values())
    for (method, model, epochs), count in counted.items():
        conditions = f"{count // seeds} condition{'s' * (count > seeds)}"
        console.print(f"  {method}: {model}, {epochs} epochs, {conditions} x {seeds} seeds", markup=False)
    names = ", ".join(spec.name for spec in study.samplers) or "as in its recipe"
    console.print(f"\n{len(runs)} trainings; DiDiCM is sampled with: {names}", markup=False)
    console.print(f"results would be in {out}; nothing was written (--dry-run)", markup=False)

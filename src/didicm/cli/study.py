"""`didicm study`: the paper's studies and ours, from YAML files, with the published numbers beside ours."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from didicm.cli.compare import StudyOptions, show_plan, show_report
from didicm.cli.flags import parse
from didicm.experiments.run import run_study
from didicm.experiments.study_file import list_studies, load_study
from didicm.report.html import write_report
from didicm.text import SafeConsole, quoted
from didicm.values import Few


@dataclass(frozen=True)
class NamedStudyOptions(StudyOptions):
    """Run a study, from a YAML file or one of those that ship.

    Args:
        name: one of the studies, or a YAML file; without it they are listed
        data: where the images are; by default where the study says
        out: folder for studies and models
        seeds: trainings per method and condition; by default as many as the study says
    """

    name: str = ""
    data: str | None = None
    out: Path = Path("studies")
    seeds: Few | None = None


def main(argv: list[str]) -> int:
    """Run what is left of the study, then print and write what it shows; without a name, list the studies."""
    text = (
        f"Run a study from a YAML file, or one of these: {', '.join(list_studies())}. Those on ImageNet are as in "
        "the paper, those for the CPU take minutes to hours; without a name, the question of each is listed. "
        "Run it again to resume. Studies in the same --out share the networks that they have in common."
    )
    options = parse(argv, NamedStudyOptions, command="study", description=text, positional=["name"])
    console = SafeConsole(soft_wrap=True)
    if not options.name:
        for name in list_studies():
            console.print(f"{name:24}{load_study(name).question}")
        return 0
    study = load_study(options.name)
    search: dict[str, Any] = {"tune": options.tune, "holdouts": 1 if options.tune == 0 else options.holdouts}
    study = replace(study, **{name: value for name, value in search.items() if value is not None})
    out = options.out / study.name
    asked: dict[str, Any] = {"data": options.data, "seeds": options.seeds, "settings": options.settings}
    if options.dry_run:
        show_plan(study, out, options, console, **asked)
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

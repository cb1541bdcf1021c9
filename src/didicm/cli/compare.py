"""`didicm compare`: is DiDiCM better than a standard classifier on these images, and at what cost?"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from didicm.cli.flags import parse
from didicm.data.label_noise import LabelNoise
from didicm.errors import UserError
from didicm.experiments.executors import ExecutorName
from didicm.experiments.results import RESULTS
from didicm.experiments.run import run_study
from didicm.experiments.spec import Trials
from didicm.experiments.study_file import METHODS, compare_study
from didicm.report.html import Report, write_report
from didicm.text import SafeConsole, quoted
from didicm.values import Amount, Few, Natural, Pixels


@dataclass(frozen=True)
class StudyOptions:
    """Options that all grids of trainings share.

    Args:
        labels: a table of what the images of a folder show, as for didicm train
        group_by: a column or a regular expression, as for didicm train: no split parts a patient's images
        set: any setting of didicm train, for all trainings, as in --set batch_size=32
        tune: first choose learning rate, weight decay and epochs of every method under every condition, each by so
            many trials, judged by held-out training images
        report_only: make tables, figures and report again
        jobs: trainings at the same time
        devices: processors of each training, such as GPUs
        executor: where the trainings run: local (this machine), ray, slurm (through submitit), or submitit-local,
            which tries out submitit on this machine
        cluster: what each job asks of the cluster, as in --cluster slurm_partition=gpu, or of Ray: num_cpus=4
    """

    labels: str | None = None
    group_by: str | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    tune: Trials | None = None
    report_only: bool = False
    jobs: Few = 1
    devices: Few = 1
    executor: ExecutorName = "local"
    cluster: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all trainings."""
        named = {"labels": self.labels, "group_by": self.group_by}
        given = {name: value for name, value in named.items() if value is not None}
        return {**self.set, **given, "run.devices": self.devices}

    @property
    def execution(self) -> dict[str, Any]:
        """Where the trainings run, as arguments of `run_study`."""
        return {"executor": self.executor, "jobs": self.jobs, "cluster": self.cluster}


@dataclass(frozen=True)
class CompareOptions(StudyOptions):
    """Options of `didicm compare`.

    Args:
        out: folder of results, models and report.html
        data: where the images are: a folder, hf://..., wds://..., timm://..., fashion-mini
        recipe: settings of all trainings
        resolutions: pixels that the networks see, such as 28,14,7; by default the recipe's
        fractions: of the training images, such as 1,0.5,0.25; whole numbers from 2 are images per class
        corruptions: of all images, such as none,noise:3,blur:2+jpeg:4
        label_noises: shares of wrong training labels, such as 0,0.2,0.4, or files of confusion matrices
        methods: which to compare
        seeds: trainings of each kind
        epochs: of every training; by default the recipe's
        steps: of DiDiCM's sampler; by default the recipe's
    """

    out: Path = field(kw_only=True)
    data: str = ""
    recipe: str = "small"
    resolutions: tuple[Pixels, ...] = ()
    fractions: tuple[Amount, ...] = (1.0,)
    corruptions: tuple[str, ...] = ("none",)
    label_noises: tuple[LabelNoise, ...] = (0.0,)
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: Few = 3
    epochs: Natural | None = None
    steps: Natural | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all trainings, short forms included."""
        short = {"epochs": self.epochs, "sampler.steps": self.steps}
        return {**super().settings, **{name: value for name, value in short.items() if value is not None}}

    @property
    def grid(self) -> dict[str, Any]:
        """What is compared, as arguments of `compare_study`."""
        names = (
            "methods",
            "resolutions",
            "fractions",
            "corruptions",
            "label_noises",
            "seeds",
            "recipe",
            "settings",
        )
        return {name: getattr(self, name) for name in names}


def main(argv: list[str]) -> int:
    """Run what is left of the comparison, then print and write what it shows."""
    text = (
        "Train DiDiCM and standard classifiers on the same trunk, over a grid of conditions and seeds, and say "
        "which is better at what cost. Run it again on the same --out to resume, or to add to it."
    )
    options = parse(argv, CompareOptions, command="compare", description=text)
    console = SafeConsole(soft_wrap=True)
    if options.report_only:
        report = write_report(options.out)
    elif not options.data:
        raise UserError("no --data: say where the images are")
    else:
        run = {
            "command": " ".join(["didicm compare", *map(quoted, argv)]),
            "console": console,
            **options.execution,
        }
        report = compare(options.data, options.out, **options.grid, tune=options.tune or 0, **run)
    show_report(report, console)
    return 0


def compare(
    data: str,
    out: str | Path,
    *,
    methods: Sequence[str] = tuple(METHODS),
    resolutions: Sequence[int] = (),
    fractions: Sequence[float] = (1.0,),
    corruptions: Sequence[str] = ("none",),
    label_noises: Sequence[LabelNoise] = (0.0,),
    seeds: int = 3,
    recipe: str = "small",
    settings: Mapping[str, Any] | None = None,
    tune: int = 0,
    executor: str = "local",
    jobs: int = 1,
    cluster: Mapping[str, Any] | None = None,
    command: str = "",
    console: Console | None = None,
) -> Report:
    """Compare DiDiCM with standard classifiers on these images; tables, verdict and report.html go to `out`.

    The arguments are those of `compare_study` and `run_study`.
    """
    study = compare_study(
        methods=methods, resolutions=resolutions, fractions=fractions, corruptions=corruptions,
        label_noises=label_noises, seeds=seeds, recipe=recipe, settings=settings, tune=tune,
    )  # fmt: skip
    run_study(
        study, out, data=data, executor=executor, jobs=jobs, cluster=cluster, command=command, console=console
    )
    return write_report(out)


def show_report(report: Report, console: Console, tables: int | None = None) -> None:
    """Print the first tables or all, the verdict, and where things are."""
    wide = console if console.is_terminal else SafeConsole(width=160)  # a file or a pipe has room for all columns
    for table in report.tables[:tables]:
        wide.print()
        wide.print(table.to_rich(wide.width))
    places = [f"report: {os.path.abspath(report.path)}", f"numbers: {report.path.parent / RESULTS}"]
    for line in ("", *report.verdict, "", *places):
        console.print(line, highlight=False, markup=False)

"""`didicm compare`: is DiDiCM better than a standard classifier on these images, and at what cost?"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.cli.flags import parse
from didicm.data.corruptions import LabelNoise
from didicm.errors import UserError
from didicm.experiments.executors import ExecutorName
from didicm.experiments.results import RESULTS
from didicm.experiments.run import check_begun, executor_of, forecast, plan_runs, run_study, usual_tflops
from didicm.experiments.spec import Study, Trials
from didicm.experiments.study_file import USUAL, compare_study
from didicm.experiments.tune import at_most, trials_of
from didicm.progress import duration
from didicm.report.html import Report, write_report
from didicm.text import SafeConsole, count, quoted
from didicm.values import Amount, Few, Natural, Pixels, Positive


@dataclass(frozen=True)
class StudyOptions:
    """Options that all grids of trainings share.

    Args:
        labels: a table with the labels of the images in a folder, as for didicm train
        group_by: a column or a regular expression, as for didicm train: no split separates the images of a group
        set: any setting of didicm train, for all trainings, as in --set batch_size=32
        tune: first tune learning rate, weight decay and epochs of every method under every condition, with this
            many trials each, judged on held-out training images
        holdouts: with --tune, draw the held-out images this many times and judge each trial by all draws: of few
            images, a single draw chooses by chance
        report_only: only make tables, figures and report again
        dry_run: check everything, and say what would be trained and what that would take
        tflops: TFLOP/s that one device sustains in training, for the times of --dry-run; by default a guess for
            this machine
        jobs: trainings to run at the same time
        devices: devices per training, such as GPUs
        executor: where the trainings run: local (this machine), ray, slurm (through submitit), or submitit-local,
            which tries out submitit on this machine
        cluster: what each job requests from the cluster, as in --cluster slurm_partition=gpu, or from Ray, as in
            --cluster num_cpus=4
    """

    labels: str | None = None
    group_by: str | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    tune: Trials | None = None
    holdouts: Few | None = None
    report_only: bool = False
    dry_run: bool = False
    tflops: Positive | None = None
    jobs: Few = 1
    devices: Few = 1
    executor: ExecutorName = "local"
    cluster: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all trainings."""
        named = {"labels": self.labels, "group_by": self.group_by}
        given = {name: value for name, value in named.items() if value is not None}
        if "run.devices" in self.set:
            raise UserError("--set run.devices: give --devices, for each training")
        return {**self.set, **given, "run.devices": self.devices}

    @property
    def execution(self) -> dict[str, Any]:
        """Where the trainings run, as arguments of `run_study`."""
        return {"executor": self.executor, "jobs": self.jobs, "cluster": self.cluster}


@dataclass(frozen=True)
class CompareOptions(StudyOptions):
    """Train DiDiCM and standard classifiers under several conditions, and say which is better at what cost.

    All have the same trunk, and every condition has several seeds. Run it again on the same --out to resume, or to
    add to it.

    Args:
        out: folder for results, models and report.html
        data: where the images are: a folder, hf://..., wds://..., timm://..., fashion-mini
        recipe: recipe of all trainings
        resolutions: image sizes in pixels, such as 28,14,7; by default the recipe's
        fractions: fractions of the training images, such as 1,0.5,0.25; whole numbers from 2 are images per class
        corruptions: corruptions of all images, such as none,noise:3,blur:2+jpeg:4
        label_noises: shares of wrong training labels, such as 0,0.2,0.4, or files of confusion matrices
        methods: methods to compare; there are ensemble, snapshots and swa as well; didicm-few, the network of
            recipe few, is for a DiDiRN alone
        seeds: trainings per method and condition
        epochs: epochs of every training; by default the recipe's
        views: measure answers that look at so many augmented views of each image, too, such as 8
        steps: steps of DiDiCM's sampler; by default the recipe's
    """

    out: Path = field(kw_only=True)
    data: str = ""
    recipe: str = "small"
    resolutions: tuple[Pixels, ...] = ()
    fractions: tuple[Amount, ...] = (1.0,)
    corruptions: tuple[str, ...] = ("none",)
    label_noises: tuple[LabelNoise, ...] = (0.0,)
    methods: tuple[str, ...] = USUAL
    seeds: Few = 3
    epochs: Natural | None = None
    views: Few = 1
    steps: Natural | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all trainings, short forms included."""
        short = {"epochs": self.epochs, "sampler.steps": self.steps}
        return {**super().settings, **{name: value for name, value in short.items() if value is not None}}

    @property
    def grid(self) -> dict[str, Any]:
        """What is compared, as arguments of `compare_study`."""
        axes = ("methods", "resolutions", "fractions", "corruptions", "label_noises")
        grid = {name: getattr(self, name) for name in (*axes, "seeds", "recipe", "settings")}
        return {**grid, "tune": self.tune or 0, "holdouts": self.holdouts or 1, "views": self.views}


def main(argv: list[str]) -> int:
    """Run what is left of the comparison, then print and write what it shows."""
    options = parse(argv, CompareOptions, command="compare")
    console = SafeConsole(soft_wrap=True)
    if options.report_only:
        report = write_report(options.out)
    elif not options.data:
        raise UserError("no --data: say where the images are")
    elif options.dry_run:
        show_plan(
            compare_study(**options.grid),
            options.out,
            options,
            console,
            data=options.data,
            settings=options.settings,
        )
        return 0
    else:
        command = " ".join(["didicm compare", *map(quoted, argv)])
        run = {"command": command, "console": console, **options.execution}
        report = compare(options.data, options.out, **options.grid, **run)
    show_report(report, console)
    return 0


def compare(
    data: str | Path,
    out: str | Path,
    *,
    methods: Sequence[str] = USUAL,
    resolutions: Sequence[int] = (),
    fractions: Sequence[float] = (1.0,),
    corruptions: Sequence[str] = ("none",),
    label_noises: Sequence[LabelNoise] = (0.0,),
    seeds: int = 3,
    recipe: str = "small",
    settings: Mapping[str, Any] | None = None,
    tune: int = 0,
    holdouts: int = 1,
    views: int = 1,
    executor: str = "local",
    jobs: int = 1,
    cluster: Mapping[str, Any] | None = None,
    command: str = "",
    console: Console | None = None,
) -> Report:
    """Compare DiDiCM with standard classifiers on these images; tables, verdict and report.html go to `out`.

    Args:
        data: where the images are, as for `didicm compare --data`.
        out: folder for results, models and report; run it again on the same one to resume, or to add to it.
        methods: those to compare, by name.
        resolutions: image sizes in pixels; by default the recipe's.
        fractions: of the training images; whole numbers from 2 are images per class.
        corruptions: of all images, such as `noise:3`, or `none`.
        label_noises: shares of wrong training labels, or files of confusion matrices.
        seeds: trainings per method and condition.
        recipe: of all trainings.
        settings: of all trainings, by dotted names, such as `{"optimizer.lr": 0.01}`.
        tune: trials that choose learning rate, weight decay and epochs of every method under every condition.
        holdouts: draws of held-out images that judge each trial.
        views: answers that look at so many augmented views of each image are measured, too.
        executor: where the trainings run, with `jobs` and `cluster` as for `run_study`.
        jobs: trainings at the same time.
        cluster: what each job asks of the cluster.
        command: what is shown in the report as the way to repeat it.
        console: where progress is shown.
    """
    study = compare_study(
        methods=methods, resolutions=resolutions, fractions=fractions, corruptions=corruptions,
        label_noises=label_noises, seeds=seeds, recipe=recipe, settings=settings, tune=tune, holdouts=holdouts,
        views=views,
    )  # fmt: skip
    run_study(
        study, out, data=os.fspath(data), settings=settings,
        executor=executor, jobs=jobs, cluster=cluster, command=command, console=console,
    )  # fmt: skip
    return write_report(out)


def show_plan(study: Study, out: Path, options: StudyOptions, console: Console, **asked: Any) -> None:
    """What would be trained, and what that would take; `asked` are arguments of `plan_runs`."""
    runs, plan = plan_runs(study, **asked)
    check_begun(out, plan)
    trials = trials_of(runs, study.tune, holdouts=study.holdouts)
    speed = options.tflops or usual_tflops()
    at_once = min(options.jobs, max(len(runs), len(trials)))
    executor_of(runs, out, options.executor, at_once, options.cluster, console)
    most = at_most(runs, study.tune, holdouts=study.holdouts) if trials else {}
    costs = forecast({**runs, **trials, **most})
    kinds = {(str(run.method), run.condition): (run, costs[key]) for key, run in runs.items()}
    columns = ("method", "condition", "epochs", "M parameters", "M multiply-adds", "time", "memory, MB")
    table = Table(*columns, box=None, pad_edge=False)
    for run, need in kinds.values():
        counts = f"{need.parameters / 1e6:.2f}", f"{need.multiply_adds / 1e6:,.1f}"
        takes = duration(need.seconds(speed)), f"{need.memory / 1e6:,.0f}"
        table.add_row(str(run.method), str(run.condition), str(run.config.epochs), *counts, *takes)
    console.print(f"{study.title}\n{study.question}\n")
    (console if console.is_terminal else SafeConsole(width=160)).print(table)
    names = "; ".join(spec.name for spec in study.samplers) or "as in its recipe"
    precision = next(iter(runs.values())).config.run.precision
    foreseen = [costs[key] for key in {**runs, **trials}]
    seconds, disk = sum(need.seconds(speed) for need in foreseen), sum(need.disk for need in foreseen)
    search = (
        f"{count(len(trials), 'training')} of the search (up to {study.tune} trials of each kind"
        f"{f', {study.holdouts} draws of held-out images each' if study.holdouts > 1 else ''}), then "
        if trials
        else ""
    )
    longest = duration(sum(costs[key].seconds(speed) for key in most))
    length = f" if the search keeps these epochs, {longest} if longer is always better" if most else ""
    devices = options.devices * at_once
    notes = [f"{seconds / 3600:,.0f} device-hours"] if seconds >= 3600 else []  # as clusters count
    notes += [f"at best {duration(seconds / devices)} on {devices} devices"] if devices > 1 else []
    takes_in_total = duration(seconds) + " on one device" + (f" ({'; '.join(notes)})" if notes else "")
    console.print(
        f"\n{search}{count(len(runs), 'training')}: {count(len(kinds), 'kind')}, "
        f"{len({run.seed for run in runs.values()})} of each; DiDiCM is sampled with: {names}\n"
        "multiply-adds: of one image's posterior, by the first sampler; time: of one training and its measuring "
        f"on one device at {speed:g} TFLOP/s (--tflops); memory: of a training, per device ({precision})\n"
        f"in total {takes_in_total} and {disk / 1e9:,.2f} GB on disk{length}\n"
        f"results would be in {out}; nothing was written (--dry-run)",
    )


def show_report(report: Report, console: Console, tables: int | None = None) -> None:
    """Print the first tables or all, the verdict, and where things are."""
    wide = console if console.is_terminal else SafeConsole(width=160)  # a file or a pipe has room for all columns
    for table in report.tables[:tables]:
        wide.print()
        wide.print(table.to_rich(wide.width))
    places = [f"report: {os.path.abspath(report.path)}", f"numbers: {report.path.parent / RESULTS}"]
    for line in ("", *report.verdict, "", *places):
        console.print(line)

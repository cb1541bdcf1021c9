"""Run a study: one owner per folder hands the runs that are left to an executor and stores what they give."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from didicm.data.folder import keep_listings
from didicm.errors import UserError
from didicm.experiments.execute import close_run, prepare, read_result, read_share, write_run
from didicm.experiments.executors import Executor, make_executor
from didicm.experiments.results import (
    Plan,
    Record,
    RunResult,
    Trial,
    append_result,
    read_plan,
    read_results,
    read_trials,
    write_plan,
)
from didicm.experiments.spec import Run, Study
from didicm.experiments.tune import next_stage, trials_of
from didicm.processes import LOCK, held, interrupted
from didicm.progress import ProgressDisplay
from didicm.text import SafeConsole, count
from didicm.training.build import INDEX

JOBS = "jobs"
POLL, QUIET = 1.0, 20.0  # seconds between looks at the runs' folders; without a line, where there is no bar


def run_study(
    study: Study,
    out: str | Path,
    *,
    data: str | None = None,
    seeds: int | None = None,
    settings: Mapping[str, Any] | None = None,
    executor: str = "local",
    jobs: int = 1,
    cluster: Mapping[str, Any] | None = None,
    trainings: str | Path | None = None,
    command: str = "",
    console: Console | None = None,
) -> list[RunResult]:
    """Run what is left of a study; returns all its results, in the order of its runs.

    Args:
        study: what to train and how to sample it.
        out: folder of the results; it keeps to one set of settings.
        data: where the images are, if not where the study says.
        seeds: trainings of each kind, if not as many as the study says.
        settings: of all trainings, by dotted names; they override recipes and study, but not what makes a method.
        executor: `local`, `ray`, `slurm`, or `submitit-local`, which tries out submitit on this machine.
        jobs: runs at the same time.
        cluster: what each job asks of the cluster, by the names of submitit or of Ray's tasks.
        trainings: folder of the trained networks, if several studies share them.
        command: what the user typed, for the report.
        console: where to show progress.
    """
    out, home, console = Path(out), Path(trainings or out), console or SafeConsole(soft_wrap=True)
    runs, plan = plan_runs(study, data, seeds, settings, command)
    stored, begun = _check_folder(out), bool(_read_done(out))
    if stored and begun and (changed := stored.conflict(plan)):
        raise UserError(f"{out} was started with other settings ({changed}): give them again, or another --out")

    def executor_for(left: Mapping[str, Run]) -> Executor:
        first = next(iter(runs.values())).config.run
        at_once = min(jobs, max(1, len(left)))
        return make_executor(executor, at_once, first, cluster or {}, out / JOBS, console)

    def find_stage() -> tuple[dict[str, Run], dict[str, Run]]:
        """All that can be run now, and what is left of it."""
        stage, done = next_stage(runs, study.tune, read_trials(out)), _read_done(out)
        return stage, {key: run for key, run in stage.items() if key not in done}

    search = {key: str(run.method) for key, run in trials_of(runs, study.tune).items()}
    stage, left = find_stage()
    check_runs(left, home / INDEX)  # a mistake shows before anything is written
    executor_for(left)
    with held(home, command=command):
        keep_listings(home / INDEX)
        while True:  # the trials of a search, if there is one; then what they chose
            plan = replace(plan, runs={**search, **{key: str(run.method) for key, run in stage.items()}})
            write_plan(out, stored.extended(plan) if stored and begun else plan)
            if not left:
                break
            _run_stage(stage, left, out, home, executor_for(left), console)
            stage, left = find_stage()
    done = {result.key: result for result in read_results(out)}
    return [done[key] for key in stage]


def _run_stage(
    stage: Mapping[str, Run], left: Mapping[str, Run], out: Path, home: Path, run_all: Executor, console: Console
) -> None:
    """Carry out the runs that are left of a stage, and store what each gives."""
    folders = {key: write_run(out, home, run) for key, run in left.items()}
    try:
        with (
            interrupted(),
            StudyProgress(console, stage, stage.keys() - left, folders) as progress,
            closing(run_all(list(folders.values()))) as finished,
        ):
            for folder in finished:
                result = read_result(folder)
                append_result(out, result)
                close_run(folder)
                progress.finish(result)
    except KeyboardInterrupt:
        told = f"stopped; what is done is in {out}: run the same command again to resume"
        console.print(told, markup=False)
        raise


def _read_done(out: Path) -> set[str]:
    """Keys of all finished runs, trials too."""
    return {result.key for result in read_results(out)} | {trial.key for trial in read_trials(out)}


def plan_runs(
    study: Study,
    data: str | None = None,
    seeds: int | None = None,
    settings: Mapping[str, Any] | None = None,
    command: str = "",
) -> tuple[dict[str, Run], Plan]:
    """The runs of a study by key, and what is stored of them; two methods that are one training are a mistake."""
    data = data or study.data
    if not data:
        raise UserError(f"study {study.name} needs --data: say where the images are")
    if seeds is not None and seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {seeds}")
    runs: dict[str, Run] = {}
    for run in study.runs(data, seeds or study.seeds, settings):
        same = runs.setdefault(run.key, run)
        if same is not run:
            raise UserError(f"{same.method} and {run.method} have the same settings: leave one of them out")
    labels = {key: str(run.method) for key, run in runs.items()}
    described = {f"{run.method}, {run.condition}": run.settings for run in runs.values()}
    return runs, Plan(study, command, data, described, labels)


def check_runs(runs: Mapping[str, Run], index: Path | None = None) -> None:
    """Build every method under every condition once: a mistake shows now and not after hours."""
    for run in {(str(run.method), run.condition): run for run in runs.values()}.values():
        try:
            prepare(run, index)
        except UserError as error:
            raise UserError(f"{run.condition}: {error}") from error


def _check_folder(out: Path) -> Plan | None:
    """What the folder was started with; one that holds something else is left alone."""
    plan = read_plan(out)
    others = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else out.exists()
    if plan is None and others:
        raise UserError(f"--out {out} is not empty and holds no comparison: give another folder")
    return plan


class StudyProgress:
    """Shows how far the runs are, whoever carries them out, as their folders tell; use it as a context."""

    def __init__(
        self, console: Console, runs: Mapping[str, Run], done: Iterable[str], folders: Mapping[str, Path]
    ):
        self._runs, self._folders = runs, folders
        self._work = {key: _work(run) for key, run in runs.items()}
        self._done = set(done)
        self._display = ProgressDisplay(console, sum(self._work.values()), int(self._worked()), seconds=QUIET)
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "StudyProgress":
        self._display.__enter__()
        if not self._display.console.is_terminal:
            what = count(len(self._runs), "trial" if _are_trials(self._runs) else "training")
            done = f", {len(self._done)} of them done before" if self._done else ""
            self._display.print(f"{what}{' of the search' if _are_trials(self._runs) else ''}{done}")
        self._watcher.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._watcher.join()
        self._display.__exit__(kind, error, trace)

    def finish(self, result: Record) -> None:
        """Note a finished run, and print what came out."""
        with self._guard:
            self._done.add(result.key)
            self._display.update(self._worked(), self._count())
            self._display.print(
                f"{self._count()}  {self._runs[result.key]}: {_outcome(result)}{self._display.left}"
            )

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            with self._guard:
                shares = {key: read_share(path) for key, path in self._folders.items() if key not in self._done}
                running = next((f"  {self._runs[key]}" for key, share in shares.items() if 0 < share < 1), "")
                self._display.update(self._worked(shares), self._count() + running)

    def _worked(self, shares: Mapping[str, float] | None = None) -> float:
        whole = sum(self._work[key] for key in self._done)
        return whole + sum(self._work[key] * share for key, share in (shares or {}).items())

    def _count(self) -> str:
        search = "search " if _are_trials(self._runs) else ""
        return f"{search}{len(self._done)}/{len(self._runs)}"


def _are_trials(runs: Mapping[str, Run]) -> bool:
    return any(run.trial is not None for run in runs.values())


def _outcome(result: Record) -> str:
    """What came out, in a few words."""
    if isinstance(result, Trial):
        return "diverged" if result.metrics is None else f"held-out NLL {result.nll:.3f}"
    metrics = result.measurements[0].metrics
    return f"top-1 {100 * metrics['cls/Acc']:.1f} %  NLL {metrics['cls/NLL']:.3f}"


def _work(run: Run) -> float:
    """Rough work of a run: images seen times what an image costs."""
    config = run.config
    size = config.image.size or config.image.limit
    draws = config.draws_per_image if config.method == "diffusion" else 1
    return config.epochs * config.fraction * (size**2 + 200) * (1 + draws)

"""Run a study: one owner per folder hands the runs that are left to an executor and stores what they give."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from filelock import Timeout
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments.execute import LOCK, close_run, locked, prepare, read_result, write_run
from didicm.experiments.executors import interrupted_by_sigterm, make_executor
from didicm.experiments.progress import StudyProgress
from didicm.experiments.results import Plan, RunResult, append_result, read_plan, read_results, write_plan
from didicm.experiments.spec import Run, Study
from didicm.files import read_json, to_json, write_files
from didicm.values import flatten

OWNER, JOBS = "owner.json", "jobs"


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
    out, home, console = Path(out), Path(trainings or out), console or Console(soft_wrap=True)
    runs, plan = plan_runs(study, data, seeds, settings, command)
    stored, done = _check_folder(out), {result.key: result for result in read_results(out)}
    if stored and done and (changed := conflicts(stored, plan)):
        raise UserError(f"{out} was started with other settings ({changed}): give them again, or another --out")
    left = {key: run for key, run in runs.items() if key not in done}
    check_runs(left)  # a mistake shows before anything is written
    first = next(iter(runs.values())).config.run
    jobs = min(jobs, max(1, len(left)))
    run_all = make_executor(executor, jobs, first, cluster or {}, out / JOBS, console)
    with owned(home, command):
        write_plan(out, extend(stored, plan) if stored and done else plan)
        if left:
            folders = {key: write_run(out, home, run) for key, run in left.items()}
            try:
                with (
                    interrupted_by_sigterm(),
                    StudyProgress(console, runs, runs.keys() & done, folders) as progress,
                    closing(run_all(list(folders.values()))) as finished,
                ):
                    for folder in finished:
                        result = read_result(folder)
                        append_result(out, result)
                        close_run(folder)
                        progress.finish(result)
            except KeyboardInterrupt:
                console.print(
                    f"stopped; what is done is in {out}: the same command goes on from there", markup=False
                )
                raise
    done = {result.key: result for result in read_results(out)}
    return [done[key] for key in runs]


def plan_runs(
    study: Study, data: str | None, seeds: int | None, settings: Mapping[str, Any] | None, command: str = ""
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
    described = {f"{run.method}, {run.condition}": _described(run) for run in runs.values()}
    return runs, Plan(study, command, data, described, labels)


def check_runs(runs: Mapping[str, Run]) -> None:
    """Build every method under every condition once: a mistake shows now and not after hours."""
    for run in {(str(run.method), run.condition): run for run in runs.values()}.values():
        try:
            prepare(run)
        except UserError as error:
            raise UserError(f"{run.condition}: {error}") from error


@contextmanager
def owned(folder: Path, command: str = "") -> Iterator[None]:
    """Be the only process that runs a study in a folder; the system frees it, however this process ends."""
    about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%H:%M"), "command": command}
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, wait=False))
        except Timeout:
            told = f"{folder} is being run by {_owner(folder)}: wait for it, or give another --out"
            raise UserError(told) from None
        write_files(folder, {OWNER: to_json(about)})
        yield


def _owner(folder: Path) -> str:
    try:
        about = read_json(folder / OWNER, "")
        return f"pid {about['pid']} on {about['host']} since {about['since']} ({about['command']})"
    except (UserError, KeyError, TypeError):  # it is just starting
        return "another process"


def _check_folder(out: Path) -> Plan | None:
    """What the folder was started with; one that holds something else is left alone."""
    plan = read_plan(out)
    mine = (LOCK, OWNER)
    if (
        plan is None
        and out.exists()
        and (not out.is_dir() or any(path.name not in mine for path in out.iterdir()))
    ):
        raise UserError(f"--out {out} is in use and holds no comparison: give another folder")
    return plan


# What a folder keeps to


def conflicts(stored: Plan, plan: Plan) -> str:
    """What differs from what a folder was started with, if anything; methods, conditions and seeds may join."""
    before, now = stored.study, plan.study
    if before.held_out != now.held_out:
        return f"held_out is {before.held_out:g}, not {now.held_out:g}"
    by_condition = _names(_CONDITION, *before.by_fraction.values(), *now.by_fraction.values())
    for m, c, other, d in product(before.methods, before.conditions, now.methods, now.conditions):
        if str(m) != str(other) and (m.recipe, m.baseline) != (other.recipe, other.baseline):
            continue  # nothing in common
        own = _names(m.settings, other.settings) if str(m) != str(other) else set()
        own |= by_condition if c != d else set()
        new = _leaves(plan.settings.get(f"{other}, {d}", {}))
        for name, value in _leaves(stored.settings.get(f"{m}, {c}", {})).items():
            if name not in own and new.get(name, value) != value:
                return f"{name} is {value}, not {new[name]}"
    if [(s.name, s.settings) for s in before.samplers] != [(s.name, s.settings) for s in now.samplers]:
        return f"samplers are {', '.join(spec.name for spec in before.samplers) or 'the usual ones'}"
    return ""


def extend(stored: Plan, plan: Plan) -> Plan:
    """The plan with what was asked for earlier: a comparison may grow, a study is what its file says."""
    before, now = stored.study, plan.study
    if now.layout != "comparison":
        return plan
    methods = {str(method): method for method in (*before.methods, *now.methods)}
    study = replace(
        now,
        methods=tuple(methods.values()),
        conditions=tuple(dict.fromkeys((*before.conditions, *now.conditions))),
        by_fraction={**before.by_fraction, **now.by_fraction},
        seeds=max(before.seeds, now.seeds),
    )
    settings, runs = {**stored.settings, **plan.settings}, {**stored.runs, **plan.runs}
    return replace(plan, study=study, settings=settings, runs=runs)


_CONDITION = dict.fromkeys(("image.size", "fraction", "corrupt_train", "corrupt_eval"))


def _described(run: Run) -> dict[str, Any]:
    """Settings that a folder keeps to: not how a training is carried out, but for its precision."""
    kept = {k: v for k, v in flatten(run.config).items() if k not in ("out", "seed") and not k.startswith("run.")}
    return {**kept, "run.precision": run.config.run.precision}


def _leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, free mappings too."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {name: value}
        flat |= inner
    return flat


def _names(*settings: Mapping[str, Any]) -> set[str]:
    return {name for own in settings for name in _leaves(own)}

"""Run a study: one owner per folder hands the runs that are left to an executor and stores what they give.

What that will take is counted before anything runs: arithmetic, memory and files of every training.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from didicm.classifier import Ensemble
from didicm.data import ImageSet
from didicm.data.folder import keep_listings
from didicm.data.loader import most_unreadable
from didicm.errors import UserError
from didicm.experiments.execute import close_run, prepare, read_result, read_share, write_run
from didicm.experiments.executors import Executor, make_executor
from didicm.experiments.measure import KEPT, samplers_of
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
from didicm.experiments.spec import Condition, Run, Study
from didicm.experiments.tune import VERSION, later_rounds, next_stage, trials_of
from didicm.processes import LOCK, held, interrupted
from didicm.progress import ProgressDisplay
from didicm.text import SafeConsole, count
from didicm.training.build import INDEX, RunComponents, TrainingCost, estimate, training_multiply_adds
from didicm.values import override

JOBS = "jobs"
FLOAT = 4  # bytes
GPU_TFLOPS, CPU_TFLOPS = 50.0, 0.02  # sustained in training by a recent GPU, and by one thread of a CPU
# What other options than --set decide.
DECIDED = {
    "run.devices": "give --devices",
    "image.size": "give --resolutions, or copy the study's file",
    "fraction": "give --fractions, or copy the study's file",
    "label_noise": "give --label-noises, or copy the study's file",
    "corrupt_train": "give --corruptions, or copy the study's file",
    "corrupt_eval": "give --corruptions, or copy the study's file",
    "seed": "seeds count from 0 to --seeds",
}
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
    begun = check_begun(out, plan)

    def executor_for(left: Mapping[str, Run]) -> Executor:
        return executor_of(runs, out, executor, min(jobs, max(1, len(left))), cluster or {}, console)

    def find_stage() -> tuple[dict[str, Run], dict[str, Run]]:
        """All that can be run now, and what is left of it."""
        stage, done = next_stage(runs, study.tune, read_trials(out), holdouts=study.holdouts), _read_done(out)
        return stage, {key: run for key, run in stage.items() if key not in done}

    stage, left = find_stage()
    for run in {run.kind: run for run in left.values()}.values():  # a mistake shows before anything is written
        _check_same_data(run, *_prepare(run, home / INDEX), out)
    executor_for(left)
    with held(home, command=command):
        keep_listings(home / INDEX)
        while True:  # the rounds of a search, if there is one; then what they chose
            tried = trials_of(runs, study.tune, read_trials(out), holdouts=study.holdouts)
            plan = replace(plan, runs={key: str(run.method) for key, run in {**tried, **stage}.items()})
            write_plan(out, begun.extended(plan) if begun else plan)
            if not left:
                break
            later = later_rounds(runs, study.tune, stage, holdouts=study.holdouts)
            _run_stage(stage, left, later, out, home, executor_for(left), console)
            stage, left = find_stage()
    done = {result.key: result for result in read_results(out)}
    return [done[key] for key in stage]


def _run_stage(
    stage: Mapping[str, Run],
    left: Mapping[str, Run],
    later: Mapping[str, Run],
    out: Path,
    home: Path,
    run_all: Executor,
    console: Console,
) -> None:
    """Carry out the runs that are left of a stage, and store what each gives."""
    folders = {key: write_run(out, home, run) for key, run in left.items()}
    try:
        with (
            interrupted(),
            _progress(console, stage, folders, later) as finish,
            closing(run_all(list(folders.values()))) as finished,
        ):
            for folder in finished:
                result = read_result(folder)
                append_result(out, result)
                close_run(folder)
                finish(result)
    except KeyboardInterrupt:
        console.print(f"stopped; what is done is in {out}: run the same command again to resume", markup=False)
        raise


def check_begun(out: Path, plan: Plan) -> Plan | None:
    """The plan of a folder that has results, which a new one must agree with; any other folder must be empty."""
    stored = read_plan(out)
    ours = {LOCK, INDEX}  # of a command that was stopped before it wrote its plan
    if stored is None and ({path.name for path in out.iterdir()} - ours if out.is_dir() else out.exists()):
        raise UserError(f"--out {out} is not empty and holds no comparison: give another folder")
    if stored is None or not _read_done(out):
        return None
    if changed := stored.conflict(plan):
        raise UserError(f"{out} was started with other settings ({changed}): give them again, or another --out")
    return stored


def executor_of(
    runs: Mapping[str, Run], out: Path, name: str, jobs: int, cluster: Mapping[str, Any], console: Console
) -> Executor:
    """What carries out the runs of a folder; all of them ask for the same devices."""
    return make_executor(name, jobs, next(iter(runs.values())).config.run, cluster, out / JOBS, console)


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
    if study.holdouts > 1 and not study.tune:
        raise UserError("--holdouts repeats the trials of a search: give --tune too, such as --tune 4")
    runs: dict[str, Run] = {}
    for run in study.runs(data, seeds or study.seeds, settings):
        same = runs.setdefault(run.key, run)
        if same is not run:
            raise UserError(f"{same.method} and {run.method} have the same settings: leave one of them out")
    _check_effect(settings or {}, runs.values())
    if study.holdouts > 1 and any(run.config.data_seed is not None for run in runs.values()):
        raise UserError("--holdouts draws held-out images anew, which data_seed keeps: leave one of them out")
    labels = {key: str(run.method) for key, run in runs.items()}
    described = {f"{run.method}, {run.condition}": run.settings for run in runs.values()}
    return runs, Plan(study, command, data, described, labels, search=VERSION)


def _check_effect(settings: Mapping[str, Any], runs: Collection[Run]) -> None:
    """Refuse a setting that methods, conditions, seeds or samplers decide: it would change nothing, or not all."""
    for name, value in settings.items():
        for run in runs:
            sampled = any(name in ("sampler", f"sampler.{key}") for spec in run.samplers for key in spec.settings)
            if sampled or override(run.config, {name: value}) != run.config:
                instead = DECIDED.get(name, "leave the method out, or copy the study's file")
                raise UserError(f"--set {name}={value} does not hold for {run.method}, {run.condition}: {instead}")


@dataclass(frozen=True)
class Forecast:
    """What one training and the measuring of its network take."""

    parameters: int
    multiply_adds: int  # of one image's posterior, by the main sampler
    training: float  # multiply-adds
    measuring: float  # multiply-adds
    memory: float  # bytes per device
    disk: float  # bytes that stay

    def seconds(self, tflops: float) -> float:
        """Time on one device at a sustained speed; a multiply-add is two operations."""
        return 2 * (self.training + self.measuring) / (tflops * 1e12)


def usual_tflops() -> float:
    """What this machine's devices sustain in training, roughly."""
    return GPU_TFLOPS if torch.cuda.is_available() else CPU_TFLOPS * torch.get_num_threads()


def forecast(runs: Mapping[str, Run]) -> dict[str, Forecast]:
    """Build every method under every condition once, which shows mistakes, and count.

    Seeds take the same; what differs in length takes in proportion, and trials of a search keep no posteriors.
    """
    needs: dict[tuple[str, int | None], TrainingCost] = {}  # a network's, which takes longer to count
    made: dict[tuple[str, Condition], tuple[Forecast, int]] = {}  # with their epochs
    for run in runs.values():
        if run.kind in made:
            continue
        components, test = _prepare(run)
        if (network := (str(run.method), run.condition.resolution)) not in needs:
            devices = run.config.run.devices
            gpu = run.config.run.accelerator != "cpu"  # where it may run, not here
            needs[network] = estimate(run.config, components, devices if isinstance(devices, int) else 1, gpu=gpu)
        made[run.kind] = _forecast(run, components, len(test), needs[network]), run.config.epochs
    found = {}
    for key, run in runs.items():
        one, epochs = made[run.kind]
        found[key] = replace(one, training=one.training * run.config.epochs / epochs)
        if run.trial is not None:
            training, disk = (x / run.method.members for x in (found[key].training, FLOAT * one.parameters))
            found[key] = replace(found[key], training=training, measuring=0.0, disk=disk)
    return found


def _forecast(run: Run, components: RunComponents, test_images: int, need: TrainingCost) -> Forecast:
    classifier, networks, price = components.classifier, run.networks, need.cost
    samplers = samplers_of(
        Ensemble([classifier] * networks) if networks > 1 else classifier, run.samplers, run.views
    )
    posterior = []  # multiply-adds, by the most calls that each may take
    for spec in samplers:
        settings = dict(spec.settings)
        members = settings.pop("members", networks)
        sampler, _ = classifier.resolve(**settings)
        calls, encodings = (sampler.calls, sampler.encodings) if sampler else (1, settings.get("views", 1))
        posterior.append(members * price.total(calls, encodings))
    measured = test_images + (len(components.val) if run.held_out else 0)
    posteriors = sum(spec.stored for spec in samplers) * test_images * len(components.class_names)
    pictures = KEPT * components.eval_transform.channels * components.eval_transform.size**2
    return Forecast(
        parameters=networks * price.parameters,
        multiply_adds=posterior[0],
        training=len(run.members) * training_multiply_adds(run.config, components, price),
        measuring=sum(posterior) * measured,
        memory=(need.weights_mb + need.activations_mb) * 2**20,
        disk=FLOAT * (networks * price.parameters + posteriors) + pictures,
    )


def _check_same_data(run: Run, components: RunComponents, test: ImageSet, out: Path) -> None:
    """Refuse to join results of other images: means and differences would be of both."""
    for result in read_results(out) if run.trial is None else ():
        alike = result.method == str(run.method) and result.condition == run.condition
        for what, before, now, fewer in (
            ("classes", result.num_classes, len(components.class_names), 0),
            ("test images", result.num_test, len(test), most_unreadable(len(test))),  # counted as they were read
            ("training images", result.num_train, len(components.train) if alike else result.num_train, 0),
        ):
            if not now - fewer <= before <= now:
                raise UserError(
                    f"{run.config.data} has {now} {what} ({run.condition}), and had {before} when {out} was "
                    "begun: restore them, or give another --out"
                )


def _prepare(run: Run, index: Path | None = None) -> tuple[RunComponents, ImageSet]:
    """Build a run as it will be: a mistake shows now and not after hours."""
    try:
        return prepare(run, index)
    except UserError as error:
        raise UserError(f"{run.condition}: {error}") from error


@contextmanager
def _progress(
    console: Console, runs: Mapping[str, Run], folders: Mapping[str, Path], later: Mapping[str, Run]
) -> Iterator[Callable[[Record], None]]:
    """Show how far the runs are, whoever carries them out, as the folders of those that are left tell.

    Runs of `later` are counted as to come. Gives a function that notes a finished run, and prints what came out.
    """
    work, done = {key: _work(run) for key, run in runs.items()}, runs.keys() - folders
    search = any(run.trial is not None for run in runs.values())
    stop, guard = threading.Event(), threading.Lock()

    def worked() -> float:
        return sum(work[key] for key in done)

    def counted() -> str:
        return f"{'search ' if search else ''}{len(done)}/{len(runs) + len(later)}"

    def finish(result: Record) -> None:
        with guard:
            done.add(result.key)
            display.update(worked(), counted())
            display.print(f"{counted()}  {runs[result.key]}: {_outcome(result)}{display.left}")

    def watch() -> None:
        while not stop.wait(POLL):
            with guard:
                shares = {key: read_share(path) for key, path in folders.items() if key not in done}
                running = next((f"  {runs[key]}" for key, share in shares.items() if 0 < share < 1), "")
                begun = sum(work[key] * share for key, share in shares.items())
                display.update(worked() + begun, counted() + running)

    total = sum(work.values()) + sum(map(_work, later.values()))
    with ProgressDisplay(console, total, int(worked()), seconds=QUIET) as display:
        if not console.is_terminal:
            what = count(len(runs) + len(later), "trial" if search else "training")
            display.print(what + (f", {len(done)} of them done before" if done else ""))
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield finish
        finally:
            stop.set()
            watcher.join()


def _outcome(result: Record) -> str:
    """What came out, in a few words."""
    if isinstance(result, Trial):
        return "diverged" if result.metrics is None else f"held-out NLL {result.nll:.3f}"
    metrics = result.measurements[0].metrics
    return f"top-1 {100 * metrics['cls/Acc']:.1f} %  NLL {metrics['cls/NLL']:.3f}"


def _work(run: Run) -> float:
    """Rough work of a run: images seen by all its members, times what an image costs."""
    config = run.config
    size = config.image.size or config.image.limit
    draws = config.draws_per_image if config.method == "diffusion" else 1
    return len(run.members) * config.epochs * config.fraction * (size**2 + 200) * (1 + draws)

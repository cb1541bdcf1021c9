"""What a trained network gives: metrics by sampler, as trained and with a temperature, and images to look at."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from didicm.checkpoint import load
from didicm.classifier import Classifier, DiffusionClassifier, Ensemble
from didicm.data import ImageSet
from didicm.diffusion import Step
from didicm.evaluation.calibration import WEAK_PRIOR, apply_temperature, fit_temperature
from didicm.evaluation.metrics import evaluate_probs, nll
from didicm.evaluation.run import Evaluation, Scratch, evaluate
from didicm.evaluation.store import save_posteriors
from didicm.experiments.results import Measurement, Record, RunResult, Trial
from didicm.experiments.spec import MEASURED, ONE_CALL, PICTURES, Run, SamplerSpec
from didicm.experiments.tune import SEARCHED
from didicm.files import write_files
from didicm.models import cost
from didicm.text import count
from didicm.training.build import RunComponents, training_multiply_adds
from didicm.training.devices import make_fabric, tune
from didicm.training.state import LAST, SNAPSHOTS
from didicm.training.tracking import METRICS

EVAL_SEED = 0  # the test images are corrupted alike for every method and seed
CPU_BATCH, GPU_BATCH = 50, 250  # on each device; of fewer images, what layers hand on stays in the caches of a CPU
LOSSES = 200  # of a trial: enough for the standard error of a difference
SCRATCH = "scratch"
KEPT = 200  # test images that are kept to look at
TRACED = 24  # of them, with their trajectory through diffusion time
_CP_SETTINGS = ("steps", "solver", "score_time", "floor", "select")  # of a trajectory over probabilities


def measure(
    run: Run, components: RunComponents, test: ImageSet, seconds: float | None, folder: Path
) -> Record | None:
    """Measure a trained run, whose training took so many seconds; posteriors and images go to `folder`.

    Every device of the run takes its share of the images, with the run's precision for the network; the first
    process has the result, the others None. A trial is judged by its main sampler on held-out images, as trained.
    """
    trained = _Trained(run, components)
    with trained.scratch(folder) as scratch:
        tested = trained.posteriors(test, scratch / "test", keep=KEPT) if run.trial is None else None
        held_out = trained.posteriors(components.val, scratch / "held") if run.held_out else None
        trained.fabric.barrier()  # nobody reads the files of the others any more
        if not trained.fabric.is_global_zero:
            return None
        if tested is None:
            assert held_out is not None
            return trial_of(run, components, seconds, held_out.probs[trained.samplers[0].name], held_out.labels)
        with trained.fabric.autocast():
            _store_pictures(trained, tested, folder)
        return _result(trained, tested, held_out, seconds, folder)


class _Trained:
    """What a run was trained for, on this process's device: its last model, or the ensemble it makes."""

    def __init__(self, run: Run, components: RunComponents) -> None:
        self.run, self.components, self.fabric = run, components, make_fabric(run.config.run)
        self.fabric.launch()
        tune(self.fabric.device)
        place = SNAPSHOTS if run.networks > len(run.members) else LAST
        classifier = load(Path(run.config.out) / place).classifier
        self.classifier = classifier.to(self.fabric.device).to(memory_format=torch.channels_last)
        self.samplers = samplers_of(classifier, run.samplers, run.views)[: None if run.trial is None else 1]

    def posteriors(self, images: ImageSet, place: Path, keep: int = 0) -> Evaluation:
        """By all samplers, the files of all processes in a folder of the scratch."""
        return evaluate(
            self.classifier,
            images,
            self.components.eval_transform,
            {spec.name: spec.settings for spec in self.samplers},
            corruption=self.components.corrupt_eval,
            batch_size=CPU_BATCH if self.fabric.device.type == "cpu" else GPU_BATCH,
            workers=self.run.config.run.workers,
            seed=EVAL_SEED,
            keep=keep,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            autocast=self.fabric.autocast,
            scratch=Scratch(place, self.fabric.barrier),
        )

    @contextmanager
    def scratch(self, folder: Path) -> Iterator[Path]:
        """A folder for posteriors until they are measured: many samplers of many images do not fit into memory."""
        place = folder / SCRATCH
        if self.fabric.is_global_zero:
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            for part in ("test", "held"):
                (place / part).mkdir(parents=True)
        self.fabric.barrier()
        try:
            yield place
        finally:
            if self.fabric.is_global_zero:
                shutil.rmtree(place, ignore_errors=True)


def trial_of(
    run: Run,
    components: RunComponents,
    seconds: float | None = None,
    probs: Tensor | None = None,
    labels: Tensor | None = None,
) -> Trial:
    """The record of a trial, by its answers (N, K) to the held-out images; without any its training diverged."""
    assert run.trial is not None
    metrics, losses = None, None
    if probs is not None and labels is not None:
        metrics = evaluate_probs(probs, labels)
        groups = np.array_split(nll(probs, labels).numpy(), min(len(labels), LOSSES))
        losses = tuple(round(float(group.mean()), 4) for group in groups)
    return Trial(
        key=run.key,
        method=str(run.method),
        condition=run.condition,
        number=run.trial,
        settings={name: run.settings[name] for name in SEARCHED},
        num_train=len(components.train),
        num_held_out=len(components.val),
        train_seconds=seconds,
        metrics=metrics,
        versions=_versions(),
        losses=losses,
        repeat=run.repeat,
    )


def _result(
    trained: _Trained, tested: Evaluation, held_out: Evaluation | None, seconds: float | None, folder: Path
) -> RunResult:
    """Metrics of one sampler after the other, and files of the posteriors that are stored."""
    run, components, classifier = trained.run, trained.components, trained.classifier
    size, measurements = components.eval_transform.size, []
    price = cost(components.classifier.model, size)
    for i, spec in enumerate(trained.samplers):
        probs, calls = tested.probs[spec.name], tested.nfe[spec.name]
        temperature, scaled, file = None, None, None
        if held_out is not None:
            temperature = fit_temperature(held_out.probs[spec.name], held_out.labels, WEAK_PRIOR).value
            scaled = evaluate_probs(apply_temperature(probs, temperature), tested.labels)
        if spec.stored:
            file = folder / f"posteriors-{i}.safetensors"
            meta = {"run": run.key, "sampler": spec.name, "temperature": temperature}
            save_posteriors(file, probs, tested.labels, components.class_names, tested.image_names, meta)
        measurements.append(
            Measurement(
                sampler=spec.name,
                group=spec.group or spec.name,
                settings=dict(spec.settings),
                calls=calls,
                multiply_adds=classifier.multiply_adds(size, calls, **spec.settings),
                metrics=evaluate_probs(probs, tested.labels),
                temperature=temperature,
                scaled_metrics=scaled,
                posteriors=None if file is None else f"{MEASURED}/{folder.name}/{file.name}",
            )
        )
    not_shown = len(tested.skipped) + (len(held_out.skipped) if held_out else 0)
    return RunResult(
        key=run.key,
        method=str(run.method),
        condition=run.condition,
        seed=run.seed,
        num_train=len(components.train),
        num_held_out=len(components.val) if run.held_out else 0,
        num_test=len(tested.labels),
        num_classes=len(components.class_names),
        parameters=sum(p.numel() for p in classifier.parameters()),
        train_seconds=seconds,
        measurements=tuple(measurements),
        versions=_versions(),
        train_multiply_adds=sum(training_multiply_adds(x, components, price) for x in run.members),
        final_epochs_gain=final_epochs_gain(Path(run.members[0].out) / METRICS, run.config.epochs),
        skipped_steps=sum(highest(Path(x.out) / METRICS, "skipped_steps") for x in run.members),
        unreadable=highest(Path(run.members[0].out) / METRICS, "unreadable_images") + not_shown,
    )


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("didicm", "torch", "timm")}


def samplers_of(classifier: Classifier, asked: Sequence[SamplerSpec] = (), views: int = 1) -> list[SamplerSpec]:
    """The ways to sample a classifier: those asked for, or its recipe's, a single call, and fewer steps.

    With several views of an image, also one call and as many steps with them. An ensemble answers by its first
    members, from one to all.
    """
    if isinstance(classifier, Ensemble):  # all of its members, and how the answer grows better with them
        every = len(classifier.members)
        counts = range(every, 0, -1)
        return [SamplerSpec(count(n, "member"), {"members": n}, n == every, "members") for n in counts]
    if asked:
        return list(asked)
    once = {"method": "readout"} if isinstance(classifier, DiffusionClassifier) else {}
    often = [SamplerSpec(f"{views} views", {**once, "views": views})] if views > 1 else []
    if not isinstance(classifier, DiffusionClassifier) or classifier.mask == 1:
        return [SamplerSpec(ONE_CALL, once), *often]

    steps, own = classifier.sampler.steps, classifier.sampler.method
    method = "cp" if own == "readout" else own

    def in_steps(steps: int, stored: bool = True) -> SamplerSpec:
        return SamplerSpec(f"{steps} steps" if steps > 1 else "1 step", {"method": method, "steps": steps}, stored)

    fewer = [in_steps(2**i, stored=False) for i in reversed(range(12)) if 2**i < steps]
    usual = [in_steps(steps), SamplerSpec(ONE_CALL, once)]
    if often:
        often.append(SamplerSpec(f"{views} augmented steps", {"method": method, "steps": views, "views": views}))
    return [*(usual[::-1] if own == "readout" else usual), *often, *fewer]


def final_epochs_gain(metrics: Path, epochs: int) -> float | None:
    """Relative decrease of the mean loss from the last but one tenth of the epochs to the last, if known."""
    tenths: tuple[list[float], list[float]] = ([], [])
    for line in metrics.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if "loss" in values and values["epoch"] > 0.8 * epochs:
            tenths[values["epoch"] > 0.9 * epochs].append(values["loss"])
    if min(map(len, tenths)) < 2:
        return None
    before, last = (math.fsum(losses) / len(losses) for losses in tenths)
    return (before - last) / before if before > 0 and math.isfinite(before + last) else None


def highest(metrics: Path, name: str) -> int:
    """A count of a training that only grows, such as its skipped steps."""
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return max((line.get(name, 0) for line in lines), default=0)


def _store_pictures(trained: _Trained, tested: Evaluation, folder: Path) -> None:
    """Keep some test images as the network sees them, and the trajectories of some of those."""
    classifier, spec, image = trained.classifier, trained.samplers[0], tested.kept_images
    tensors = {"shown": tested.kept, "images": trained.components.eval_transform.restore(image)}
    if isinstance(classifier, DiffusionClassifier) and classifier.mask < 1:  # else it has no steps
        # From the most to the least confident, so that both kinds are there.
        order = torch.special.entr(tested.probs[spec.name][tested.kept]).sum(-1).argsort()
        traced = order[torch.linspace(0, len(order) - 1, min(TRACED, len(order))).long()]
        path: list[Step] = []
        image = image[traced].to(trained.fabric.device)
        shared = {name: spec.settings[name] for name in _CP_SETTINGS if name in spec.settings}
        classifier.posterior(image, callback=path.append, method="cp", **shared)
        start = torch.full_like(path[0].probs, 1 / classifier.num_classes)
        tensors["traced"] = traced
        tensors["trajectory"] = torch.stack([start, *(step.probs for step in path)], 1).float().cpu()
        tensors["times"] = torch.tensor([1.0, *(step.time for step in path)])
    write_files(folder, {PICTURES: lambda path: save_file({k: x.contiguous() for k, x in tensors.items()}, path)})

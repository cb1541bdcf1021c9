"""What a study will take, counted before anything runs: arithmetic, memory and files of every training."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from didicm.classifier import Classifier, Ensemble
from didicm.errors import UserError
from didicm.experiments.execute import prepare
from didicm.experiments.measure import KEPT, samplers_of
from didicm.experiments.spec import Condition, Run
from didicm.models import Cost
from didicm.training.build import RunComponents, TrainingCost, estimate, training_multiply_adds

FLOAT = 4  # bytes
GPU_TFLOPS, CPU_TFLOPS = 50.0, 0.02  # sustained in training by a recent GPU, and by one thread of a CPU


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
    made: dict[tuple[str, Condition], tuple[Forecast, int]] = {}  # with their epochs
    needs: dict[tuple[str, int | None], TrainingCost] = {}  # a network's, which takes longer to count
    for run in runs.values():
        if (kind := (str(run.method), run.condition)) not in made:
            try:
                components, test = prepare(run)
            except UserError as error:
                raise UserError(f"{run.condition}: {error}") from error
            if (network := (str(run.method), run.condition.resolution)) not in needs:
                devices = run.config.run.devices
                world, gpu = devices if isinstance(devices, int) else 1, run.config.run.accelerator != "cpu"
                needs[network] = estimate(run.config, components, world, gpu=gpu)  # where it may run, not here
            made[kind] = _forecast(run, components, len(test), needs[network]), run.config.epochs
    return {key: _in_proportion(run, *made[str(run.method), run.condition]) for key, run in runs.items()}


def _in_proportion(run: Run, found: Forecast, epochs: int) -> Forecast:
    found = replace(found, training=found.training * run.config.epochs / epochs)
    return found if run.trial is None else replace(found, measuring=0.0, disk=FLOAT * found.parameters)


def _forecast(run: Run, components: RunComponents, test_images: int, need: TrainingCost) -> Forecast:
    classifier, networks = components.classifier, run.networks
    samplers = samplers_of(Ensemble([classifier] * networks) if networks > 1 else classifier, run.samplers)
    asked = [{"members": networks, **spec.settings} for spec in samplers]
    posterior = [_posterior(classifier, need.cost, **settings) for settings in asked]
    measured = test_images + (len(components.val) if run.held_out else 0)
    posteriors = sum(spec.stored for spec in samplers) * test_images * len(components.class_names)
    pictures = KEPT * components.eval_transform.channels * components.eval_transform.size**2
    return Forecast(
        parameters=networks * need.cost.parameters,
        multiply_adds=posterior[0],
        training=len(run.members) * training_multiply_adds(run.config, components, need.cost),
        measuring=sum(posterior) * measured,
        memory=(need.weights_mb + need.activations_mb) * 2**20,
        disk=FLOAT * (networks * need.cost.parameters + posteriors) + pictures,
    )


def _posterior(classifier: Classifier, price: Cost, members: int, **settings: Any) -> int:
    """Multiply-adds of one posterior, by the most calls that it may take."""
    sampler, _ = classifier.resolve(**settings)
    if sampler is None:
        return members * price.total(1, settings.get("views", 1))
    return members * price.total(sampler.calls, sampler.encodings)

"""What a posterior and a training step cost, in units of network calls, on one thread."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.measure import Result, ratio
from didicm.classifier import DiffusionClassifier
from didicm.inference.optimize import optimize_for_inference
from didicm.models import create_model


@torch.no_grad()
def run() -> list[Result]:
    torch.manual_seed(0)
    return [*didirn(), *backbones(), *optimised(), training_step()]


def condition(batch: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, dtype=torch.long), torch.ones(batch)


def didirn() -> list[Result]:
    classifier, image = DiffusionClassifier(create_model("didirn18")).eval(), torch.randn(32, 3, 64, 64)

    def forward() -> Tensor:
        return classifier.model(image, *condition(32))

    def encode_and_eight_calls() -> None:
        features = classifier.model.encode(image)
        for _ in range(8):
            classifier.model.score(features, *condition(32))

    forwards = ratio(partial(classifier, image), forward)
    sampler = ratio(partial(classifier, image), encode_and_eight_calls, rounds=8)
    return [
        Result("didirn18 at 64 px, K = 1000, B = 32: 8 steps", forwards, "forwards", 7.4, at_least=False),
        Result("the same, against encoding and 8 calls", sampler, "x the cost", 1.03, at_least=False),
    ]


def backbones() -> list[Result]:
    results = []
    for backbone in ("resnet18", "resnet50"):
        classifier = DiffusionClassifier(create_model("backbone_score", backbone=backbone)).eval()
        baseline = create_model("backbone_baseline", backbone=backbone).eval()
        for size in (64, 224):
            for batch in (1, 16):
                image = torch.randn(batch, 3, size, size)
                cost = ratio(partial(classifier, image), partial(baseline, image), rounds=8)
                name = f"BackboneScore {backbone} at {size} px, B = {batch}: 8 steps"
                results.append(Result(name, cost, "baseline forwards", 1.2, at_least=False))
    return results


def optimised() -> list[Result]:
    classifier = DiffusionClassifier(create_model("didirn18", layout="official")).eval()
    image = torch.randn(16, 3, 64, 64)
    randomise_statistics(classifier.model)

    def eight_forwards() -> None:
        for _ in range(8):
            classifier.model(image, *condition(16))

    results = []
    for name, compile in (("", False), (", compiled", True)):
        fast = optimize_for_inference(classifier, compile=compile)
        difference = (fast(image) - classifier(image)).abs().max().item()
        speed = ratio(eight_forwards, lambda fast=fast: fast(image))
        bound = 1.8 if compile else None
        results += [
            Result(f"optimize_for_inference{name}: 8 steps against 8 forwards", speed, "x faster", bound),
            Result(f"optimize_for_inference{name}: largest change", difference, "", 1e-4, at_least=False),
        ]
    return results


def randomise_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)


@torch.enable_grad()
def training_step() -> Result:
    """Share of a training step spent outside the network's passes and the optimiser."""
    classifier = DiffusionClassifier(create_model("didirn18"))
    optimizer = torch.optim.SGD(classifier.parameters(), lr=1e-3, momentum=0.9)
    image, target = torch.randn(32, 3, 64, 64), torch.randint(1000, (32,))
    target = nn.functional.one_hot(target, 1000).float()

    def step(loss: Callable[[], Tensor]) -> float:
        start = perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return perf_counter() - start

    def network_alone() -> Tensor:
        return classifier.model(image, *condition(32)).sum()

    whole, alone = [], []
    for _ in range(8):
        whole.append(step(lambda: classifier.loss(image, target)))
        alone.append(step(network_alone))
    share = 100 * max(0.0, 1 - min(alone) / min(whole))
    return Result("training step, didirn18 at 64 px, B = 32, K = 1000: outside", share, "%", 2, at_least=False)

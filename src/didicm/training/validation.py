"""Validation during training, with the real sampler."""

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from didicm.classifier import Classifier
from didicm.data import make_loader
from didicm.evaluation.metrics import evaluate_probs
from didicm.settings import TrainConfig
from didicm.training.build import RunComponents


@torch.no_grad()
def validate(
    classifier: Classifier, parts: RunComponents, config: TrainConfig, fabric: Fabric
) -> dict[str, float]:
    """Metrics of the validation images; each process takes its share."""
    loader = make_loader(
        parts.val,
        parts.view,
        max(1, config.batch_size // fabric.world_size),
        train=False,
        seed=config.seed,
        workers=config.run.workers,
        corruption=parts.corrupt_eval,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        device=fabric.device,
    )
    classifier.eval()
    probs, labels = [], []
    for image, label in loader:
        with fabric.autocast():
            probs.append(classifier(image).float())
        labels.append(label)
    return evaluate_probs(*_join(fabric, torch.cat(probs), torch.cat(labels)))


def _join(fabric: Fabric, probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Join what the processes have, which may differ by an image."""
    if fabric.world_size > 1:
        longest = int(fabric.all_reduce(torch.tensor(float(len(labels)), device=labels.device), reduce_op="max"))
        pad = longest - len(labels)
        labels = fabric.all_gather(nn.functional.pad(labels, (0, pad), value=-1)).flatten()
        probs = fabric.all_gather(nn.functional.pad(probs, (0, 0, 0, pad))).flatten(0, 1)
        probs, labels = probs[labels >= 0], labels[labels >= 0]
    return probs.cpu(), labels.cpu()

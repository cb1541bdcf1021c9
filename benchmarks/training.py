"""Training against what others run: a step against the released code's, a whole run against timm's own loop."""

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.loading import write_images
from benchmarks.measure import Result, ratio
from didicm.classifier import DiffusionClassifier
from didicm.models import create_model
from didicm.settings import TrainConfig, load_recipe
from didicm.training.loop import train
from didicm.values import override

MODEL, EPOCHS, ROUNDS = "didirn10", 3, 6
IMAGES, SIZE, BATCH, WORKERS = 256, 64, 16, 2  # of a run


def run() -> list[Result]:
    return [released_step("paper", 3.0), released_step("official", None), *timms_loop()]


# A step


def released_step(layout: str, bound: float | None, batch: int = 16, classes: int = 1000) -> Result:
    """Soft targets, as with Mixup: the released code noises them by a K x K matrix per image, in float64.

    Both steps train the same network. The released layout costs several times the multiply-adds of the paper's,
    which both sides pay: what is gained on the rest weighs less there.
    """
    torch.manual_seed(0)
    classifier = DiffusionClassifier(create_model("didirn18", layout=layout, num_classes=classes))
    optimizer = torch.optim.SGD(classifier.parameters(), lr=1e-3, momentum=0.9)
    image, target = torch.randn(batch, 3, 64, 64), torch.rand(batch, classes).softmax(-1)
    rate_matrix = torch.full((classes, classes), 1 / classes, dtype=torch.float64) - torch.eye(classes)
    eigenvalues, eigenvectors = torch.linalg.eigh(rate_matrix)

    def released_noise(total: Tensor) -> Tensor:
        vectors = eigenvectors.repeat(batch, 1, 1)
        kernel = torch.bmm(torch.diag_embed(torch.exp(eigenvalues * total[:, None])), vectors.transpose(1, 2))
        kernel = torch.bmm(vectors, kernel).float()
        q = torch.bmm(kernel, target[..., None]).squeeze(-1).clamp(min=1e-10)
        return q / q.sum(-1, keepdim=True)

    def released_loss() -> Tensor:
        t = 1e-3 + (1 - 1e-3) * torch.rand(batch)
        total, rate = -torch.log1p(-(1 - 1e-3) * t), (1 - 1e-3) / (1 - (1 - 1e-3) * t)
        q = released_noise(total)
        label = (q / (1e-10 - (torch.rand_like(q) + 1e-10).log())).argmax(-1)
        s = (q / q.gather(-1, label[:, None])).clamp(1e-10, 1e10)
        log_score = classifier.model(image, label, total).clamp(-20, 20)
        others = 1 - torch.zeros_like(q).scatter(-1, label[:, None], 1.0)
        terms = others * (log_score.exp() - s * log_score) + s * (s.log() - 1)
        return (rate * terms.mean(-1)).mean()

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def take() -> None:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return take

    t = torch.rand(batch)
    noisy = classifier.process.marginal(target, t)
    assert torch.allclose(released_noise(classifier.process.schedule.total(t)), noisy, rtol=1e-3)
    speed = ratio(step(released_loss), step(lambda: classifier.loss(image, target)), rounds=3)
    name = f"training step, didirn18, layout {layout}, 64 px, K = {classes}, soft targets"
    return Result(name, speed, "x the released step", bound)


# A run


def timms_loop() -> list[Result]:
    """Images per second of the best epoch; the runs of both take turns, and each starts its workers anew.

    There are too many images to keep them in memory, which ours would do. Ours also takes the norm of every
    gradient and looks whether it is finite; timm's loop does neither.
    """
    sides = {"ours": _ours, "timm": _timms}
    best = dict.fromkeys(sides, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_images(data / "train", IMAGES)
        write_images(data / "val", 8)
        for k in range(ROUNDS):
            config = _config(data, Path(folder) / f"run{k}")
            for side, steps_of in sides.items():
                best[side] = max(best[side], _best_epoch(steps_of(config)))
    name = f"didicm train --method standard, ResNet-10, JPEGs to {SIZE} px, {WORKERS} workers"
    return [
        Result(name, best["ours"] / best["timm"], "x timm's loop", 1.0),
        Result("the same, alone", best["ours"], "images/s"),
    ]


def _config(data: Path, out: Path) -> TrainConfig:
    changes: dict[str, Any] = {
        "data": str(data), "out": str(out), "model": MODEL, "image.size": SIZE, "batch_size": BATCH,
        "epochs": EPOCHS, "run.validate_epochs": EPOCHS, "run.workers": WORKERS, "run.precision": "32-true",
        "run.devices": 1, "run.accelerator": "cpu",
    }  # fmt: skip
    return override(load_recipe("weak", "standard"), changes)


def _best_epoch(steps: Iterator[float]) -> float:
    """Images per second of the best epoch after the first, which starts the workers."""
    per_epoch = IMAGES // BATCH
    ends = list(steps)[per_epoch - 1 :: per_epoch]
    return max(per_epoch * BATCH / (b - a) for a, b in pairwise(ends))


def _ours(config: TrainConfig) -> Iterator[float]:
    times: list[float] = []
    train(config, on_step=lambda done, total: times.append(time.perf_counter()), console=Console(quiet=True))
    return iter(times)


def _timms(config: TrainConfig) -> Iterator[float]:
    """timm's train.py: its data set, loader, optimiser and schedule, epoch after epoch, without its logs."""
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter

    augment, settings = config.augment, config.optimizer
    loader = create_loader(
        create_dataset("", root=config.data, split="train", is_training=True, batch_size=BATCH),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=False,  # as timm does without a GPU
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter or None,
        auto_augment=augment.auto_augment,
        interpolation=augment.train_interpolation,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    torch.manual_seed(config.seed)
    model = create_model(f"{MODEL}_baseline", num_classes=len(loader.dataset.reader.class_to_idx))
    optimizer = create_optimizer_v2(
        model, opt=settings.name, lr=settings.lr, weight_decay=settings.weight_decay, momentum=settings.momentum
    )
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=config.epochs, updates_per_epoch=len(loader), step_on_epochs=False
    )
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(config.epochs):
        model.train()
        losses, batch_time, updates, started = AverageMeter(), AverageMeter(), epoch * len(loader), time.time()
        for image, label in loader:
            image = image.contiguous()
            loss = loss_function(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            losses.update(loss.item(), len(label))
            batch_time.update(time.time() - started)
            scheduler.step_update(num_updates=updates, metric=losses.avg)
            started = time.time()
            yield time.perf_counter()
        scheduler.step(epoch + 1, losses.avg)

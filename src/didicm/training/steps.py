"""Taking steps: the optimiser, its schedule, and what happens where a gradient is not finite."""

import logging
import math
import re
from pathlib import Path
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from didicm.errors import UserError, reason
from didicm.settings import TrainConfig
from didicm.training.devices import gather, scatter, works_behind
from didicm.training.state import Snapshot, TrainState

# It would say of a training of one step that its learning rate does not change.
logging.getLogger("timm.scheduler.cosine_lr").setLevel(logging.ERROR)

LAYERWISE = re.compile("lamb|lar[cs]")  # in timm's names of optimisers that adapt the step to each layer
ZERO_STARTED_LR = 0.1  # of the others' learning rate, for what those optimisers leave unscaled
MAX_SKIPPED = 50  # steps in a row that half precision may skip; full precision has no excuse


class Steps:
    """Steps of the optimiser without those whose gradient is not finite; most of them wait for no device.

    Reading a number waits for all work that a GPU has queued, so steps between two readings are taken on trust.
    Where one of them was not finite, the run goes back to a copy from before the first of them and takes them
    again, reading each. As everything random is a function of the step, that is as exact as reading every step.
    A gradient scaler (float16) skips by itself; PyTorch's waits for the device in every step, so all are read.
    """

    def __init__(self, state: TrainState, optimizer: torch.optim.Optimizer, fabric: Fabric) -> None:
        self._state, self._optimizer, self._fabric = state, optimizer, fabric
        self._scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
        self._always = self._scaled or not works_behind(fabric.device)
        self._limit = 1 if state.config.run.precision == "32-true" else MAX_SKIPPED
        self._trusted: list[Tensor] = []  # norms of the gradients since the last reading
        self._before: Snapshot | None = None  # of the first of them
        self._statistics: list[Tensor] = []
        self._read_until, self._skipped_in_a_row = 0, 0

    def must_read(self, wanted: bool) -> bool:
        """Whether to read the next step: where that is wanted or free, or where some were not finite."""
        return wanted or self._always or self._state.progress.step < self._read_until or self._skipped_in_a_row > 0

    def begin(self, *, read: bool) -> bool:
        """Keep what a skipped step must not change; True if the run had to go back to steps taken on trust."""
        went_back = read and bool(self._trusted) and not torch.stack(self._trusted).isfinite().all().item()
        if went_back:
            assert self._before is not None
            self._read_until = self._state.progress.step
            self._state.go_back(self._before, self._optimizer)
        if read:
            self._trusted, self._before = [], None
            self._statistics = [x.clone() for x in self._state.classifier.model.buffers()]
        elif not self._trusted:
            self._before = self._state.copy(self._optimizer)
        return went_back

    def clip(self, module: nn.Module) -> Tensor:
        """Norm of the gradient, which is limited where the settings say so."""
        if largest := self._state.config.optimizer.clip:
            clipped = self._fabric.clip_gradients(
                module, self._optimizer, max_norm=largest, error_if_nonfinite=False
            )
            return cast(Tensor, gather(clipped))
        # Without a limit that would multiply every gradient by one.
        precision, own = self._fabric.strategy.precision, self._optimizer.optimizer  # type: ignore[attr-defined]
        precision.unscale_gradients(own)
        norms = torch._foreach_norm([p.grad for p in precision.main_params(own) if p.grad is not None])
        return cast(Tensor, gather(torch.linalg.vector_norm(torch.stack(norms))))

    def take(self, norm: Tensor, *, read: bool) -> None:
        """Move the weights by a gradient of this norm, unless it is read and not finite."""
        finite = not read or math.isfinite(norm.item())
        if finite or self._scaled:
            self._optimizer.step()
        self._optimizer.zero_grad()
        if not finite:  # else batch statistics would keep what broke this step
            for x, before in zip(self._state.classifier.model.buffers(), self._statistics, strict=True):
                x.copy_(before)
        self._state.average()
        progress = self._state.progress
        progress.step += 1
        progress.skipped_steps += not finite
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if not read:
            self._trusted.append(norm)

    @property
    def hopeless(self) -> bool:
        """Whether too many steps in a row could not be taken."""
        return self._skipped_in_a_row >= self._limit


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Make timm's optimiser of that name."""
    settings = config.optimizer
    lr = settings.lr * (config.fraction**-0.5 if settings.scale_lr else 1)
    parameters: Any = model
    zero_started = getattr(model, "zero_started", ())
    if zero_started and LAYERWISE.search(settings.name.lower()):
        # These scale a step with the norm of the weights: those that start at zero would stay there. They do not
        # scale the steps of parameters without weight decay, which are then many times as long as those of other
        # layers: at the same learning rate the condition drowns the image in a deep trunk.
        own = [p for name, p in model.named_parameters() if name in zero_started]
        parameters = param_groups_weight_decay(model, settings.weight_decay)
        for group in parameters:
            group["params"] = [p for p in group["params"] if all(p is not x for x in own)]
        parameters.append({"params": own, "weight_decay": 0.0, "lr_scale": ZERO_STARTED_LR})
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            parameters, opt=settings.name, lr=lr, weight_decay=settings.weight_decay, momentum=settings.momentum
        )
    except AssertionError as error:  # of those that need a GPU, or a library that is not here
        raise UserError(
            f"optimizer.name {settings.name} does not work here ({reason(error)}): choose another"
        ) from error
    return optimizer


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], folder: Path) -> None:
    """Give an optimiser the state that a run in this folder had."""
    try:
        optimizer.load_state_dict(scatter(state, optimizer))
    except ValueError as error:  # of earlier versions, which grouped what starts at zero otherwise
        raise UserError(
            f"{folder} holds an optimiser's state with other groups of weights, as of another version of didicm: "
            "train anew in another --out"
        ) from error


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int, total_steps: int
) -> CosineLRScheduler:
    """Warm-up, then half a cosine, step by step; with snapshots, half a cosine in every cycle."""
    warmup, cycles = round(config.optimizer.warmup_epochs * steps_per_epoch), config.optimizer.snapshots or 1
    return CosineLRScheduler(
        optimizer,
        t_initial=total_steps // cycles,
        warmup_t=min(warmup, total_steps // cycles // 2),  # a short run must not be all warm-up
        warmup_lr_init=1e-6,
        cycle_limit=cycles,
        t_in_epochs=False,
    )

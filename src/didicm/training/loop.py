"""The training loop, for diffusion and standard classifiers alike."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from didicm.checkpoint import save
from didicm.classifier import Loss
from didicm.data import Loader, Mixer, make_loader, transform_to_dict
from didicm.data.randomness import keys
from didicm.errors import UserError
from didicm.files import write_files
from didicm.settings import TrainConfig, to_yaml
from didicm.training.build import RunComponents, build, build_classifier, check_batches
from didicm.training.devices import agree, gather, is_sharded, make_fabric, scatter, stoppable
from didicm.training.state import Progress, has_state, load_state, save_state
from didicm.training.tracking import Tracker
from didicm.training.validation import validate

CONFIG, STATE, LAST, BEST = "config.yaml", "state", "last", "best"
MAX_SKIPPED = 50  # half-precision steps skipped in a row


def train(config: TrainConfig) -> Path:
    """Run or resume a training; returns the run's directory."""
    fabric = make_fabric(config.run)
    fabric.launch()
    return Training(config, build(config), fabric).run()


class Training:
    """One run: its parts, its position, and the steps that move it."""

    def __init__(self, config: TrainConfig, parts: RunComponents, fabric: Fabric) -> None:
        self.config, self.parts, self.fabric = config, parts, fabric
        self.folder = Path(config.out)
        share = check_batches(config, parts, fabric.world_size)
        self.classifier = parts.classifier
        if fabric.world_size > 1 and fabric.device.type == "cuda":
            self.classifier = nn.SyncBatchNorm.convert_sync_batchnorm(self.classifier)
        self.loader = self._loader(share)
        self.steps_per_epoch = self.loader.batches_per_epoch // config.accumulate
        self.total_steps = config.epochs * self.steps_per_epoch
        self.mixer = Mixer(config.augment, len(parts.class_names), config.seed, fabric.global_rank)

        self.position = Progress()
        self._skipped_in_a_row = 0
        self.sharded = is_sharded(config.run)
        self.ema = None
        if config.optimizer.ema is not None:
            if self.sharded:
                raise UserError(
                    "optimizer.ema does not go with fsdp, which splits the weights: leave one of them out"
                )
            # Warm-up: at first the average follows the weights, or a short run would keep its random start.
            network = self.classifier.model.to(fabric.device)
            self.ema = ModelEmaV3(network, config.optimizer.ema, use_warmup=True)
        resumed = has_state(self.folder / STATE)
        optimizer_state = self._restore() if resumed else None
        loss = Loss(self.classifier)
        self.loss = fabric.setup_module(torch.compile(loss) if config.run.compile else loss)
        optimizer = self._optimizer()  # after the module: a sharded one has other parameters
        if optimizer_state is not None:
            optimizer.load_state_dict(scatter(optimizer_state, optimizer))
        self.optimizer = fabric.setup_optimizers(optimizer)
        self.scheduler = self._scheduler()
        if not resumed and fabric.is_global_zero:
            write_files(self.folder, {CONFIG: lambda path: path.write_text(to_yaml(config), encoding="utf-8")})
        fabric.barrier()

    def run(self) -> Path:
        """Train from where the run stands to its end."""
        position, fabric = self.position, self.fabric
        tracker = Tracker(
            self.folder, self.config.run, self.total_steps, position.step, silent=not fabric.is_global_zero
        )
        saved = time.monotonic()
        try:
            with stoppable() as stop:
                while position.step < self.total_steps:
                    epoch, batch = divmod(position.step, self.steps_per_epoch)
                    self.loader.set_epoch(epoch, batch * self.config.accumulate)
                    for numbers in self._steps():
                        position.step += 1
                        tracker.step(position.step, epoch, self.config.batch_size, numbers)
                        if position.step % self.steps_per_epoch == 0:
                            self._after_epoch(epoch, tracker)
                        due = time.monotonic() - saved >= self.config.run.save_seconds
                        stopping, due = agree(fabric, bool(stop), due)
                        if stopping or due:
                            self._save()
                            saved = time.monotonic()
                        if stopping:
                            raise KeyboardInterrupt
                        if position.step % self.steps_per_epoch == 0:
                            break
            position.finished = True
            self._save()
        finally:
            tracker.close()
        return self.folder

    def _steps(self) -> Iterator[dict[str, float]]:
        """Take the steps that are left of the epoch; yields what is worth noting."""
        config, fabric = self.config, self.fabric
        batches = iter(self.loader)
        while True:
            step = self.position.step
            self.scheduler.step_update(step)
            self.loss.train()
            total = 0.0
            for part in range(config.accumulate):
                drawn = next(batches, None)
                if drawn is None:
                    return
                last = part == config.accumulate - 1
                with fabric.no_backward_sync(self.loss, enabled=not last):
                    loss = self.loss(*self._batch(*drawn, step * config.accumulate + part)) / config.accumulate
                    fabric.backward(loss)
                total += loss.item()
            norm = self._clip()
            if not math.isfinite(norm) and config.run.precision != "16-mixed":
                self._stop_broken(step, total, norm)
            self._update()
            yield {"loss": total, "gradient_norm": norm, "lr": self.optimizer.param_groups[0]["lr"]}

    def _batch(self, image: Tensor, label: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Image, target, random numbers and weights of one part of a step: all functions of seed and part."""
        config, fabric, classifier = self.config, self.fabric, self.classifier
        seed = int(keys(config.seed, part)) % 2**63
        torch.manual_seed(seed + fabric.global_rank)  # dropout and the like
        # Numbers for the whole batch, dealt out as the loader deals the images: any split draws the same noise.
        shape = len(image) * fabric.world_size, classifier.draws_per_image, classifier.numbers_per_draw
        numbers = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        numbers = numbers[fabric.global_rank :: fabric.world_size].to(image.device)
        image, target = self.mixer(image, label, part)
        weight = None
        if self.parts.class_weight is not None:
            weight = target @ self.parts.class_weight.to(target.device)
        return image, Loss.bits(target), Loss.bits(numbers), None if weight is None else Loss.bits(weight)

    def _clip(self) -> float:
        largest = self.config.optimizer.clip or math.inf
        norm = self.fabric.clip_gradients(self.loss, self.optimizer, max_norm=largest, error_if_nonfinite=False)
        return gather(norm).item()

    def _update(self) -> None:
        """Step the optimiser; count the steps that half precision had to skip."""
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        before = scaler.get_scale() if scaler else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if scaler:
            skipped = scaler.get_scale() < before
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
            self.position.skipped_steps += int(skipped)
            if self._skipped_in_a_row >= MAX_SKIPPED:
                self._stop_broken(self.position.step, math.nan, math.inf)
        if self.ema is not None:
            self.ema.update(self.classifier.model, step=self.position.step)

    def _after_epoch(self, epoch: int, tracker: Tracker) -> None:
        """Validate when it is time, and keep the last and the best model."""
        self.position.unreadable = len(self.loader.skipped)
        if (epoch + 1) % self.config.run.validate_epochs and epoch + 1 < self.config.epochs:
            return
        with self._as_saved():
            metrics = validate(self.classifier, self.parts, self.config, self.fabric)
            tracker.validation(self.position.step, epoch, metrics)
            score = [metrics["cls/Acc"], metrics["cls/NLL"]]
            best = self.position.best
            better = best is None or (-score[0], score[1]) < (-best[0], best[1])
            if self.fabric.is_global_zero:
                self._save_model(LAST)
                if better:
                    self._save_model(BEST)
            self.position.best = score if better else best
        self.fabric.barrier()

    @contextmanager
    def _as_saved(self) -> Iterator[None]:
        """Use the weights that are validated and saved inside the block: averaged ones, or sharded ones joined."""
        trained = self.classifier.model
        if self.ema is not None:
            self.classifier.model = self.ema.module
        elif self.sharded:
            whole = build_classifier(self.config, len(self.parts.class_names), self.parts.view.channels).model
            whole.load_state_dict(gather(trained.state_dict()))
            self.classifier.model = whole.to(self.fabric.device)
        try:
            yield
        finally:
            self.classifier.model = trained

    def _save_model(self, name: str) -> None:
        transform = transform_to_dict(self.parts.view)
        save(self.classifier, self.folder / name, class_names=self.parts.class_names, transform=transform)

    def _save(self) -> None:
        weights = {"model": gather(self.classifier.model.state_dict())}
        optimizer = gather(self.optimizer.optimizer.state_dict())
        if self.fabric.is_global_zero:
            if self.ema is not None:
                weights["ema"] = self.ema.module.state_dict()
            save_state(self.folder / STATE, self.position, weights, optimizer)
        self.fabric.barrier()

    def _restore(self) -> dict[str, Any]:
        self.position, weights, optimizer = load_state(self.folder / STATE)
        self.classifier.model.load_state_dict(weights["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(weights["ema"])
        return optimizer

    def _stop_broken(self, step: int, loss: float, norm: float) -> None:
        self._save()
        raise UserError(
            f"step {step + 1} has a loss of {loss:g} and a gradient of norm {norm:g}: training cannot go on; try "
            f"a lower optimizer.lr, optimizer.clip 1.0 or run.precision 32-true in a new --out "
            f"(the state before that step is in {self.folder})"
        )

    def _loader(self, share: int) -> Loader:
        config = self.config
        return make_loader(
            self.parts.train,
            self.parts.train_transform,
            share,
            train=True,
            seed=config.seed,
            workers=config.run.workers,
            repeats=config.augment.repeats,
            balanced=config.balance == "sampling",
            corruption=self.parts.corrupt_train,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            device=self.fabric.device,
        )

    def _optimizer(self) -> torch.optim.Optimizer:
        settings = self.config.optimizer
        lr = settings.lr * (self.config.fraction**-0.5 if settings.scale_lr else 1)
        try:
            return create_optimizer_v2(
                self.classifier.model,
                opt=settings.name,
                lr=lr,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
            )
        except (KeyError, ValueError, AssertionError) as error:
            raise UserError(f"optimizer.name {settings.name!r} is none of timm's optimizers: {error}") from error

    def _scheduler(self) -> CosineLRScheduler:
        warmup = round(self.config.optimizer.warmup_epochs * self.steps_per_epoch)
        return CosineLRScheduler(
            self.optimizer,
            t_initial=self.total_steps,
            warmup_t=min(warmup, self.total_steps // 2),  # a short run must not be all warm-up
            warmup_lr_init=1e-6,
            t_in_epochs=False,
        )

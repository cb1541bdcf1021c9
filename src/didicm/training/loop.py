"""The training loop, for diffusion and standard classifiers alike: read it from top to bottom."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import torch
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor, nn

from didicm.classifier import Loss
from didicm.data import Loader, Mixer, make_loader
from didicm.data.folder import keep_listings
from didicm.data.loader import check_readable
from didicm.data.randomness import keys
from didicm.errors import UserError
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.run import evaluate
from didicm.files import clear_leftovers, write_files
from didicm.processes import held, stoppable
from didicm.settings import TrainConfig, to_yaml
from didicm.text import SafeConsole, count
from didicm.training.build import RunComponents, build, check_batches, check_settings
from didicm.training.devices import (
    agree,
    first_alone,
    fixed_statistics,
    gather_rows,
    gather_texts,
    image_layout,
    make_fabric,
    seed_device,
    share_statistics,
    tune,
)
from didicm.training.features import FEATURES, with_features
from didicm.training.state import (
    BEST,
    CONFIG,
    CYCLES,
    HELD,
    LAST,
    SNAPSHOTS,
    STATE,
    TrainState,
    check_cycles,
    ended_cycle,
    has_state,
    holds_run,
    join_cycles,
    keep,
    resume,
    run_folder,
)
from didicm.training.steps import Steps, make_optimizer, make_scheduler, restore_optimizer
from didicm.training.tracking import Tracker

OnStep = Callable[[int, int], object]  # is told the steps done and to do


class DivergedError(UserError):
    """A training whose gradients are not finite any more."""


def train(
    config: TrainConfig,
    *,
    extend: bool = False,
    components: RunComponents | None = None,
    on_step: OnStep | None = None,
    console: Console | None = None,
) -> Path:
    """Run or resume a training; returns the run's directory.

    Ctrl-C, SIGTERM and SLURM's SIGUSR1 or SIGUSR2 save the run after the step that is being taken, then raise
    KeyboardInterrupt.

    Args:
        config: all settings; a run that exists in `config.out` goes on, if all but run.* are as they were.
        extend: let an existing run have more epochs.
        components: what `build` made of the settings, if some of it is to be other.
        on_step: called after every step.
        console: where progress is shown.
    """
    if not isinstance(config, TrainConfig):
        raise UserError(f"train takes what load_recipe('small', data=...) returns, got {type(config).__name__}")
    # A study's folders hold more than a run, and are its own.
    folder = run_folder(config.out) if components is None else Path(config.out)
    if holds_run(folder):
        config = resume(folder, config, extend=extend, elsewhere=True)
    check_settings(config)  # before processes are started
    fabric = make_fabric(config.run)
    fabric.launch()
    tune(fabric.device)
    run = components or build(config, fresh=not has_state(folder))
    if run.class_weight is not None:
        run = replace(run, class_weight=run.class_weight.to(fabric.device))
    if run.teacher is not None:
        run.teacher.to(fabric.device)
    check_batches(config, run, fabric.world_size)  # before anything is written
    check_cycles(config, run.classifier)
    make_optimizer(config, run.classifier.model)  # or say why it cannot be made
    console = console or SafeConsole(soft_wrap=True)
    with ExitStack() as until_the_end:
        first_alone(fabric, lambda: until_the_end.enter_context(held(folder, HELD)))
        return _train(config, run, fabric, folder, on_step, console)


def _train(
    config: TrainConfig, run: RunComponents, fabric: Fabric, folder: Path, on_step: OnStep | None, console: Console
) -> Path:
    """The loop itself, in a folder that nobody else trains in."""
    # The state: weights, their average, optimiser and position, restored if the run exists.
    state = TrainState.make(config, run.classifier, fabric)
    resumed = has_state(folder)
    optimizer_state = state.restore(folder, fabric, run.class_names) if resumed else None
    progress, classifier = state.progress, state.classifier
    before = progress.images or len(run.train)
    progress.classes, progress.images = run.class_names, len(run.train)
    first_alone(fabric, lambda: _open_folder(folder, config, run.index))

    # Batches of images, or of what a frozen backbone makes of them
    run = with_features(config, run, fabric, folder, console.print)
    loader = _training_loader(config, run, fabric)
    steps_per_epoch = loader.batches_per_epoch // config.accumulate
    total_steps = config.epochs * steps_per_epoch

    def batches_from(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What is left of an epoch at a step."""
        epoch, done = divmod(step, steps_per_epoch)
        loader.set_epoch(epoch, done * config.accumulate)
        return iter(loader)

    mixer = Mixer(config.augment, len(run.class_names), config.seed, fabric.global_rank)

    # What moves the weights
    loss_module = Loss(classifier)
    compiled = cast(nn.Module, torch.compile(loss_module)) if config.run.compile else loss_module
    module = fabric.setup_module(compiled)
    # After `setup_module`: sharding makes other parameters.
    torch_optimizer = make_optimizer(config, classifier.model)
    if optimizer_state is not None:
        restore_optimizer(torch_optimizer, optimizer_state, folder)
    optimizer = cast(torch.optim.Optimizer, fabric.setup_optimizers(torch_optimizer))
    scheduler = make_scheduler(config, torch_optimizer, steps_per_epoch, total_steps)
    annealing = state.annealing(total_steps)
    if resumed and fabric.is_global_zero:
        news = "" if before == progress.images else f", on {count(progress.images, 'image')}, {before:,} before"
        console.print(f"resuming from step {progress.step} of {total_steps}{news}", highlight=False)

    steps = Steps(state, optimizer, fabric)
    recomputing = partial(fixed_statistics, classifier.model) if config.run.grad_checkpointing else nullcontext
    layout = image_layout(classifier.model, fabric.device)
    silent, saved = not fabric.is_global_zero, time.monotonic()
    read = True  # whether the host looks at a step's numbers, which waits for a GPU
    with (
        stoppable() as stop,
        Tracker(folder, config.run, total_steps, progress.step, console, silent=silent) as tracker,
    ):
        for epoch in range(progress.step // steps_per_epoch, config.epochs):
            module.train()
            batches = batches_from(progress.step)
            while progress.step < (epoch + 1) * steps_per_epoch:
                if steps.begin(read=read):  # back to an earlier one
                    batches = batches_from(progress.step)

                # Loss and gradient, in `accumulate` parts
                scheduler.step_update(min(progress.step, annealing))
                losses = []
                for part in range(config.accumulate):
                    number = progress.step * config.accumulate + part
                    batch = _batch(*next(batches), number, config, run, mixer, layout, fabric)
                    with fabric.no_backward_sync(module, enabled=part < config.accumulate - 1):
                        part_loss = module(*batch) / config.accumulate
                        with recomputing():
                            fabric.backward(part_loss)
                    losses.append(part_loss.detach())

                # Step, unless the gradient is not finite
                norm = steps.clip(module)
                steps.take(norm, read=read)
                if steps.hopeless:
                    state.save(folder, optimizer, fabric)
                    _stop_broken(folder, progress.step, sum(x.item() for x in losses), norm.item())

                # Log
                numbers = None
                if read:
                    losses = [fabric.all_reduce(x, reduce_op="mean") for x in losses]
                    lr, skipped = torch_optimizer.param_groups[0]["lr"], progress.skipped_steps
                    numbers = {"loss": sum(x.item() for x in losses), "gradient_norm": norm.item()}
                    numbers |= {"lr": lr, "skipped_steps": skipped}
                tracker.step(progress.step, epoch + 1, config.batch_size, numbers)
                if on_step is not None:
                    on_step(progress.step, total_steps)

                # Validate, and keep the last and the best model
                last, whole = epoch + 1 == config.epochs, progress.step % steps_per_epoch == 0
                if whole and (last or (epoch + 1) % config.run.validate_epochs == 0):
                    with tracker.elsewhere(), state.as_saved():
                        share_statistics(classifier.model, fabric)
                        metrics = _validate(config, run, state, fabric, tracker, epoch + 1)
                        found = [metrics["cls/Acc"], metrics["cls/NLL"]]
                        better = progress.improved_by(*found)
                        places = [folder / name for name in ((LAST, BEST) if better else (LAST,))]
                        first_alone(fabric, partial(keep, run, classifier, *places))
                        progress.best = found if better else progress.best
                if whole and (cycle := ended_cycle(config, epoch + 1)):
                    with tracker.elsewhere(), state.as_saved():
                        first_alone(fabric, partial(keep, run, classifier, folder / CYCLES / str(cycle)))

                # Save, but only what was read; else the next step is
                saving = time.monotonic() - saved >= config.run.save_seconds
                stopping, saving, logging = agree(fabric, bool(stop), saving, tracker.due)
                if read and (stopping or saving):
                    with tracker.elsewhere():
                        state.save(folder, optimizer, fabric)
                    saved = time.monotonic()
                if read and stopping:
                    raise KeyboardInterrupt
                last_of_epoch = (progress.step + 1) % steps_per_epoch == 0
                read = steps.must_read(stopping or saving or logging or last_of_epoch)
            unreadable = gather_texts(fabric, loader.skipped.values())
            progress.unreadable = len(unreadable)
            tracker.unreadable("training", unreadable)
            if unreadable:
                tracker.write(progress.step, {"unreadable_images": len(unreadable)})
            check_readable(unreadable, len(run.train), "training")
    first_alone(fabric, partial(join_cycles, config, run, folder))
    progress.finished, progress.epochs = True, config.epochs
    state.save(folder, optimizer, fabric)
    for name in (FEATURES, CYCLES):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder


def _open_folder(folder: Path, config: TrainConfig, index: Path | None) -> None:
    """Keep the settings and the listing of large data, and remove what a killed process left."""
    write_files(folder, {CONFIG: to_yaml(config)})
    if index is not None:
        keep_listings(index)
    for place in (*(folder / name for name in (LAST, BEST, SNAPSHOTS, FEATURES)), (folder / STATE).parent):
        clear_leftovers(place)


def _batch(
    image: Tensor,
    label: Tensor,
    number: int,
    config: TrainConfig,
    run: RunComponents,
    mixer: Mixer,
    layout: torch.memory_format,
    fabric: Fabric,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Image, target, random numbers and weights of one part of a step, as functions of the seed and its number."""
    seed = int(keys(config.seed, number)) % 2**63
    seed_device(fabric.device, seed + fabric.global_rank)  # dropout and the like
    # Numbers for the whole batch, dealt out as the loader deals the images: any split draws the same noise.
    generator = torch.Generator().manual_seed(seed)
    u = run.classifier.random_numbers(len(image) * fabric.world_size, generator)
    u = u[fabric.global_rank :: fabric.world_size].to(image.device, non_blocking=True)
    image, target = mixer(image, label, number)
    if run.teacher is not None:
        with fabric.autocast():
            target = run.teacher.posterior(image, **config.teacher_sampler).probs
    weight = None if run.class_weight is None else Loss.bits(target @ run.class_weight)
    if image.ndim == 4:  # stored features have no such layout
        image = image.to(memory_format=layout)
    return image, Loss.bits(target), Loss.bits(u), weight


def _validate(
    config: TrainConfig, run: RunComponents, state: TrainState, fabric: Fabric, tracker: Tracker, epoch: int
) -> dict[str, float]:
    """Metrics of the validation images, with the real sampler; each process takes its share."""
    found = evaluate(
        state.classifier,
        run.val,
        run.eval_transform,
        corruption=run.corrupt_eval,
        batch_size=max(1, config.batch_size // fabric.world_size),
        workers=config.run.workers,
        seed=config.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        autocast=fabric.autocast,
        progress=tracker.validating(state.progress.step, epoch),
    )
    unreadable = gather_texts(fabric, found.skipped)
    tracker.unreadable("validation", unreadable)
    check_readable(unreadable, len(run.val), "validation")
    metrics = evaluate_probs(*gather_rows(fabric, found.probs[""], found.labels))
    tracker.validation(state.progress.step, epoch, metrics)
    return metrics


def _training_loader(config: TrainConfig, run: RunComponents, fabric: Fabric) -> Loader:
    return make_loader(
        run.train,
        run.train_transform,
        check_batches(config, run, fabric.world_size),
        train=True,
        seed=config.seed,
        workers=config.run.workers,
        repeats=config.augment.repeats,
        balanced=config.balance == "sampling",
        corruption=run.corrupt_train,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        device=fabric.device,
    )


def _stop_broken(folder: Path, step: int, loss: float, norm: float) -> NoReturn:
    raise DivergedError(
        f"step {step} has a loss of {loss:g} and a gradient of norm {norm:g}: training cannot go on; try "
        f"a lower optimizer.lr, optimizer.clip 1.0 or run.precision 32-true in a new --out "
        f"({folder} has the weights before that step; resumed, it goes on after it)"
    )

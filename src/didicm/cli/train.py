"""`didicm train`: from images to a model, in one command that can be stopped and resumed at any time."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from didicm.checkpoint import model_directory
from didicm.cli.flags import read_flags, show_help
from didicm.data.sources import describe_votes
from didicm.errors import UserError
from didicm.settings import TrainConfig, read_config, read_recipe, read_yaml, recipes, to_yaml
from didicm.text import SafeConsole, count, quoted
from didicm.training.build import build, check_batches, estimate, training_multiply_adds
from didicm.training.devices import is_first, make_fabric, works_behind
from didicm.training.loop import train
from didicm.training.state import (
    BEST,
    CONFIG,
    LAST,
    SNAPSHOTS,
    STATE,
    has_state,
    holds_run,
    load_state,
    resume,
    run_folder,
)
from didicm.training.tracking import METRICS
from didicm.values import coerce, override, setting_types

Options = TypeVar("Options", bound="TrainOptions")


@dataclass(frozen=True)
class TrainOptions:
    """What is no setting of the run itself.

    Args:
        recipe: settings to start from
        config: a YAML file of settings, which override the recipe's
        dry_run: show what would happen, write nothing
        extend: train an existing run for more epochs
    """

    recipe: str | None = None
    config: Path | None = None
    dry_run: bool = False
    extend: bool = False


def main(argv: list[str]) -> int:
    """Train, resume, or with --dry-run say what would happen."""
    text = (
        "Train a diffusion or standard classifier. Run it again on the same --out to resume. "
        f"Recipes: {', '.join(recipes())}."
    )
    options, given, rest = read_settings(argv, TrainOptions, "train", text)
    if rest:
        raise UserError(f"didicm train does not take {rest[0]!r}: see didicm train --help")
    return carry_out(options, TrainConfig(), *stated(options, given))


def read_settings(
    argv: Sequence[str], kind: type[Options], usage: str, description: str
) -> tuple[Options, dict[str, Any], list[str]]:
    """Options of a command that trains, settings of its run, and what has no name; --help shows them and exits."""
    own = setting_types(kind)
    given, rest = read_flags(argv, {**own, **setting_types(TrainConfig)}, usage.partition(" ")[0])
    if given.get("help"):
        print(show_help(usage, description, kind, TrainConfig))
        sys.exit(0)
    named = {name: given.pop(name) for name in own if name in given}
    options = {name: coerce(x, own[name], f"--{name.replace('_', '-')}") for name, x in named.items()}
    return kind(**options), given, rest


def carry_out(options: TrainOptions, base: TrainConfig, *changes: Mapping[str, Any]) -> int:
    """Train, resume or describe a run: a new one has these settings with the changes that the user stated.

    A run that exists has settings of its own, which what was stated must not change.
    """
    config = override(base, *changes)
    folder, console = run_folder(config.out), SafeConsole(soft_wrap=True)
    if holds_run(folder):
        config = resume(folder, override(read_config(folder / CONFIG), *changes), extend=options.extend)
    if options.dry_run:
        show_plan(config, console)
        return 0
    if is_finished(folder, config):
        console.print(f"{folder} is finished; its best model is in {model_directory(folder)}")
        return 0
    for line in describe_votes(config.data, config.labels, config.group_by):
        console.print(line)
    if config.balance != "none":
        console.print(
            f"note: balance {config.balance} makes rare classes seem as common as others, which shifts calibration"
        )
    try:
        train(config, extend=options.extend, console=console)
    except KeyboardInterrupt:
        console.print(f"stopped and saved; resume with: didicm train --out {quoted(folder)}")
        return 130
    if not is_first():
        return 0
    progress = load_state(folder)[0]
    if progress.skipped_steps:
        console.print(f"skipped {count(progress.skipped_steps, 'step')} whose gradient was not finite")
    if progress.unreadable:
        console.print(
            f"{count(progress.unreadable, 'training image')} could not be read: see didicm doctor "
            f"{quoted(config.data)}"
        )
    best = f" (NLL {progress.best[1]:.3f}, accuracy {100 * progress.best[0]:.1f} %)" if progress.best else ""
    snapshots = f"   ensemble: {folder / SNAPSHOTS}" if config.optimizer.snapshots else ""
    console.print(f"best model: {folder / BEST}{best}")
    console.print(f"last: {folder / LAST}{snapshots}   numbers: {folder / METRICS}")
    return 0


def is_finished(folder: Path, config: TrainConfig) -> bool:
    """Whether there is nothing left to do; a run that is being extended has settings ahead of its state."""
    if not has_state(folder):
        return False
    progress = load_state(folder)[0]
    return progress.finished and config.epochs == (progress.epochs or read_config(folder / CONFIG).epochs)


def stated(options: TrainOptions, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the user said, by recipe, file and flags; each overrides the one before."""
    file = read_yaml(options.config) if options.config else {}
    method = given.get("method", file.get("method", "diffusion"))
    return [read_recipe(options.recipe, method) if options.recipe else {}, file, given]


def show_plan(config: TrainConfig, console: Console) -> None:
    """Everything resolved: settings, data, cost, memory, files."""
    components, fabric = build(config), make_fabric(config.run)
    for line in describe_votes(config.data, config.labels, config.group_by):
        console.print(line)
    world = fabric.world_size
    check_batches(config, components, world)
    need = estimate(config, components, world, gpu=works_behind(fabric.device))
    counts = np.bincount(components.train.labels, minlength=len(components.class_names))
    steps = need.steps_per_epoch * config.epochs
    per_step = training_multiply_adds(config, components, need.cost) / steps
    size, channels = components.eval_transform.size, components.eval_transform.channels
    table = Table(show_header=False, box=None)
    for name, value in {
        "images": f"{len(components.train)} for training, {len(components.val)} for validation",
        "classes": f"{len(components.class_names)}, with {counts.min()} to {counts.max()} training images",
        "input": f"{size} x {size} pixels, {channels} channels",
        "model": f"{config.method} {config.model}, {need.cost.parameters / 1e6:.2f} M parameters",
        "multiply-adds": f"{need.cost.total(1) / 1e6:,.1f} M per call, {per_step / 1e9:,.1f} G per training step",
        "steps": f"{need.steps_per_epoch} per epoch, {steps} in all",
        "memory": f"{need.weights_mb:,.0f} MB for weights and optimiser, about {need.activations_mb:,.0f} MB for "
        "activations, per process",
        "device": f"{fabric.device}, {count(world, 'process')}",
        "writes": f"{config.out}/ with {CONFIG}, {METRICS}, {Path(STATE).parent}/, {LAST}/ and {BEST}/"
        + (f", and {SNAPSHOTS}/ at the end" if config.optimizer.snapshots else ""),
    }.items():
        table.add_row(name, value)
    console.print(to_yaml(config), end="")
    console.print(table)
    console.print("nothing was written (--dry-run)")

"""`didicm train`: from images to a model, in one command that can be stopped and resumed at any time."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from didicm.cli.flags import read_flags, show_help
from didicm.errors import UserError
from didicm.settings import (
    CHANGEABLE_ON_RESUME,
    TrainConfig,
    load_recipe,
    read_config,
    read_yaml,
    recipes,
    to_yaml,
)
from didicm.text import SafeConsole, count, quoted
from didicm.training.build import build, check_batches, estimate
from didicm.training.devices import make_fabric, works_behind
from didicm.training.loop import CONFIG, HELD, train
from didicm.training.state import BEST, LAST, SNAPSHOTS, STATE, has_state, load_state
from didicm.training.tracking import METRICS
from didicm.values import coerce, flatten, override, setting_types

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
    names = stated(options, given)
    return carry_out(resolve(options, given), names, dry_run=options.dry_run, extend=options.extend)


def read_settings(
    argv: Sequence[str], kind: type[Options], usage: str, description: str
) -> tuple[Options, dict[str, Any], list[str]]:
    """Options of a command that trains, settings of its run, and what has no name; --help shows them and exits."""
    own = setting_types(kind)
    given, rest = read_flags(argv, {**own, **setting_types(TrainConfig)}, usage.partition(" ")[0])
    if given.get("help"):
        print(show_help(usage, description, kind, TrainConfig))
        sys.exit(0)
    asked = {}
    for name in [name for name in own if name in given]:
        asked[name] = coerce(given.pop(name), own[name], f"--{name.replace('_', '-')}")
    return kind(**asked), given, rest


def carry_out(config: TrainConfig, names: Sequence[str], *, dry_run: bool = False, extend: bool = False) -> int:
    """Train, resume or describe a run of these settings, of which the user stated those of these names."""
    if not config.out:
        raise UserError("no --out: say where the run's directory should be")
    folder, console = Path(config.out), SafeConsole(soft_wrap=True)
    if holds_run(folder):
        config = resume(folder, config, names, extend=extend)
    elif folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {HELD}):
        raise UserError(f"{folder} is not empty and holds no run: give another --out")
    if dry_run:
        show_plan(config, console)
        return 0
    if is_finished(folder, config):
        console.print(f"{folder} is finished; its best model is in {folder / BEST}")
        return 0
    if config.balance != "none":
        console.print(
            f"note: balance {config.balance} makes rare classes seem as common as others, which shifts calibration"
        )
    try:
        train(config, console=console)
    except KeyboardInterrupt:
        console.print(f"stopped and saved; resume with: didicm train --out {quoted(folder)}")
        return 130
    progress = load_state(folder)[0]
    if progress.skipped_steps:
        console.print(f"skipped {count(progress.skipped_steps, 'step')} whose gradient was not finite")
    if progress.unreadable:
        console.print(
            f"{count(progress.unreadable, 'training image')} could not be read: see didicm doctor "
            f"{quoted(config.data)}"
        )
    snapshots = f"   ensemble: {folder / SNAPSHOTS}" if config.optimizer.snapshots else ""
    console.print(f"best model: {folder / BEST}   last: {folder / LAST}{snapshots}   numbers: {folder / METRICS}")
    return 0


def holds_run(folder: Path) -> bool:
    """Whether a folder is one of ours: somebody else's config.yaml makes no run."""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in (HELD, METRICS, STATE, LAST))


def is_finished(folder: Path, config: TrainConfig) -> bool:
    """Whether there is nothing left to do; a run that is being extended has settings ahead of its state."""
    if not has_state(folder):
        return False
    progress = load_state(folder)[0]
    return progress.finished and config.epochs == (progress.epochs or read_config(folder / CONFIG).epochs)


def resolve(options: TrainOptions, given: Mapping[str, Any]) -> TrainConfig:
    """Settings from defaults, recipe, file and flags; each overrides the one before."""
    base = TrainConfig()
    if options.recipe is not None:
        base = load_recipe(options.recipe, given.get("method", "diffusion"))
    return override(base, read_yaml(options.config) if options.config else {}, given)


def stated(options: TrainOptions, given: Mapping[str, Any]) -> list[str]:
    """Settings that the user stated, by recipe, file or flag: a run that exists must agree with these alone."""
    usual, asked = flatten(TrainConfig()), flatten(resolve(options, given))
    whole = options.recipe is not None or options.config is not None
    return [name for name in asked if name in given or (whole and asked[name] != usual[name])]


def resume(folder: Path, asked: TrainConfig, names: Sequence[str], *, extend: bool) -> TrainConfig:
    """Settings to go on with: the stored ones; a setting that was stated must be the same."""
    stored = read_config(folder / CONFIG)
    old, new = flatten(stored), flatten(asked)
    wanted = {name: new[name] for name in names if new[name] != old[name] and name != "out"}
    changes = {name: wanted.pop(name) for name in CHANGEABLE_ON_RESUME if name in wanted}
    if extend and "epochs" in wanted:
        changes["epochs"] = wanted.pop("epochs")
        if changes["epochs"] < stored.epochs:
            raise UserError(f"--extend needs more epochs than the {stored.epochs} of {folder}")
        if stored.optimizer.snapshots:
            raise UserError(
                f"--extend would change the cycles of {folder}, whose snapshots stay: give another --out"
            )
    if wanted:
        told = "; ".join(f"{name} is {old[name]}, not {value}" for name, value in wanted.items())
        remedy = "add --extend to train longer, " if list(wanted) == ["epochs"] else ""
        raise UserError(
            f"{folder} was started with other settings ({told}): {remedy}"
            f"resume it with just --out {quoted(folder)}, or give another --out"
        )
    return replace(override(stored, changes), out=str(folder))


def show_plan(config: TrainConfig, console: Console) -> None:
    """Everything resolved: settings, data, cost, memory, files."""
    components, fabric = build(config), make_fabric(config.run)
    world = fabric.world_size
    check_batches(config, components, world)
    need = estimate(config, components, world, gpu=works_behind(fabric.device))
    counts = np.bincount(components.train.labels, minlength=len(components.class_names))
    per_step = 3 * need.cost.total(config.draws_per_image) * config.batch_size
    size, channels = components.eval_transform.size, components.eval_transform.channels
    table = Table(show_header=False, box=None)
    for name, value in {
        "images": f"{len(components.train)} for training, {len(components.val)} for validation",
        "classes": f"{len(components.class_names)}, with {counts.min()} to {counts.max()} training images",
        "input": f"{size} x {size} pixels, {channels} channels",
        "model": f"{config.method} {config.model}, {need.cost.parameters / 1e6:.2f} M parameters",
        "multiply-adds": f"{need.cost.total(1) / 1e6:,.1f} M per call, {per_step / 1e9:,.1f} G per training step",
        "steps": f"{need.steps_per_epoch} per epoch, {need.steps_per_epoch * config.epochs} in all",
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

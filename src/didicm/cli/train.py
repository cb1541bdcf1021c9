"""`didicm train`: from images to a model, in one command that can be stopped and resumed at any time."""

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table

from didicm.errors import UserError
from didicm.settings import TrainConfig, differences, recipe_path, recipes, to_yaml
from didicm.training.build import build, check_batches, estimate
from didicm.training.loop import BEST, CONFIG, LAST, STATE, train
from didicm.training.state import has_state, load_state
from didicm.training.tracking import METRICS


def main(argv: list[str]) -> int:
    """Train, resume, or with --dry-run say what would happen."""
    parser = make_parser()
    parsed = parser.parse_args(expand_recipe(argv))
    config = to_config(parser, parsed)
    if not config.out:
        raise UserError("no --out: say where the run's directory should be")
    folder = Path(config.out)
    stored = read_stored(folder, parser)
    if stored is not None:
        config = resume(stored, config, asked=_asked(argv), folder=folder)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is in use and holds no run: give another --out")
    console = Console(soft_wrap=True)
    if parsed.dry_run:
        show_plan(config, console)
        return 0
    if has_state(folder / STATE) and load_state(folder / STATE)[0].finished:
        console.print(f"{folder} is finished; its best model is in {folder / BEST}")
        return 0
    warn(config, console)
    try:
        train(config)
    except KeyboardInterrupt:
        console.print(f"stopped and saved; resume with: didicm train --out {folder}")
        return 130
    position = load_state(folder / STATE)[0]
    if position.skipped_steps:
        console.print(f"half precision skipped {position.skipped_steps} steps")
    if position.unreadable:
        console.print(f"{position.unreadable} images could not be read: didicm doctor {config.data} names them")
    console.print(f"best model: {folder / BEST}   last: {folder / LAST}   numbers: {folder / METRICS}")
    return 0


def make_parser() -> ArgumentParser:
    """The flags: every field of TrainConfig, `--recipe`, `--config` and `--dry-run`."""
    parser = ArgumentParser(
        prog="didicm train",
        description="Train a diffusion or standard classifier. Run it again on the same --out to resume.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", help=f"settings to start from: {', '.join(recipes())}")
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file of settings")
    parser.add_argument("--dry-run", action="store_true", help="show what would happen, write nothing")
    parser.add_class_arguments(TrainConfig)
    return parser


def expand_recipe(argv: list[str]) -> list[str]:
    """Replace `--recipe NAME` by its YAML file, before all other flags so that they override it."""
    rest, name, method = [], None, "diffusion"
    values = iter(argv)
    for flag in values:
        key, equals, value = flag.partition("=")
        if key == "--recipe":
            name = value if equals else next(values, "")
            continue
        if key == "--method":
            method = value if equals else next(values, "")
            rest.append(f"--method={method}")
            continue
        rest.append(flag)
    return rest if name is None else [f"--config={recipe_path(name, method)}", *rest]


def to_config(parser: ArgumentParser, parsed: Namespace) -> TrainConfig:
    """Settings as dataclasses."""
    made = parser.instantiate_classes(parsed)
    return TrainConfig(**{field.name: made[field.name] for field in fields(TrainConfig)})


def read_stored(folder: Path, parser: ArgumentParser) -> TrainConfig | None:
    """Settings of a run that exists."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        return to_config(parser, parser.parse_object(text))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def resume(stored: TrainConfig, config: TrainConfig, asked: bool, folder: Path) -> TrainConfig:
    """Settings to go on with: the stored ones, unless others were asked for, which is refused."""
    if not asked:
        return stored
    changed = differences(stored, config)
    if changed:
        raise UserError(
            f"{folder} was started with other settings ({'; '.join(changed)}): "
            f"resume it with just --out {folder}, or give another --out"
        )
    return config


def warn(config: TrainConfig, console: Console) -> None:
    """Say what a user should know before hours pass."""
    if config.balance != "none":
        console.print(
            f"note: balance {config.balance} makes rare classes seem as common as others, which shifts calibration"
        )


def show_plan(config: TrainConfig, console: Console) -> None:
    """Everything resolved: settings, data, cost, memory, files."""
    parts = build(config)
    world = config.run.devices * config.run.nodes if isinstance(config.run.devices, int) else config.run.nodes
    check_batches(config, parts, world)
    need = estimate(config, parts, world)
    counts = np.bincount(parts.train.labels, minlength=len(parts.class_names))
    per_step = 3 * need.cost.total(config.draws_per_image) * config.batch_size
    table = Table(show_header=False, box=None)
    for name, value in {
        "images": f"{len(parts.train)} for training, {len(parts.val)} for validation",
        "classes": f"{len(parts.class_names)}, with {counts.min()} to {counts.max()} training images",
        "input": f"{parts.view.size} x {parts.view.size} pixels, {parts.view.channels} channels",
        "model": f"{config.method} {config.model}, {need.cost.parameters / 1e6:.2f} M parameters",
        "multiply-adds": f"{need.cost.total(1) / 1e6:,.1f} M a call, {per_step / 1e9:,.1f} G a training step",
        "steps": f"{need.steps_per_epoch} an epoch, {need.steps_per_epoch * config.epochs} in all",
        "memory": f"{need.weights_mb:,.0f} MB for weights and optimiser, about {need.activations_mb:,.0f} MB for "
        "activations, on each process",
        "writes": f"{config.out}/ with {CONFIG}, {METRICS}, {STATE}/, {LAST}/ and {BEST}/",
    }.items():
        table.add_row(name, value)
    console.print(to_yaml(config), highlight=False, end="")
    console.print(table)
    console.print("nothing was written (--dry-run)")


def _asked(argv: list[str]) -> bool:
    """Whether any setting but --out was given."""
    keys = [flag.partition("=")[0] for flag in argv if flag.startswith("--")]
    return any(key not in ("--out", "--dry-run") for key in keys)


if __name__ == "__main__":  # what lightning-fabric starts again for every further process
    sys.exit(main(sys.argv[1:]))

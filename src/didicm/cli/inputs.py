"""What the commands that use a model share: which run, which images, which flags."""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from didicm.checkpoint import HUB, Checkpoint, load
from didicm.data import Corruptions, ImageSet, hold_out, open_data
from didicm.diffusion.sampling import Select, Solver
from didicm.errors import UserError
from didicm.evaluation.run import (
    Evaluation,
    model_directory,
    resolve_sampler,
    view_of,
)

POSTERIORS, METRICS, CLASSES = "posteriors.safetensors", "metrics.json", "classes.json"
WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Run:
    """A model, and what is known of the training it comes from."""

    model: str | Path  # directory, or its address on the hub
    data: str | None = None  # what it was trained on
    val_fraction: float = 0.0
    seed: int = 0
    corrupt_eval: str | None = None


def open_run(source: str) -> Run:
    """Find the model of a run or a model directory, and the settings of the run around it."""
    model = model_directory(source)
    if str(model).startswith(HUB):
        return Run(model)
    for path in (Path(model) / "config.yaml", Path(model).absolute().parent / "config.yaml"):
        if path.is_file():
            try:
                stored = yaml.safe_load(path.read_text(encoding="utf-8"))
                return Run(
                    model,
                    str(stored["data"]),
                    float(stored["val_fraction"]),
                    int(stored["seed"]),
                    stored["corrupt_eval"],
                )
            except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): restore it") from error
    return Run(model)


def choose_images(uri: str, split: str | None, checkpoint: Checkpoint, run: Run) -> tuple[ImageSet, str]:
    """The images to look at, and a few words on which they are; the training's own split is cut again."""
    data = open_data(uri, channels=view_of(checkpoint).channels, strict=False)
    own = data.val is None and run.data is not None and same_place(uri, run.data)
    if own:
        data = hold_out(data, run.val_fraction, run.seed)
    if split == "train":
        return data.train, f"training split of {uri}"
    if data.val is not None:
        return data.val, f"held out from training on {uri}" if own else f"validation split of {uri}"
    if split == "val":
        raise UserError(f"--data {uri} has no validation split: leave out --split to use all of its images")
    return data.train, f"all of {uri}"


def same_place(one: str, other: str) -> bool:
    """Whether two URIs name the same data."""
    one, other = one.removeprefix("folder:"), other.removeprefix("folder:")
    paths = [Path(uri).expanduser() for uri in (one, other)]
    return one == other or (all(path.exists() for path in paths) and os.path.samefile(*paths))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of all commands that run a model over labelled images."""
    parser.add_argument("run", metavar="RUN", help="a run (its best model), a model directory, or hf://owner/name")
    parser.add_argument("--data", required=True, help="where the images are, as for didicm train")
    add_sampler_flags(parser)
    parser.add_argument(
        "--corruption", type=_corruption, help="spoil the images first: noise:3, blur:2+jpeg:4, ..."
    )
    parser.add_argument("--batch-size", type=at_least_one, default=64, help="default 64")
    parser.add_argument(
        "--workers", type=at_least_zero, default=WORKERS, help=f"processes that decode (default {WORKERS})"
    )
    parser.add_argument("--seed", type=int, help="of sampler, corruption and intervals")


def add_sampler_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that change how a model is asked; those not given stay as stored with it."""
    group = parser.add_argument_group("how to ask the model (default: as stored with it)")
    group.add_argument("--sampler", choices=["cp", "cl", "readout"], help="probabilities, labels, or one call")
    group.add_argument("--steps", type=at_least_one, help="diffusion steps")
    group.add_argument("--chains", type=at_least_one, help="chains of sampler cl")
    group.add_argument("--select", choices=get_args(Select), help="label that sampler cp asks about")
    group.add_argument("--solver", choices=get_args(Solver), help="how to step")
    group.add_argument("--size", type=at_least_one, metavar="PX", help="input size in pixels")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")


def sampler_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampler's settings that were given."""
    names = {"sampler": "method", "steps": "steps", "chains": "chains", "select": "select", "solver": "solver"}
    given = {name: getattr(arguments, flag) for flag, name in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def load_model(run: Run, arguments: argparse.Namespace) -> tuple[Checkpoint, dict[str, Any]]:
    """The model on its device, with the size that was asked for, and the settings of its sampler."""
    checkpoint = load(run.model)
    settings = sampler_settings(arguments)
    if resolve_sampler(checkpoint.classifier, settings) is not None and arguments.seed is not None:
        settings["seed"] = arguments.seed
    if arguments.size is not None:
        checkpoint = replace(checkpoint, transform=view_of(checkpoint, arguments.size).to_dict())
    checkpoint.classifier.to(find_device(arguments.device))
    return checkpoint, settings


def find_device(name: str) -> torch.device:
    """The device of a flag."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return torch.device(name)


@contextmanager
def progress_of(console: Console, seconds: float = 10) -> Iterator[Any]:
    """A function to call with images done and to do: a bar on a terminal, a line now and then elsewhere."""
    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("images", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            console.print(f"{done}/{total} images", highlight=False)

    yield line


def hint_corruption(run: Run, corruption: Corruptions | None, console: Console) -> None:
    """Remind of the corruption that the run validated with."""
    if run.corrupt_eval and corruption is None:
        console.print(
            f"note: training validated on spoilt images; add --corruption {run.corrupt_eval} to do the same",
            highlight=False,
        )


def tell_skipped(result: Evaluation, console: Console) -> None:
    """Name an image that could not be read."""
    if result.skipped:
        console.print(
            f"{len(result.skipped)} images are left out, the first: {result.skipped[0]}", highlight=False
        )


def at_least_one(text: str, least: int = 1) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def at_least_zero(text: str) -> int:
    """A whole number, not below 0, for argparse."""
    return at_least_one(text, 0)


def _corruption(text: str) -> Corruptions:
    try:
        return Corruptions.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

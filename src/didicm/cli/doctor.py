"""`didicm doctor`: look at the data before training."""

import argparse
from pathlib import Path

from rich.console import Console

from didicm.cli.train import expand_recipe, make_parser, to_config
from didicm.data import TrainTransform, open_data
from didicm.data.doctor import examine, render
from didicm.errors import UserError
from didicm.training.build import find_view


def main(argv: list[str]) -> int:
    """Examine the data, print the findings; exit code 1 when there are problems."""
    parser = argparse.ArgumentParser(
        prog="didicm doctor",
        description="Scan images before training: unreadable files, tiny classes, imbalance, duplicates, sizes.",
        allow_abbrev=False,
    )
    parser.add_argument("data", help="where the images are, as for didicm train --data")
    parser.add_argument("--recipe", default="small", help="whose transforms to draw (default small)")
    parser.add_argument(
        "--examples", type=Path, default=Path("doctor.png"), help="where to draw what the transforms do"
    )
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    settings = make_parser()
    config = to_config(settings, settings.parse_args(expand_recipe(["--recipe", arguments.recipe])))
    transform, channels = None, config.image.channels or 3
    try:
        view = find_view(config.image, open_data(arguments.data, channels=channels, strict=False))
        transform, channels = TrainTransform(config.augment, view), view.channels
    except UserError as error:  # nothing to draw, but still something to report
        console.print(str(error))
    findings = examine(
        arguments.data, channels=channels, transform=transform, examples=arguments.examples, console=console
    )
    for part in render(findings):
        console.print(part)
    return 1 if findings.problems else 0

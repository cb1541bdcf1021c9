"""`didicm models`: the networks, and what they cost."""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from didicm.models import ScoreModel, cost, create_model, list_models


def main(argv: list[str]) -> None:
    """Print one line per network."""
    parser = argparse.ArgumentParser(
        prog="didicm models",
        description="List the networks with their parameters and multiply-adds for one image.",
        allow_abbrev=False,
    )
    parser.add_argument("--size", type=int, default=224, help="image size in pixels (default 224)")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes (default 1000)")
    parser.add_argument("--channels", type=int, default=3, help="image channels (default 3)")
    parser.add_argument("--steps", type=int, default=8, help="network calls of a posterior (default 8)")
    arguments = parser.parse_args(argv)
    if min(arguments.size, arguments.channels, arguments.steps) < 1 or arguments.classes < 2:
        parser.error("--size, --channels and --steps must be at least 1, --classes at least 2")

    table = Table("model", "parameters", "one call", f"{arguments.steps} calls", "kind")
    for column in table.columns[1:4]:
        column.justify = "right"
    for name in list_models():
        with torch.device("meta"):  # shapes are enough to count
            model = create_model(name, num_classes=arguments.classes, in_chans=arguments.channels)
        price, scores = cost(model, arguments.size), isinstance(model, ScoreModel)
        table.add_row(
            name,
            f"{price.parameters / 1e6:.1f} M",
            f"{price.total(1) / 1e9:.3f} G",
            f"{price.total(arguments.steps) / 1e9:.3f} G" if scores else "-",
            "score network" if scores else "plain classifier",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Multiply-adds at {arguments.size} px, {arguments.classes} classes. What does not depend on the "
        "diffusion step is computed once per image. backbone_* take any timm model; shown: resnet18."
    )

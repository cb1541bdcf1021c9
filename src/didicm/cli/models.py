"""`didicm models`: the networks and what they cost."""

from dataclasses import dataclass
from typing import Annotated

import torch
from rich.table import Table

from didicm.cli.flags import parse
from didicm.cli.options import right
from didicm.models import ScoreModel, cost, create_model, list_models
from didicm.text import SafeConsole
from didicm.values import Natural, Pixels, Range


@dataclass(frozen=True)
class ModelsOptions:
    """List the networks with their parameters and multiply-adds for one image.

    Args:
        size: image size in pixels
        classes: number of classes
        channels: image channels
        steps: network calls per posterior
    """

    size: Pixels = 224
    classes: Annotated[int, Range(2)] = 1000
    channels: Natural = 3
    steps: Natural = 8


def main(argv: list[str]) -> int:
    """Print one line per network."""
    options = parse(argv, ModelsOptions, command="models")
    table = Table("model", *right("parameters", "one call", f"{options.steps} calls"), "kind")
    for name in list_models():
        with torch.device("meta"):  # shapes are enough to count
            model = create_model(name, num_classes=options.classes, in_chans=options.channels)
        price, scores = cost(model, options.size), isinstance(model, ScoreModel)
        table.add_row(
            name,
            f"{price.parameters / 1e6:.1f} M",
            f"{price.total(1) / 1e9:.3f} G",
            f"{price.total(options.steps) / 1e9:.3f} G" if scores else "-",
            "score network" if scores else "baseline",
        )
    console = SafeConsole()
    console.print(table)
    console.print(
        f"Multiply-adds at {options.size} px, {options.classes} classes. What does not depend on the diffusion "
        "step is computed once per image. backbone_* take any timm model; shown: resnet18."
    )
    return 0

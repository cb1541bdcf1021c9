"""`didicm doctor`: look at the data before training."""

import argparse
from pathlib import Path

from rich.console import Console

from didicm.data.doctor import examine, render


def main(argv: list[str]) -> int:
    """Examine the data, print the findings; exit code 1 when there are problems."""
    parser = argparse.ArgumentParser(
        prog="didicm doctor",
        description="Scan images before training: unreadable files, tiny classes, imbalance, duplicates, sizes.",
        allow_abbrev=False,
    )
    parser.add_argument("data", help="where the images are, as for didicm train --data")
    parser.add_argument("--channels", type=int, choices=[1, 3], default=3, help="1 for grey, 3 for RGB")
    parser.add_argument(
        "--examples", type=Path, default=Path("doctor.png"), help="where to draw what the transforms do"
    )
    arguments = parser.parse_args(argv)
    console = Console()
    findings = examine(arguments.data, channels=arguments.channels, examples=arguments.examples, console=console)
    for part in render(findings):
        console.print(part)
    return 1 if findings.problems else 0

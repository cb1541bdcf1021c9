"""`didicm doctor`: look at the data before training."""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from didicm.data import DataError, TrainTransform, find_transform, open_data
from didicm.data.doctor import Findings, Look, examine, save_examples, spread
from didicm.settings import load_recipe


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
    config = load_recipe(arguments.recipe)
    data = open_data(arguments.data, strict=False)
    try:
        image = config.image
        transform = find_transform(
            data, image.size, image.limit, image.channels, image.crop_pct, image.interpolation
        )
    except DataError as error:  # nothing to draw, but still something to report
        console.print(escape(str(error)))
    else:
        data = data.with_channels(transform.channels)
        save_examples(data.train, TrainTransform(config.augment, transform), arguments.examples)
        console.print(f"What the transforms do to three images: {escape(str(arguments.examples))}")
    findings = examine(data, partial(_track, console))
    for part in render(findings):
        console.print(part)
    return 1 if findings.problems else 0


def render(findings: Findings) -> Iterator[RenderableType]:
    """Yield what to print with rich, line by line and table by table."""
    splits = [split for split in (findings.train, findings.val) if split is not None]
    title = escape(findings.uri)
    table = Table("", *("train", "val")[: len(splits)], title=title, title_justify="left")
    table.add_row("images", *(f"{s.images:,}" for s in splits))
    table.add_row("classes with images", *(str(len(s.counts) - len(s.empty)) for s in splits))
    table.add_row("images per class, min/median/max", *(_slashed(spread(list(s.counts.values()))) for s in splits))
    table.add_row("largest / smallest class", *(f"{s.imbalance:.1f}" for s in splits))
    table.add_row("width, min/median/max", *(_slashed(s.widths) for s in splits))
    table.add_row("height, min/median/max", *(_slashed(s.heights) for s in splits))
    table.add_row("stored as", *(", ".join(f"{m} {n:,}" for m, n in s.modes.items()) for s in splits))
    table.add_row("unreadable", *(f"{len(s.unreadable):,}" for s in splits))
    yield table
    yield from _first([reason for s in splits for reason in s.unreadable])
    yield from _first([f"also in validation: {a} = {b}" for a, b in findings.leaks])
    yield from _first([f"under two classes: {a} = {b}" for a, b in findings.contradictions])
    # File names may hold square brackets, which rich would read as colours.
    yield from (f"[red]problem[/]  {escape(problem)}" for problem in findings.problems)
    yield from (f"[yellow]note[/]     {escape(line)}" for line in findings.advice)
    yield f"[bold]{escape(findings.verdict)}[/]"


def _first(lines: list[str], most: int = 10) -> Iterator[str]:
    yield from map(escape, lines[:most])
    if len(lines) > most:
        yield f"... and {len(lines) - most:,} more like this"


def _slashed(values: Iterable[int]) -> str:
    return "/".join(map(str, values))


def _track(console: Console, looks: Iterable[Look], split: str, count: int) -> Iterable[Look]:
    """A bar on a terminal, one line elsewhere."""
    if console.is_terminal:
        return track(looks, f"looking at {split}", total=count, console=console, transient=True)
    console.print(f"looking at {count:,} images of {split}")
    return looks

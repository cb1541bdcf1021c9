"""`didicm doctor`: look at the data before training."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from didicm.cli.flags import parse
from didicm.cli.options import percent
from didicm.data import Data, DataError, TrainTransform, find_transform, open_data, stratified_split
from didicm.data.doctor import Findings, Look, examine, save_examples, spread
from didicm.data.sources import describe_votes
from didicm.errors import UserError
from didicm.evaluation.assess import find_suspects
from didicm.evaluation.stored import open_model
from didicm.files import check_replaceable, is_our_picture
from didicm.progress import ProgressDisplay
from didicm.settings import TrainConfig, load_recipe
from didicm.text import SafeConsole, count, quoted, readable
from didicm.training.build import small_batch

MOST_SUSPECTS = 50
POOR = 0.8  # accuracy below which most doubts are likely to be the model's mistakes


@dataclass(frozen=True)
class DoctorOptions:
    """Scan images before training: unreadable files, tiny classes, imbalance, duplicates, sizes.

    Args:
        data: where the images are, as for didicm train --data
        labels: a table with the labels of the images in a folder, as for didicm train
        group_by: a column or a regular expression, as for didicm train: groups that are in two splits are reported
        check_labels: a run whose model looks for wrong labels among the images that it was not trained on
        recipe: recipe whose transforms are drawn
        examples: where to save a picture of what the transforms do
        force: replace a file there that this command did not make
    """

    data: str
    labels: str | None = None
    group_by: str | None = None
    check_labels: str | None = None
    recipe: str = "small"
    examples: Path = Path("doctor.png")
    force: bool = False


def main(argv: list[str]) -> int:
    """Examine the data, print the findings; exit code 1 when there are problems."""
    options = parse(argv, DoctorOptions, command="doctor", positional=["data"])
    console = SafeConsole(soft_wrap=True)
    if options.labels is not None and Path(options.labels).is_dir():
        raise UserError(
            f"--labels is for a table, and {options.labels} is a folder: a run whose model is to look for wrong "
            "labels is given with --check-labels"
        )
    check_replaceable(options.examples, is_our_picture, "--examples", force=options.force)
    config, notes = load_recipe(options.recipe), list[str]()
    image = config.image
    model = open_model(options.check_labels) if options.check_labels else None
    data = open_data(options.data, labels=options.labels, group_by=options.group_by, strict=False)
    for line in describe_votes(options.data, options.labels, options.group_by):
        console.print(line)
    transform = None
    try:
        transform = find_transform(
            data, image.size, image.limit, image.channels, image.crop_pct, image.interpolation
        )
    except DataError as error:  # nothing to draw, but still something to report
        console.print(readable(str(error)))
    else:
        data = data.with_channels(transform.channels)
        save_examples(data.train, TrainTransform(config.augment, transform), options.examples)
        console.print(f"What the transforms do to three images: {readable(str(options.examples))}")
    findings = examine(data, partial(_track, console))
    if transform is not None and min(findings.train.widths[1], findings.train.heights[1]) > 2 * transform.size:
        notes.append(
            f"recipe {options.recipe} scales images down to {transform.size} pixels: --image.size "
            f"{2 * transform.size} shows more of them, and --recipe finetune starts from a pretrained backbone"
        )
    if model is not None:
        suspects = find_suspects(model, options.data, labels=options.labels, group_by=options.group_by)
        told = [
            f"The model in {options.check_labels} doubts {len(suspects.found)} of "
            f"{count(suspects.ranked, 'label')} ({suspects.described}); "
            f"it is right for {percent(suspects.accuracy)} of them"
        ]
        if suspects.accuracy < POOR:
            told.append(
                "With a model that errs so often many of these labels are right and the model is wrong: look at "
                "the first ones only, or train a better model"
            )
        if left := len(data.train) + len(data.val or ()) - suspects.ranked:
            told.append(
                f"It cannot check the other {count(left, 'label')}: it has learned them, right or wrong. "
                "To check them, train with those images held out; without a validation split, --seed chooses which"
            )
        for line in (*told, *_first([str(suspect) for suspect in suspects.found], MOST_SUSPECTS)):
            console.print(readable(line))
    for part in render(findings, notes, _next_command(options, config, data)):
        console.print(part)
    return 1 if findings.problems else 0


def _next_command(options: DoctorOptions, config: TrainConfig, data: Data) -> str:
    """The training that these images are ready for, with what was said of them here."""
    words = ["didicm", "train", "--recipe", options.recipe, "--data", quoted(options.data)]
    for flag, value in (("--labels", options.labels), ("--group-by", options.group_by)):
        words += [flag, quoted(value)] if value is not None else []
    images = len(data.train)
    if data.val is None:  # as training will hold some out
        images = len(stratified_split(data.train.labels, config.val_fraction, config.seed, data.train.groups)[0])
    if images < config.batch_size:
        words += ["--batch-size", str(small_batch(images))]
    return " ".join([*words, "--out", "runs/mine"])


def render(findings: Findings, notes: Sequence[str], command: str) -> Iterator[RenderableType]:
    """Yield what to print with rich, line by line and table by table; `command` is what to do if all is well."""
    splits = [split for split in (findings.train, findings.val) if split is not None]
    title = readable(findings.uri)
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
    yield from _first([f"copy: {b} = {a}" for a, b in findings.copies])
    yield from (Text.assemble(("problem", "red"), f"  {readable(problem)}") for problem in findings.problems)
    yield from (Text.assemble(("note", "yellow"), f"     {readable(line)}") for line in (*findings.advice, *notes))
    verdict = f"Ready to train: {command}"
    if findings.problems:
        verdict = f"Fix {'this' if len(findings.problems) == 1 else 'these'} first, then look again."
    yield Text(readable(verdict), "bold")


def _first(lines: list[str], most: int = 10) -> Iterator[str]:
    yield from map(readable, lines[:most])
    if len(lines) > most:
        yield f"... and {len(lines) - most:,} more like this"


def _slashed(values: Iterable[int]) -> str:
    return "/".join(map(str, values))


def _track(console: Console, looks: Iterable[Look], split: str, count: int) -> Iterable[Look]:
    console.print(f"looking at {count:,} images of {split}")
    with ProgressDisplay(console, count) as progress:
        for done, look in enumerate(looks, 1):
            progress.update(done, f"{done:,} of {count:,} images of {split}")
            yield look

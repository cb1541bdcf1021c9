"""`didicm predict`: what is on images, how sure the model is, and how it came to that."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from didicm.cli.flags import parse
from didicm.cli.options import AskOptions, percent
from didicm.data import UnreadableImageError, open_image, readable, to_channels
from didicm.data.folder import EXTENSIONS
from didicm.errors import UserError
from didicm.files import write_files
from didicm.inference.prediction import Prediction
from didicm.inference.predictor import Predictor

MOST_DRAWN = 12  # images in a picture of trajectories


@dataclass(frozen=True)
class PredictOptions(AskOptions):
    """Options of `didicm predict`.

    Args:
        images: image files, or folders of them
        top: classes to show
        json: one line of JSON per image
        trajectory: a PNG file: draw the posterior over diffusion time
        conformal: kind of set: lac (small) or aps (adapts to the image)
    """

    images: tuple[str, ...] = ()
    top: int = 5
    json: bool = False
    trajectory: Path | None = None
    conformal: Literal["lac", "aps"] = "lac"


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    text = "Classify images: the most probable classes, the entropy, the conformal set if calibrated."
    options = parse(argv, PredictOptions, command="predict", description=text, positional=["run", "images"])
    if not options.images:
        raise UserError("didicm predict needs IMAGES: image files, or folders of them")
    if options.top < 1:
        raise UserError(f"--top must be at least 1, got {options.top}")
    console, errors = Console(soft_wrap=True, markup=False), Console(stderr=True, soft_wrap=True, markup=False)
    predictor = Predictor.load(
        options.run,
        options.device,
        calibrated=options.calibration,
        size=options.size,
        conformal=options.conformal,
        **options.sampler,
    )
    if options.trajectory is not None:
        predictor.check_trajectory()
        if options.trajectory.suffix.lower() != ".png":
            raise UserError(f"--trajectory {options.trajectory} must be a .png file")
    errors.print(predictor.note, highlight=False)
    failed, count = 0, 0
    drawn: list[tuple[Path, Prediction]] = []
    paths = find_images(options.images)
    while batch := list(islice(paths, options.batch_size)):
        read, seen = [], []
        for path in batch:
            try:
                seen.append(predictor.read(path))
                read.append(path)
            except UnreadableImageError as error:
                failed += 1
                print(f"didicm: {error}", file=sys.stderr)
        if not seen:
            continue
        wanted = options.trajectory is not None and len(drawn) < MOST_DRAWN
        predictions = predictor.predict_batch(torch.stack(seen), trajectory=wanted)
        count += len(predictions)
        for path, prediction in zip(read, predictions, strict=True):
            if options.json:
                print(json.dumps(to_line(path, prediction, options.top), ensure_ascii=False, allow_nan=False))
            else:
                show(path, prediction, predictor, options.top, console)
        drawn += list(zip(read, predictions, strict=True))[: MOST_DRAWN - len(drawn)] if wanted else []
    if drawn and options.trajectory is not None:
        draw(drawn, options.trajectory, options.top)
        left = f", the first {len(drawn)} of {count} images" if count > len(drawn) else ""
        errors.print(f"trajectories: {options.trajectory}{left}", highlight=False)
    return 2 if failed else 0


def find_images(sources: Sequence[str]) -> Iterator[Path]:
    """The files that were named, and the images in the folders that were, in order of their names."""
    for source in map(Path, sources):
        if not source.is_dir():
            yield source  # if it does not exist, reading says so
            continue
        inside = sorted(
            path
            for path in source.rglob("*")
            if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and not path.is_dir()
        )
        yield from inside or [source]


def to_line(path: Path, prediction: Prediction, top: int) -> dict[str, Any]:
    """One line of JSON."""
    line: dict[str, Any] = {
        "image": readable(str(path)),
        "classes": [{"name": label, "probability": p} for label, p in prediction.classes[:top]],
        "entropy": prediction.entropy,
        "conformal_set": prediction.conformal_set,
    }
    if prediction.trajectory is not None:
        line["trajectory"] = [{"time": time, "probs": probs.tolist()} for time, probs in prediction.trajectory]
    return line


def show(path: Path, prediction: Prediction, predictor: Predictor, top: int, console: Console) -> None:
    """A small table, the entropy and the set."""
    table = Table("class", "probability", "", title=readable(str(path)), title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, p in prediction.classes[:top]:
        table.add_row(name, percent(p), "█" * round(20 * p))
    console.print(table)
    text = f"entropy {prediction.entropy:.2f} nats, of {math.log(len(prediction.classes)):.2f} at most"
    if prediction.conformal_set is not None and predictor.rule is not None:
        held = f"{100 * (1 - predictor.rule.alpha):g} %"
        text += f"; the set that holds the truth for {held} of images: {', '.join(prediction.conformal_set)}"
    console.print(text, highlight=False)


def draw(drawn: Sequence[tuple[Path, Prediction]], path: Path, top: int) -> None:
    """One row per image: the image, and its most probable classes over diffusion time."""
    from didicm.report.images import Traced, trajectory_picture

    items = []
    for source, prediction in drawn:
        order = prediction.probs.argsort(descending=True, stable=True)[:top]
        times = [max(time, 0.0) for time, _ in prediction.trajectory or []]  # `official` ends a little below 0
        states = torch.stack([probs[order] for _, probs in prediction.trajectory or []]).numpy()  # (T, top)
        names = [name for name, _ in prediction.classes[:top]]
        items.append(Traced(readable(source.name), to_channels(open_image(source), 3), times, states, names))
    figure = trajectory_picture(items)
    try:
        write_files(path.parent, {path.name: lambda part: figure.savefig(part, dpi=120, format="png")})
    except OSError as error:
        raise UserError(f"--trajectory {path} cannot be written ({error}): give another file") from error

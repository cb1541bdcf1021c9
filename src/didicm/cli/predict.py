"""`didicm predict`: what is on images, how sure the model is, and how it came to that."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.table import Table

from didicm.cli.inputs import add_sampler_flags, at_least_one, find_device, sampler_settings
from didicm.data import UnreadableImageError, to_channels
from didicm.data.folder import EXTENSIONS
from didicm.data.images import open_image, readable
from didicm.errors import UserError
from didicm.files import write_files
from didicm.inference.predictor import Prediction, Predictor

MOST_DRAWN = 12  # images in a picture of trajectories
DRAWN_CLASSES = 5
# Okabe and Ito's colours, of different brightness; with line and marker they can be told apart in grey too.
STYLES = (
    ("#000000", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#0072B2", "-.", "^"),
    ("#009E73", ":", "D"),
    ("#CC79A7", (0, (5, 1, 1, 1, 1, 1)), "v"),
)


@dataclass(frozen=True)
class Drawn:
    """An image and its prediction, to draw."""

    name: str
    image: Image.Image
    prediction: Prediction


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    parser = argparse.ArgumentParser(
        prog="didicm predict",
        description="Classify images: the most probable classes, the entropy, the conformal set if calibrated.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run (its best model), a model directory, or hf://owner/name")
    parser.add_argument("images", metavar="IMAGES", nargs="+", help="image files, or folders of them")
    parser.add_argument("--top", type=at_least_one, default=5, help="classes to show (default 5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON an image")
    parser.add_argument("--trajectory", type=Path, metavar="PNG", help="draw the posterior over diffusion time")
    parser.add_argument("--conformal", choices=["lac", "aps"], default="lac", help="kind of set (default lac)")
    parser.add_argument("--no-calibration", action="store_true", help="leave out the stored calibration")
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="default 32")
    add_sampler_flags(parser)
    arguments = parser.parse_args(argv)
    console, errors = Console(soft_wrap=True, markup=False), Console(stderr=True, soft_wrap=True, markup=False)

    predictor = Predictor.load(
        arguments.run,
        find_device(arguments.device),
        calibrated=not arguments.no_calibration,
        size=arguments.size,
        conformal=arguments.conformal,
        **sampler_settings(arguments),
    )
    if arguments.trajectory is not None:
        check_trajectory(predictor, arguments.trajectory)
    errors.print(predictor.note, highlight=False)
    failed, count, drawn = 0, 0, list[Drawn]()
    paths = find_images(arguments.images)
    while batch := list(islice(paths, arguments.batch_size)):
        names, seen = [], []
        for path in batch:
            try:
                seen.append(predictor.read(path))
                names.append(path)
            except UnreadableImageError as error:
                failed += 1
                print(f"didicm: {error}", file=sys.stderr)
        if not seen:
            continue
        wanted = arguments.trajectory is not None and len(drawn) < MOST_DRAWN
        for path, prediction in zip(
            names, predictor.predict_batch(torch.stack(seen), trajectory=wanted), strict=True
        ):
            count += 1
            name = readable(str(path))
            if arguments.json:
                print(json.dumps(to_json(name, prediction, arguments.top), ensure_ascii=False, allow_nan=False))
            else:
                show(name, prediction, predictor, arguments.top, console)
            if wanted and len(drawn) < MOST_DRAWN:
                drawn.append(Drawn(name, to_channels(open_image(path), 3), prediction))
    if drawn:
        draw(drawn, arguments.trajectory)
        left = f", the first {len(drawn)} of {count} images" if count > len(drawn) else ""
        errors.print(f"trajectories: {arguments.trajectory}{left}", highlight=False)
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
            if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()
        )
        yield from inside or [source]


def to_json(name: str, prediction: Prediction, top: int) -> dict[str, Any]:
    """One line of output."""
    line: dict[str, Any] = {
        "image": name,
        "classes": [{"name": label, "probability": p} for label, p in prediction.classes[:top]],
        "entropy": prediction.entropy,
        "conformal_set": prediction.conformal_set,
    }
    if prediction.trajectory is not None:
        line["trajectory"] = [{"time": time, "probs": probs.tolist()} for time, probs in prediction.trajectory]
    return line


def show(name: str, prediction: Prediction, predictor: Predictor, top: int, console: Console) -> None:
    """A small table, and what else is known."""
    table = Table("class", "probability", "", title=name, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for class_name, p in prediction.classes[:top]:
        table.add_row(class_name, f"{100 * p:.1f} %", "█" * round(20 * p))
    console.print(table)
    text = f"entropy {prediction.entropy:.2f} nats, of {np.log(len(prediction.probs)):.2f} at most"
    if prediction.conformal_set is not None and predictor.rule is not None:
        held = f"{100 * (1 - predictor.rule.alpha):g} %"
        text += f"; the set that holds the truth for {held} of images: {', '.join(prediction.conformal_set)}"
    console.print(text, highlight=False)


def check_trajectory(predictor: Predictor, path: Path) -> None:
    """Refuse before any work what could not be drawn."""
    predictor.check_trajectory()
    if path.suffix.lower() != ".png":
        raise UserError(f"--trajectory {path} must be a .png file")


def draw(drawn: Sequence[Drawn], path: Path) -> None:
    """One row an image: the image, and its most probable classes over diffusion time."""
    figure = Figure(figsize=(9, 0.5 + 2.8 * len(drawn)), layout="constrained")
    axes = figure.subplots(len(drawn), 2, squeeze=False, width_ratios=[1, 2.6])
    highest = max(probs.max().item() for item in drawn for _, probs in item.prediction.trajectory)
    top = next(limit for limit in (0.25, 0.5, 0.75, 1.0) if limit == 1 or highest < 0.95 * limit)
    for k, (item, (left, right)) in enumerate(zip(drawn, axes, strict=True)):
        left.imshow(item.image, interpolation="nearest" if max(item.image.size) < 128 else "antialiased")
        left.set_axis_off()
        left.set_title(_shorten(Path(item.name).name, 26), fontsize=10)
        draw_trajectory(right, item.prediction, top)
        if k == len(drawn) - 1:
            right.set_xlabel("diffusion time: from noise (1) to the answer (0)")
    try:
        write_files(path.parent, {path.name: lambda part: figure.savefig(part, dpi=120)})
    except OSError as error:
        raise UserError(f"--trajectory {path} cannot be written ({error}): give another file") from error


def draw_trajectory(axes: Axes, prediction: Prediction, top: float = 1.0) -> None:
    """The most probable classes over time up to probability `top`, each named where its line ends."""
    names = [name for name, _ in prediction.classes[:DRAWN_CLASSES]]
    order = prediction.probs.argsort(descending=True, stable=True)[:DRAWN_CLASSES]
    times = [max(time, 0.0) for time, _ in prediction.trajectory]  # the official solver ends a little below 0
    states = np.stack([probs[order].numpy() for _, probs in prediction.trajectory])  # (T, 5)
    # The least probable first, so that the answer lies on top.
    for k in reversed(range(len(names))):
        colour, line, marker = STYLES[k]
        axes.plot(
            times,
            states[:, k],
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=4,
            linewidth=1.8,
            clip_on=False,
        )
    axes.set(xlim=(1, 0), ylim=(0, top), ylabel="probability")
    ticks = np.linspace(0, top, 6)
    axes.set_yticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for k, height in enumerate(_spread(states[-1], top)):
        axes.annotate(
            f"{_shorten(names[k], 22)}  {100 * states[-1, k]:.1f} %",
            xy=(0, states[-1, k]),
            xytext=(-0.06, height),
            color=STYLES[k][0],
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": STYLES[k][0],
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def _spread(heights: np.ndarray, top: float) -> list[float]:
    """Heights for labels of falling values, far enough apart to read and inside the axes."""
    gap, floor = 0.11 * top, 0.02 * top
    placed: list[float] = []
    for height in heights.tolist():
        placed.append(min(height, placed[-1] - gap) if placed else min(height, top))
    for k in reversed(range(len(placed))):  # push up what fell out below
        placed[k] = max(placed[k], floor)
        floor = placed[k] + gap
    return placed


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"

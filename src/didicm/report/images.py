"""Pictures of single images: their posterior through diffusion time, and errors beside a baseline's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from didicm.data.picture import from_pixels, viewable
from didicm.data.randomness import keys
from didicm.errors import UserError, reason
from didicm.evaluation.store import load_posteriors
from didicm.experiments.spec import PICTURES
from didicm.report.records import Entry, Row
from didicm.report.style import FRAME, drawing, looks
from didicm.text import readable

CLASSES, MOST_CLASSES = 5, 20  # drawn of a posterior, and at most
SHOWN = 6  # images with their trajectories
ERRORS, ERRORS_SEED = 10, 0  # images that both methods get wrong; which ones, on any machine


class Traced(NamedTuple):
    """An image and its posterior's way through diffusion time."""

    title: str
    image: Any  # a PIL image, or an array (H, W) or (H, W, 3)
    times: Sequence[float]  # T, from 1 to 0
    states: np.ndarray  # (T, k): probabilities of some or all classes
    names: Sequence[str]  # k
    truth: str | None = None


@dataclass(frozen=True)
class Pictures:
    """Some test images of a run, with its posteriors."""

    shown: Tensor  # (n,): which test images
    images: Tensor  # (n, C, H, W), uint8
    probs: Tensor  # (n, K)
    labels: Tensor  # (n,)
    class_names: list[str]
    traced: Tensor | None  # (m,): which of the n
    trajectory: Tensor | None  # (m, steps + 1, K)
    times: Tensor | None  # (steps + 1,)


def draw_trajectory(axes: Axes, item: Traced, top: int = CLASSES, limit: float = 1.0) -> None:
    """The `top` classes that end as the most probable over time, each named where its line ends."""
    last = item.states[-1]
    order = np.argsort(-last, kind="stable")[:top]
    times = [max(time, 0.0) for time in item.times]  # the official solver ends a little below 0
    heights, palette = _spread(last[order], limit), looks((str(k), False) for k in order)
    for k, height in reversed(list(zip(order, heights, strict=True))):  # so that the answer lies on top
        name, look = item.names[k], palette[str(k)]
        axes.plot(times, item.states[:, k], **look._asdict(), markersize=4, clip_on=False)
        text = f"{shorten(name, 22)}{' ✓' * (name == item.truth)}  {100 * last[k]:.1f} %"
        arrow = {"arrowstyle": "-", "color": look.color, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkB": 3}
        label = axes.annotate(text, (0, last[k]), (-0.06, height), arrowprops=arrow, annotation_clip=False)
        label.set(color=look.color, fontsize=9, va="center")
    ticks = np.linspace(0, limit, 6)
    axes.set(xlim=(1, 0), ylim=(0, limit), ylabel="probability")
    axes.set_yticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
    axes.grid(alpha=0.25)


def trajectory_picture(items: Sequence[Traced], *, columns: int = 1, top: int = CLASSES) -> Figure:
    """Images, each beside its `top` most probable classes over diffusion time, on one scale of probability."""
    top = min(top, MOST_CLASSES, max(len(item.names) for item in items))
    highest = max(float(item.states.max()) for item in items)
    limit = next(limit for limit in (0.25, 0.5, 0.75, 1.0) if limit == 1 or highest < 0.95 * limit)
    with drawing():
        figure, axes = _pairs(len(items), columns, width=6.4, height=max(2.5, 0.27 * top))
        for item, (left, right) in zip(items, axes, strict=True):
            show_image(left, item.image, item.title)
            draw_trajectory(right, item, top, limit)
        for _, right in axes[-columns:]:
            right.set_xlabel("diffusion time: from noise (1) to the answer (0)")
        # The layout's solver differs from call to call by a hair; the same picture should be the same file.
        figure.draw_without_rendering()
        for panel in figure.axes:
            left, bottom, width, height = (round(x, 3) for x in panel.get_position(original=True).bounds)
            panel.set_position((left, bottom, width, height))
        figure.set_layout_engine("none")
    return figure


def load_pictures(row: Row, folder: Path) -> Pictures:
    """What a run stored to look at, beside its posteriors."""
    posteriors = folder / str(row.measured.posteriors)
    path = posteriors.with_name(PICTURES)
    try:
        tensors = load_file(path)
        shown, images = tensors["shown"], tensors["images"]
    except (OSError, SafetensorError, KeyError) as error:
        remedy = "delete its line in results.jsonl and run again"
        raise UserError(f"{path} is missing or damaged ({reason(error)}): {remedy}") from error
    stored = load_posteriors(posteriors)
    rest = (tensors.get(name) for name in ("traced", "trajectory", "times"))
    return Pictures(shown, images, stored.probs[shown], stored.labels[shown], stored.class_names, *rest)


def trajectories(pictures: Pictures) -> Figure | None:
    """Some images with their posteriors through diffusion time, from the most to the least confident."""
    traced, paths, times, names = pictures.traced, pictures.trajectory, pictures.times, pictures.class_names
    if traced is None or paths is None or times is None or not len(traced):
        return None
    chosen = np.unique(np.linspace(0, len(traced) - 1, min(SHOWN, len(traced))).astype(int))
    items = []
    for at, path in zip(traced[chosen].tolist(), paths[chosen].numpy(), strict=True):
        truth = names[int(pictures.labels[at])]
        items.append(Traced(truth, _array(pictures.images[at]), times.tolist(), path, names, truth))
    return trajectory_picture(items, columns=min(2, len(items)))


def errors(one: Pictures, other: Pictures, entries: Sequence[Entry]) -> Figure | None:
    """Ten images at random that both sides get wrong, with both posteriors (the paper's figure `bad`)."""
    if one.images.shape != other.images.shape or not bool((one.shown == other.shown).all()):
        return None
    wrong = (one.probs.argmax(-1) != one.labels) & (other.probs.argmax(-1) != one.labels)
    places = wrong.nonzero().squeeze(1)
    if not len(places):
        return None
    chosen = places[np.argsort(keys(ERRORS_SEED, one.shown[places].numpy()))[:ERRORS]].tolist()
    palette = looks((str(entry), entry.method.baseline) for entry in entries)
    figure, axes = _pairs(len(chosen), min(2, len(chosen)), width=5.6, height=2.6)
    for at, (left, right) in zip(chosen, axes, strict=True):
        truth = int(one.labels[at])
        show_image(left, _array(one.images[at]), one.class_names[truth])
        both = one.probs[at] + other.probs[at]
        best = both.topk(min(CLASSES, len(both))).indices.tolist()
        best = best if truth in best else [*best[:-1], truth]
        y = np.arange(len(best))
        for pictures, entry, shift in zip((one, other), entries, (-0.2, 0.2), strict=True):
            colour, widths = palette[str(entry)].color, pictures.probs[at][best].numpy()
            bars = right.barh(y + shift, widths, 0.36, color=colour, edgecolor=colour, label=str(entry))
            if pictures is other:
                for bar in bars:
                    bar.set(facecolor="white", hatch="///")
        names = [shorten(one.class_names[k], 16) + " ✓" * (k == truth) for k in best]
        right.set_yticks(y, names, fontsize=8)
        right.invert_yaxis()
        right.set_xlim(0, 1)
        right.grid(axis="y", visible=False)
    figure.legend(*axes[-1][1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def show_image(axes: Axes, image: Any, title: str) -> None:
    """An image of any size, small ones as sharp pixels; a long title takes several lines."""
    pixels = np.asarray(image)
    smooth = "nearest" if max(pixels.shape[:2]) < 128 else "antialiased"
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation=smooth)
    axes.set_title(fill(shorten(title, 108), 18), fontsize=9, loc="center")
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, color=FRAME)


def shorten(text: str, length: int) -> str:
    """At most so many characters, all of which can be drawn."""
    text = readable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def _array(image: Tensor) -> np.ndarray:
    """(C, H, W) as matplotlib shows it."""
    return np.asarray(viewable(from_pixels(image.permute(1, 2, 0).numpy())))


def _pairs(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """A figure of so many images, each with a plot at its right."""
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    grid = figure.add_gridspec(rows, 2 * columns, width_ratios=[1, 2.2] * columns)
    axes = [figure.add_subplot(grid[divmod(i, 2 * columns)]) for i in range(2 * count)]
    return figure, list(zip(axes[::2], axes[1::2], strict=True))


def _spread(values: np.ndarray, top: float) -> list[float]:
    """Heights for labels of falling values, far enough apart to read and inside the axes."""
    gap, floor = min(0.11, 0.98 / len(values)) * top, 0.02 * top
    placed: list[float] = []
    for value in values.tolist():
        placed.append(min(value, placed[-1] - gap) if placed else min(value, top))
    for k in reversed(range(len(placed))):  # push up what fell out below
        placed[k] = max(placed[k], floor)
        floor = placed[k] + gap
    return placed

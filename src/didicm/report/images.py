"""Pictures of single images, from what the cells stored: trajectories through diffusion time, and errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from didicm.errors import UserError
from didicm.evaluation import load_posteriors
from didicm.experiments.cells import LABELS
from didicm.experiments.measure import MEASURED, PICTURES
from didicm.report.records import Row
from didicm.report.style import TOP5, bare, look, plt


@dataclass(frozen=True)
class Pictures:
    """Some test images of a cell, with its posteriors."""

    shown: Tensor  # (n,): which test images
    images: Tensor  # (n, C, H, W), uint8
    probs: Tensor  # (n, K)
    labels: Tensor  # (n,)
    class_names: list[str]
    traced: Tensor | None  # (m,): which of the n
    trajectory: Tensor | None  # (m, steps + 1, K)
    times: Tensor | None  # (steps + 1,)


def load_pictures(row: Row, folder: Path) -> Pictures:
    """What a cell stored to look at."""
    path = folder / MEASURED / row.key / PICTURES
    try:
        tensors = load_file(path)
        shown, images = tensors["shown"], tensors["images"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{path} is missing or damaged ({error}): delete its line in results.jsonl and run again"
        ) from error
    stored = load_posteriors(folder / row.posteriors)
    rest = (tensors.get(name) for name in ("traced", "trajectory", "times"))
    return Pictures(shown, images, stored.probs[shown], stored.labels[shown], stored.class_names, *rest)


def trajectories(pictures: Pictures, count: int = 6) -> plt.Figure | None:
    """The five most probable classes over diffusion time, next to the image; from sure to unsure."""
    if pictures.traced is None or not len(pictures.traced):
        return None
    chosen = np.unique(np.linspace(0, len(pictures.traced) - 1, min(count, len(pictures.traced))).astype(int))
    columns = min(2, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = plt.figure(figsize=(5.6 * columns, 2.7 * lines), layout="constrained")
    grid = figure.add_gridspec(lines, 2 * columns, width_ratios=[1, 2.4] * columns)
    times = pictures.times.numpy()
    for place, which in enumerate(chosen):
        line, column = divmod(place, columns)
        at = int(pictures.traced[which])
        path = pictures.trajectory[which]
        left, right = figure.add_subplot(grid[line, 2 * column]), figure.add_subplot(grid[line, 2 * column + 1])
        _show_image(left, pictures.images[at])
        truth = pictures.class_names[int(pictures.labels[at])]
        left.set_title(_short(truth, 18), fontsize=9, loc="center")
        for rank, label in enumerate(path[-1].topk(min(5, path.shape[-1])).indices.tolist()):
            colour, marker, style = TOP5[rank]
            name = pictures.class_names[label]
            shown = _short(name, 18) + (" ✓" if name == truth else "")
            right.plot(
                times, path[:, label].numpy(), color=colour, marker=marker, linestyle=style, label=shown, ms=4
            )
        right.set(xlim=(1.02, -0.02), ylim=(-0.02, 1.02))
        right.legend(fontsize=7.5, loc="upper left", labelspacing=0.25, handlelength=2.6)
        if line == lines - 1:
            right.set_xlabel("diffusion time: from noise to answer")
    return figure


def mistakes(one: Pictures, other: Pictures, methods: Sequence[str], count: int = 6) -> plt.Figure | None:
    """Images that at least one side gets wrong, with both posteriors; those first where the sides differ most."""
    if one.images.shape != other.images.shape or not bool((one.shown == other.shown).all()):
        return None
    wrong = (one.probs.argmax(-1) != one.labels) | (other.probs.argmax(-1) != one.labels)
    places = wrong.nonzero().squeeze(1)
    if not len(places):
        return None
    own = [p.probs[places].gather(1, p.labels[places].unsqueeze(1)).squeeze(1) for p in (one, other)]
    order = (own[0] - own[1]).argsort()
    # As many from either end: where one side does better, and where the other does.
    half = min(count, len(order)) // 2 or 1
    chosen = places[[*order[:half].tolist(), *order[len(order) - half :].tolist()]].unique()[:count]
    columns = min(2, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = plt.figure(figsize=(5.6 * columns, 2.5 * lines + 0.4), layout="constrained")
    grid = figure.add_gridspec(lines, 2 * columns, width_ratios=[1, 2] * columns)
    for place, at in enumerate(chosen.tolist()):
        line, column = divmod(place, columns)
        left, right = figure.add_subplot(grid[line, 2 * column]), figure.add_subplot(grid[line, 2 * column + 1])
        _show_image(left, one.images[at])
        truth = int(one.labels[at])
        left.set_title(_short(one.class_names[truth], 18), fontsize=9, loc="center")
        both = one.probs[at] + other.probs[at]
        best = both.topk(min(4, len(both))).indices.tolist()
        best = best if truth in best else [*best[:-1], truth]
        y = np.arange(len(best))
        for i, (pictures, method) in enumerate(zip((one, other), methods, strict=True)):
            colour, _, _ = look(method)
            hatch = "///" if i else None
            label = LABELS.get(method, method)
            face = "white" if i else colour
            values = pictures.probs[at][best].numpy()
            right.barh(y + 0.2 * (2 * i - 1), values, 0.36, color=face, edgecolor=colour, hatch=hatch, label=label)
        names = [_short(one.class_names[k], 16) + (" ✓" if k == truth else "") for k in best]
        right.set_yticks(y, names, fontsize=8)
        right.invert_yaxis()
        right.set_xlim(0, 1)
        right.grid(axis="y", visible=False)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _show_image(axes, image: Tensor) -> None:
    picture = image.permute(1, 2, 0).numpy()
    axes.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=255)
    bare(axes)


def _short(text: str, length: int) -> str:
    text = f" {text}" if text.startswith("_") else text  # legends leave such names out
    return text if len(text) <= length else text[: length - 1] + "…"

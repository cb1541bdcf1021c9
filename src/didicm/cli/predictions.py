"""How `didicm predict` reads images, and shows predictions: as tables, JSON, a picture, or a word on rows."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from didicm.cli.options import percent
from didicm.data.decode import own_channels, to_channels
from didicm.data.listing import NO_IMAGES, ImageRef
from didicm.data.picture import Picture, viewable
from didicm.errors import UserError
from didicm.files import SOFTWARE, write_files
from didicm.inference.bulk import Tally
from didicm.inference.prediction import Prediction, read_or_error
from didicm.text import count, readable

T = TypeVar("T")


def read_batches(
    images: Iterable[ImageRef], size: int, prepare: Callable[[Picture], T]
) -> Iterator[list[tuple[ImageRef, T | str]]]:
    """Batches of images, each with what `prepare` makes of it, or why it could not be read."""
    rest, some = iter(images), False
    while batch := list(islice(rest, size)):
        some = True
        read = [(image, read_or_error(prepare, image)) for image in batch]
        for image, found in read:
            if isinstance(found, str):
                told = f"{image.name} cannot be read as an image ({found})"
                print(f"didicm: {readable(told)}", file=sys.stderr)
        yield read
    if not some:  # an empty list on standard input
        raise UserError(NO_IMAGES)


def tell_rows(out: Path, done: Tally, calls: int) -> str:
    """What came of writing rows, in a sentence."""
    text = f"{out}: {count(done.images, 'row')} written now" if done.images else f"{out} was complete"
    if done.unreadable:
        text += f"; {done.unreadable} of them without a prediction: the column error says why"
    if readable_images := done.images - done.unreadable:
        text += f"; {count(round(done.calls / readable_images, 2), 'network call')} per image"
        if done.calls < calls * readable_images:
            text += (
                f" instead of {calls}: the early stop saved {percent(1 - done.calls / calls / readable_images)}"
            )
    return text


def to_line(image: str, prediction: Prediction | str, claimed: str | None, top: int) -> str:
    """One line of JSON: a prediction, with what is claimed of the set, or why there is none."""
    if isinstance(prediction, str):
        line: dict[str, Any] = {"image": image, "error": prediction}
    else:
        line = {"image": image, **prediction.to_record(top, claimed)}
        if prediction.trajectory is not None:
            path = prediction.trajectory
            line["trajectory"] = [{"time": time, "probs": probs.tolist()} for time, probs in path]
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    return text if is_utf8() and text == readable(text) else json.dumps(line)


def is_utf8() -> bool:
    """Whether what we print may be any character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def show(image: str, prediction: Prediction, claimed: str | None, top: int, console: Console) -> None:
    """A small table, the entropy and the set, with what is claimed of it."""
    table = Table("class", "probability", "", title=readable(image), title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, p in prediction.classes[:top]:
        table.add_row(readable(name), percent(p), ("█" if is_utf8() else "#") * round(20 * p))
    console.print(table)
    text = f"entropy {prediction.entropy:.2f} nats, of {math.log(len(prediction.classes)):.2f} at most"
    if prediction.conformal_set is not None:
        text += f"; {claimed}: {', '.join(map(readable, prediction.conformal_set))}"
    if prediction.unlike_training:
        text += (
            f"; unlike the training images (outlier score {prediction.outlier_score:.2f}): do not rely on these "
            "probabilities, and no set of classes is sure to hold the truth"
        )
    console.print(text)


def draw(drawn: Sequence[tuple[ImageRef, Prediction]], names: Sequence[str], path: Path, top: int) -> None:
    """One row per image: the image, and its most probable classes over diffusion time."""
    from didicm.report.images import Traced, trajectory_picture
    from didicm.report.style import drawing

    items = []
    for image, prediction in drawn:
        times, states = zip(*prediction.trajectory or [], strict=True)
        with image.open() as opened:
            upright = viewable(to_channels(opened, own_channels(opened)))
        items.append(Traced(Path(image.name).name, upright, times, np.stack(states), names))
    with drawing():
        figure = trajectory_picture(items, top=top)
        save = partial(figure.savefig, dpi=120, format="png", metadata=SOFTWARE)
        write_files(path.parent, {path.name: save})

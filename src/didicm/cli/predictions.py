"""How predictions are printed, whatever made them."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.cli.options import percent
from didicm.errors import UserError
from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.adjust import Adjustment
from didicm.inference.estimate import Estimate
from didicm.inference.parts import Tally
from didicm.inference.prediction import Prediction
from didicm.progress import duration
from didicm.text import readable

DEVICES = (1, 8, 64)  # for which --dry-run says what many images would take


def parse_shard(text: str) -> tuple[int, int]:
    """Which shard, and of how many."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise UserError(f"--shard must be i/n with i from 1 to n, as in 2/8, got {text!r}")
    return int(found[1]), int(found[2])


def tell_rows(out: Path, done: Tally) -> str:
    """What came of writing rows, in a sentence."""
    text = f"{out}: {done.images} rows written now" if done.images else f"{out} was complete"
    if done.unreadable:
        text += f"; {done.unreadable} of them without a prediction: the column error says why"
    if readable_images := done.images - done.unreadable:
        text += f"; {done.calls / readable_images:.3g} network calls per image"
    return text


def show_estimate(found: Estimate, workers: int, console: Console) -> None:
    """What a million and a billion images would take."""
    table = Table("images", "files", "size", *(f"{n} device{'s' if n > 1 else ''}" for n in DEVICES))
    for column in table.columns:
        column.justify = "right"
    for name, count in (("a million", 10**6), ("a billion", 10**9)):
        times = (duration(found.seconds(count, workers, n)) for n in DEVICES)
        table.add_row(name, f"{found.files(count):,}", f"{found.bytes(count) / 10**9:,.1f} GB", *times)
    console.print(table)
    console.print(
        f"measured on {found.images} images, {found.unreadable} of them unreadable: "
        f"{1e3 * found.decoding:.1f} ms to decode one, {1e3 * found.network:.1f} ms to predict it; "
        f"each device with {workers} workers that decode, the number of files with --part-size "
        f"{found.part_size}",
        highlight=False,
    )


def to_line(image: str, prediction: Prediction, top: int) -> str:
    """One line of JSON."""
    line: dict[str, Any] = {
        "image": image,
        "classes": [{"name": label, "probability": p} for label, p in prediction.classes[:top]],
        "entropy": prediction.entropy,
        "outlier_score": prediction.outlier_score,
        "unlike_training": prediction.unlike_training,
        "conformal_set": prediction.conformal_set,
    }
    if prediction.trajectory is not None:
        line["trajectory"] = [{"time": time, "probs": probs.tolist()} for time, probs in prediction.trajectory]
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    return text if is_utf8() and text == readable(text) else json.dumps(line)


def is_utf8() -> bool:
    """Whether what we print may be any character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def claim(rule: ConformalRule | None, adjustment: Adjustment | None) -> str:
    """What a conformal set is said to hold; nothing where there is none."""
    if rule is None:
        return ""
    text = f"the set that holds the truth for {100 * (1 - rule.alpha):g} % of images"
    if rule.per_class:
        return f"{text} of every class"
    restricted = adjustment is not None and adjustment.restricted
    return f"{text} of all classes, without those impossible here" if restricted else text


def show(image: str, prediction: Prediction, claimed: str, top: int, console: Console) -> None:
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
    console.print(text, highlight=False)

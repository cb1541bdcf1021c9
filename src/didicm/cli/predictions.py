"""How predictions are printed, whatever made them."""

import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.cli.options import percent
from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.prediction import Prediction
from didicm.text import readable


def to_line(image: str, prediction: Prediction, top: int) -> str:
    """One line of JSON."""
    line: dict[str, Any] = {
        "image": image,
        "classes": [{"name": label, "probability": p} for label, p in prediction.classes[:top]],
        "entropy": prediction.entropy,
        "conformal_set": prediction.conformal_set,
    }
    if prediction.trajectory is not None:
        line["trajectory"] = [{"time": time, "probs": probs.tolist()} for time, probs in prediction.trajectory]
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    return text if is_utf8() and text == readable(text) else json.dumps(line)


def is_utf8() -> bool:
    """Whether what we print may be any character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def show(image: str, prediction: Prediction, rule: ConformalRule | None, top: int, console: Console) -> None:
    """A small table, the entropy and the set."""
    table = Table("class", "probability", "", title=readable(image), title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, p in prediction.classes[:top]:
        table.add_row(readable(name), percent(p), ("█" if is_utf8() else "#") * round(20 * p))
    console.print(table)
    text = f"entropy {prediction.entropy:.2f} nats, of {math.log(len(prediction.classes)):.2f} at most"
    if prediction.conformal_set is not None and rule is not None:
        held = f"{100 * (1 - rule.alpha):g} %"
        names = ", ".join(map(readable, prediction.conformal_set))
        text += f"; the set that holds the truth for {held} of images: {names}"
    console.print(text, highlight=False)

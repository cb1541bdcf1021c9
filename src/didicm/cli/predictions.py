"""How predictions are printed, whatever made them."""

import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.prediction import Prediction


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
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def show(image: str, prediction: Prediction, rule: ConformalRule | None, top: int, console: Console) -> None:
    """A small table, the entropy and the set."""
    table = Table("class", "probability", "", title=image, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, p in prediction.classes[:top]:
        table.add_row(name, percent(p), "█" * round(20 * p))
    console.print(table)
    text = f"entropy {prediction.entropy:.2f} nats, of {math.log(len(prediction.classes)):.2f} at most"
    if prediction.conformal_set is not None and rule is not None:
        held = f"{100 * (1 - rule.alpha):g} %"
        text += f"; the set that holds the truth for {held} of images: {', '.join(prediction.conformal_set)}"
    console.print(text, highlight=False)


def percent(value: float) -> str:
    """A share, to a tenth of a per cent."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"

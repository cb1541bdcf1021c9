"""`didicm evaluate`: how good a model's posterior is on labelled images, how sure that is, and what it costs."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.checkpoint import HUB
from didicm.cli.flags import parse
from didicm.cli.options import LabelledOptions, hint_corruption, percent, right
from didicm.data.corruptions import SEVERITIES
from didicm.errors import UserError
from didicm.evaluation.assess import UNLIKE, ModelEvaluation, ShiftEvaluation, evaluate, evaluate_shift
from didicm.evaluation.calibration import Calibration
from didicm.evaluation.diagnostics import ClassRow
from didicm.evaluation.metrics import BINS, MEANINGS
from didicm.evaluation.store import is_posteriors, save_posteriors
from didicm.evaluation.stored import StoredModel
from didicm.files import SOFTWARE, check_replaceable, is_our_picture, to_json, write_files
from didicm.text import SafeConsole, count, readable
from didicm.values import Natural

POSTERIORS, METRICS, CLASSES = "posteriors.safetensors", "metrics.json", "classes.json"
MOST_CLASSES, WORST = 20, 10
NUMBERS, PICTURE = "shift.json", "shift.png"
FLAGGED = "flagged as unlike the training images"
TITLES = {"cls/Acc": "accuracy", "cls/NLL": "NLL, in nats", "cal/ECE": "ECE", UNLIKE: FLAGGED}


@dataclass(frozen=True)
class EvaluateOptions(LabelledOptions):
    """Measure a model on labelled images: metrics with intervals, cost, a table by class.

    Args:
        out: where to store the results; by default RUN/evaluation/DATA
        bins: bins of the calibration errors
        shift: measure instead how accuracy, NLL and ECE change under every corruption at severities 1 to 5
    """

    out: Path | None = None
    bins: Natural = BINS
    shift: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """What is measured, as arguments of `evaluate` and `evaluate_shift`."""
        asked = {"split": self.split, "calibrated": self.calibration, "bins": self.bins}
        return {**asked, "labels": self.labels, "group_by": self.group_by}

    def check_replaceable(self, folder: Path, names: Sequence[str], ours: Callable[[], bool]) -> None:
        """Refuse to replace files, which are written together, if they are not `ours`."""
        for name in names:
            check_replaceable(folder / name, lambda _: ours(), "--out", force=self.force)

    def about(
        self, model: StoredModel, images: str, calibration: Calibration | None, **more: Any
    ) -> dict[str, Any]:
        """What stored numbers are of."""
        return {
            "model": str(model.place),
            "weights_sha256": model.checkpoint.weights_sha256,
            "data": self.data,
            "images": images,
            **more,
            "posterior": model.posterior,
            "temperature": calibration.temperature if calibration else None,
            "seed": self.seed,
            "bins": self.bins,
        }


def main(argv: list[str]) -> int:
    """Evaluate, show, store."""
    options = parse(argv, EvaluateOptions, command="evaluate", positional=["run"])
    console = SafeConsole(soft_wrap=True)
    corruption = options.parsed_corruption()
    if options.shift and corruption is not None:
        raise UserError("--shift corrupts the images itself: leave out --corruption")
    model = options.open()
    folder = options.out or default_folder(options)
    make_folder(folder)
    if options.shift:
        return measure_shift(model, folder, options, console)
    options.check_replaceable(folder, (POSTERIORS, METRICS, CLASSES), lambda: is_posteriors(folder / POSTERIORS))
    hint_corruption(model, options.corruption, console)
    with options.loading(console) as loading:
        result = evaluate(model, options.data, **options.asked, **loading)
    _tell(len(result.labels) + len(result.skipped), result.images, result.note, result.skipped, console)
    store(folder, model, result, options, None if corruption is None else str(corruption))
    console.print(metrics_table(result))
    console.print(class_table(result.classes))
    for note in result.notes:
        console.print(f"note: {note}")
    console.print(f"posteriors, metrics and classes: {folder}/")
    return 0


def measure_shift(model: StoredModel, folder: Path, options: EvaluateOptions, console: Console) -> int:
    """`--shift`: measure what every corruption does to a model at severities 1 to 5, show, store."""
    from didicm.report.figures import shift_figure  # Matplotlib takes its time
    from didicm.report.style import drawing

    picture = folder / PICTURE
    options.check_replaceable(folder, (NUMBERS, PICTURE), lambda: picture.is_file() and is_our_picture(picture))
    with options.loading(console) as loading:
        del loading["corruption"]
        shift = evaluate_shift(model, options.data, **options.asked, **loading)
    test, seen = shift.test, {"num_images": shift.num_images, "num_skipped": len(shift.skipped)}
    about = options.about(model, test.described, test.calibration, **seen, notes=test.notes)
    numbers = {"clean": shift.clean, "mean": shift.mean, "corruptions": shift.corruptions}
    with drawing():
        save = partial(shift_figure(shift).savefig, dpi=130, format="png", metadata=SOFTWARE)
        write_files(folder, {NUMBERS: to_json({**about, **numbers}), PICTURE: save})
    _tell(shift.num_images, test.described, test.note, shift.skipped, console)
    for metric in shift.clean:
        console.print(shift_table(shift, metric))
    for note in test.notes:
        console.print(f"note: {note}")
    console.print(f"numbers and plot: {folder / NUMBERS}, {picture}")
    return 0


def _tell(images: int, described: str, note: str, skipped: Sequence[str], console: Console) -> None:
    """Which images were measured, and which could not be read."""
    console.print(f"{count(images, 'image')}: {described}; {note}")
    if skipped:
        unreadable = count(len(skipped), "unreadable image")
        console.print(f"skipped {unreadable}, the first: {skipped[0]}")


def store(
    folder: Path, model: StoredModel, result: ModelEvaluation, options: EvaluateOptions, corruption: str | None
) -> None:
    """Write the posteriors, and the numbers and the table by class as JSON."""
    about = options.about(model, result.images, result.calibration, corruption=corruption)
    numbers = {
        "metrics": result.metrics,
        "intervals": result.intervals,
        "conformal": result.conformal,
        "unlike_training": result.unlike_training,
        "num_images": len(result.labels),
        "num_skipped": len(result.skipped),
        "notes": result.notes,
        "nfe": result.nfe,
        "calls_saved": result.most_calls - result.nfe,
        "multiply_adds": result.multiply_adds,
        "images_per_second": result.images_per_second,
    }
    names = result.class_names, result.image_names
    save_posteriors(folder / POSTERIORS, result.probs, result.labels, *names, about)
    rows = [{key: _or_null(value) for key, value in asdict(row).items()} for row in result.classes]
    write_files(folder, {METRICS: to_json({**about, **numbers}), CLASSES: to_json(rows)})


def make_folder(folder: Path) -> None:
    """Make sure of the place before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created ({error.strerror}): give another --out") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable: give another --out")


def metrics_table(result: ModelEvaluation) -> Table:
    """One row per number, by its name in torch-uncertainty and in plain English."""
    table = Table("", *right("value", "95 % interval"), "meaning")
    for name, value in result.metrics.items():
        if name == "cls/Acc5" and len(result.class_names) <= 5:
            continue
        meaning, share = MEANINGS[name]
        show = percent if share else _number
        interval = result.intervals.get(name)
        table.add_row(name, show(value), "" if interval is None else " to ".join(map(show, interval)), meaning)
    for name, sets in result.conformal.items():
        meaning = f"{name.upper()} sets that hold the truth, aimed at {percent(sets['target'])}"
        table.add_row(f"{name}/coverage", percent(sets["coverage"]), "", meaning)
        table.add_row(
            f"{name}/size", f"{sets['mean_size']:.2f}", "", f"classes per set of {name.upper()}, on average"
        )
    if result.unlike_training is not None:
        table.add_row(UNLIKE, percent(result.unlike_training), "", FLAGGED)
    table.add_section()
    saved = f"; {result.most_calls} without the early stop" if result.nfe < result.most_calls else ""
    table.add_row("calls", f"{round(result.nfe, 2):g}", "", f"network calls per image{saved}")
    table.add_row("multiply-adds", _big(result.multiply_adds), "", "per image")
    table.add_row("images/s", f"{result.images_per_second:.0f}", "", "network and sampler, without reading images")
    return table


def shift_table(shift: ShiftEvaluation, metric: str) -> Table:
    """One metric: a row per corruption and one for their mean, a column per severity."""
    show = "{:.4f}".format if metric == "cls/NLL" else percent
    columns = right("clean", *map(str, SEVERITIES))
    table = Table("corruption", *columns, title=f"{TITLES[metric]}, by severity", title_justify="left")
    for name, levels in shift.corruptions.items():
        table.add_row(name, "", *(show(level[metric]) for level in levels))
    table.add_section()
    table.add_row("mean", show(shift.clean[metric]), *(show(level[metric]) for level in shift.mean))
    return table


def class_table(rows: Sequence[ClassRow]) -> Table:
    """All classes, or the worst ones where they are many."""
    shown = rows
    table = Table("class", *right("images", "recall", "precision", "confidence", "NLL"))
    if len(rows) > MOST_CLASSES:
        present = [row for row in rows if row.support]
        shown = sorted(present, key=lambda row: (row.recall, -row.nll))[:WORST]
        table.title = f"the {len(shown)} worst of {len(rows)} classes"
    for row in shown:
        shares = (percent(x) for x in (row.recall, row.precision, row.confidence))
        table.add_row(readable(row.name), str(row.support), *shares, _number(row.nll))
    return table


def default_folder(options: EvaluateOptions) -> Path:
    """Where results go: beside the model, by the name of the data and what was done to it."""
    parts = [options.data, options.split if options.split == "train" else "", options.corruption or ""]
    name = "-".join(filter(None, (re.sub(r"[^\w.]+", "-", str(part)).strip("-.") for part in parts)))
    if options.run.startswith(HUB):
        return Path("evaluation") / options.run.removeprefix(HUB).replace("/", "--") / name
    return Path(options.run) / "evaluation" / name


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _big(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)

"""`didicm evaluate`: how good a model's posterior is on labelled images, how sure that is, and what it costs."""

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.checkpoint import HUB
from didicm.cli.inputs import (
    add_flags,
    at_least_one,
    choose_images,
    hint_corruption,
    load_model,
    open_run,
    progress_of,
    same_place,
    tell_skipped,
)
from didicm.errors import UserError
from didicm.evaluation import (
    ClassRow,
    bootstrap,
    coverage,
    evaluate_probs,
    mean_size,
    per_class,
    save_posteriors,
)
from didicm.evaluation.metrics import BINS
from didicm.evaluation.run import (
    Calibration,
    Evaluation,
    describe_posterior,
    evaluate,
    find_calibration,
)
from didicm.files import write_files

POSTERIORS, METRICS, CLASSES = "posteriors.safetensors", "metrics.json", "classes.json"
MOST_CLASSES, WORST = 20, 10
# Metrics in plain English, and whether they are shares.
PLAIN = {
    "cls/Acc": ("accuracy", True),
    "cls/Acc5": ("truth among the five most probable", True),
    "cls/NLL": ("negative log-likelihood, in nats", False),
    "cls/Brier": ("Brier score, 0 to 2", False),
    "cls/Entropy": ("entropy of the posterior, in nats", False),
    "cal/ECE": ("calibration error: confidence against accuracy", True),
    "cal/aECE": ("the same, in bins of equal mass", True),
    "cal/cwECE": ("the same, class by class", True),
    "sc/AURC": ("area under risk over coverage", False),
    "sc/AUGRC": ("the same, generalised risk", False),
    "sc/Cov@5Risk": ("images that can be answered with 5 % errors", True),
    "sc/Cov@1Risk": ("images that can be answered with 1 % errors", True),
}


def main(argv: list[str]) -> int:
    """Evaluate, show, store."""
    parser = argparse.ArgumentParser(
        prog="didicm evaluate",
        description="Measure a model on labelled images: metrics with intervals, cost, a table by class.",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.add_argument("--split", choices=["val", "train"], help="default: val, or all images if there is none")
    parser.add_argument("--out", type=Path, help="where to store the results (default RUN/evaluation/DATA)")
    parser.add_argument(
        "--bins", type=at_least_one, default=BINS, help=f"bins of the calibration errors (default {BINS})"
    )
    parser.add_argument("--no-calibration", action="store_true", help="leave out the stored calibration")
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True, markup=False)

    run = open_run(arguments.run)
    checkpoint, settings = load_model(run, arguments)
    images, described = choose_images(arguments.data, arguments.split, checkpoint, run)
    calibration, note = None, "calibration left out"
    if not arguments.no_calibration:
        calibration, note = find_calibration(run.model, checkpoint, settings)
    console.print(f"{len(images)} images: {described}; {note}", highlight=False)
    hint_corruption(run, arguments.corruption, console)
    folder = arguments.out or default_folder(arguments)
    make_folder(folder)
    with progress_of(console) as progress:
        result = evaluate(
            checkpoint,
            images,
            settings=settings,
            corruption=arguments.corruption,
            batch_size=arguments.batch_size,
            workers=arguments.workers,
            temperature=calibration.temperature if calibration else 1.0,
            seed=arguments.seed or 0,
            progress=progress,
        )
    tell_skipped(result, console)

    numbers = measure(result, calibration, bins=arguments.bins, seed=arguments.seed or 0)
    about = {
        "model": str(run.model),
        "data": arguments.data,
        "images": described,
        "corruption": None if arguments.corruption is None else str(arguments.corruption),
        "posterior": describe_posterior(checkpoint, settings),
        "temperature": calibration.temperature if calibration else None,
        "seed": arguments.seed or 0,
        "bins": arguments.bins,
    }
    rows = per_class(result.probs, result.labels, result.class_names)
    store(folder, result, numbers, about, rows)
    console.print(metrics_table(result, numbers))
    console.print(class_table(rows))
    if calibration and same_place(str(calibration.fitted_on.get("data")), arguments.data):
        console.print(
            f"note: the calibration was fitted on {calibration.fitted_on.get('images')} images of the same data; "
            "on those it looks a little better than it is"
        )
    console.print(f"posteriors, metrics and classes: {folder}/", highlight=False)
    return 0


def measure(
    result: Evaluation, calibration: Calibration | None, *, bins: int = BINS, seed: int = 0
) -> dict[str, Any]:
    """Every number of an evaluation: metrics, their intervals, conformal sets, cost."""
    sets = {}
    for name, rule in (calibration.conformal if calibration else {}).items():
        inside = rule.sets(result.probs)
        sets[name] = {
            "target": 1 - rule.alpha,
            "coverage": coverage(inside, result.labels),
            "mean_size": mean_size(inside),
        }
    return {
        "metrics": evaluate_probs(result.probs, result.labels, bins=bins),
        "intervals": bootstrap(result.probs, result.labels, seed=seed, bins=bins),
        "conformal": sets,
        "num_images": len(result.labels),
        "num_skipped": len(result.skipped),
        "nfe": result.nfe,
        "multiply_adds": result.multiply_adds,
        "images_per_second": result.images_per_second,
    }


def store(
    folder: Path, result: Evaluation, numbers: dict[str, Any], about: dict[str, Any], rows: Sequence[ClassRow]
) -> None:
    """Write the posteriors, and the numbers and the table by class as JSON."""
    names = result.class_names, result.image_names
    save_posteriors(folder / POSTERIORS, result.probs, result.labels, *names, about)
    texts = {
        METRICS: {**about, **numbers},
        CLASSES: [{key: _or_null(value) for key, value in asdict(row).items()} for row in rows],
    }
    write_files(folder, {name: _json_writer(values) for name, values in texts.items()})


def make_folder(folder: Path) -> None:
    """Make sure of the place before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): give another --out") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} may not be written to: give another --out")


def metrics_table(result: Evaluation, numbers: dict[str, Any]) -> Table:
    """One row a number, by its name in torch-uncertainty and in plain English."""
    table = Table("", "value", "95 % interval", "meaning")
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, value in numbers["metrics"].items():
        if name == "cls/Acc5" and len(result.class_names) <= 5:
            continue
        meaning, share = PLAIN[name]
        show = _percent if share else _number
        interval = numbers["intervals"].get(name)
        table.add_row(name, show(value), "" if interval is None else " to ".join(map(show, interval)), meaning)
    for name, sets in numbers["conformal"].items():
        meaning = f"{name.upper()} sets that hold the truth, aimed at {_percent(sets['target'])}"
        table.add_row(f"{name}/coverage", _percent(sets["coverage"]), "", meaning)
        table.add_row(
            f"{name}/size", f"{sets['mean_size']:.2f}", "", f"classes in a set of {name.upper()}, on average"
        )
    table.add_section()
    table.add_row("calls", str(result.nfe), "", "network calls an image")
    table.add_row("multiply-adds", _big(result.multiply_adds), "", "an image")
    table.add_row("images/s", f"{result.images_per_second:.0f}", "", "network and sampler, without reading images")
    return table


def class_table(rows: Sequence[ClassRow]) -> Table:
    """All classes, or the worst ones where they are many."""
    shown = rows
    table = Table("class", "images", "recall", "precision", "confidence", "NLL")
    if len(rows) > MOST_CLASSES:
        present = [row for row in rows if row.support]
        shown = sorted(present, key=lambda row: (row.recall, -row.nll))[:WORST]
        table.title = f"the {len(shown)} worst of {len(rows)} classes"
    for column in table.columns[1:]:
        column.justify = "right"
    for row in shown:
        shares = (_percent(x) for x in (row.recall, row.precision, row.confidence))
        table.add_row(row.name, str(row.support), *shares, _number(row.nll))
    return table


def default_folder(arguments: argparse.Namespace) -> Path:
    """Where results go: beside the model, by the name of the data and what was done to it."""
    parts = [arguments.data, arguments.split if arguments.split == "train" else "", arguments.corruption or ""]
    name = "-".join(filter(None, (re.sub(r"[^\w.]+", "-", str(part)).strip("-.") for part in parts)))
    if arguments.run.startswith(HUB):
        return Path("evaluation") / arguments.run.removeprefix(HUB).replace("/", "--") / name
    return Path(arguments.run) / "evaluation" / name


def _json_writer(values: Any) -> Any:
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return lambda path: path.write_text(text, encoding="utf-8")


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _big(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)

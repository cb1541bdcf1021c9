"""`didicm calibrate`: a temperature and conformal sets, fitted on images the model was not trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from didicm.checkpoint import CALIBRATION
from didicm.cli.flags import parse
from didicm.cli.options import LabelledOptions, hint_corruption, percent
from didicm.errors import UserError
from didicm.evaluation.calibration import Calibration, is_calibration
from didicm.evaluation.fitting import calibrate, check_storable
from didicm.files import check_replaceable
from didicm.text import SafeConsole


@dataclass(frozen=True)
class CalibrateOptions(LabelledOptions):
    """Fit a temperature, conformal sets and an outlier score on held-out images, and store them.

    Args:
        alpha: share of conformal sets that may miss the true class
        fraction: share of the images to fit on; the others check the fit
        per_class: fit a conformal threshold for each class, so that the images of each are covered
        replace: replace a calibration even if it was fitted on more images
        false_alarms: share of images like these that may be flagged as unlike the training images
    """

    alpha: float = 0.1
    fraction: float = 0.5
    per_class: bool = False
    replace: bool = False
    false_alarms: float = 0.05


def main(argv: list[str]) -> int:
    """Fit on one part of the held-out images, report on the other, store."""
    options = parse(argv, CalibrateOptions, command="calibrate", positional=["run"])
    console = SafeConsole(soft_wrap=True)
    if options.split == "train":
        raise UserError("--split train is what the model was trained on: calibrate on images it has not seen")
    check_storable(options.run)
    options.parsed_corruption()
    model = options.open()
    check_replaceable(Path(model.place) / CALIBRATION, is_calibration, "", force=options.force)
    hint_corruption(model, options.corruption, console)
    with options.loading(console) as loading:
        asked: dict[str, Any] = {"labels": options.labels, "group_by": options.group_by}
        asked |= {"alpha": options.alpha, "fraction": options.fraction, "false_alarms": options.false_alarms}
        asked |= {"per_class": options.per_class, "replace": options.replace}
        made = calibrate(model, options.data, **asked, **loading)
    show(made.calibration, made.images, made.notes, console)
    console.print(f"temperature and thresholds: {made.path}; didicm evaluate and predict use them from now on")
    return 0


def show(calibration: Calibration, images: str, notes: list[str], console: Console) -> None:
    """What it was fitted on, and two small tables."""
    check, value = calibration.check, calibration.temperature
    count = calibration.fitted_on["images"] + check["images"]
    console.print(f"{count} images: {images}")
    for note in notes:
        console.print(f"note: {note}")
    error = "overconfident" if value > 1 else "underconfident"
    effect = "posteriors stay as they are" if value == 1 else f"the model was {error}"
    console.print(f"temperature {value:.3f}: {effect}")
    table = Table(f"on the other {check['images']} images", "before", "after")
    table.add_row("NLL", *(f"{check[when]['cls/NLL']:.4f}" for when in ("before", "after")))
    table.add_row("ECE", *(percent(check[when]["cal/ECE"]) for when in ("before", "after")))
    console.print(table)
    table = Table("conformal sets", "threshold", "target", "coverage", "classes on average")
    for name, rule in calibration.conformal.items():
        sets = check[name]
        lowest = f"{min(rule.class_thresholds):.4f} to " if rule.class_thresholds else ""
        row = f"{lowest}{rule.threshold:.4f}", f"{100 * (1 - rule.alpha):g} %", percent(sets["coverage"])
        table.add_row(name.upper(), *row, f"{sets['mean_size']:.2f}")
    console.print(table)
    if (outliers := calibration.outliers) is not None:
        console.print(
            f"outlier score above {outliers.threshold:.3f}: unlike the training images, with false alarms for "
            f"{100 * outliers.false_alarms:g} % of images like these",
        )

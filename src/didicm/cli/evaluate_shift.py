"""`didicm evaluate --shift`: what every corruption does to a model, at severities 1 to 5."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from didicm.cli.options import percent
from didicm.data.corruptions import SEVERITIES
from didicm.evaluation.assess import UNLIKE, ShiftEvaluation, evaluate_shift
from didicm.evaluation.stored import StoredModel
from didicm.files import SOFTWARE, check_replaceable, is_our_picture, to_json, write_files
from didicm.report.shift import shift_figure
from didicm.report.style import drawing
from didicm.text import count

if TYPE_CHECKING:
    from didicm.cli.evaluate import EvaluateOptions

NUMBERS, PICTURE = "shift.json", "shift.png"
TITLES = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL, in nats",
    "cal/ECE": "ECE",
    UNLIKE: "flagged as unlike the training images",
}


def measure_shift(model: StoredModel, folder: Path, options: "EvaluateOptions", console: Console) -> int:
    """Measure, show, store."""
    for name in (NUMBERS, PICTURE):  # written together
        check_replaceable(
            folder / name,
            lambda _: (folder / PICTURE).is_file() and is_our_picture(folder / PICTURE),
            "--out",
            force=options.force,
        )
    with options.loading(console) as loading:
        del loading["corruption"]
        shift = evaluate_shift(
            model,
            options.data,
            split=options.split,
            labels=options.labels,
            group_by=options.group_by,
            calibrated=options.calibration,
            bins=options.bins,
            **loading,
        )
    about = {
        "model": str(model.place),
        "weights_sha256": model.checkpoint.weights_sha256,
        "data": options.data,
        "images": shift.test.described,
        "num_images": shift.num_images,
        "num_skipped": len(shift.skipped),
        "notes": shift.test.notes,
        "posterior": model.posterior,
        "temperature": shift.test.calibration.temperature if shift.test.calibration else None,
        "seed": options.seed,
        "bins": options.bins,
    }
    numbers = {"clean": shift.clean, "mean": shift.mean, "corruptions": shift.corruptions}
    with drawing():
        save = partial(shift_figure(shift).savefig, dpi=130, format="png", metadata=SOFTWARE)
        write_files(folder, {NUMBERS: to_json({**about, **numbers}), PICTURE: save})
    console.print(
        f"{count(shift.num_images, 'image')}: {shift.test.described}; {shift.test.note}", highlight=False
    )
    if shift.skipped:
        console.print(
            f"skipped {count(len(shift.skipped), 'unreadable image')}, the first: {shift.skipped[0]}",
            highlight=False,
        )
    for metric in shift.clean:
        console.print(shift_table(shift, metric))
    for note in shift.test.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(f"numbers and plot: {folder / NUMBERS}, {folder / PICTURE}", highlight=False)
    return 0


def shift_table(shift: ShiftEvaluation, metric: str) -> Table:
    """One metric: a row per corruption and one for their mean, a column per severity."""
    show = "{:.4f}".format if metric == "cls/NLL" else percent
    table = Table("corruption", "clean", *map(str, SEVERITIES), title=f"{TITLES[metric]}, by severity")
    table.title_justify = "left"
    for column in table.columns[1:]:
        column.justify = "right"
    for name, levels in shift.corruptions.items():
        table.add_row(name, "", *(show(level[metric]) for level in levels))
    table.add_section()
    table.add_row("mean", show(shift.clean[metric]), *(show(level[metric]) for level in shift.mean))
    return table

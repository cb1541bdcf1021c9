"""`didicm distill`: a student that says in one network call what its teacher says in many."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from didicm.cli.train import TrainOptions, carry_out, read_settings, stated
from didicm.errors import UserError
from didicm.settings import TrainConfig, read_config
from didicm.training.state import CONFIG, holds_run
from didicm.values import override


@dataclass(frozen=True)
class DistillOptions(TrainOptions):
    """What is no setting of the student's training.

    Args:
        student: same (the teacher's own network, started from its weights and asked once without a label) or
            standard (a standard classifier on the same trunk)
    """

    student: Literal["same", "standard"] = "same"


def main(argv: list[str]) -> int:
    """Train a student on its teacher's posteriors; a training like any other, which resumes."""
    text = (
        "Train a student that says in one network call what RUN, its teacher, says in many: its targets are "
        "the teacher's posteriors of augmented and mixed training images. Settings are those of RUN, unless "
        "others are given. Run it again on the same --out to resume."
    )
    options, given, rest = read_settings(argv, DistillOptions, "distill RUN", text)
    if len(rest) != 1:
        raise UserError("didicm distill needs RUN, the teacher: a run, a model directory, or hf://owner/name")
    base, changes = student_settings(rest[0], options, given)
    return carry_out(options, base, *changes)


def student_settings(
    teacher: str, options: DistillOptions, given: Mapping[str, Any]
) -> tuple[TrainConfig, list[Mapping[str, Any]]]:
    """Settings of the teacher, or of a recipe or a file if it is no run, and what a student changes in them."""
    of_run, same = holds_run(Path(teacher)), options.student == "same"
    if not of_run and options.recipe is None and options.config is None:
        raise UserError(
            f"{teacher} is not a run whose settings a student could take: add --recipe or --config, and --data"
        )
    base = read_config(Path(teacher) / CONFIG) if of_run else TrainConfig()
    recipe, file, _ = stated(options, given)
    own: dict[str, Any] = {"teacher": teacher, "out": ""}
    if of_run:
        own["model_args"] = {"weights": teacher if same else None}
    if same and override(base, recipe, file).method == "diffusion":
        own |= {"mask": 1.0, "sampler.method": "readout", "sampler.views": 1}
    else:
        own |= {"method": "standard", "objective": "cross-entropy"}
    return base, [recipe, file, own, given]

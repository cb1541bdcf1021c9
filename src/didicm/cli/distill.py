"""`didicm distill`: a student that says in one network call what its teacher says in many."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from didicm.cli.train import TrainOptions, carry_out, holds_run, read_settings, resolve
from didicm.errors import UserError
from didicm.settings import TrainConfig, read_config
from didicm.training.loop import CONFIG
from didicm.values import flatten, override


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
    config = student_settings(rest[0], options, given)
    names = [name for name in flatten(config) if name in given or name in ("teacher", "method")]
    return carry_out(config, names, dry_run=options.dry_run, extend=options.extend)


def student_settings(teacher: str, options: DistillOptions, given: Mapping[str, Any]) -> TrainConfig:
    """Settings of the student: the teacher's own, or for a teacher that is no run those of a recipe or a file."""
    of_run, same = holds_run(Path(teacher)), options.student == "same"
    if not of_run and options.recipe is None and options.config is None:
        raise UserError(
            f"{teacher} is not a run whose settings a student could take: add --recipe or --config, and --data"
        )
    base = read_config(Path(teacher) / CONFIG) if of_run else resolve(options, {})
    changes: dict[str, Any] = {"teacher": teacher, "out": ""}
    if of_run:
        changes["model_args"] = {"weights": teacher if same else None}
    if same and base.method == "diffusion":
        changes |= {"mask": 1.0, "sampler.method": "readout", "sampler.views": 1}
    else:
        changes |= {"method": "standard", "objective": "cross-entropy"}
    return override(base, changes, given)

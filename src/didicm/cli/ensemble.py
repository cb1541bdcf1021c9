"""`didicm ensemble`: several stored models as one."""

from dataclasses import dataclass, field

from didicm.cli.flags import parse
from didicm.evaluation.stored import ensemble
from didicm.text import SafeConsole


@dataclass(frozen=True)
class EnsembleOptions:
    """Make one model of several: its posterior is the mean of theirs.

    It is used as any other model.

    Args:
        runs: runs (their best models), model directories, or hf://owner/name
        out: the model directory to write
    """

    runs: tuple[str, ...]
    out: str = field(kw_only=True)


def main(argv: list[str]) -> int:
    """Write the ensemble and say what is known of it."""
    options = parse(argv, EnsembleOptions, command="ensemble", positional=["runs"])
    notes = ensemble(options.runs, options.out)
    console = SafeConsole(soft_wrap=True)
    console.print(f"ensemble of {len(options.runs)} models written to {options.out}")
    for note in notes:
        console.print(f"note: {note}")
    return 0

"""`didicm push`: a model on the Hugging Face hub, with a card."""

from dataclasses import dataclass

from didicm.cli.flags import parse
from didicm.inference.hub import push
from didicm.text import SafeConsole


@dataclass(frozen=True)
class PushOptions:
    """Upload a model to the Hugging Face hub, with its calibration and a card.

    Log in first: hf auth login.

    Args:
        run: a run (its best model) or a model directory
        destination: hf://owner/name
        private: make the repository visible to you alone
    """

    run: str
    destination: str
    private: bool = False


def main(argv: list[str]) -> int:
    """Upload, say what and where."""
    options = parse(argv, PushOptions, command="push", positional=["run", "destination"])
    pushed = push(options.run, options.destination, private=options.private)
    console = SafeConsole(soft_wrap=True)
    console.print(f"{pushed.address}: {', '.join(sorted(pushed.files))}")
    for note in pushed.notes:
        console.print(f"note: {note}")
    return 0

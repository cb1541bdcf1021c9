"""The `didicm` command: finds the module of a command, and tells mistakes in one sentence."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from io import TextIOWrapper

from didicm.errors import UserError, did_you_mean, reason, torch_required

# What each command does.
COMMANDS = {
    "train": "train a classifier on your images; run it again to resume",
    "distill": "train a student that answers in one network call",
    "evaluate": "measure a model on labelled images",
    "calibrate": "fit a temperature and conformal sets on held-out images",
    "predict": "classify images, and say how sure the answers are",
    "ensemble": "combine several models into one",
    "export": "write a model as one ONNX file that runs without PyTorch",
    "serve": "serve a model over HTTP, with a page to try it",
    "push": "upload a model to the Hugging Face hub, with a card",
    "doctor": "check your images for problems before training",
    "models": "list the networks and what they cost",
    "import-official": "convert a checkpoint of the authors' code",
    "compare": "compare DiDiCM with standard classifiers on your images: report.html",
    "study": "run one of the paper's studies or ours, next to the published numbers",
    "demo": "compare them in minutes, on images that ship with this package",
}
# A command's module here is named alike and has a `main`, but for those that share the module of another.
SHARED = {
    "distill": "train",
    "study": "compare",
    "import-official": "models",
    "ensemble": "models",
    "export": "models",
    "push": "models",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 2 for a mistake the user can fix, told in one sentence."""
    command, *arguments = list(sys.argv[1:] if argv is None else argv) or [""]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may be more than the terminal can show
    try:
        code = _run(command, arguments)
        sys.stdout.flush()  # here a reader that is gone can still be told from a mistake
        return code
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError, FloatingPointError) as error:  # the latter: a network's answers are not finite
        from didicm.text import readable

        print(f"didicm: {readable(reason(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("didicm: interrupted", file=sys.stderr)
        return 130


def _run(command: str, arguments: list[str]) -> int:
    if command in ("", "-h", "--help"):
        print(_help())
        return 0 if command else 2
    if command == "--version":
        print(f"didicm {metadata.version('didicm')}")
        return 0
    if command not in COMMANDS:
        raise UserError(f"there is no command {command!r}: {did_you_mean(command, COMMANDS)}")
    with torch_required(f"didicm {command}"):
        return find_command(command)(arguments)


def find_command(command: str) -> Callable[[list[str]], int]:
    """The function that carries out a command: it takes the arguments and returns the exit code."""
    name, function = command.replace("-", "_"), "main"
    if command in SHARED:
        name, function = SHARED[command], f"{name}_main"
    found: Callable[[list[str]], int] = getattr(import_module(f"didicm.cli.{name}"), function)
    return found


def _help() -> str:
    lines = ["usage: didicm COMMAND ...", "", "Image classification with a posterior you can trust.", ""]
    lines += [f"  {name:<17} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "Each command explains itself: didicm COMMAND --help"])


if __name__ == "__main__":
    sys.exit(main())

"""The `didicm` command.

It lives beside the package, not in it: importing `didicm` imports PyTorch and registers the models with timm,
and `didicm --help` should not wait for that.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata

# name -> (what it does, module and function that does it)
COMMANDS = {
    "train": ("train a classifier on your images; run it again to resume", "didicm.cli.train:main"),
    "evaluate": ("measure a model on labelled images", "didicm.cli.evaluate:main"),
    "calibrate": ("fit a temperature and conformal sets on held-out images", "didicm.cli.calibrate:main"),
    "predict": ("say what is on images, and how sure that is", "didicm.cli.predict:main"),
    "doctor": ("look for trouble in your images before training", "didicm.cli.doctor:main"),
    "models": ("list the networks and what they cost", "didicm.cli.models:main"),
    "import-official": ("convert a checkpoint of the authors' code", "didicm.cli.import_official:main"),
    "compare": ("DiDiCM against standard classifiers on your images: report.html", "didicm.cli.compare:main"),
    "study": ("run one of the paper's studies or ours, published numbers beside", "didicm.cli.study:main"),
    "demo": ("compare them on images that ship with this package, in minutes", "didicm.cli.demo:main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 2 for a mistake the user can mend, told in one sentence."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        return _run(COMMANDS[argv[0]][1], argv[1:])
    parser = argparse.ArgumentParser(
        prog="didicm",
        description="Image classification with a posterior you can trust.",
        epilog="Each command explains itself: didicm COMMAND --help",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"didicm {metadata.version('didicm')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (description, _) in COMMANDS.items():
        commands.add_parser(name, help=description)
    parser.parse_args(argv)  # shows help, the version, or what is wrong, and exits
    return 0


def _run(target: str, arguments: list[str]) -> int:
    module, _, function = target.partition(":")
    command: Callable[[list[str]], int | None] = getattr(import_module(module), function)
    from didicm.errors import UserError

    try:
        return command(arguments) or 0
    except UserError as error:
        print(f"didicm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("didicm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

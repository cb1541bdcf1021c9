"""How far a reader has to walk: the files that a task passes through, and how often it goes from one to another.

    python -m benchmarks.walks            count the walks of docs/architecture.md
    python -m benchmarks.walks --list     and show the functions of each, in order
    python -m benchmarks.walks --write    and write the counts into docs/architecture.md
    python -m benchmarks.walks --check    only say whether docs/architecture.md shows the stored counts

A walk lists the package's functions in the order of their first call, without those that only have a meaning
inside another one (lambdas, comprehensions). Its files are those the functions lie in; a switch is where two
neighbours of the list lie in different files.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import didicm
from didicm.cli.__main__ import main

ROOT = str(Path(didicm.__file__).parent)
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
STORED = PAGE.with_name("walks.json")
START, END = "<!-- walks: python -m benchmarks.walks --write -->", "<!-- end of walks -->"
TINY = ["--data=fashion-mini", "--model-args.width=0.125", "--fraction=0.1", "--batch-size=50", "--image.size=14"]


def walk(task: Callable[[], object]) -> list[tuple[str, str]]:
    """Functions of the package, as (file, name), in the order of their first call."""
    seen: dict[tuple[str, int], tuple[str, str]] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and "<" not in code.co_name:
            place = code.co_filename[len(ROOT) + 1 :]
            seen.setdefault((place, code.co_firstlineno), (place, code.co_name))

    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            task()
    finally:
        sys.setprofile(None)
    return list(seen.values())


def command(*arguments: object) -> Callable[[], object]:
    """A command, run in this process."""
    return lambda: main([str(argument) for argument in arguments])


def walks(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """An image in training, a photo in predict, four runs in compare."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.png")
    compare = ["--fractions=0.1", "--methods=standard,didicm-score", "--seeds=2", "--epochs=1", "--resolutions=14"]
    tasks = {
        "train": command("train", "--recipe=small", *TINY, "--epochs=1", "--out", folder / "run"),
        "predict": command("predict", folder / "run", folder / "photo.png"),
        "compare": command("compare", "--data=fashion-mini", *compare, "--out", folder / "compare"),
    }
    for name in (*(f"cli.{name}" for name in tasks), "inference.predictor"):  # importing is no part of a walk
        __import__(f"didicm.{name}")
    return {name: walk(task) for name, task in tasks.items()}


def tables(stored: dict[str, Any]) -> str:
    """The counts as the page on architecture shows them."""
    lines = ["| walk | files before | files | switches before | switches |", "|---|---:|---:|---:|---:|"]
    for name, now in stored["now"].items():
        before = stored["before"][name]
        cells = f"{before['files']} | {now['files']} | {before['switches']} | {now['switches']}"
        lines.append(f"| `didicm {name}` | {cells} |")
    lines += ["", "| Python in `src` | files | lines |", "|---|---:|---:|"]
    lines += [f"| {when} | {count['files']} | {count['lines']:,} |" for when, count in stored["source"].items()]
    return "\n".join(lines)


def with_tables(page: str, stored: dict[str, Any]) -> str:
    """A page with the counts between its marks."""
    head, _, rest = page.partition(START)
    return f"{head}{START}\n{tables(stored)}\n{END}{rest.partition(END)[2]}"


def write(counts: dict[str, dict[str, int]]) -> None:
    """Keep the counts beside those before the move, and show them on the page on architecture."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    sources = list(Path(ROOT).rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    stored["now"], stored["source"]["now"] = counts, {"files": len(sources), "lines": lines}
    STORED.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--list", "--write", "--check"):
        parser.add_argument(option, action="store_true")
    asked = parser.parse_args()
    if asked.check:
        text = PAGE.read_text(encoding="utf-8")
        sys.exit(with_tables(text, json.loads(STORED.read_text(encoding="utf-8"))) != text)
    counted = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, functions in walks(Path(scratch)).items():
            files = [file for file, _ in functions]
            switches = sum(one != other for one, other in pairwise(files))
            counted[name] = {"files": len(set(files)), "switches": switches, "functions": len(functions)}
            print(f"{name:8} {len(set(files)):3} files {switches:4} switches {len(functions):4} functions")
            if asked.list:
                print("\n".join(f"    {file:32} {function}" for file, function in functions))
    if asked.write:
        write(counted)

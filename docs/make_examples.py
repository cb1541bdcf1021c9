"""Run the commands and code blocks of README.md and docs/, and write what they print into the pages.

python docs/make_examples.py              all pages, some minutes; `make examples` runs it
python docs/make_examples.py few.md       those whose names end so; start.md has to be run before

Blocks of `sh` and `python` run in order. Every page begins with a copy of the folder that docs/start.md leaves:
real images in photos/, test/ and new/, a trained model in runs/mine. A block with a title is a file. A comment may
stand before one:

<!-- not run: REASON -->         it needs what a test has not: its options are only parsed
<!-- output -->                  what the block above prints; written by this script
<!-- output: last 5 lines -->    the end of it, or the first lines; `in other words` if images decide
"""

import ast
import io
import logging
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from glob import glob
from importlib import import_module
from inspect import signature
from operator import attrgetter
from pathlib import Path
from textwrap import indent, wrap
from typing import Any
from unittest import mock

from didicm.data.corruptions import SUITE
from didicm.diffusion.schedule import SCHEDULES
from didicm.evaluation.metrics import MEANINGS, MEANS

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"results.md", "reliability.md", "speed.md"}  # by scripts of their own
RESULTS = ROOT / "docs" / "results"  # which are generated, too
START = ROOT / "docs" / "start.md"
PICTURES = {"trajectory.png": ROOT / "docs" / "assets" / "trajectory.png"}  # that a page makes and shows
REPORT, REPORT_PICTURE = "runs/compare/report.html", ROOT / "docs" / "assets" / "report.png"  # answers/method.md
PORT = "8000"
WIDTH, TEXT = 100, 80  # of the terminal, for tables; of sentences
BOX = "│┃┡└├┌┏"  # what tables are drawn with
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>output|not run)(?:: (?P<detail>[^\n]+?))? -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    code: str  # without the indentation of the page
    title: str | None
    mark: str | None  # "output" or "not run"
    detail: str | None  # which lines of an output, or why it is not run
    indent: str
    span: tuple[int, int]  # where its code stands in the page

    @property
    def is_output(self) -> bool:
        return self.mark == "output"

    def part_of(self, printed: str) -> str:
        """The lines of what was printed that this output shows."""
        if not self.detail:
            return printed
        end, count = self.detail.split()[:2]  # as in: last 5 lines
        lines = printed.splitlines(keepends=True)
        return "".join(lines[: int(count)] if end == "first" else lines[-int(count) :])

    @property
    def runs(self) -> bool:
        return self.mark is None


def pages() -> list[Path]:
    """README.md, and the pages that are written by hand."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    written = (path for path in found if path.name not in GENERATED and RESULTS not in path.parents)
    return [ROOT / "README.md", *written]


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(
            found["language"],
            re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            found["title"],
            found["mark"],
            found["detail"],
            found["indent"],
            found.span("code"),
        )
        for found in FENCE.finditer(text)
    ]


def start_didicm(*arguments: str) -> "subprocess.Popen[Any]":
    """Start a command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "didicm.cli", *arguments], stdout=subprocess.DEVNULL)


@dataclass
class Reader:
    """Somebody who follows a page to the letter, in a folder of their own."""

    folder: Path
    shorten: Callable[[list[str]], list[str]] = lambda argv: argv  # a command that takes less time than this one
    shorten_code: Callable[[str], str] = lambda code: code  # likewise
    start: Callable[..., "subprocess.Popen[Any]"] = start_didicm  # in a process of its own
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})  # of Python
    served: list[str] | None = None  # how the server was started
    server: "subprocess.Popen[Any] | None" = None
    port: str = PORT

    def follow(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, str]]:
        """Run the blocks; yield those that hold output, each with what the block before it printed.

        What a page registers is forgotten at its end.
        """
        printed = ""
        with ExitStack() as forgotten:
            for registry in (SCHEDULES, SUITE, MEANS, MEANINGS):
                forgotten.enter_context(mock.patch.dict(registry))
            for block in blocks:
                if block.is_output:
                    yield block, block.part_of(printed)
                elif block.runs:
                    printed = self.run(block)
                else:
                    self.check(block)

    def run(self, block: Block) -> str:
        """What a block prints, on both streams, without the name of the folder."""
        printed = io.StringIO()
        logging.disable(logging.WARNING)  # what other libraries have to say about this machine
        with (
            self.here(),
            warnings.catch_warnings(),
            redirect_stdout(printed),
            redirect_stderr(printed),
        ):
            warnings.simplefilter("ignore")
            if block.title:
                Path(block.title).write_text(block.code, encoding="utf-8")
            elif block.language == "python":
                exec(compile(self.shorten_code(block.code), "block", "exec"), self.names)
            else:
                for line in lines_of(block.code):
                    self.shell(line)
        logging.disable(logging.NOTSET)
        text = re.sub(rf"(/private)?{re.escape(str(self.folder))}/?", "", printed.getvalue())
        return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n") + "\n"

    def check(self, block: Block) -> None:
        """What can be known of what is not run: options, extras, targets and arguments of functions exist."""
        if block.language == "python":
            check_code(block.code)
            return
        with self.here():
            for line in lines_of(block.code):
                command, *arguments = shlex.split(line, comments=True)
                if command == "didicm":
                    parse_only(arguments)
                elif command == "make":
                    assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
                elif command == "pip":
                    for extra in re.findall(r"[\w-]+", ",".join(re.findall(r"didicm\[([^]]+)\]", line))):
                        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M), line

    def shell(self, line: str) -> None:
        """Run one line: `didicm` in this process, which has PyTorch at hand, all else in a shell."""
        before, pipe, command = line.rpartition("| didicm ")
        if line.startswith("didicm serve"):
            self.served = self.expand(line)[1:]
            parse_only(self.served)
        elif line.startswith("didicm "):
            self.didicm(self.expand(line)[1:], b"")
        elif pipe:
            self.didicm(self.expand(command), self.bash(before))
        elif line.startswith("python examples/"):
            with mock.patch.object(sys, "argv", self.shorten(self.expand(line)[1:])):
                runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        elif line.startswith("python -m benchmarks."):
            with mock.patch.object(sys, "argv", self.expand(line)[2:]):
                runpy.run_module(sys.argv[0], run_name="__main__")
        else:
            if line.startswith("curl"):
                self.serve()
            print(self.bash(line.replace(f":{PORT}/", f":{self.port}/")).decode(), end="")

    def didicm(self, argv: list[str], piped: bytes) -> None:
        from didicm.cli.__main__ import main

        with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped))):
            code = main(self.shorten(argv))
        if code:
            raise RuntimeError(f"didicm {shlex.join(argv)} ended with {code}: {sys.stdout.getvalue()}")

    @staticmethod
    def expand(line: str) -> list[str]:
        """Words of a command, patterns replaced by the files they stand for."""
        return [name for word in shlex.split(line, comments=True) for name in sorted(glob(word)) or [word]]

    @staticmethod
    def bash(line: str) -> bytes:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-ec", line], capture_output=True, env={**os.environ, "PATH": path})
        if done.returncode:
            raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr.decode()}")
        return done.stdout

    def serve(self) -> None:
        """Start the server that the page has spoken of, and wait for it."""
        assert self.served, "nothing is served yet"
        if self.server is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = str(free.getsockname()[1])
            self.server = self.start(*self.served, f"--port={self.port}")
        while self.server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health").close()
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("the server ended")

    @contextmanager
    def here(self) -> Iterator[None]:
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            yield
        finally:
            os.chdir(before)

    def close(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.terminate()
            self.server.wait()


def lines_of(code: str) -> list[str]:
    """Commands of a block, each on one line, without comments."""
    joined = (line.strip() for line in code.replace("\\\n", " ").splitlines())
    return [line for line in joined if line and not line.startswith("#")]


def check_code(code: str) -> None:
    """Code that is not run parses, and calls functions of didicm that exist with arguments that they take."""
    import didicm

    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func)).startswith("didicm."):
            named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            signature(attrgetter(name.removeprefix("didicm."))(didicm)).bind(*call.args, **named)


class _ParsedError(Exception):
    """The options of a command were fine."""


def parse_only(argv: Sequence[str]) -> None:
    """Read the options of a command, and go no further."""
    command, *options = argv
    module = import_module(f"didicm.cli.{command.replace('-', '_')}")
    name = "override" if command == "train" else "parse"
    read = getattr(module, name)

    def parse(*arguments: Any, **options: Any) -> Any:
        read(*arguments, **options)
        raise _ParsedError

    with mock.patch.object(module, name, parse):
        try:
            module.main(options)
        except _ParsedError:
            return
    raise AssertionError(f"didicm {shlex.join(argv)} was not parsed")


def wrapped(line: str) -> str:
    """A line of output as the page shows it; rows of tables and lists stay aligned, JSON stays JSON."""
    if set(line) & set(BOX) or line.lstrip().startswith('"'):
        return line
    column = re.search(r"(?<=\S) {3,}(?=\S)", line)
    width, start = (WIDTH, column.end()) if column else (TEXT, 0)
    return "\n".join(wrap(line, width, subsequent_indent=" " * start))


def fill_in(text: str, outputs: Sequence[tuple[Block, str]]) -> str:
    """A page with other outputs, its sentences wrapped to the width of the page."""
    for block, printed in reversed(outputs):
        printed = "\n".join(map(wrapped, printed.splitlines())).strip("\n") + "\n"
        text = text[: block.span[0]] + indent(printed, block.indent) + text[block.span[1] :]
    return text


def rewrite(page: Path, folder: Path) -> None:
    """Run a page in a folder, write its outputs into it, and keep the pictures that it made."""
    reader, text = Reader(folder), page.read_text(encoding="utf-8")
    try:
        page.write_text(fill_in(text, list(reader.follow(read_blocks(text)))), encoding="utf-8")
    finally:
        reader.close()
    for name, place in PICTURES.items():
        if (folder / name).exists():
            shutil.copy(folder / name, place)
    if (folder / REPORT).exists():
        photograph(folder / REPORT, REPORT_PICTURE)


def photograph(page: Path, place: Path) -> None:
    """The top of a page, as Chromium shows it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1100, "height": 1250})
        window.goto(page.as_uri())
        window.screenshot(path=place)
        browser.close()


def main(wanted: Sequence[str]) -> int:
    """Run the pages that are wanted, or all; the exit code is the number of those that failed."""
    os.environ["COLUMNS"] = str(WIDTH)
    sys.path.insert(0, str(ROOT))  # some blocks import from the source
    scratch, failed = Path(tempfile.gettempdir()).resolve() / "didicm-examples", 0
    folder, started = scratch / "reader", scratch / "started"  # one for all: calibrations know images by path
    for page in [START, *(page for page in pages() if page != START)]:
        if wanted and not any(str(page).endswith(name) for name in wanted):
            continue
        print(page.relative_to(ROOT), file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        if page == START:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(started, folder)
        try:
            rewrite(page, folder)
            if page == START:
                shutil.copytree(folder, started, dirs_exist_ok=True)
        except Exception:
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Parts that tests of several rooms share: real image files, tiny runs, commands in processes of their own."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file

# A busy machine is no failure, and neither is what only one run in a hundred would try.
settings.register_profile("patient", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# One thread each, in child processes too: pytest-xdist already gives every core a worker, and sums that more
# threads share differ in the last digit.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Child processes keep what they compile: else each of them compiles this package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test cuts the power, and to wait for the disk after every file takes a while.
os.fsync = lambda file: None

# Ctrl-C is tested, also where the tests run in the background of a shell, which would have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--devices", type=int, help="processes per training in all of tests/e2e/test_imagenet.py")
    parser.addoption("--jobs", type=int, help="trainings at a time, in the same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """The same random numbers for a test, whichever tests this process has run before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def alone():
    """No test leaves a process group or a signal's handler to those after it.

    Forked processes would inherit the group; and once started, Ray answers SIGTERM by leaving the process.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a process group is left")


@pytest.fixture(scope="session")
def picture():
    """Smooth shapes with some noise, so that every corruption has something to act on."""

    def make(seed=0, size=(32, 24), mode="RGB"):
        rng = np.random.default_rng(seed)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
        pixels = smooth + rng.normal(0, 8, (size[1], size[0], 3))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)

    return make


@pytest.fixture(scope="session")
def write(picture):
    """Write such a picture to a file."""

    def write(path, seed=0, size=(32, 24), mode="RGB", **options):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(seed, size, mode).save(path, **options)
        return path

    return write


@pytest.fixture(scope="session")
def make_folder(write):
    """A folder with one subfolder per class."""

    def make_folder(root, classes=("cat", "dog"), count=6, size=(32, 24), suffix="png"):
        for k, name in enumerate(classes):
            for i in range(count):
                write(root / name / f"{i}.{suffix}", seed=1000 * k + i, size=size)
        return root

    return make_folder


@pytest.fixture
def scans(monkeypatch, tmp_path):
    """Folders below `data` that are read; listings are kept of small ones too, once they are a little old."""
    from didicm.data import folder

    monkeypatch.setattr(folder, "_listings", {})
    monkeypatch.setattr(folder, "LARGE", 1)
    monkeypatch.setattr(folder, "SETTLED", 10**8)
    seen, real = [], os.scandir

    def scandir(folder="."):
        if str(folder).startswith(str(tmp_path / "data")):
            seen.append(os.path.basename(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    return seen


TINY = {
    "recipe": "small",
    "data": "fashion-mini",
    "model-args.width": "0.125",
    "fraction": "0.1",
    "batch-size": "40",
    "epochs": "2",
    "image.size": "14",
    "run.log-seconds": "0",
    "optimizer.ema": "0.9",
    "sampler.steps": "2",  # most of the time goes into validation
}


@pytest.fixture(scope="session")
def train_flags():
    """Flags of `didicm train` for a run that takes a second."""

    def flags(out, **changes):
        settings = {**TINY, **{key.replace("__", ".").replace("_", "-"): str(x) for key, x in changes.items()}}
        return [f"--{key}={value}" for key, value in settings.items()] + [f"--out={out}"]

    return flags


def become(act):
    """Do something in a process that was just forked, and end with the exit code that it returns."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Whatever the tests have open, and the pipe whose end Popen waits for.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != nowhere:
            with contextlib.suppress(OSError):
                os.dup2(nowhere, int(name))
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = 1
    try:
        code = act()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become_didicm(arguments):
    """Run a command in a process that was just forked, and end."""
    from didicm.cli.__main__ import main

    become(lambda: main(list(map(str, arguments))))


def become_python(command, environment):
    """Be `python -m MODULE ...` in a process that was just forked, and end."""

    def run():
        for number in signal.valid_signals():  # handlers do not outlive a new program
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        _, *sys.argv = command[command.index("-m") :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return 0

    become(run)


@pytest.fixture(scope="session")
def start_didicm():
    """Start a command in a process of its own; `under` puts another program before it.

    Without one, this process is forked: to import PyTorch anew takes longer than most commands do.
    """

    def start(*arguments, under=(), **options):
        if not under:
            options["preexec_fn"] = partial(become_didicm, arguments)
        return subprocess.Popen(
            [sys.executable, *under, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start


@pytest.fixture(scope="session")
def fork_python():
    """What Popen does for `python -m MODULE ...`, without an interpreter that imports PyTorch anew.

    Where a library starts others like this, put it in place of the Popen of that library.
    """

    def start(args, env=None, **options):
        return subprocess.Popen(args, preexec_fn=partial(become_python, list(args), env), **options)

    return start


@pytest.fixture
def few_pictures(monkeypatch):
    """Figures of a report show two images each: to draw them all takes seconds."""
    for number in ("SHOWN", "ERRORS"):
        monkeypatch.setattr(f"didicm.report.images.{number}", 2)


@pytest.fixture
def unrendered(monkeypatch, few_pictures):
    """Figures are made but not laid out or rendered, which takes seconds: for tests that do not look at them."""

    def savefig(figure, place, metadata=None, **options):
        if isinstance(place, Path):
            told = PngInfo()
            for name, value in (metadata or {}).items():
                told.add_text(name, value)
            Image.new("L", (1, 1)).save(place, "PNG", pnginfo=told)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    monkeypatch.setattr("matplotlib.figure.Figure.draw_without_rendering", lambda figure: None)


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers of studies are forked, not spawned: to import PyTorch anew takes longer than most trainings here."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr("didicm.experiments.executors.multiprocessing.get_context", lambda method: fork)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A folder that takes long to make: the first process of pytest-xdist that asks makes it for all."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def once(name, make):
        place, done = root / name, root / f"{name}.done"
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed when it is closed
            if not done.exists():
                shutil.rmtree(place, ignore_errors=True)  # of one that failed
                place.mkdir()
                make(place)
                done.touch()
        return place

    return once


@pytest.fixture(scope="session")
def few_images(once):
    """File of the images that ship with the package, but with a hundred for testing instead of a thousand."""
    from didicm.data.sources import FASHION_MINI

    def make(folder):
        with np.load(FASHION_MINI) as file:
            kept = {name: x[:100] if name.endswith("_test") else x for name, x in file.items()}
        np.savez(folder / "fashion_mini.npz", **kept)

    return once("few-images", make) / "fashion_mini.npz"


@pytest.fixture
def few_tested(few_images, monkeypatch):
    """These in place of fashion-mini, here and in forked processes: measuring takes most of the time of a run."""
    monkeypatch.setattr("didicm.data.sources.FASHION_MINI", few_images)


@pytest.fixture(scope="session")
def run_module():
    """Run what `python -m MODULE` does, in this process; the exit code."""

    def run(module, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module, *map(str, arguments)])
            try:
                runpy.run_module(module, run_name="__main__")
            except SystemExit as end:
                return int(end.code or 0)
        return 0

    return run


@pytest.fixture(scope="session")
def weights_of():
    """Weights of a model of a run."""
    return lambda run, which="last": load_file(run / which / "model.safetensors")


@pytest.fixture(scope="session")
def assert_same():
    """Two sets of tensors are equal, bit by bit unless a tolerance is given."""

    def check(one, other, **tolerance):
        assert one.keys() == other.keys()
        for name in one:
            if tolerance:
                assert torch.allclose(one[name].double(), other[name].double(), **tolerance), name
            else:
                assert torch.equal(one[name], other[name]), name

    return check


@pytest.fixture(scope="session")
def metrics_of():
    """Lines of a run's metrics.jsonl."""
    return lambda run: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def fails(capsys):
    """The one sentence of a command that ends with exit code 2."""
    from didicm.cli.__main__ import main

    def fails(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("didicm: ")
        assert "\n" not in error
        return error

    return fails


@pytest.fixture
def works(capsys):
    """What a command prints that ends well."""
    from didicm.cli.__main__ import main

    def works(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed

    return works

"""A study whose runs take a second."""

import threading
from contextlib import contextmanager

import pytest

from didicm.experiments.results import read_results
from didicm.experiments.run import run_study
from didicm.experiments.study_file import make_study

TINY = {
    "name": "tiny",
    "title": "Tiny networks on few images",
    "question": "Does it run?",
    "layout": "comparison",
    "data": "fashion-mini",
    "resolutions": [7],
    "fractions": [0.05],
    "seeds": 2,
    "settings": {
        "model_args": {"width": 0.125, "stem": "small"},
        "batch_size": 20,
        "epochs": 2,
        "optimizer.ema": 0.9,
        "sampler.steps": 2,
        "image.channels": 1,
    },
    "methods": [
        {"name": "standard", "method": "standard"},
        {"name": "DiDiCM", "model_args.parameterization": "posterior"},
    ],
}


@pytest.fixture(scope="session")
def tiny():
    """The study, with other values for some keys; settings are added to its own."""

    def tiny(settings=None, **changes):
        return make_study({**TINY, "settings": {**TINY["settings"], **(settings or {})}, **changes}, "test")

    return tiny


@pytest.fixture(scope="session")
def whole(tiny, once):
    """Folder of a study that one process carried out without interruption; nobody changes it."""
    return once("whole", lambda out: run_study(tiny(), out))


@pytest.fixture(scope="session")
def numbers_of():
    """All that a study measured, by run; not how long it took."""

    def numbers(out):
        results = sorted(read_results(out), key=lambda result: result.key)
        return [(r.key, r.method, r.num_train, r.num_held_out, r.num_test, r.measurements) for r in results]

    return numbers


@pytest.fixture
def corrupt(tmp_path):
    """Make a run fail with a sentence; returns the file to delete."""

    def corrupt(run):
        path = tmp_path / "runs" / run.key / "trained.json"
        path.parent.mkdir(parents=True)
        path.write_text("{")
        return path

    return corrupt


@pytest.fixture(scope="session")
def meanwhile():
    """Do something once a condition holds, while the body runs."""

    @contextmanager
    def meanwhile(condition, act):
        stop = threading.Event()

        def watch():
            while not stop.wait(0.02):
                if condition():
                    act()
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    return meanwhile

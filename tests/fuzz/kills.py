"""A training that is killed and stopped at random moments ends with the very bits of an undisturbed one.

`python -m tests.fuzz.kills --times 40 --seed 0` prints what happened; `survive` is the same as a function.
"""

import argparse
import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import didicm
from didicm.cli.__main__ import main
from didicm.training.state import has_state, load_state

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STEPS = 6  # that a training is left alone at most, before it is disturbed
TINY = {
    "recipe": "small",
    "data": "fashion-mini",
    "model-args.width": 0.125,
    "fraction": 0.1,
    "batch-size": 40,
    "image.size": 8,
    "optimizer.ema": 0.9,
    "corrupt-train": "noise:1",  # so that workers decode the images
    "run.workers": 2,
    "run.log-seconds": 0,
    "run.save-seconds": 0.2,
    "run.validate-epochs": 2,
    "sampler.steps": 2,
}


def start(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Start the command as a user does."""
    command = [sys.executable, "-m", "didicm.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def survive(
    folder: Path, times: int, seed: int, start: Callable[..., "subprocess.Popen[str]"] = start
) -> dict[str, int]:
    """Disturb a training so many times, by a signal to all its processes; counts of what came of it.

    Anything that is lost, broken or different raises AssertionError.
    """
    rng = random.Random(seed)
    epochs = 2 + times * STEPS // 5  # of five steps each
    undisturbed, disturbed = folder / "undisturbed", folder / "it's disturbed"
    _finish(undisturbed, epochs)
    counts = Counter({**dict.fromkeys((number.name for number in SIGNALS), 0), "while starting": 0})
    for _ in range(times):
        number = rng.choice(SIGNALS)
        process = start(*_command(disturbed, epochs), start_new_session=True)
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0, 6))
            step = 0
        else:
            step = _wait_for_steps(process, rng.randint(1, STEPS))
            time.sleep(rng.uniform(0, 0.1))
        os.killpg(process.pid, number)
        printed, trouble = process.communicate()
        counts[number.name] += 1
        counts["while starting"] += not step
        assert "Traceback" not in trouble, trouble
        if number != signal.SIGKILL and step:
            assert process.returncode == 130, trouble
            assert f"resume with: didicm train --out {shlex.quote(str(disturbed))}" in printed
            assert load_state(disturbed)[0].step >= step, "a step that was told of is lost"
        _check(disturbed)
    for place in ("", "state", "last", "best"):  # as a kill in the very middle of writing leaves it
        (disturbed / place / ".saving-x").mkdir(parents=True)
        (disturbed / place / ".saving-x" / "model.safetensors").touch()
    _finish(disturbed, epochs)
    _check(disturbed)
    assert not list(disturbed.rglob(".saving-*")), "something half-written was left"
    for place in ("last", "best"):
        one, other = (load_file(run / place / "model.safetensors") for run in (undisturbed, disturbed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), f"{place} is not the same"
    steps = [json.loads(line)["step"] for line in (disturbed / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps), "numbers are not in order"
    return dict(counts)


def _finish(out: Path, epochs: int) -> None:
    """Train to the end, in this process, without workers: they change nothing."""
    with redirect_stdout(io.StringIO()):
        assert main([*_command(out, epochs), "--run.workers=0"]) == 0


def _command(out: Path, epochs: int) -> list[str]:
    return ["train", *(f"--{name}={value}" for name, value in {**TINY, "epochs": epochs, "out": out}.items())]


def _wait_for_steps(process: "subprocess.Popen[str]", count: int) -> int:
    """The step that a training has reached after so many lines about steps."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            count -= 1
            if not count:
                return int(line.split()[1].partition("/")[0])
    raise AssertionError(f"it ended by itself: {process.communicate()}")


def _check(run: Path) -> None:
    """Whatever is there can be used."""
    if has_state(run):
        load_state(run)
    for place in ("last", "best"):
        if (run / place / "config.json").exists():
            didicm.load(run / place)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(survive(Path(scratch), options.times, options.seed)))

import json
import os
import pty
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

from rich.console import Console

from didicm.settings import RunConfig
from didicm.training.tracking import Tracker, forget_after

NUMBERS = {"loss": 1.5, "gradient_norm": 1.0, "lr": 0.1, "skipped_steps": 0}
METRICS = {"cls/Acc": 0.5, "cls/Acc5": 0.9, "cls/NLL": 1.0, "cal/ECE": 0.1}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_speed_is_of_training_alone(tmp_path, monkeypatch):
    now = [0.0]
    # Its own clock alone: in the same process servers of other tests wait by the system's.
    monkeypatch.setattr("didicm.training.tracking.time", SimpleNamespace(monotonic=lambda: now[0]))
    console = Console(record=True, width=200)
    with Tracker(tmp_path, RunConfig(log_seconds=0), 3, 0, console, silent=False) as tracker:
        now[0] += 2
        tracker.step(1, 1, 100, NUMBERS)
        with tracker.elsewhere():
            now[0] += 1000  # a validation
        now[0] += 4
        tracker.step(2, 1, 100, NUMBERS)
    assert [line["images_per_second"] for line in lines(tmp_path)] == [50, 25]
    assert "step 2/3  epoch 1  loss 1.5000  lr 0.1  25 images/s" in console.export_text()


def test_unreadable_images_are_named_once_and_not_too_many(tmp_path):
    console = Console(record=True, width=200)
    with Tracker(tmp_path, RunConfig(), 3, 0, console, silent=False) as tracker:
        tracker.unreadable("training", ["a.jpg is torn"])
        for _ in range(2):
            tracker.unreadable("training", ["a.jpg is torn", *(f"{i}.jpg is torn" for i in range(20))])
    shown = console.export_text()
    assert shown.count("a.jpg") == 1
    assert shown.count("left out") == 6
    assert shown.endswith("left out: 21 training images so far\n")


def test_other_processes_are_silent_and_write_nothing(tmp_path):
    console = Console(record=True)
    with Tracker(tmp_path, RunConfig(log_seconds=0), 3, 0, console, silent=True) as tracker:
        tracker.step(1, 1, 100, NUMBERS)
        tracker.validation(1, 1, METRICS)
        tracker.write(1, {"unreadable_images": 1})
    assert console.export_text() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_forgets_what_it_will_do_again_and_a_torn_line(tmp_path):
    text = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste'
    (tmp_path / "metrics.jsonl").write_text(text)
    forget_after(tmp_path, 2)
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}]


def test_every_run_has_a_record_of_its_own_at_wandb(tmp_path, monkeypatch):
    begun, ended = [], []

    def init(**settings):
        begun.append(settings)
        return SimpleNamespace(log=lambda numbers, step: None, finish=lambda exit_code: ended.append(exit_code))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for place in ("a/run", "b/run", "a/run"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        with (
            suppress(KeyboardInterrupt),
            Tracker(tmp_path / place, RunConfig(wandb="x"), 3, 0, Console(quiet=True), silent=False) as tracker,
        ):
            tracker.write(1, {"loss": 1.0})
            if place == "b/run":
                raise KeyboardInterrupt
    one, other, again = (settings["id"] for settings in begun)
    assert one == again != other
    assert {settings["name"] for settings in begun} == {"run"}
    assert ended == [0, 1, 0]


def read_all(controller, shown):
    """Collect what is shown until the other end is closed."""
    try:
        while part := os.read(controller, 65536):
            shown += part
    except OSError:  # how Linux tells that nobody has the other end
        pass


def test_a_terminal_shows_a_bar_that_moves_during_validation_and_no_lines_per_step(tmp_path, monkeypatch):
    """In a real pseudo-terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    controller, terminal = pty.openpty()
    shown = bytearray()
    with ThreadPoolExecutor() as reader, open(terminal, "w", encoding="utf-8") as screen:
        reader.submit(read_all, controller, shown)
        console = Console(file=screen, width=150)
        with Tracker(tmp_path, RunConfig(), 4, 0, console, silent=False) as tracker:
            for step in range(1, 3):
                tracker.step(step, 1, 10, NUMBERS)
            show = tracker.validating(2, 1)
            show(30, 90)
            show(60, 90)
            begun = time.monotonic()
            while b"validating 60/90 images" not in shown and time.monotonic() - begun < 1200:
                time.sleep(0.01)  # the bar is drawn ten times a second, on an idle machine
            tracker.validation(2, 1, METRICS)
            tracker.step(4, 2, 10, {**NUMBERS, "loss": 0.5})
    text = shown.decode()
    assert "━" in text
    assert "validating 60/90 images" in text
    assert "epoch 2  loss 0.5000" in text
    assert "epoch 1: accuracy 50.0 %" in text
    assert "images/s" not in text

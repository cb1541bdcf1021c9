import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from didicm.errors import UserError
from didicm.evaluation import evaluate_probs, load_posteriors
from didicm.experiments import (
    METHODS,
    Cell,
    Reading,
    Results,
    Setting,
    main_table,
    rows_of,
    run_grid,
    write_report,
)
from didicm.experiments.train_cell import prepare, shrink
from tests.unit.study.making import SETTING, base, cells

WORK = """
import sys
from didicm.experiments import run_grid
from tests.unit.study.making import base, cells
if __name__ == "__main__":
    run_grid(base(), cells(seeds=2), sys.argv[1])
"""


def start(out):
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def table(out):
    return main_table(rows_of(sorted(Results(out).read().values(), key=lambda record: record["key"]))).rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted grid."""
    out = tmp_path_factory.mktemp("whole")
    run_grid(base(), cells(seeds=2), out)
    return out


def test_each_cell_has_one_line_with_metrics_costs_and_stored_posteriors(whole):
    records = Results(whole).read()
    assert list(records) == [cell.key(base()) for cell in cells(seeds=2)]
    for record in records.values():
        assert record["num_train"] == 90
        assert record["num_held_out"] == 10
        for reading in record["readings"]:
            if reading["posteriors"]:
                stored = load_posteriors(whole / reading["posteriors"])
                assert evaluate_probs(stored.probs, stored.labels) == reading["metrics"]
                assert len(set(stored.image_names)) == 1000
                assert reading["tempered"]["cls/Acc"] == reading["metrics"]["cls/Acc"]
    diffusion = records[cells()[1].key(base())]
    assert [reading["name"] for reading in diffusion["readings"]] == ["2 steps", "1 call", "1 step"]
    assert [reading["calls"] for reading in diffusion["readings"]] == [2, 1, 1]
    assert not list(whole.glob("cells/*/state"))


def test_what_is_done_is_skipped_and_new_cells_are_added(whole, capsys):
    before = (whole / "results.jsonl").read_bytes()
    begun = time.monotonic()
    run_grid(base(), cells(seeds=2), whole)
    assert time.monotonic() - begun < 2
    assert (whole / "results.jsonl").read_bytes() == before
    assert capsys.readouterr().out == ""


def test_killed_and_run_again_gives_the_same_table(whole, tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    # Killed in its second cell, somewhere.
    while len(list(tmp_path.glob("cells/*"))) < 2:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = Results(tmp_path).read()
    assert 1 <= len(done) < 4
    assert list((tmp_path / "claims").iterdir())  # of a process that is no more
    with open(tmp_path / "results.jsonl", "ab") as file:
        file.write(b'{"key": "half a li')
    run_grid(base(), cells(seeds=2), tmp_path)
    assert table(tmp_path) == table(whole)
    assert not list((tmp_path / "claims").iterdir())


def test_two_processes_share_a_grid_and_run_no_cell_twice(whole, tmp_path):
    processes = [start(tmp_path), start(tmp_path)]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == sorted(cell.key(base()) for cell in cells(seeds=2))
    for log in tmp_path.glob("cells/*/train.log"):
        assert log.read_text().count("epoch 2: accuracy") == 1
    assert table(tmp_path) == table(whole)


def test_jobs_share_the_work(whole, tmp_path):
    records = run_grid(base(), cells(seeds=2), tmp_path, jobs=2)
    assert [record["key"] for record in records] == [cell.key(base()) for cell in cells(seeds=2)]
    assert table(tmp_path) == table(whole)


def test_ctrl_c_saves_the_trainings_of_all_jobs(tmp_path):
    work = WORK.replace("base()", "base(epochs=5000)").replace("sys.argv[1])", "sys.argv[1], jobs=2)")
    script = tmp_path / "work.py"
    script.write_text(work)  # a file: processes that are spawned import it again
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "out"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len([1 for share in Results(tmp_path / "out").shares().values() if share > 0]) < 2:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # a terminal tells all of them
    process.communicate(timeout=60)
    assert len(list((tmp_path / "out").glob("cells/*/state/*.safetensors"))) == 2


def test_a_second_grid_reads_the_networks_of_the_first(whole, tmp_path):
    readings = (Reading("labels", {"method": "cl", "steps": 1, "chains": 2}),)
    other = [Cell("DiDiCM", SETTING, 0, METHODS["didicm-posterior"], readings)]
    shutil.copytree(whole / "cells", tmp_path / "cells")
    models = [path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("model.safetensors")]
    (record,) = run_grid(base(), other, tmp_path / "second", trainings=tmp_path)
    assert [reading["name"] for reading in record["readings"]] == ["labels"]
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("model.safetensors")] == models
    assert not (tmp_path / "second" / "cells").exists()


def test_without_held_out_images_all_are_for_training_and_there_is_no_temperature(tmp_path):
    cell = replace(cells()[0], held_out=0.0)
    (record,) = run_grid(base(), [cell], tmp_path)
    assert (record["num_train"], record["num_held_out"], record["num_test"]) == (100, 0, 1000)
    assert record["readings"][0]["temperature"] is None
    assert record["readings"][0]["tempered"] is None
    assert write_report(tmp_path).tables[0].rows


def test_a_cell_can_be_trained_by_several_processes(tmp_path):
    (record,) = run_grid(base(**{"run.devices": 2}), cells(methods=("didicm-posterior",)), tmp_path)
    log = (tmp_path / "cells" / record["key"] / "train.log").read_text()
    assert log.count("epoch 2: accuracy") == 1
    assert record["num_train"] == 90
    assert not list(tmp_path.glob("cells/*/state"))


def test_contestants_that_are_the_same_training_are_named(tmp_path):
    same = [Cell(name, SETTING, 0, METHODS["standard"]) for name in ("a", "b")]
    with pytest.raises(UserError, match="a and b have the same settings"):
        run_grid(base(), same, tmp_path)


def test_a_key_tells_trainings_apart_and_nothing_else():
    cell = cells()[0]
    assert cell.key(base()) == cell.key(base(**{"run.workers": 3, "out": "elsewhere"}))
    others = [
        cell.key(base(epochs=3)),
        cells()[1].key(base()),
        Cell("standard", SETTING, 1, METHODS["standard"]).key(base()),
        Cell("standard", Setting(7, 0.05, "noise:3"), 0, METHODS["standard"]).key(base()),
    ]
    assert len({cell.key(base()), *others}) == 5


def test_temperature_images_are_cut_from_the_training_images_alike_for_all_methods():
    made = [prepare(cell.config(base()), cell.held_out) for cell in cells()]
    for parts, test in made:
        names = [{images.name(i) for i in range(len(images))} for images in (parts.train, parts.val, test)]
        assert not names[0] & names[1]
        assert not (names[0] | names[1]) & names[2]
        assert len(names[2]) == 1000
    (one, _), (other, _) = made
    assert [one.val.name(i) for i in range(10)] == [other.val.name(i) for i in range(10)]


def test_mistakes_are_told_before_anything_is_trained(tmp_path):
    wrong = [Cell("standard", Setting(7, 0.01), 0, METHODS["standard"])]
    with pytest.raises(UserError, match=r"7 px, 1 % of the images: .* lower batch_size"):
        run_grid(base(), wrong, tmp_path)
    with pytest.raises(UserError, match=r"no setting 'optimizer.speed'"):
        run_grid(base(), [Cell("standard", SETTING, 0, {"optimizer.speed": 1})], tmp_path)
    assert not Results(tmp_path).read()


def test_resizing_once_gives_the_same_pixels():
    from didicm.data import make_loader

    parts, test = prepare(cells()[0].config(base()), 0.1)
    small, small_test = shrink(parts, test)
    for before, after, transform, train in (
        (parts.train, small.train, parts.train_transform, True),
        (test, small_test, parts.view, False),
    ):
        one, other = (make_loader(x, transform, 20, train=train, seed=3) for x in (before, after))
        assert other.fast
        assert torch.equal(next(iter(one))[0], next(iter(other))[0])
        assert before.name(5) == after.name(5)

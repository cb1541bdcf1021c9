"""Grids that submitit spreads, with its local executor in place of SLURM: real jobs, submitted and watched."""

import importlib.util
import json

import pytest
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments import METHODS, Cell, Results, main_table, rows_of, run_grid
from didicm.experiments.cluster import JOBS
from tests.unit.study.making import SETTING, base, cells


def table(out):
    return main_table(rows_of(sorted(Results(out).read().values(), key=lambda record: record["key"]))).rows


def test_jobs_of_a_cluster_share_a_grid_and_run_no_cell_twice(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    console = Console(record=True)
    records = run_grid(base(), cells(seeds=2), there, jobs=2, cluster="local", console=console)
    assert "submitted 2 jobs" in console.export_text()
    run_grid(base(), cells(seeds=2), here)
    assert table(there) == table(here)
    lines = [json.loads(line) for line in (there / "results.jsonl").read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == sorted(record["key"] for record in records)
    logs = "".join(path.read_text() for path in (there / JOBS).glob("*_log.out"))
    assert logs.count("done: ") == 4  # between the two of them


def test_a_job_that_fails_is_told_with_where_to_look(tmp_path):
    cell = Cell("standard", SETTING, 0, METHODS["standard"])
    (tmp_path / "cells" / cell.key(base())).mkdir(parents=True)
    (tmp_path / "cells" / cell.key(base()) / "state").write_text("not a folder")
    with pytest.raises(UserError, match=r"job \w+ failed .*: see .*_log.err"):
        run_grid(base(), [cell], tmp_path, cluster="local")


def test_wrong_options_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"--executor local cannot be used so .*speed"):
        run_grid(base(), cells(), tmp_path, cluster="local", cluster_options={"speed": 3})


def test_without_submitit_it_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "submitit" else find(name))
    with pytest.raises(UserError, match=r'pip install "didicm\[slurm\]"'):
        run_grid(base(), cells(), tmp_path, cluster="slurm")

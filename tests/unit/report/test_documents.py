"""The published page says what the stored results say."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from didicm.experiments.results import read_plan, read_results

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_number_of_the_results_page_was_typed_in(maker, tmp_path, unrendered):
    stored = {path.relative_to(DOCS / "results") for path in (DOCS / "results").rglob("*.*")}
    figures = {path for path in stored if path.suffix == ".svg"}
    assert figures
    for path in stored - figures:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / "results" / path, tmp_path / path)
    assert maker.write_page(tmp_path) == (DOCS / "results.md").read_text(encoding="utf-8")
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")} == figures


def test_results_are_taken_over_with_six_digits_and_nothing_of_the_machine(maker, tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "FOLDER", tmp_path / "taken")
    source = tmp_path / "studies"
    shutil.copytree(DOCS / "results" / "solvers-cpu", source / "solvers-cpu")
    maker.take_over(source)
    taken = tmp_path / "taken" / "solvers-cpu"
    assert read_results(taken) == read_results(source / "solvers-cpu")
    assert read_plan(taken).command == "didicm study solvers-cpu"

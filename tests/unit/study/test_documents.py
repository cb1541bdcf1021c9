"""The published page says what the stored results say."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_number_of_the_results_page_was_typed_in(maker, tmp_path):
    stored = list((DOCS / "results").glob("*.json*"))
    assert stored
    for path in stored:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert maker.write_page(tmp_path) == (DOCS / "results.md").read_text(encoding="utf-8")
    for figure in tmp_path.glob("*.svg"):
        assert (DOCS / "results" / figure.name).exists()
    assert not [path for path in (DOCS / "results").glob("*.svg") if not (tmp_path / path.name).exists()]

"""The published page says what the stored results say."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from didicm.experiments.results import read_plan, read_results
from didicm.models import cost, create_model
from didicm.report import figures

DOCS = Path(__file__).parents[3] / "docs"
README = DOCS.with_name("README.md")


class Undrawn:
    """A figure, or a plot of one, that takes whatever is drawn and shows nothing."""

    def __getattr__(self, name):
        return Undrawn()

    def __call__(self, *arguments, **options):
        return None

    def get_ylim(self):
        return 0.0, 1.0

    def get_figheight(self):
        return 1.0

    def get_legend_handles_labels(self):
        return [], []


@pytest.fixture(scope="module")
def maker():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("make_results")


@pytest.fixture(scope="module")
def plots(maker):
    return sys.modules["plots"]


def test_no_number_of_the_pages_of_results_was_typed_in(maker, plots, monkeypatch):
    for module in (figures, plots):  # the text is what counts, and the plots of all studies take longer than it
        monkeypatch.setattr(module, "make_axes", lambda count, *_, **__: (Undrawn(), [Undrawn()] * count))
    made = maker.write_pages()
    drawings = {path.relative_to(DOCS).as_posix() for path in (DOCS / "results").rglob("*.svg")}
    assert {path for path in made if path.endswith(".svg")} == drawings
    stored = {path.relative_to(DOCS).as_posix() for path in (DOCS / "results").rglob("*.md")}
    assert made.keys() - drawings == {"results.md", *stored}
    for path in made.keys() - drawings:
        assert made[path] == (DOCS / path).read_text(encoding="utf-8"), path


def test_every_question_has_a_figure_and_a_table():
    _, *sections = re.split(r"^## \d\. ", (DOCS / "results.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(sections) == 7
    for section in sections:
        answer = section.partition("\n## ")[0]
        assert re.search(r"^\*\*", answer, re.MULTILINE), answer  # a plain sentence
        assert re.search(r"^!\[.+\]\(.+\.svg\)$", answer, re.MULTILINE), answer
        assert "\n|---|" in answer, answer


def test_no_number_of_the_readme_was_typed_in(maker):
    text = README.read_text(encoding="utf-8")
    assert maker.write_summary(text) == text


def test_the_stem_costs_what_the_documents_say():
    """Per network call, and for the eight that the paper makes."""
    with torch.device("meta"):
        published, resnet = create_model("didirn50", layout="official"), create_model("didirn50_baseline")
    ours, theirs = ([cost(model, size) for size in (56, 112, 224)] for model in (published, resnet))
    one, eight = ([a.total(calls) / b.total(1) for a, b in zip(ours, theirs, strict=True)] for calls in (1, 8))
    a, b, c = (f"{ratio:.1f}" for ratio in one)
    page, readme = (" ".join(path.read_text(encoding="utf-8").split()) for path in (DOCS / "paper.md", README))
    assert (
        f"costs {a} times the multiply-adds of that ResNet-50 at 56 px, {b} times at 112 px and {c} times" in page
    )
    assert "its eight calls {:.0f}, {:.0f} and {:.0f} times".format(*eight) in page
    assert f"costs {a} to {c} times the multiply-adds" in readme


def test_results_are_taken_over_with_six_digits_and_nothing_of_the_machine(maker, tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "FOLDER", tmp_path / "taken")
    source = tmp_path / "studies"
    shutil.copytree(DOCS / "results" / "solvers-cpu", source / "solvers-cpu")
    maker.take_over(source)
    taken = tmp_path / "taken" / "solvers-cpu"
    assert read_results(taken) == read_results(source / "solvers-cpu")
    assert read_plan(taken).command == "didicm study solvers-cpu"


@pytest.mark.usefixtures("maker")
def test_stratified_times_have_a_part_of_their_own_each_and_any_image_may_have_any():
    stratified = importlib.import_module("make_stratified").StratifiedTimes(
        create_model("didirn8", num_classes=3, width=0.25), draws_per_image=2
    )
    generator = torch.Generator().manual_seed(0)
    u = torch.stack([stratified.random_numbers(20, generator) for _ in range(300)])
    parts = (u[..., 0] * 40).long().flatten(1)
    assert (parts.sort(1).values == torch.arange(40)).all()
    assert ((u[..., 0].mean(0) - 0.5).abs() < 0.1).all()  # of each draw, over batches: the loss keeps its mean
    assert ((u[..., 1:].mean(0) - 0.5).abs() < 0.1).all()

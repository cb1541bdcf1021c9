import io
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments import Setting, run_grid, write_report
from tests.unit.study.making import base, cells

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIGURES = {"uncertainty", "gains", "calls", "reliability", "risk", "entropy", "trajectories", "mistakes"}
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Collects what a test asks about, and checks that tags close."""

    def __init__(self, text):
        super().__init__()
        self.images, self.resources, self.open, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.resources += [value for name, value in attributes.items() if name in ("src", "href", "srcset")]
        if tag == "img":
            self.images.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "a b"
    settings = (Setting(14, 0.1), Setting(7, 0.05))
    run_grid(base(), cells(2, ("standard", "didicm-posterior"), settings), out)
    write_report(out)
    return out


def test_the_report_is_one_file_with_every_picture_inside(study):
    text = (study / "report.html").read_text()
    page = Page(text)
    assert len(page.images) == len(FIGURES)
    assert all(image["src"].startswith("data:image/") and image["alt"] for image in page.images)
    assert all(resource.startswith("data:") for resource in page.resources)
    assert "http" not in re.sub(r"data:image[^\"]*", "", text)
    assert "url(" not in text
    for words in ("1000 test images", "14 px, 10 % of the images", "--report-only", "DiDiCM posterior, 1 call"):
        assert words in page.text


def test_everything_is_made_again_from_stored_results_alone(study, tmp_path):
    copy = tmp_path / "a b"
    shutil.copytree(study, copy)
    for made in ("report.html", "figures"):
        path = copy / made
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in (copy / "cells").iterdir():
        shutil.rmtree(folder / "last")  # no model is needed
    again = write_report(copy)
    assert {path.stem for path in (copy / "figures").iterdir()} == FIGURES
    for path in (study / "figures").glob("*.svg"):
        assert path.read_bytes() == (copy / "figures" / path.name).read_bytes()
    assert again.verdict == write_report(copy).verdict
    strip = lambda path: path.read_text().replace(str(path.parent), "")  # noqa: E731
    assert strip(study / "report.html") == strip(copy / "report.html")


def test_a_half_finished_grid_can_be_reported(tmp_path):
    run_grid(base(), cells(1, ("standard",)), tmp_path)
    assert "nothing to compare" in write_report(tmp_path).verdict[0]


def test_class_names_are_no_formulas(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("$10_$20", "_background [old]", "US$ 1 and $x^"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for i in range(12):
            Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{i}.png")
    settings = {"data": str(tmp_path / "data"), "batch_size": 5, "image.size": 8}
    run_grid(base(**settings), cells(1, settings=(Setting(),)), tmp_path / "out")
    report = write_report(tmp_path / "out")
    assert {path.stem for path in (tmp_path / "out" / "figures").iterdir()} == FIGURES
    Console(file=io.StringIO()).print(report.tables[0].to_rich(80))


def test_no_results_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no results yet"):
        write_report(tmp_path)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install it to test the report in a real browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(360, 740), (1440, 900)], ids=["phone", "wide"])
def test_a_real_browser_shows_it_whole(study, browser, size, scheme):
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("requestfailed", lambda request: trouble.append(request.url[:80]))
    page.goto((study / "report.html").as_uri())
    assert trouble == []
    assert page.title() == page.locator("h1").inner_text()
    for image in page.locator("img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("i => i.complete && i.naturalWidth > 50")
    assert page.locator("img").count() == len(FIGURES)
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll in themselves
    # The verdict is seen at once, and can be read.
    box = page.locator(".verdict p").first.bounding_box()
    assert box["y"] < height
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    )
    assert (ink > paper) == (scheme == "dark")
    assert abs(ink - paper) > 380
    context.close()

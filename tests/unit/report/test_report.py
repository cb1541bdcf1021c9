import io
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from playwright.sync_api import sync_playwright
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments.results import read_plan, write_plan
from didicm.experiments.spec import Condition
from didicm.experiments.study_file import METHODS, make_study
from didicm.report import html
from didicm.report.html import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
POSTERIORS = {"reliability", "risk", "entropy", "trajectories", "errors"}
FIGURES = {"uncertainty", "gains", "calls", *POSTERIORS}
VOID = {"meta", "img", "br", "hr", "link", "input"}
NAMES = ("$10_$20", "_background [old]", "US$ 1 and $x^")  # no formulas and no markup, whatever they look like


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
def folder(once, store, comparison):
    def make(out):
        methods = METHODS["standard"], METHODS["didicm-posterior"]
        conditions = Condition(14, 0.1), Condition(7, 0.05)
        store(out / "a b", comparison(*methods, conditions=conditions, note="Mind the gap."), NAMES)
        write_report(out / "a b")

    return once("report", make) / "a b"


def test_the_report_is_one_file_with_every_picture_inside(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert len(page.images) == len(FIGURES)
    assert all(image["src"].startswith("data:image/") and image["alt"] for image in page.images)
    assert all(resource.startswith("data:") for resource in page.resources)
    assert "http" not in re.sub(r"data:image[^\"]*", "", text)
    assert "url(" not in text
    for words in ("40 test images", "14 px, 10 % of the images", "DiDiCM, posterior, 1 call", "Mind the gap."):
        assert words in page.text
    assert "--report-only" in page.text


def test_everything_is_made_again_from_stored_results_alone(folder, tmp_path):
    copy = tmp_path / "a b"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "figures")
    (copy / "report.html").unlink()
    write_report(copy)
    assert {path.stem for path in (copy / "figures").iterdir()} == FIGURES
    for path in (folder / "figures").glob("*.svg"):
        assert path.read_bytes() == (copy / "figures" / path.name).read_bytes()
    strip = lambda path: path.read_text().replace(str(path.parent), "")  # noqa: E731
    assert strip(folder / "report.html") == strip(copy / "report.html")


@pytest.mark.parametrize("method", ["standard", "didicm-score"])
def test_a_half_finished_comparison_can_be_reported(tmp_path, store, comparison, unrendered, method):
    store(tmp_path, comparison(METHODS[method]), seeds=1)
    assert "nothing to compare" in write_report(tmp_path).verdict[0]


@pytest.mark.parametrize(
    ("layout", "figures"),
    [
        ("uncertainty", {"uncertainty", "gains", "calls"}),
        ("sizes", {"gains"}),
        ("steps", {"steps"}),
        ("metrics", {"uncertainty"}),
    ],
)
def test_every_layout_has_its_figures_and_tables(tmp_path, store, monkeypatch, request, layout, figures):
    monkeypatch.setattr(html, "_draw_posteriors", lambda *_: [])  # the same in every layout, and slow
    if figures <= FIGURES:  # which are rendered above
        request.getfixturevalue("unrendered")
    size = {"size": "8"} if layout == "sizes" else {}
    methods = [{"name": "DiDiCM-CP", "variant": "Weak Aug", **size}]
    if layout != "steps":
        methods.insert(0, {**methods[0], "name": "standard", "method": "standard"})
    content = {"name": "x", "title": "X", "question": "Why?", "layout": layout, "methods": methods}
    content["prediction"] = "It will <win>."
    if layout in ("uncertainty", "sizes"):
        content["published"] = "tab:main_results" if layout == "uncertainty" else "tab:all_resnet"
    if layout == "steps":
        content["samplers"] = {"exact": {"steps": [8, 1]}}
    store(tmp_path, make_study(content, "here"))
    report = write_report(tmp_path)
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == figures
    titles = [table.title for table in report.tables]
    assert titles[-2:] == ["Test images", "Cost"]
    assert any(title.startswith("Published: ") for title in titles) == ("published" in content)
    page = (tmp_path / "report.html").read_text()
    assert "didicm study x.yaml" in page
    assert "Predicted: It will &lt;win&gt;." in page


def test_a_run_has_the_label_that_its_method_has_now(tmp_path, store, comparison, unrendered):
    store(tmp_path, comparison(METHODS["standard"], METHODS["didicm-score"]))
    plan = read_plan(tmp_path)
    renamed = replace(METHODS["standard"], name="cross-entropy [old]")
    study = replace(plan.study, methods=(renamed, METHODS["didicm-score"]))
    labels = {"standard": "cross-entropy [old]", "DiDiCM, score": "DiDiCM, score"}
    write_plan(tmp_path, replace(plan, study=study, runs={k: labels[x] for k, x in list(plan.runs.items())[:2]}))
    table = write_report(tmp_path).tables[0]
    names = [row[0].strip() for row in table.rows]
    assert names[1:] == ["cross-entropy [old]", "DiDiCM, score, 8 steps", "DiDiCM, score, 1 call"]
    screen = Console(file=io.StringIO(), width=200)
    screen.print(table.to_rich(200))
    assert "cross-entropy [old]" in screen.file.getvalue()  # brackets are no markup


def test_no_results_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no results yet"):
        write_report(tmp_path)


def test_a_missing_picture_is_named_with_its_remedy(tmp_path, store, comparison, unrendered):
    store(tmp_path, comparison(METHODS["standard"], METHODS["didicm-score"]), seeds=1)
    for path in tmp_path.glob("measured/*/pictures.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=r"pictures.safetensors is missing or damaged .*: delete its line"):
        write_report(tmp_path)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install it to test the report in a real browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1_200_000)
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "height", "scheme"), [(360, 740, "light"), (1280, 900, "dark")])
def test_a_real_browser_shows_it_whole(folder, browser, width, height, scheme):
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    context.set_default_timeout(1_200_000)
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("requestfailed", lambda request: trouble.append(request.url[:80]))
    page.goto((folder / "report.html").as_uri())
    assert trouble == []
    assert page.title() == page.locator("h1").inner_text()
    for image in page.locator("img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("i => i.complete && i.naturalWidth > 50")
    assert page.locator("img").count() == len(FIGURES)
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll in themselves
    hidden = page.evaluate("[...document.querySelectorAll('.scroll')].map(x => x.scrollWidth - x.clientWidth)")
    assert width < 1280 or not any(hidden), "a wide screen shows every column"
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

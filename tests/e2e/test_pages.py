"""Every command and code block of README and docs runs, and prints what the pages say; the examples run too."""

import ast
import importlib.util
import inspect
import json
import pickle
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from mkdocs.commands.build import build
from mkdocs.config import load_config
from playwright.sync_api import sync_playwright

import didicm
from didicm import diffusion
from didicm.cli.__main__ import main
from didicm.data import open_data
from didicm.errors import UserError
from didicm.experiments.study_file import list_studies, load_study
from didicm.inference import export as exporting

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Made from fashion-mini by docs/start.md; here a few of each class are enough.
FEWER = {
    '("photos/train", data.train, 0, 40)': '("photos/train", data.train, 0, 20)',
    '("photos/val", data.val, 0, 30)': '("photos/val", data.val, 0, 12)',
    '("test", data.val, 30, 50)': '("test", data.val, 30, 34)',
    'out="runs/mine")': 'out="runs/mine", epochs=1, sampler=didicm.Sampler(steps=2))',
}
FASTER = {
    "train": ["--epochs=1", "--sampler.steps=2"],
    "distill": ["--epochs=1"],
    "compare": ["--epochs=1", "--seeds=1"],
    "examples/fine_tune.py": ["1"],  # epoch
}
CLASSES = open_data("fashion-mini").class_names
COARSE = ["shoes", "tops", "other"]  # of a taxonomy
NUMBER = r"[-+\u2212]?\d[\d,]*(?:\.(?P<digits>\d+))?(?:e[-+]\d+)?"
VARIABLE = {  # what another training changes
    r"^ *step .*|#+": "",  # progress, bars
    r"\bnan\b": "0.0",
    r"\btemperature(?: of)?\s+[\d.]*\d": "temperature",  # 1 may be written without decimals
    r"the model was (?:over|under)confident|posteriors stay as they are": "CONFIDENT",
    r"\b(?:true|false)\b": "FLAG",
    r"(?:under )?\d[\d.,]* (?:days?|h|min|s)\b(?: \d+ (?:h|min|s)\b)?": "TIME",
    r"\d[\d.,]* [GMk]B?\b": "SIZE",
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


maker = load("make_examples")
PAGES = [page for page in maker.pages() if page != maker.START]


def faster(argv):
    if "--extend" in argv:
        return [*argv, "--epochs=2"]
    return [*argv, *FASTER.get(argv[0], [])]


def fewer(code):
    for usual, small in FEWER.items():
        code = code.replace(usual, small)
    return code


def shape(text):
    """Rows of tables, cell by cell, and words of sentences, in order, without what another training changes.

    Numbers are left by their kind: whole, with one decimal, with more. What repeats is left once, as there may be
    more or fewer classes in a set, images in a list and epochs in a training.
    """
    for pattern, word in VARIABLE.items():
        text = re.sub(pattern, word, text, flags=re.MULTILINE | re.IGNORECASE)
    for name in [*CLASSES, *COARSE]:
        text = re.sub(rf"\b{name.replace('/', '-')}\b", "CLASS", text)
    text = re.sub(NUMBER, lambda found: f" N{min(len(found['digits'] or ''), 2)} ", text)
    parts = []
    for line in text.splitlines():
        if set(line) & set("│┃"):
            cells = (" ".join(cell.split()) for cell in re.split("[│┃]", line))
            parts.append(tuple("N1 %" if cell == "-" else cell for cell in cells))  # of a class never predicted
        elif not set(line) & set(maker.BOX):
            parts += re.sub(r"[^\w\s/]", " ", line).split()
    return shorter(parts)


def shorter(parts):
    """Parts of which none follows itself; neither do two or more of them together."""
    for length in range(1, 13):
        left = []
        for part in parts:
            left.append(part)
            if left[-length:] == left[-2 * length : -length]:
                del left[-length:]
        parts = left
    return parts


def without_further_notes(printed, shown):
    """What was printed, without notes that the page has not: a model as weak as the tests' gives more cause."""
    words = " ".join(map(str, shape(shown)))
    lines = printed.splitlines(keepends=True)
    return "".join(x for x in lines if not x.startswith("note: ") or " ".join(map(str, shape(x))) in words)


@pytest.fixture(scope="module", autouse=True)
def a_terminal():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(maker.WIDTH))
        yield


@pytest.fixture(scope="module", autouse=True)
def export_once():
    """Converting a graph takes seconds, and all pages have the same model: the second time its file is there.

    What was said of it lies beside it, as the file may be another process's.
    """
    real = exporting.export

    def export(model, out, **options):
        asked = inspect.signature(real).bind(model, out, **options)
        asked.apply_defaults()
        kept = Path(f"{out}.{'-'.join(map(str, asked.kwargs.values()))}.pickle")
        if not (Path(out).exists() and kept.exists()):
            kept.write_bytes(pickle.dumps(real(model, out, **options)))
        return pickle.loads(kept.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "export", export)
        patch.setattr("didicm.cli.export.export", export)
        patch.setattr(didicm, "export", export)  # else the first one that was asked for stays
        yield


def follow(page, folder, start):
    """Run a page, and compare what it shows with what it prints."""
    reader = maker.Reader(folder, faster, fewer, start)
    try:
        for block, printed in reader.follow(maker.read_blocks(page.read_text(encoding="utf-8"))):
            if block.detail and "in other words" in block.detail:  # for other images
                continue
            message = f"{page.name} shows\n{block.code}\nand not\n{printed}\nrun make examples"
            assert shape(without_further_notes(printed, block.code)) == shape(block.code), message
    finally:
        reader.close()


@pytest.fixture(scope="module")
def started(once, start_didicm):
    """The folder that the start page leaves."""
    return once("start", lambda folder: follow(maker.START, folder.resolve(), start_didicm))


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs_and_prints_what_is_shown(page, started, start_didicm, tmp_path):
    folder = shutil.copytree(started, tmp_path / "work")
    follow(page, folder.resolve(), start_didicm)


@pytest.mark.parametrize("page", maker.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_on_a_page_escapes(page):
    """A fence that is not understood would not be run."""
    text = page.read_text(encoding="utf-8")
    blocks = maker.read_blocks(text)
    assert text.count("```") == 2 * len(blocks)
    for block in blocks:
        assert block.language in (("text",) if block.is_output else ("sh", "python", "yaml")), block.code
        assert (block.mark == "not run") <= bool(block.detail), "say why it is not run"
        assert block.language != "yaml" or block.title, "a YAML block is a file and needs a name"


@pytest.mark.parametrize("page", maker.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_have_options_that_exist(page):
    for command in re.findall(r"`didicm ([a-z-]+ [^`]+)`", page.read_text(encoding="utf-8")):
        words = command.replace("...", "").split()
        if not any(word.isupper() for word in words):  # DIR stands for something
            try:
                maker.parse_only(words)
            except UserError as error:
                if " needs " not in str(error):  # a sentence may leave out what goes without saying
                    raise


def test_the_commands_of_the_pages_of_results_name_studies_and_options_that_exist():
    pages = (ROOT / "docs" / "results").glob("*/README.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = re.findall(r"^didicm (study .+)$", text, re.MULTILINE)
    assert len(commands) > len(list_studies()) / 2
    for command in commands:
        maker.parse_only(command.split())
        load_study(command.split()[1])


def test_the_commands_of_the_results_page_run(works, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    commands = re.findall(r"^didicm (.+)$", text, re.MULTILINE)
    plain = re.search(r"alone, add `(.+?)`", text)[1]
    assert "`--mask 0.5`" in text
    assert [command.split()[0] for command in commands] == ["train", "train", "train", "compare"]
    monkeypatch.chdir(tmp_path)
    for command in (*commands, f"{commands[0]} {plain}", f"{commands[1]} {plain} --mask 0.5"):
        works(*command.replace("photos", "fashion-mini").split(), "--dry-run")


def test_code_that_is_shown_of_an_example_is_that_example():
    shown = [
        (block.detail.removeprefix("it is "), block.code)
        for page in maker.pages()
        for block in maker.read_blocks(page.read_text(encoding="utf-8"))
        if (block.detail or "").startswith("it is examples/")
    ]
    assert shown
    for name, code in shown:
        assert (ROOT / name).read_text(encoding="utf-8").endswith(code), name


@pytest.mark.parametrize(
    "code", ["print(", "didicm.comparison('photos')", "didicm.compare('photos', 'runs/compare', seed=2)"]
)
def test_wrong_code_that_is_not_run_is_found(code):
    with pytest.raises((SyntaxError, AttributeError, TypeError)):
        maker.check_code(code)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name in ("answers", "guides")], ids=lambda p: p.name
)
def test_a_page_says_what_it_continues_from(page):
    assert re.match(r"# .+\n\n\*(Continues from \[Start\]|Stands alone)", page.read_text(encoding="utf-8"))


def test_every_study_is_on_the_page_on_comparisons(capsys):
    page = (ROOT / "docs" / "guides" / "compare.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    text = capsys.readouterr().out
    for name in list_studies():
        assert name in page
        assert name in text


def test_the_counts_of_the_architecture_page_are_the_stored_ones(run_module):
    assert run_module("benchmarks.walks", "--check") == 0


def test_the_page_on_speed_shows_what_was_measured(run_module):
    stored = json.loads((ROOT / "docs" / "speed.json").read_text(encoding="utf-8"))
    assert {"networks", "diffusion", "exported"} <= stored.keys()
    assert run_module("benchmarks", "--check") == 0


def test_every_public_name_has_an_example():
    blocks = maker.read_blocks((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"))
    code = "".join(block.code for block in blocks if block.language == "python")
    used = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    assert set(didicm.__all__) <= used


def test_below_every_equation_stands_its_function():
    """An equation is an indented line; the link is checked when the site is built."""
    paragraphs = (ROOT / "docs" / "maths.md").read_text(encoding="utf-8").split("\n\n")
    equations = [i for i, text in enumerate(paragraphs) if text.startswith("    ")]
    assert len(equations) > 6
    for i in equations:
        assert re.match(r"\*In code: \[`\w", paragraphs[i + 1]), paragraphs[i]


@pytest.fixture(scope="module")
def site(once):
    """The pages as HTML; a warning is an error."""
    return once(
        "site", lambda place: build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(place), strict=True))
    )


def test_the_site_is_whole_and_fetches_nothing(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//", text), page
        assert not re.findall(
            r"<link[^>]+rel=\"?(?:stylesheet|preconnect|preload)[^>]+href=\"?(?:https?:)?//", text
        ), page


def test_the_site_holds_pages_and_not_what_they_are_made_from(site):
    made_from = {path.suffix for path in site.rglob("*.*")} & {".py", ".json", ".jsonl", ".md"}
    assert not made_from - {".json"}
    assert [path.name for path in site.rglob("*.json")] == ["search_index.json"]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1_200_000)
        yield chromium
        chromium.close()


def new_page(browser, **options):
    """A page that waits as long as a busy machine needs."""
    page = browser.new_page(**options)
    page.set_default_timeout(1_200_000)
    return page


# What is wider than its place: the page itself, or code that a reader of a wide screen would have to scroll.
TOO_WIDE = """(wide) => [
  ...(document.documentElement.scrollWidth > innerWidth ? [`${document.documentElement.scrollWidth} px`] : []),
  ...[...document.querySelectorAll(".md-content :not(details) > .highlight pre > code")]
    .filter((code) => wide && code.checkVisibility() && code.scrollWidth > code.clientWidth + 1)
    .map((code) => code.innerText),
]"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_every_page_fits_wide_and_narrow_screens_in_light_and_dark(site, browser):
    page, troubles = new_page(browser), []
    page.on("pageerror", lambda error: troubles.append(f"{page.url}: {error}"))
    page.on(
        "requestfailed", lambda request: troubles.append(f"{page.url} asks for {request.url}, {request.failure}")
    )
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # a server's, with addresses that start at its root
            continue
        page.set_viewport_size({"width": 1280, "height": 900})  # before it is laid out: what slides takes time
        page.goto(path.as_uri())
        for width, scheme in ((1280, "default"), (390, "slate")):
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("(scheme) => document.body.setAttribute('data-md-color-scheme', scheme)", scheme)
            too_wide = page.evaluate(TOO_WIDE, width == 1280)
            troubles += [f"{path.name}, {width} px, {scheme}: {what}" for what in too_wide]
    page.close()
    dark = new_page(browser, color_scheme="dark")
    dark.goto((site / "index.html").as_uri())
    assert dark.locator("body").get_attribute("data-md-color-scheme") == "slate"
    dark.close()
    assert not [trouble for trouble in troubles if "ERR_ABORTED" not in trouble]  # left before its icon was there


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_search_works_from_a_disk(site, browser):
    page = new_page(browser)
    page.goto((site / "guides" / "data.html").as_uri())
    page.locator(".md-search__input").press_sequentially("conformal")  # it answers keys
    page.locator(".md-search-result__link").first.wait_for()
    assert page.locator(".md-search-result__link[href*='answers/set.html']").count()
    page.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_picture_computes_what_the_library_does(site, browser):
    """The same truth, and the same error of the network in every step: the states of all steps agree."""
    process, truth = diffusion.UniformProcess(3), [0.6, 0.32, 0.08]
    errors = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Erring:
        def encode(self, image):
            self.calls = iter(errors)
            return image

        def score(self, features, label, total):
            keep = torch.exp(-total.double()).unsqueeze(-1)
            log_q = (keep * features + (1 - keep) / 3).log() + next(self.calls)
            return log_q - log_q.gather(-1, label.unsqueeze(-1))

    page = new_page(browser)
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((site / "picture.html").as_uri())
    page.locator("#simplex [data-part=t]").fill("0.25")
    said = page.locator("#simplex [data-part=say]").inner_text()
    page.locator("#simplex [data-part=t]").press("3")  # pulls the truth to the third class
    assert page.locator("#simplex [data-part=say]").inner_text() != said
    for solver in ("exact", "euler"):
        drawn = page.evaluate(
            "([truth, solver, errors]) => simplex.reverse(truth, 4, solver, errors).map((x) => x.p)",
            [truth, solver, errors.tolist()],
        )
        steps = []
        image = torch.tensor([truth], dtype=torch.float64)
        diffusion.sample_cp(Erring(), image, process, steps=4, solver=solver, callback=steps.append)
        ours = torch.cat([step.probs for step in steps])
        assert torch.allclose(torch.tensor(drawn[1:], dtype=torch.float64), ours.double(), atol=1e-6)
    page.close()
    assert "75 % of the labels" in said
    assert not troubles


@pytest.mark.parametrize(
    ("name", "says"), [("own_loop.py", "likelihood"), ("label_next.py", "least certain: 200")]
)
def test_an_example_that_no_page_runs(name, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "1"])  # epoch
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert says in capsys.readouterr().out


def test_every_example_is_run_and_named_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [
        block.code for page in maker.pages() for block in maker.read_blocks(page.read_text(encoding="utf-8"))
    ]
    for example in (ROOT / "examples").glob("*.py"):
        assert f"examples/{example.name}" in readme
        run_here = example.name in ("own_loop.py", "label_next.py")
        assert run_here or any(f"python examples/{example.name}" in code for code in blocks)

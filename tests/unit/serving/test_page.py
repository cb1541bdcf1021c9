"""The page in a real browser, against a real server."""

import shutil

import pytest
import torch
from playwright.sync_api import expect, sync_playwright

from didicm import DiffusionClassifier, StandardClassifier, create_model, save
from didicm.data import EvalTransform, open_data
from didicm.data.decode import image_formats
from didicm.evaluation.fitting import calibrate
from didicm.inference.predictor import Predictor
from didicm.serving.security import Access, Limits
from didicm.serving.service import find_examples

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 1_200_000  # milliseconds
TOKEN = "correct-horse-battery-staple"
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A calibrated model and a standard classifier of the classes whose images ship with the package."""
    names = open_data("fashion-mini", channels=1).train.class_names
    found = {}
    for name, network, kind in (
        ("shoes", "didirn8", DiffusionClassifier),
        ("plain", "didirn8_baseline", StandardClassifier),
    ):
        torch.manual_seed(0)
        network = create_model(network, num_classes=10, in_chans=1, width=0.125, stem="small")
        with torch.no_grad():
            for parameter in network.parameters():  # networks start by saying nothing
                parameter.add_(0.1 * torch.randn_like(parameter))
        place = tmp_path_factory.mktemp("models") / name
        save(kind(network), place, class_names=names, transform=EvalTransform(14, 1, crop_pct=1.0).to_dict())
        if kind is DiffusionClassifier:
            calibrate(place, "fashion-mini")
        found[name] = Predictor.load(place, "cpu")
    return found


@pytest.fixture(scope="module")
def address(serve_here, models):
    client = serve_here(models, examples=find_examples(None, models["shoes"].class_names, Limits()))
    return f"http://127.0.0.1:{client.port}/"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install it to test the page in a real browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open the page; whatever the browser complains of is an error."""
    trouble, contexts = [], []

    def visit(address, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: trouble.append(request.url) if outside(request.url, address) else None)
        page.goto(address)
        return page

    def outside(url, address):
        return not url.startswith((address, f"blob:{address}"))

    yield visit
    for context in contexts:
        context.close()
    # The browser itself reports answers such as 422, which are meant.
    assert [text for text in trouble if "Failed to load resource" not in text] == []


def shown(page, panel="shoes"):
    rows = page.get_by_role("region", name=panel).get_by_role("row").all_inner_texts()
    return [row.replace("\xa0", " ").split("\t") for row in rows]


def test_an_upload_is_answered_and_the_slider_walks_its_steps(visit, address, models, write, tmp_path):
    page = visit(address)
    path = write(tmp_path / "photo.jpg")
    page.get_by_label("Choose an image file").set_input_files(path)
    expect(page.get_by_role("heading", name="Posterior")).to_be_visible()
    assert page.get_by_role("img", name="your image photo.jpg").evaluate("i => i.complete && i.naturalWidth") == 32
    expected = models["shoes"](path)
    rows = shown(page)
    assert [row[0] for row in rows] == [name for name, _ in expected.classes[:5]]
    assert rows[0][-1] == f"{100 * expected.classes[0][1]:.1f} %"
    assert [row[0] for row in shown(page, "plain")] == [name for name, _ in models["plain"](path).classes[:5]]
    region = page.get_by_role("region", name="shoes")
    assert expected.unlike_training  # no shoe: no set would hold the truth
    expect(region.get_by_role("definition").nth(1)).to_contain_text("do not rely on these probabilities")
    expect(region).to_contain_text("Final posterior")
    expect(region).to_contain_text(f"{expected.entropy:.2f} of at most 2.30 nats")
    slider = page.get_by_role("slider", name="Step")
    expect(region).to_contain_text("step 0: uniform")
    expect(region).to_contain_text("step 8: final")
    slider.fill("0")
    expect(region).to_contain_text("After step 0 of 8")
    assert {row[-1] for row in shown(page)} == {"10.0 %"}  # it knows nothing
    expect(region).to_contain_text("2.30 of at most 2.30 nats")
    page.get_by_role("button", name="Play").click()
    expect(region).to_contain_text("Final posterior")
    expect(page.get_by_role("button", name="Play")).to_be_visible()  # it was Pause until the end
    assert shown(page) == rows


def test_a_text_file_is_an_error_that_the_next_image_clears(visit, address, write, tmp_path):
    page = visit(address)
    (tmp_path / "notes.png").write_text("no image at all")
    page.get_by_label("Choose an image file").set_input_files(tmp_path / "notes.png")
    expect(page.get_by_role("alert")).to_have_text(
        f"This cannot be read as an image: it is none of {', '.join(image_formats())} or NPY."
    )
    expect(page.get_by_role("slider")).not_to_be_visible()
    page.get_by_label("Choose an image file").set_input_files(write(tmp_path / "photo.png"))
    expect(page.get_by_role("slider")).to_be_visible()
    expect(page.get_by_role("alert")).not_to_be_visible()
    page.get_by_label("Choose an image file").set_input_files(write(tmp_path / "scan.tiff"))
    undrawn = page.get_by_text("your image scan.tiff: browsers do not draw its format")
    expect(undrawn).to_be_visible()
    page.get_by_label("Choose an image file").set_input_files(tmp_path / "photo.png")
    expect(undrawn).not_to_be_visible()
    expect(page.get_by_role("img", name="your image photo.png")).to_be_visible()


def test_an_image_that_is_chosen_before_the_page_knows_its_model_is_answered(visit, address, write, tmp_path):
    page, held = visit(address), []
    page.route("**/info", lambda route: held.append(route))
    page.reload()
    page.get_by_label("Choose an image file").set_input_files(write(tmp_path / "photo.png"))
    while not held:
        page.wait_for_timeout(10)
    held[0].continue_()
    expect(page.get_by_role("slider")).to_be_visible()


def test_the_conformal_set_of_an_example_is_shown(visit, address, models):
    examples = find_examples(None, models["shoes"].class_names, Limits())
    expected = {item.name: models["shoes"](item.data) for item in examples}
    name, known = next((name, found) for name, found in expected.items() if found.conformal_set is not None)
    page = visit(address)
    page.get_by_role("button", name=name).click()
    region = page.get_by_role("region", name="shoes")
    expect(region.get_by_role("term").nth(1)).to_have_text(
        "Final set, which holds the true class for 90 % of images"
    )
    expect(region.get_by_role("definition").nth(1)).to_have_text(", ".join(known.conformal_set))
    expect(region).not_to_contain_text("do not rely on these probabilities")


def test_an_image_can_be_dropped(visit, address, file):
    page = visit(address)
    expect(page.get_by_role("button", name="Sneaker")).to_be_visible()
    page.evaluate(
        """bytes => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "bee.png"));
            document.getElementById("drop").dispatchEvent(
                new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        list(file()),
    )
    expect(page.get_by_role("slider")).to_be_visible()


def test_the_keyboard_is_enough(visit, address):
    page = visit(address)
    expect(page.get_by_role("button", name="Sneaker")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Choose an image file")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Trouser")).to_be_focused()
    page.keyboard.press("Enter")
    slider = page.get_by_role("slider", name="Step")
    expect(slider).to_be_visible()
    expect(page.get_by_role("button", name="Trouser")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("status")).to_contain_text("Most probable:")
    for _ in range(20):
        if slider.evaluate("element => element === document.activeElement"):
            break
        page.keyboard.press("Tab")
    expect(slider).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("region", name="shoes")).to_contain_text("After step 7 of 8")
    assert slider.get_attribute("aria-valuetext").startswith("step 7 of 8: ")
    page.keyboard.press("Home")
    expect(page.get_by_role("region", name="shoes")).to_contain_text("After step 0 of 8")


@pytest.mark.parametrize(("width", "height", "scheme"), [(320, 640, "dark"), (1440, 900, "light")])
def test_it_fits_a_phone_and_follows_the_colours_of_the_system(visit, address, width, height, scheme):
    page = visit(address, viewport={"width": width, "height": height}, color_scheme=scheme)
    page.get_by_role("button", name="Bag").click()
    expect(page.get_by_role("slider")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for control in page.locator("button:visible, input[type=range]:visible, #drop label").all():
        box = control.bounding_box()
        assert min(box["width"], box["height"]) >= 40  # a thumb's size
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    )
    assert (ink > paper) == (scheme == "dark")
    assert abs(ink - paper) > 380


def test_the_page_asks_for_the_token_and_then_works(visit, serve_here, models):
    client = serve_here(models, Access(TOKEN), examples=find_examples(None, models["shoes"].class_names, Limits()))
    page = visit(f"http://127.0.0.1:{client.port}/")
    page.get_by_label("This server needs a token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The token is wrong.")
    page.get_by_label("This server needs a token").fill(TOKEN)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Coat").click()
    expect(page.get_by_role("slider")).to_be_visible()

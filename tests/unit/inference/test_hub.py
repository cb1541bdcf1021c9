import json
import shutil

import pytest
import yaml

from didicm import Predictor, UserError, push
from didicm.inference.hub import METRICS, _public
from tests.oracle.hub import running_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Files on a hub that the real client believes in."""
    with running_hub() as (address, files):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        yield files


def test_a_model_its_calibration_and_a_card(hub, calibrated_model, tmp_path, make_folder, picture, works):
    run = shutil.copytree(calibrated_model, tmp_path / "run" / "best").parent
    photos = make_folder(tmp_path / "private" / "photos", ("ant", "bee", "cät"), count=4)
    works("evaluate", run, "--data", photos, "--workers", 0)
    shown = works("push", run, "hf://owner/name").out
    assert "hf://owner/name: README.md, calibration.json, config.json, model.safetensors" in shown
    assert "note" not in shown
    assert not any(str(tmp_path).encode() in content for content in hub.values())  # no path of this machine

    config = json.loads(hub["config.json"])
    assert config["label_names"] == config["class_names"] == ["ant", "bee", "cät"]
    _, head, card = hub["README.md"].decode().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["pipeline_tag"] == "image-classification"
    assert about["library_name"] == "didicm"
    measured = json.loads(next(run.glob("evaluation/*/metrics.json")).read_text())
    told = {x["type"]: x["value"] for x in about["model-index"][0]["results"][0]["metrics"]}
    assert told == {name: measured["metrics"][ours] for ours, name in METRICS.items()}
    for words in (
        f"| accuracy | {measured['metrics']['cls/Acc']:.4f} |",
        "12 images: all of photos",
        "## Intended use",
        'Predictor.load("hf://owner/name")',
        "- cät",
        "temperature of 1.7 and conformal sets (LAC with alpha 0.1, APS with alpha 0.1)",
    ):
        assert words in card

    ours, theirs = Predictor.load(run), Predictor.load("hf://owner/name")
    assert "calibrated by hf://owner/name/calibration.json" in theirs.note
    assert theirs(picture(0)).classes == ours(picture(0)).classes
    assert theirs(picture(0)).conformal_set == ours(picture(0)).conformal_set


def test_what_is_missing_or_out_of_date_is_told(hub, save_model, tmp_path):
    model = save_model(tmp_path / "model")
    metrics = tmp_path / "model" / "evaluation" / "old" / "metrics.json"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(json.dumps({"weights_sha256": "others", "metrics": {}}))
    stale, uncalibrated = push(model, "hf://owner/name").notes
    assert stale == "1 evaluation is of other weights and left out: run didicm evaluate again"
    assert uncalibrated == "there is no calibration: didicm calibrate adds one"
    assert "Not evaluated yet." in hub["README.md"].decode()
    assert "calibration.json" not in hub
    metrics.unlink()
    assert push(model, "hf://owner/name").notes[0] == "there are no metrics: didicm evaluate adds them"


@pytest.mark.parametrize(
    ("place", "name"),
    [("/home/me/photos", "photos"), ("d/a", "a"), (".", "."), ("hf://owner/data", "hf://owner/data")],
)
def test_only_what_names_the_place_of_the_images_is_changed(place, name):
    about = {"data": place, "split": f"all of {place}", "corruption": "blur:0.5", "image_digests": "xd/ay", "n": 3}
    assert _public(about) == {**about, "data": name, "split": f"all of {name}"}


def test_nothing_is_sent_that_does_not_load(hub, save_model, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="model does not exist"):
        push(tmp_path / "model", "hf://owner/name")
    model = save_model(tmp_path / "model")
    with pytest.raises(UserError, match="write hf://owner/name"):
        push(model, "owner")
    (model / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        push(model, "hf://owner/name")
    assert hub == {}
    model = save_model(tmp_path / "model")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^hf://owner/name cannot be written: .* check the name, your login"):
        push(model, "hf://owner/name")

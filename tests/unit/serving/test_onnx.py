"""Exported models over HTTP, without PyTorch."""

import re

import pytest

from didicm.inference.onnx import OnnxPredictor
from didicm.inference.predictor import Predictor

WITHOUT_TORCH = """
import sys
for name in ("torch", "torchvision", "timm", "lightning_fabric"):
    sys.modules[name] = None  # importing one of them fails
from didicm.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def exported(serve_here, onnx_model):
    return serve_here({"bees": OnnxPredictor.load(onnx_model, "cpu")})


def test_an_exported_model_answers_as_the_model_does(exported, calibrated_model, file):
    expected = Predictor.load(calibrated_model, "cpu")(file())
    status, content = exported.post("/predict", file())
    assert status == 200
    (prediction,) = content["predictions"]
    found = {entry["name"]: entry["probability"] for entry in prediction["classes"]}
    assert found == pytest.approx(dict(expected.classes), abs=1e-4)
    assert prediction["conformal_set"] == expected.conformal_set


def test_it_says_what_it_is(exported):
    model = exported.get("/info")[1]["models"]["bees"]
    assert (model["engine"], model["kind"]) == ("onnxruntime", "diffusion classifier")
    assert (model["calibrated"], model["trajectory"]) == (True, False)
    assert model["coverage"] == pytest.approx(0.9)
    assert model["input"] == {"size": 12, "channels": 3}
    assert model["sampler"]["steps"] == 2


def test_it_answers_no_other_question(exported, file):
    for query in ("steps=3", "sampler=cl", "trajectory=true"):
        status, content = exported.post(f"/predict?{query}", file())
        assert status == 422
        assert "as it was exported" in content["error"]


def test_the_command_serves_it_without_pytorch(onnx_model, start_didicm, connect, file):
    process = start_didicm("serve", onnx_model, "--port", "0", under=("-c", WITHOUT_TORCH))
    shown = ""
    while "serving model" not in shown:
        assert process.poll() is None, process.stderr.read()
        shown = process.stderr.readline()
    client = connect(int(re.search(r"127.0.0.1:(\d+)/", shown)[1]))
    while True:  # the socket is bound, and soon listens
        try:
            assert client.get("/")[0] == 200
            break
        except ConnectionRefusedError:
            continue
    assert client.post("/predict", file())[0] == 200
    process.terminate()
    process.communicate()
    assert process.returncode == 0


def test_settings_of_a_sampler_come_too_late(onnx_model, fails):
    assert "as it was exported" in fails("serve", onnx_model, "--port", "0", "--sampler.steps", "3")
    for late in ("--size=9", "--optimize", "--compile", "--no-calibration"):
        assert "as it was exported" in fails("serve", onnx_model, "--port", "0", late)

import json
import zipfile

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from didicm import DiffusionClassifier, Ensemble, Predictor, Sampler, StandardClassifier, UserError, save
from didicm.data import EvalTransform
from didicm.data.images import stack
from didicm.evaluation.calibration import Calibration, Conformal, save_calibration
from didicm.evaluation.stored import open_model
from didicm.inference import export as module
from didicm.inference.export import export


@pytest.fixture(scope="module")
def photos(tmp_path_factory, write):
    """JPEG files of several sizes, one of them grey."""
    folder = tmp_path_factory.mktemp("photos")
    sizes = [(40, 30), (30, 40), (12, 12), (13, 13), (200, 15)]
    paths = [write(folder / f"{i}.jpg", seed=i, size=size) for i, size in enumerate(sizes)]
    return [*paths, write(folder / "grey.jpg", seed=9, mode="L")]


def answers(path, pixels):
    return onnxruntime.InferenceSession(path).run(["probs"], {"image": pixels})[0]


def test_one_graph_from_8_bit_pixels_to_the_calibrated_posterior(calibrated_model, onnx_model, photos):
    predictor = Predictor.load(calibrated_model)
    pixels = stack([predictor.model.transform.prepare(read) for read in map(Image.open, photos)])
    for batch in (1, 2, 3, 6):
        expected = np.stack([prediction.probs for prediction in predictor(photos[:batch])])
        got = answers(onnx_model, pixels[:batch])
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(expected - expected[0]).max() > 0.01  # it does look at the image
    uncalibrated = Predictor.load(calibrated_model, calibrated=False)(photos[0]).probs.numpy()
    assert np.abs(expected[0] - uncalibrated).max() > 0.01  # and the temperature does something


def test_the_file_says_what_it_is(calibrated_model, onnx_model):
    session = onnxruntime.InferenceSession(onnx_model)
    image, probs = session.get_inputs()[0], session.get_outputs()[0]
    assert (image.name, image.shape, image.type) == ("image", ["batch", 12, 12, 3], "tensor(uint8)")
    assert (probs.name, probs.shape, probs.type) == ("probs", ["batch", 3], "tensor(float)")
    metadata = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
    assert metadata["class_names"] == ["ant", "bee", "cät"]
    assert metadata["transform"] == EvalTransform(12, crop_pct=0.9, interpolation="bilinear").to_dict()
    assert metadata["sampler"][0]["steps"] == 2
    assert metadata["schedule"] == [{"name": "log-linear", "eps": 0.001}]
    assert metadata["temperature"] == 1.7
    assert metadata["training_prior"]["images"] == [10, 20, 70]
    assert metadata["conformal"]["aps"] == Conformal("aps", 0.1, 0.8, 20).to_dict()
    content = onnx_model.read_bytes()
    assert b".py" not in content  # nothing of the machine that wrote it
    assert str(calibrated_model).encode() not in content


def test_a_standard_classifier_and_an_ensemble(tmp_path, tiny_network, photos):
    standard = StandardClassifier(tiny_network(1, "didirn8_baseline"), "binary-cross-entropy")
    diffusion = DiffusionClassifier(tiny_network(2), sampler=Sampler("readout"))
    transform = EvalTransform(12, crop_pct=1.0)
    save(Ensemble([standard, diffusion]), tmp_path / "model", transform=transform.to_dict())
    made = export(tmp_path / "model", tmp_path / "model.onnx", images=photos)
    assert made.difference < 1e-5
    predictor = Predictor.load(tmp_path / "model")
    pixels = stack([transform.prepare(Image.open(path)) for path in photos])
    expected = np.stack([prediction.probs for prediction in predictor(photos)])
    np.testing.assert_allclose(answers(made.path, pixels), expected, atol=1e-5)
    metadata = onnxruntime.InferenceSession(made.path).get_modelmeta().custom_metadata_map
    assert json.loads(metadata["nfe"]) == predictor.model.classifier.posterior(torch.zeros(1, 3, 12, 12)).nfe == 2


def test_a_torch_program(calibrated_model, tmp_path, photos):
    made = export(calibrated_model, tmp_path / "model.pt2", format="torch", images=photos[0])
    predictor, files = Predictor.load(calibrated_model), {"didicm.json": ""}
    program = torch.export.load(made.path, extra_files=files)
    pixels = stack([predictor.model.transform.prepare(Image.open(path)) for path in photos[:3]])
    got = program.module()(torch.from_numpy(pixels)).detach()
    expected = torch.stack([prediction.probs for prediction in predictor(photos[:3])])
    assert torch.allclose(got, expected, atol=1e-5)
    assert json.loads(json.loads(files["didicm.json"])["class_names"]) == ["ant", "bee", "cät"]
    with zipfile.ZipFile(made.path) as archive:
        assert not any(b".py" in archive.read(name) for name in archive.namelist())


def test_what_cannot_be_exported_is_told(calibrated_model, tmp_path, fails, monkeypatch):
    out = ["--out", tmp_path / "model.onnx"]
    assert "draws labels at random cannot be exported" in fails(
        "export", calibrated_model, *out, "--sampler.method", "cl"
    )
    assert "draws labels at random" in fails("export", calibrated_model, *out, "--sampler.select", "sample")
    assert "must end in .onnx, or in .pt2 with --format torch" in fails(
        "export", calibrated_model, *out, "--format", "torch"
    )
    assert "cannot be read as an image (no such file)" in fails(
        "export", calibrated_model, *out, "--images", "x.jpg"
    )
    monkeypatch.setattr(module, "LARGEST", 1000)
    assert "do not fit into one ONNX file: choose --format torch" in fails("export", calibrated_model, *out)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_differs_is_not_written(tiny_network, tmp_path, monkeypatch):
    """A temperature that only the graph has stands for whatever a converter may get wrong."""
    model = tmp_path / "model"
    transform = EvalTransform(12, crop_pct=1.0).to_dict()
    save(StandardClassifier(tiny_network(1, "didirn8_baseline")), model, transform=transform)
    save_calibration(model, Calibration(1.7, {}, open_model(model).posterior, {"data": "x"}, {}))
    monkeypatch.setattr(module, "temperature_scaled", lambda probs, temperature: probs)
    with pytest.raises(
        UserError, match=r"differs from PyTorch by 0\.\d+ in a probability, .* nothing was written"
    ):
        export(model, tmp_path / "out" / "model.pt2", format="torch")
    assert not list((tmp_path / "out").iterdir())


def test_an_answer_that_is_not_a_number_differs():
    cases = [(None, np.array([[0.5, 0.5]]), [None]), (None, np.array([[np.nan, 0.5]]), [None])]
    with pytest.raises(UserError, match="differs from PyTorch by nan"):
        module._largest_difference(lambda pixels: (np.array([[0.5, 0.5]]), None), cases)

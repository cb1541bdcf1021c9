"""A tiny calibrated model, exported once."""

import pytest
import torch

from didicm import DiffusionClassifier, Sampler, create_model, save
from didicm.data import EvalTransform
from didicm.evaluation.calibration import Calibration, save_calibration
from didicm.evaluation.conformal import Conformal
from didicm.evaluation.stored import open_model
from didicm.inference.export import export


@pytest.fixture(scope="session")
def tiny_network():
    """A network of the smallest kind whose answers differ from image to image."""

    def make(seed=0, name="didirn8"):
        torch.manual_seed(seed)
        network = create_model(name, num_classes=3, width=0.125, stem="tiny")
        with torch.no_grad():
            network.fc.weight.normal_()  # networks start by saying nothing
            if name == "didirn8":
                network.project.weight.normal_(0, 0.02)
        return network.eval()

    return make


@pytest.fixture(scope="session")
def calibrated_model(tmp_path_factory, tiny_network):
    """Its directory: a diffusion classifier with a temperature and conformal sets."""
    folder = tmp_path_factory.mktemp("calibrated")
    classifier = DiffusionClassifier(tiny_network(), sampler=Sampler(steps=2))
    transform = EvalTransform(12, crop_pct=0.9, interpolation="bilinear").to_dict()
    save(classifier, folder, class_names=["ant", "bee", "cät"], transform=transform)
    rules = {"lac": Conformal("lac", 0.1, 0.6, 20), "aps": Conformal("aps", 0.1, 0.8, 20)}
    save_calibration(folder, Calibration(1.7, rules, open_model(folder).posterior, {"data": "x"}, {}))
    return folder


@pytest.fixture(scope="session")
def onnx_model(tmp_path_factory, calibrated_model):
    """The same as an ONNX file."""
    return export(calibrated_model, tmp_path_factory.mktemp("exported") / "model.onnx").path

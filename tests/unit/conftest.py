"""Small trained-looking models and images, for the tests of evaluation, inference and serving."""

import os
import resource

import numpy as np
import pytest
import torch
from PIL import Image

from didicm import DiffusionClassifier, Sampler, StandardClassifier, create_model, save
from didicm.checkpoint import Checkpoint
from didicm.data import ArraySet, EvalTransform
from didicm.evaluation.calibration import Calibration, Conformal, save_calibration
from didicm.evaluation.stored import open_model
from didicm.inference.export import export

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(scope="session")
def make_checkpoint():
    """A classifier of three classes whose answers differ from image to image."""

    def make(kind="diffusion", names=NAMES, transform=True):
        torch.manual_seed(0)
        name = "didirn8" if kind == "diffusion" else "didirn8_baseline"
        model = create_model(name, num_classes=3, in_chans=1, width=0.125, stem="small")
        classifier = DiffusionClassifier(model) if kind == "diffusion" else StandardClassifier(model)
        with torch.no_grad():
            for parameter in model.parameters():  # networks start by saying nothing
                parameter.add_(0.1 * torch.randn_like(parameter))
        seen = EvalTransform(8, 1, crop_pct=1.0).to_dict() if transform else None
        return Checkpoint(classifier.eval(), names, seen)

    return make


@pytest.fixture(scope="session")
def save_model(make_checkpoint):
    """The same, in a model directory."""

    def save_model(folder, kind="diffusion", training_prior=None, **options):
        checkpoint = make_checkpoint(kind, **options)
        described = {"class_names": checkpoint.class_names, "transform": checkpoint.transform}
        return save(checkpoint.classifier, folder, **described, training_prior=training_prior)

    return save_model


@pytest.fixture(scope="session")
def some_images():
    """Labelled images of noise."""

    def make(count=20, names=NAMES, classes=3):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8), dtype=np.uint8)
        return ArraySet(pixels, np.arange(count) % classes, names, channels=1)

    return make


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
    prior = {"images": [10, 20, 70], "balance": "none"}
    save(classifier, folder, class_names=["ant", "bee", "cät"], transform=transform, training_prior=prior)
    rules = {"lac": Conformal("lac", 0.1, 0.6, 20), "aps": Conformal("aps", 0.1, 0.8, 20)}
    save_calibration(folder, Calibration(1.7, rules, open_model(folder).posterior, {"data": "x"}, {}))
    return folder


@pytest.fixture(scope="session")
def onnx_model(once, calibrated_model):
    """The same as an ONNX file."""
    return once("onnx", lambda folder: export(calibrated_model, folder / "model.onnx")) / "model.onnx"


@pytest.fixture(scope="session")
def peak():
    """Bytes that a function needs at most, and what it says, measured in a process of its own."""
    EvalTransform(8)(Image.new("RGB", (40, 30)))  # what is imported along the way counts for nobody

    def highest():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def measure(function):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            before = highest()
            try:
                answer = str(function())
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, f"{highest() - before} {answer}".encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as file:
            used, answer = file.read().split(" ", 1)
        os.waitpid(child, 0)
        return int(used), answer

    return measure

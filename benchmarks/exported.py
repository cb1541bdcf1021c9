"""An exported model by ONNX Runtime against PyTorch, eager and optimised: one thread, pixels in."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from benchmarks.measure import Result, ratio
from didicm.checkpoint import Checkpoint
from didicm.classifier import Classifier, DiffusionClassifier
from didicm.data import EvalTransform
from didicm.evaluation.stored import StoredModel
from didicm.inference.export import export
from didicm.inference.optimize import optimize_for_inference
from didicm.models import create_model

SIZE, CLASSES = 64, 100


@torch.no_grad()
def run() -> list[Result]:
    torch.manual_seed(0)
    networks = {
        "didirn18": create_model("didirn18", num_classes=CLASSES),
        "BackboneScore resnet18": create_model("backbone_score", backbone="resnet18", num_classes=CLASSES),
    }
    return [
        result
        for name, network in networks.items()
        for result in compare(name, DiffusionClassifier(network).eval())
    ]


def compare(name: str, classifier: Classifier) -> list[Result]:
    """Ratios at two batch sizes, and the largest difference of a probability."""
    transform = EvalTransform(SIZE)
    model = StoredModel("", Checkpoint(classifier, None, None), transform, {})
    with tempfile.TemporaryDirectory() as folder:
        path = export(model, Path(folder) / "model.onnx", calibrated=False).path
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options)
    fast, compiled = (optimize_for_inference(classifier, compile=compile) for compile in (False, True))
    rivals = {
        "eager PyTorch": (classifier, (1, 16)),
        "optimize_for_inference": (fast, (1, 16)),
        "optimize_for_inference, compiled": (compiled, (16,)),  # compiling takes a minute
    }
    results, difference = [], 0.0
    for rival, (answers, batches) in rivals.items():
        for batch in batches:
            pixels = np.random.default_rng(0).integers(0, 256, (batch, SIZE, SIZE, 3), dtype=np.uint8)
            exported = partial(session.run, ["probs"], {"image": pixels})
            eager = partial(ask, answers, transform, pixels)
            difference = max(difference, float(np.abs(exported()[0] - eager()).max()))
            what = f"{name}, B = {batch}: ONNX Runtime against {rival}"
            results.append(Result(what, ratio(eager, exported), "x the speed"))
    return [*results, Result(f"{name}: largest difference", difference, "", 1e-4, at_least=False)]


def ask(classifier: Classifier, transform: EvalTransform, pixels: np.ndarray) -> np.ndarray:
    """Probabilities (B, K) of 8-bit pixels (B, H, W, C) by PyTorch."""
    return classifier(transform.finish(torch.from_numpy(pixels).permute(0, 3, 1, 2))).numpy()

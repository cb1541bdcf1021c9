"""A classifier as one graph: 8-bit images in, the calibrated posterior out, the sampler's steps unrolled."""

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import cycle, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import ExportedProgram

from didicm.classifier import Classifier, DiffusionClassifier, Ensemble, Sampler
from didicm.data.decode import MODES
from didicm.data.images import stack
from didicm.errors import UserError, reason
from didicm.evaluation.calibration import Calibration, find_calibration, temperature_scaled
from didicm.evaluation.stored import StoredModel, open_model
from didicm.files import write_files
from didicm.inference.onnx import IMAGE, PROBS, SCORE, Metadata, OnnxPredictor
from didicm.inference.prediction import Array, read_source
from didicm.inference.predictor import Predictor

Format: TypeAlias = Literal["onnx", "torch"]
Answer: TypeAlias = Callable[[Array], tuple[Array, Array | None]]  # probabilities, and outlier scores

BATCH = "batch"  # what the number of images is called
BATCHES = (1, 2, 5)  # that the exported graph is checked with
TOLERANCE = 1e-4  # of a probability
SCORE_TOLERANCE = 1e-2  # of an outlier score, of itself: unusual features are scaled up by a lot
LARGEST = 2**31 - 2**24  # bytes of weights in one ONNX file, whose own limit is 2 GB
METADATA = "didicm.json"  # inside a .pt2 file


class Graph(nn.Module):
    """From resized 8-bit images (B, H, W, C) to probabilities (B, K): normalisation, sampler, temperature.

    With an outlier rule the scores (B,) come too.
    """

    def __init__(self, model: StoredModel, calibration: Calibration | None) -> None:
        super().__init__()
        self.classifier = model.classifier
        self._transform, self._sampler, self._calibration = model.transform, model.sampler, calibration

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        seen = self._transform.finish(image.permute(0, 3, 1, 2))
        posterior = self.classifier.posterior(seen, **self._sampler)
        probs = posterior.probs.float()
        if self._calibration is None:
            return probs
        probs = temperature_scaled(probs, self._calibration.temperature)
        rule = self._calibration.outliers
        if rule is None or posterior.features is None:
            return probs
        return probs, rule.distance(posterior.features)


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked."""

    path: Path
    difference: float  # largest, of a probability, between the file and PyTorch, from image files
    note: str  # on the calibration


def export(
    model: str | Path | StoredModel,
    out: str | Path,
    *,
    format: Format = "onnx",
    images: str | Path | Sequence[str | Path] = (),
    calibrated: bool = True,
) -> Exported:
    """Write a model as one graph, after checking it against PyTorch from image files at several batch sizes.

    Args:
        model: a run, a model directory, `hf://owner/name`, or an opened model; on the CPU.
        out: the file to write.
        format: onnx, for ONNX Runtime; or torch, a .pt2 of torch.export for programs that have PyTorch.
        images: one or several files to check with; by default some JPEGs are made.
        calibrated: put the calibration stored with the model into the file, if it fits the settings.
    """
    model = model if isinstance(model, StoredModel) else open_model(model, device="cpu")
    _check_exportable(model, format)
    calibration, note = None, "calibration left out"
    if calibrated:
        calibration, note = find_calibration(model.place, model.posterior)
    out, metadata, difference = Path(out), _metadata(model, calibration), math.inf
    write = {"onnx": _write_onnx, "torch": _write_torch}[format]

    with tempfile.TemporaryDirectory() as folder:
        given = [images] if isinstance(images, (str, Path)) else images
        files = given or _make_images(Path(folder), model.transform.channels)
        cases = _cases(Predictor(model, calibration), files)

    def write_checked(part: Path) -> None:
        nonlocal difference
        program = _trace(model, calibration)
        scored = len(program.graph_signature.user_outputs) > 1
        answer = write(program, part, metadata if scored else replace(metadata, outliers=None))
        difference = _largest_difference(answer, cases)

    write_files(out.parent, {out.name: write_checked})
    return Exported(out, difference, note)


def is_exported(path: Path) -> bool:
    """Whether `export` wrote a file: its metadata names us."""
    with open(path, "rb") as file:
        return path.stat().st_size > 0 and mmap(file.fileno(), 0, access=ACCESS_READ).find(b"didicm") >= 0


def _check_exportable(model: StoredModel, format: Format) -> None:
    if model.posterior.get("views", 1) > 1:
        raise UserError("views are drawn from the image's content and cannot be exported: leave out sampler.views")
    for _, sampler in _diffusing(model):
        if sampler.method == "cl" or (sampler.method == "cp" and sampler.select == "sample"):
            raise UserError(
                "a sampler that draws labels at random cannot be exported: choose --sampler.method cp with "
                "--sampler.select argmin, or readout"
            )
    if next(model.classifier.parameters()).device.type != "cpu":
        raise UserError("models are exported from the CPU: open this one with device cpu")
    weights = sum(x.numel() * x.element_size() for x in model.classifier.state_dict().values())
    if format == "onnx" and weights > LARGEST:
        raise UserError(f"{weights >> 20} MB of weights do not fit into one ONNX file: choose --format torch")


def _diffusing(model: StoredModel) -> list[tuple[DiffusionClassifier, Sampler]]:
    """The diffusion classifiers in a model, each with its sampler as it is asked."""
    members: Sequence[Classifier] = [model.classifier]
    settings = model.sampler
    if isinstance(model.classifier, Ensemble):
        members, settings = model.classifier.asked(settings)
    return [(x, x.sampler.changed(**settings)) for x in members if isinstance(x, DiffusionClassifier)]


def _metadata(model: StoredModel, calibration: Calibration | None) -> Metadata:
    return Metadata(
        class_names=model.class_names,
        transform=model.transform.to_dict(),
        sampler=[sampler.identity() for _, sampler in _diffusing(model)],
        schedule=[classifier.process.schedule.to_dict() for classifier, _ in _diffusing(model)],
        temperature=None if calibration is None else calibration.temperature,
        conformal={} if calibration is None else {k: rule.to_dict() for k, rule in calibration.conformal.items()},
        training_prior=model.checkpoint.training_prior,
        outliers=None if calibration is None or calibration.outliers is None else calibration.outliers.to_dict(),
        nfe=model.calls,
        versions={package: version(package) for package in ("didicm", "torch")},
    )


def _trace(model: StoredModel, calibration: Calibration | None) -> ExportedProgram:
    """The graph, for any number of images."""
    size, channels = model.transform.size, model.transform.channels
    example = torch.zeros(2, size, size, channels, dtype=torch.uint8)
    try:
        with torch.no_grad():
            return torch.export.export(
                Graph(model, calibration).eval(),
                (example,),
                dynamic_shapes={IMAGE: {0: torch.export.Dim(BATCH)}},
            )
    except Exception as error:  # of a network of somebody else's, tracing can raise nearly anything
        raise UserError(f"torch.export cannot trace this network: {reason(error)}") from error


def _write_onnx(program: ExportedProgram, path: Path, metadata: Metadata) -> Answer:
    try:
        import onnx_ir
        import onnxscript  # noqa: F401, what the conversion runs on
    except ModuleNotFoundError as error:
        raise UserError('didicm export needs ONNX: pip install "didicm[export]"') from error
    outputs = [PROBS] if metadata.outliers is None else [PROBS, SCORE]
    converted = torch.onnx.export(program, dynamo=True, input_names=[IMAGE], output_names=outputs, verbose=False)
    assert converted is not None
    graph = converted.model.graph
    for place in (*graph.inputs, *graph.outputs):
        place.shape = onnx_ir.Shape([BATCH, *(place.shape or ())[1:]])
    for node in graph.all_nodes():
        node.metadata_props.clear()  # where in whose files each came from
    converted.model.metadata_props.update(metadata.to_strings())
    converted.save(path, external_data=False)
    return OnnxPredictor.load(path, "cpu").posterior


def _write_torch(program: ExportedProgram, path: Path, metadata: Metadata) -> Answer:
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on weights that share memory: what is read back is checked
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata.to_strings())})
    module = program.module()  # the file itself is not read back: that might unpickle

    def answer(images: Array) -> tuple[Array, Array | None]:
        found = module(torch.from_numpy(images))
        probs, scores = found if isinstance(found, tuple) else (found, None)
        return probs.detach().numpy(), None if scores is None else scores.numpy()

    return answer


def _cases(predictor: Predictor, files: Sequence[str | Path]) -> list[tuple[Array, Array, list[float | None]]]:
    """For each size of batch what the graph sees of the files, and what PyTorch says: probabilities and scores."""
    cases = []
    for batch in BATCHES:
        chosen = list(islice(cycle(files), batch))
        pixels = stack([read_source(file, predictor.model.transform.prepare) for file in chosen])
        told = predictor([*chosen])
        probs = np.stack([prediction.probs.numpy() for prediction in told])
        cases.append((pixels, probs, [prediction.outlier_score for prediction in told]))
    return cases


def _largest_difference(answer: Answer, cases: Sequence[tuple[Array, Array, list[float | None]]]) -> float:
    """Of a probability; one that is too large is an error, and so is one of an outlier score."""
    found = []
    for pixels, expected, known in cases:
        probs, scores = answer(pixels)
        found.append(np.abs(probs - expected).max())
        if scores is not None and not np.allclose(scores, np.array(known, dtype=float), rtol=SCORE_TOLERANCE):
            raise UserError("the outlier scores of the exported graph differ from PyTorch's: nothing was written")
    largest = float(np.max(found))  # Python's max would pass over what is not a number
    if not largest < TOLERANCE:
        raise UserError(
            f"the exported graph differs from PyTorch by {largest:.2g} in a probability, more than {TOLERANCE:g}: "
            "nothing was written"
        )
    return largest


def _make_images(folder: Path, channels: int) -> list[Path]:
    """A few files of different sizes, with shapes and noise: JPEG, or arrays where there are other channels."""
    random, paths = np.random.default_rng(0), []
    for i, size in enumerate(((96, 64), (64, 96), (50, 50), (333, 250), (31, 400))):
        if channels not in MODES:
            paths.append(folder / f"{i}.npy")
            np.save(paths[-1], random.integers(0, 256, (*size, channels), dtype=np.uint8))
            continue
        coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)) + random.normal(0, 10, (*size[::-1], 3))
        paths.append(folder / f"{i}.jpg")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths

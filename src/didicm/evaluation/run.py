"""Run a classifier over labelled images, and the calibration that is stored beside its weights."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from didicm.checkpoint import CONFIG, HUB, Checkpoint
from didicm.classifier import Classifier, Sampler
from didicm.data import Corruptions, EvalTransform, ImageSet, make_loader, relabel, transform_from_dict
from didicm.errors import UserError
from didicm.evaluation.calibration import apply_temperature
from didicm.evaluation.conformal import Conformal
from didicm.files import write_files
from didicm.models import cost

CALIBRATION = "calibration.json"
FORMAT = 1
# Settings of a sampler that only some methods read.
_FOR = {
    "steps": ("cp", "cl"),
    "solver": ("cp", "cl"),
    "score_time": ("cp", "cl"),
    "select": ("cp",),
    "chains": ("cl",),
    "average": ("cl",),
    "time": ("readout",),
}


@dataclass(frozen=True)
class Evaluation:
    """What a classifier said about labelled images, and what it cost."""

    probs: Tensor  # (N, K), after the temperature
    labels: Tensor  # (N,)
    class_names: list[str]  # K, in the order of the columns
    image_names: list[str]  # N, in the order of the rows
    skipped: list[str]  # images that could not be read, each with the reason
    nfe: int  # network calls per image
    multiply_adds: int  # per image
    images_per_second: float  # of network and sampler, without reading the images


def evaluate(
    checkpoint: Checkpoint,
    images: ImageSet,
    *,
    settings: Mapping[str, Any] | None = None,
    corruption: Corruptions | None = None,
    batch_size: int = 64,
    workers: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Ask for the posterior of every image, on the device where the classifier is.

    Args:
        checkpoint: the classifier, its classes and its transform.
        images: labelled images; their classes are matched to the classifier's by name.
        settings: fields of `Sampler` to change, for a diffusion classifier.
        corruption: applied to every image before the transform.
        batch_size: changes the speed, not the result.
        workers: processes that decode images.
        temperature: applied to the probabilities.
        seed: decides what is random in the corruption.
        progress: called with the number of images done and to do.
    """
    classifier = checkpoint.classifier.eval()
    settings = dict(settings or {})
    resolve_sampler(classifier, settings)
    images, view = match_classes(checkpoint, images), view_of(checkpoint)
    device = next(classifier.parameters()).device
    loader = make_loader(
        images,
        view,
        batch_size,
        train=False,
        seed=seed,
        workers=workers,
        corruption=corruption,
        device=device,
    )
    probs, labels, shown, seconds = [], [], [], []
    nfe, done = 0, 0
    for image, label in loader:
        start = time.perf_counter()
        posterior = classifier.posterior(image, **settings)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - start, len(image)))
        nfe, done = posterior.nfe, done + len(image)
        probs.append(posterior.probs.cpu())
        labels.append(label.cpu())
        shown += loader.index.tolist()
        if progress is not None:
            progress(done + len(loader.skipped), len(images))
    if not probs:
        raise UserError(f"none of the {len(images)} images can be read: look at them with didicm doctor")
    timed = seconds[1:] or seconds  # the first batch also warms up
    joined = torch.cat(probs)
    return Evaluation(
        probs=joined if temperature == 1 else apply_temperature(joined, temperature),
        labels=torch.cat(labels),
        class_names=list(images.class_names),
        image_names=[images.name(i) for i in shown],
        skipped=[skip.reason for skip in loader.skipped],
        nfe=nfe,
        multiply_adds=cost(classifier.model, view.size).total(nfe),
        images_per_second=sum(n for _, n in timed) / sum(t for t, _ in timed),
    )


def match_classes(checkpoint: Checkpoint, images: ImageSet) -> ImageSet:
    """Number the labels as the classifier does, by name; without names, at least the count must agree."""
    if checkpoint.class_names is not None:
        return relabel(images, checkpoint.class_names)
    known, found = checkpoint.classifier.num_classes, len(images.class_names)
    if known != found:
        raise UserError(
            f"the data has {found} classes and the model, which stores no class names, {known}: "
            "save or import the model with its class names, or give data with the same classes"
        )
    return images


def view_of(checkpoint: Checkpoint, size: int | None = None) -> EvalTransform:
    """The transform stored with the model, if need be with another size in pixels."""
    if checkpoint.transform is None and size is None:
        raise UserError("the model stores no transform: say with a size how large its images should be")
    view = transform_from_dict(checkpoint.transform or {"channels": checkpoint.classifier.model.in_chans})
    return view if size is None else replace(view, size=size)


def resolve_sampler(classifier: Classifier, settings: Mapping[str, Any]) -> Sampler | None:
    """The sampler that `settings` make of the classifier's own; None if it has none and none is asked for."""
    own: Sampler | None = getattr(classifier, "sampler", None)
    if own is None:
        if settings:
            named = ", ".join("sampler" if name == "method" else name for name in settings)
            raise UserError(f"a standard classifier has no sampler to set: leave out {named}")
        return None
    method = settings.get("method", own.method)
    for name, value in settings.items():
        if not hasattr(own, name):
            raise UserError(f"a sampler has no setting {name!r}: leave it out")
        if method not in _FOR.get(name, (method,)):
            raise UserError(
                f"sampler {method} has no {name}: leave it out or choose sampler {' or '.join(_FOR[name])}"
            )
        if name in ("steps", "chains") and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    return replace(own, **settings)


def describe_posterior(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that changes a posterior but not the weights: a calibration holds for this and nothing else."""
    sampler = resolve_sampler(checkpoint.classifier, settings)
    described: dict[str, Any] = {"size": view_of(checkpoint).size}
    if sampler is not None:
        values = asdict(sampler)
        described |= {
            name: value
            for name, value in values.items()
            if name != "seed" and sampler.method in _FOR.get(name, (sampler.method,))
        }
    return described


@dataclass(frozen=True)
class Calibration:
    """A temperature and rules for sets of classes, fitted to one posterior on held-out images."""

    temperature: float
    conformal: dict[str, Conformal]  # by method; for probabilities after the temperature
    posterior: dict[str, Any]  # what `describe_posterior` says of the one that was fitted
    fitted_on: dict[str, Any]  # data, images and how many, corruption
    check: dict[str, Any]  # what other held-out images say of it


def save_calibration(directory: str | Path, calibration: Calibration) -> Path:
    """Write `calibration.json` into a model directory, tied to the weights there."""
    values = {"format": FORMAT, "weights_sha256": _weights(Path(directory)), **asdict(calibration)}
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    write_files(directory, {CALIBRATION: lambda path: path.write_text(text, encoding="utf-8")})
    return Path(directory) / CALIBRATION


def load_calibration(directory: str | Path) -> Calibration | None:
    """Read the calibration of a model directory, None if there is none; one of other weights is refused."""
    path = Path(directory) / CALIBRATION
    if str(directory).startswith(HUB) or not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise UserError("it has another format than this version of didicm reads")
        weights, rules = values.pop("weights_sha256"), values.pop("conformal")
        calibration = Calibration(conformal={name: Conformal.from_dict(x) for name, x in rules.items()}, **values)
        intact = isinstance(calibration.temperature, float) and calibration.temperature > 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} cannot be used ({detail}): calibrate again, or add --no-calibration") from error
    if not intact:
        raise UserError(f"{path} cannot be used (no temperature): calibrate again, or add --no-calibration")
    if weights != _weights(Path(directory)):
        raise UserError(f"{path} belongs to other weights: calibrate again, or add --no-calibration")
    return calibration


def find_calibration(
    directory: str | Path, checkpoint: Checkpoint, settings: Mapping[str, Any]
) -> tuple[Calibration | None, str]:
    """The calibration that fits a model and how it is asked, if there is one, and a sentence that says so."""
    calibration = load_calibration(directory)
    if calibration is None:
        return None, "not calibrated; didicm calibrate fits a temperature and conformal sets"
    path, asked = Path(directory) / CALIBRATION, describe_posterior(checkpoint, settings)
    fitted = calibration.posterior
    if fitted != asked:
        changed = [name for name in {**fitted, **asked} if fitted.get(name) != asked.get(name)]
        detail = ", ".join(f"{name} {fitted.get(name, 'unset')}" for name in changed)
        return None, f"{path} is left out: it was fitted with {detail}"
    source = calibration.fitted_on
    return calibration, (
        f"calibrated by {path}: temperature {calibration.temperature:.3g} and conformal sets from "
        f"{source.get('images')} images of {source.get('data')}"
    )


def model_directory(source: str | Path) -> str | Path:
    """The model of a run (its best), of a model directory (itself), or on the hub (its address)."""
    if str(source).startswith(HUB):
        return str(source)
    path = Path(source)
    if (path / CONFIG).is_file():
        return path
    if (path / "best" / CONFIG).is_file():
        return path / "best"
    if not path.exists():
        raise UserError(f"{path} does not exist: give the directory of a run or of a model, or hf://owner/name")
    if (path / "config.yaml").is_file():
        raise UserError(f"{path} has no best model yet: train it until its first validation")
    raise UserError(f"{path} is neither a run nor a model directory: it holds no {CONFIG} and no best/{CONFIG}")


def _weights(directory: Path) -> str:
    """Digest of the weights that the config names; loading a model checks that it is theirs."""
    return str(json.loads((directory / CONFIG).read_text(encoding="utf-8"))["weights_sha256"])

"""A model directory that needs nothing else: `model.safetensors` and a readable `config.json`.

Loading never unpickles and never runs code from the directory: the config names one of our networks and its
arguments, and the weights must fit it exactly.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from didicm.classifier import Classifier, DiffusionClassifier, Sampler, StandardClassifier
from didicm.diffusion import UniformProcess, schedule_from_dict
from didicm.errors import UserError
from didicm.files import sha256, write_files
from didicm.models import create_model

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
HUB = "hf://"


@dataclass(frozen=True)
class Checkpoint:
    """What a model directory holds."""

    classifier: Classifier
    class_names: list[str] | None  # in the order of the outputs
    transform: dict[str, Any] | None  # how an image becomes the network's input


def save(
    classifier: Classifier,
    directory: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    transform: Mapping[str, Any] | None = None,
) -> Path:
    """Write a classifier into a directory; an interrupted save leaves the files that were there."""
    if class_names is not None and len(class_names) != classifier.num_classes:
        raise UserError(f"got {len(class_names)} class names for {classifier.num_classes} classes: give one each")
    config = {
        "format": FORMAT,
        **_describe(classifier),
        "class_names": None if class_names is None else list(class_names),
        "transform": None if transform is None else dict(transform),
        "versions": {package: version(package) for package in ("didicm", "torch", "timm")},
    }
    weights = {name: x.detach().cpu().contiguous() for name, x in classifier.model.state_dict().items()}

    def write_config(path: Path) -> None:
        # The digest ties the two files together: weights of another save are noticed at loading.
        signed = {**config, "weights_sha256": sha256(path.with_name(path.name.replace(CONFIG, WEIGHTS)))}
        path.write_text(json.dumps(signed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write_files(directory, {WEIGHTS: lambda path: save_file(weights, path), CONFIG: write_config})
    return Path(directory)


def load(source: str | Path) -> Checkpoint:
    """Read a model directory, or one on the Hugging Face hub as `hf://owner/name` or `hf://owner/name@revision`."""
    directory = _download(str(source)) if str(source).startswith(HUB) else Path(source)
    config = _read_config(directory)
    class_names, transform = config.pop("class_names"), config.pop("transform")
    try:
        classifier = _rebuild(config)
    except (KeyError, TypeError, ValueError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{directory / CONFIG} does not describe a model we can build: {detail}") from error
    if class_names is not None and len(class_names) != classifier.num_classes:
        raise UserError(
            f"{directory / CONFIG} has {len(class_names)} class names for {classifier.num_classes} classes: "
            "one of them was changed by hand; restore it"
        )
    _load_weights(classifier.model, directory / WEIGHTS, config["weights_sha256"])
    return Checkpoint(classifier.eval(), class_names, transform)


def push(directory: str | Path, destination: str, *, private: bool = False) -> str:
    """Upload a model directory to `hf://owner/name`, after checking that it loads; return its address."""
    from huggingface_hub import HfApi

    load(directory)
    repo, revision = _hub_name(destination)
    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    files = [CONFIG, WEIGHTS]
    api.upload_folder(repo_id=repo, folder_path=str(directory), allow_patterns=files, revision=revision)
    return HUB + repo


def _describe(classifier: Classifier) -> dict[str, Any]:
    recipe = getattr(classifier.model, "recipe", None)
    if recipe is None:
        raise UserError(
            "only networks from didicm.create_model can be saved, not their optimised copies or others"
        )
    process = classifier.process
    described: dict[str, Any] = {
        "kind": "diffusion" if isinstance(classifier, DiffusionClassifier) else "standard",
        "model": {
            "name": recipe["name"],
            "arguments": {**recipe["arguments"], "num_classes": classifier.num_classes},
        },
        "schedule": None if process is None else process.schedule.to_dict(),
        "draws_per_image": classifier.draws_per_image,
    }
    if isinstance(classifier, DiffusionClassifier):
        return {**described, "label_proposal": classifier.label_proposal, "sampler": asdict(classifier.sampler)}
    return {**described, "objective": classifier.objective}


def _rebuild(config: dict[str, Any]) -> Classifier:
    kind = config["kind"]
    if kind not in ("diffusion", "standard"):
        raise ValueError(f"kind must be diffusion or standard, got {kind!r}")
    own = {"sampler", "label_proposal"} if kind == "diffusion" else {"objective"}
    known = {"format", "kind", "model", "schedule", "draws_per_image", "versions", "weights_sha256"} | own
    unknown = set(config) - known
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    model = create_model(config["model"]["name"], **config["model"]["arguments"])
    schedule = config["schedule"]
    process = None if schedule is None else UniformProcess(model.num_classes, schedule_from_dict(schedule))
    draws = config["draws_per_image"]
    if kind == "diffusion":
        label_proposal = config.get("label_proposal", 0.0)  # older models lack it
        return DiffusionClassifier(model, process, _rebuild_sampler(config["sampler"]), draws, label_proposal)
    return StandardClassifier(model, config["objective"], process, draws)


def _rebuild_sampler(config: dict[str, Any]) -> Sampler:
    for field in fields(Sampler):
        if field.name in config and not isinstance(config[field.name], (type(field.default), int)):
            raise ValueError(f"sampler.{field.name} cannot be {config[field.name]!r}")
    return Sampler(**config)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise UserError(f"{directory} is not a model directory: give the folder that holds {CONFIG} and {WEIGHTS}")
    if not path.is_file():
        raise UserError(f"{directory} holds no {CONFIG}: it is not a model directory, or its training never saved")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UserError(f"{path} has another format than this version of didicm reads ({FORMAT}): update didicm")
    for key in ("class_names", "transform", "weights_sha256"):
        if key not in config:
            raise UserError(f"{path} lacks {key!r}: restore it from a copy")
    return config


def _load_weights(model: nn.Module, path: Path, digest: str) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing: restore it, or copy the whole model directory again")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or no safetensors file ({error}): copy it again") from error
    _check_weights(model.state_dict(), weights, path)
    if sha256(path) != digest:
        raise UserError(
            f"{path} does not belong to the {CONFIG} beside it: copy or save the whole directory again"
        )
    model.load_state_dict(weights)


def _check_weights(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: Path) -> None:
    for name in expected.keys() - weights.keys():
        raise UserError(f"{path} lacks {name}: it does not belong to the {CONFIG} beside it")
    for name in weights.keys() - expected.keys():
        raise UserError(
            f"{path} holds {name}, which the model has not: it does not belong to the {CONFIG} beside it"
        )
    for name, x in expected.items():
        if weights[name].shape != x.shape:
            raise UserError(
                f"{path} has {name} of shape {tuple(weights[name].shape)} where the model has {tuple(x.shape)}: "
                f"it does not belong to the {CONFIG} beside it"
            )


def _hub_name(source: str) -> tuple[str, str | None]:
    repo, _, revision = source.removeprefix(HUB).partition("@")
    if not source.startswith(HUB) or repo.count("/") != 1:
        raise UserError(f"{source} is not a model on the hub: write {HUB}owner/name")
    return repo, revision or None


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, revision = _hub_name(source)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{source} cannot be fetched: {reason}; check the name, your login and the network"
        ) from error

"""A model directory that needs nothing else: `model.safetensors` and a readable `config.json`.

Loading never unpickles and never runs code from the directory: the config names one of our networks and its
arguments, or the caller brings the network, and the weights must fit it exactly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from didicm.classifier import Classifier, DiffusionClassifier, Ensemble, StandardClassifier, num_classes_of
from didicm.diffusion import Sampler, UniformProcess, schedule_from_dict
from didicm.diffusion.sampler import Views
from didicm.errors import UserError, reason
from didicm.files import read_json, sha256, to_json, write_files
from didicm.models import create_model
from didicm.models.backbone import Backbone
from didicm.models.weights import load_backbone, load_network, not_finite
from didicm.values import coerce, renamed

FORMAT = 2
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CALIBRATION, OUTLIERS = "calibration.json", "outliers.safetensors"  # the second has tensors of the first
HUB = "hf://"
MOST_MEMBERS = 100  # of an ensemble
# Keys of a config beside the description of its classifier; the hub's have label_names, as timm's do.
_STORED = {"class_names": tuple[str, ...] | None, "transform": Mapping[str, Any] | None, "weights_sha256": str}
_COMMON = {"format", "label_names", "versions", "training_prior", *_STORED}


@dataclass(frozen=True)
class Checkpoint:
    """What a model directory holds."""

    classifier: Classifier
    class_names: list[str] | None  # in the order of the outputs
    transform: dict[str, Any] | None  # how an image becomes the network's input
    weights_sha256: str | None = None  # of the file that it was read from
    # `images` of each class in training, and `balance`, by which the network may have seen others.
    training_prior: dict[str, Any] | None = None


def save(
    classifier: Classifier,
    directory: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    transform: Mapping[str, Any] | None = None,
    training_prior: Mapping[str, Any] | None = None,
) -> Path:
    """Write a classifier into a directory; an interrupted save leaves the files that were there."""
    described = _describe(classifier)
    config = {
        "format": FORMAT,
        **described,
        "class_names": _check_names(class_names, classifier),
        "transform": None if transform is None else dict(transform),
        "training_prior": None if training_prior is None else dict(training_prior),
        "versions": {package: version(package) for package in ("didicm", "torch", "timm")},
    }
    # torch.compile puts a module of its own around a network.
    state = {name.replace("_orig_mod.", ""): x for name, x in classifier.model.state_dict().items()}
    weights = storable(state)
    if described.get("model", {}) is not None:  # what no loading could build again is told now
        with torch.device("meta"), suppress(NotImplementedError):
            if odd := _unfit(_rebuild(described).model, weights):
                raise UserError(
                    f"the network is no longer the one that create_model made: {odd}; to save it as a network of "
                    "your own, set its recipe to None"
                )

    def write_config(path: Path) -> None:
        # The digest ties the two files together: weights of another save are noticed at loading.
        path.write_text(to_json({**config, "weights_sha256": sha256(path.with_name(WEIGHTS))}), encoding="utf-8")

    write_files(directory, {WEIGHTS: lambda path: save_file(weights, path), CONFIG: write_config})
    return Path(directory)


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: on the host, contiguous, and none in the memory of another."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()
        address = x.untyped_storage().data_ptr()
        stored[name] = x.clone() if address in seen and x.numel() else x
        seen.add(address)
    return stored


def load(source: str | Path, *, model: nn.Module | None = None) -> Checkpoint:
    """Read a model directory, the best model of a run, or `hf://owner/name` or `hf://owner/name@revision`.

    `model` is your own network, for a classifier that was saved with one; its weights are replaced.
    """
    directory = local_directory(source)
    path = directory / CONFIG
    config = read_json(path, "restore it from a copy")
    if not isinstance(config, dict) or config.get("format") not in (1, FORMAT):
        raise UserError(
            f"{path} has a format that this version of didicm does not read (it reads {FORMAT}): update didicm"
        )
    weights = _read_weights(directory / WEIGHTS)
    try:
        values = {key: coerce(config[key], kind, key) for key, kind in _STORED.items()}
        prior = coerce(config.get("training_prior"), Mapping[str, Any] | None, "training_prior")
        described = {key: value for key, value in config.items() if key not in _COMMON}
        described = _migrate(described) if config["format"] == 1 else described
        if model is None:  # an outline first: what does not fit the weights may not take memory either
            with torch.device("meta"), suppress(NotImplementedError):
                _check_fit(_rebuild(described).model, weights, directory / WEIGHTS)
        classifier = _rebuild(described, model)
        class_names = _check_names(values["class_names"], classifier)
    except _UnfitWeightsError:
        raise
    except Exception as error:  # builders of networks raise nearly anything when an argument makes no sense
        detail = f"{error} is missing" if isinstance(error, KeyError) else reason(error)
        raise UserError(f"{path} does not describe a model that can be built: {detail}") from error
    _check_fit(classifier.model, weights, directory / WEIGHTS)
    if sha256(directory / WEIGHTS) != values["weights_sha256"]:
        raise UserError(f"{_stranger(directory / WEIGHTS)}: copy or save the whole directory again")
    classifier.model.load_state_dict(weights)
    return Checkpoint(classifier.eval(), class_names, values["transform"], values["weights_sha256"], prior)


def load_weights(model: nn.Module, source: str | Path) -> None:
    """Start a network from the weights of a run or a model directory, or its timm backbone from those of a file.

    Where the number of classes differs, the layers that depend on it stay as they are.
    """
    place = source if str(source).startswith(HUB) else Path(source).expanduser()
    if isinstance(place, str) or place.is_dir():
        load_network(model, _read_weights(local_directory(place) / WEIGHTS), source)
    elif isinstance(model, Backbone):
        load_backbone(model, place)
    else:
        raise UserError(
            f"weights {source} is neither a run nor a model directory: only backbones start from a file"
        )


def model_directory(source: str | Path) -> str | Path:
    """The model of a run (its best), of a model directory (itself), or on the hub (its address)."""
    if str(source).startswith(HUB):
        return str(source)
    path = Path(source)
    for place in (path, path / "best"):
        if (place / CONFIG).is_file():
            return place
    if not path.exists():
        raise UserError(f"{path} does not exist: give the directory of a run or of a model, or {HUB}owner/name")
    if (path / "config.yaml").is_file():
        last = path / "last"
        if (last / CONFIG).is_file():  # both are first saved at once
            raise UserError(f"{path / 'best' / CONFIG} is missing: restore it, or give the last model, {last}")
        raise UserError(
            f"{path} has no best/{CONFIG}: train it until its first validation, or restore what is lost"
        )
    raise UserError(
        f"{path} is neither a run nor a model directory (it holds no {CONFIG} and no best/{CONFIG}): give the "
        f"--out of didicm train, or {HUB}owner/name"
    )


def local_directory(source: str | Path) -> Path:
    """Where the files of a model are; those of the hub are fetched."""
    place = model_directory(source)
    if isinstance(place, Path):
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, revision = hub_name(place)
    try:
        wanted = [CONFIG, WEIGHTS, CALIBRATION, OUTLIERS]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{place} cannot be fetched: {first}; check the name, your login and the network"
        ) from error


def hub_name(source: str) -> tuple[str, str | None]:
    """The repository and the revision of `hf://owner/name@revision`."""
    repo, _, revision = source.removeprefix(HUB).partition("@")
    if not source.startswith(HUB) or repo.count("/") != 1:
        raise UserError(f"{source} is not a model on the hub: write {HUB}owner/name")
    return repo, revision or None


def _check_names(class_names: Sequence[str] | None, classifier: Classifier) -> list[str] | None:
    if class_names is None:
        return None
    names = list(coerce(tuple(class_names), tuple[str, ...], "class_names"))
    if len(names) != classifier.num_classes:
        raise UserError(f"there are {len(names)} class names for {classifier.num_classes} classes: give one each")
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise UserError(f"class_names has {twice!r} twice: give every class a name of its own")
    return names


def _describe(classifier: Classifier) -> dict[str, Any]:
    if isinstance(classifier, Ensemble):
        members = [_describe(member) for member in classifier.members]
        if any("members" not in member and member["model"] is None for member in members):
            raise UserError("an ensemble with a network of your own cannot be saved: save its members one by one")
        return {"kind": "ensemble", "members": members}
    if classifier.inference_only:
        raise UserError("optimised copies cannot be saved: save the classifier that this one was made from")
    if not isinstance(classifier, DiffusionClassifier | StandardClassifier):
        raise UserError(f"a {type(classifier).__name__} cannot be saved: only didicm's own classifiers can")
    # None for a network of the user's own, which has to be given again at loading.
    recipe: dict[str, Any] | None = getattr(classifier.model, "recipe", None)
    if recipe is not None:  # its head may be a new one
        recipe = {**recipe, "arguments": {**recipe["arguments"], "num_classes": classifier.num_classes}}
    described: dict[str, Any] = {
        "kind": "diffusion" if isinstance(classifier, DiffusionClassifier) else "standard",
        "model": recipe,
        "schedule": None if classifier.process is None else classifier.process.schedule.to_dict(),
        "draws_per_image": classifier.draws_per_image,
        "views": None if classifier.views is None else asdict(classifier.views),
    }
    if isinstance(classifier, DiffusionClassifier):
        own = {name: getattr(classifier, name) for name in ("label_proposal", *_LATER)}
        return {**described, **own, "sampler": asdict(classifier.sampler)}
    return {**described, "objective": classifier.objective}


_LATER = ("mask",)  # of diffusion classifiers; older models have the default
_GONE = ("stratified_time", "time_sampling")  # stored for a while; they mattered in training alone
_SHARED = ("kind", "model", "schedule", "draws_per_image", "views")
_KEYS = {
    "diffusion": {*_SHARED, "label_proposal", "sampler", *_LATER, *_GONE},
    "standard": {*_SHARED, "objective"},
    "ensemble": {"kind", "members"},
}


def _rebuild(config: dict[str, Any], model: nn.Module | None = None) -> Classifier:
    kind = config["kind"]
    if kind not in _KEYS:
        raise ValueError(f"kind must be one of {', '.join(_KEYS)}, got {kind!r}")
    if unknown := set(config) - _KEYS[kind]:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    own = kind != "ensemble" and config["model"] is None
    if own and model is None:
        raise ValueError("it was saved with a network of your own: give that to load as model=...")
    if not own and model is not None:
        raise ValueError("its config names the network to build: leave out model")
    if kind == "ensemble":
        members = coerce(config["members"], tuple[Mapping[str, Any], ...], "members")
        if len(members) > MOST_MEMBERS:
            raise ValueError(f"an ensemble has at most {MOST_MEMBERS} members, got {len(members)}")
        return Ensemble([_rebuild(dict(member)) for member in members])
    if model is None:
        recipe = coerce(config["model"], Mapping[str, Any], "model")
        arguments = {**coerce(recipe["arguments"], Mapping[str, Any], "model.arguments")}
        arguments.pop("pretrained", None)  # the weights are here: nothing is ever fetched
        model = create_model(coerce(recipe["name"], str, "model.name"), **arguments)
    schedule, draws = config["schedule"], config["draws_per_image"]
    process = None if schedule is None else UniformProcess(num_classes_of(model), schedule_from_dict(schedule))
    classifier: Classifier
    if kind == "diffusion":
        sampler = Sampler(**config["sampler"])
        later = {name: config[name] for name in _LATER if name in config}
        classifier = DiffusionClassifier(model, process, sampler, draws, config["label_proposal"], **later)
    else:
        classifier = StandardClassifier(model, config["objective"], process, draws)
    if (views := config.get("views")) is not None:  # older models lack it
        classifier.views = Views(**coerce(views, Mapping[str, Any], "views"))
        if classifier.views.fill is not None and len(classifier.views.fill) != classifier.in_chans:
            raise ValueError(f"views.fill must be one number for each of {classifier.in_chans} channels")
    return classifier


def _migrate(config: dict[str, Any]) -> dict[str, Any]:
    """A description of format 1 in the words of format 2."""
    config = renamed(config)
    model = config["model"]
    if config["kind"] == "diffusion":
        config.setdefault("label_proposal", 0.0)  # the oldest models lack it
    if model["name"].endswith("_plain"):
        model["name"] = model["name"].removesuffix("_plain") + "_baseline"
    return config


class _UnfitWeightsError(UserError):
    """Weights of another model than the config describes."""


def _stranger(path: Path) -> str:
    return f"{path} does not belong to the {CONFIG} beside it"


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} is missing: restore it, or copy the whole model directory again")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({reason(error)}): copy it again") from error
    if broken := not_finite(weights):
        raise UserError(f"{path} is broken: {broken} holds numbers that are not finite; train or copy it again")
    return weights


def _check_fit(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights of other names or shapes than the model's."""
    if odd := _unfit(model, weights):
        raise _UnfitWeightsError(f"{_stranger(path)}: {odd}")


def _unfit(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Where weights have other names or shapes than the model's."""
    has, needs = (
        {name: f"shape {tuple(x.shape)}" for name, x in tensors.items()}
        for tensors in (weights, model.state_dict())
    )
    if wrong := sorted(name for name in has | needs if has.get(name) != needs.get(name)):
        had, needed = (shapes.get(wrong[0], "none") for shapes in (has, needs))
        return f"of {wrong[0]} it has {had}, the model {needed}"
    return ""

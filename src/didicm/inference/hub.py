"""A model on the Hugging Face hub: its files, and a card that says what it is for and how good it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from didicm.checkpoint import (
    CALIBRATION,
    CONFIG,
    HUB,
    OUTLIERS,
    WEIGHTS,
    Checkpoint,
    hub_name,
    load,
    local_directory,
)
from didicm.classifier import Ensemble, StandardClassifier
from didicm.errors import UserError, reason
from didicm.evaluation.calibration import Calibration, load_calibration
from didicm.evaluation.metrics import MEANINGS
from didicm.files import read_json, to_json

CARD = "README.md"
EVALUATIONS = "evaluation/*/metrics.json"  # below a run or a model directory
MOST_CLASSES = 50  # that a card lists
# Metrics of a card, and the hub's names for them.
METRICS = {
    "cls/Acc": "accuracy",
    "cls/NLL": "nll",
    "cls/Brier": "brier_score",
    "cal/ECE": "expected_calibration_error",
    "sc/AURC": "aurc",
}
TAGS = ["image-classification", "uncertainty", "calibration", "discrete-diffusion", "didicm"]


@dataclass(frozen=True)
class Pushed:
    """What was uploaded."""

    address: str
    files: list[str]
    notes: list[str]  # what is missing, and what would add it


def push(source: str | Path, destination: str, *, private: bool = False) -> Pushed:
    """Upload a model to `hf://owner/name`, in one commit, after checking that it loads.

    With its calibration if there is one, and a card that tells the evaluations stored beside it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    repo, revision = hub_name(destination)
    directory = local_directory(source)
    checkpoint, calibration = load(directory), load_calibration(directory)
    evaluations, notes = _evaluations({Path(source), directory}, checkpoint)
    config = read_json(directory / CONFIG, "restore it from a copy")
    uploads: dict[str, bytes | Path] = {
        WEIGHTS: directory / WEIGHTS,
        CONFIG: to_json({**config, "label_names": checkpoint.class_names}).encode(),
        CARD: model_card(repo, checkpoint, calibration, evaluations).encode(),
    }
    if calibration is None:
        notes.append("there is no calibration: didicm calibrate adds one")
    else:
        stored = read_json(directory / CALIBRATION, "calibrate again")
        uploads[CALIBRATION] = to_json({**stored, "fitted_on": _public(stored["fitted_on"])}).encode()
        if calibration.outliers is not None:
            uploads[OUTLIERS] = directory / OUTLIERS
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in uploads.items()]
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.create_commit(repo, operations, commit_message="A model of didicm", revision=revision)
    except Exception as error:  # what a failing connection raises differs between versions of the hub's client
        first = reason(error).partition(". ")[0]
        raise UserError(
            f"{destination} cannot be written: {first}; check the name, your login and the network"
        ) from error
    return Pushed(HUB + repo, list(uploads), notes)


def model_card(
    repo: str, checkpoint: Checkpoint, calibration: Calibration | None, evaluations: Sequence[Mapping[str, Any]]
) -> str:
    """The README of a model on the hub."""
    from huggingface_hub import ModelCardData

    name = repo.rpartition("/")[2]
    data = ModelCardData(
        library_name="didicm",
        pipeline_tag="image-classification",
        tags=TAGS,
        model_name=name if evaluations else None,
        eval_results=_eval_results(evaluations) or None,
    )
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("didicm.inference").joinpath("card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        data=data.to_yaml(),
        name=name,
        kind=_kind(checkpoint),
        num_classes=checkpoint.classifier.num_classes,
        address=HUB + repo,
        evaluations=evaluations,
        condition=_condition,
        metrics=METRICS,
        meanings=MEANINGS,
        calibration=calibration,
        calibration_file=CALIBRATION,
        source=_public(calibration.fitted_on) if calibration else {},
        class_names=checkpoint.class_names,
        most_classes=MOST_CLASSES,
        config_file=CONFIG,
    )


def _kind(checkpoint: Checkpoint) -> str:
    if isinstance(checkpoint.classifier, Ensemble):
        return f"An ensemble of {len(checkpoint.classifier.members)} classifiers"
    recipe = getattr(checkpoint.classifier.model, "recipe", None)
    network = f" on {recipe['name']}" if recipe else ""
    standard = isinstance(checkpoint.classifier, StandardClassifier)
    return f"A standard classifier{network}" if standard else f"A diffusion classifier (DiDiCM{network})"


def _evaluations(folders: set[Path], checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    """What `didicm evaluate` stored for these very weights, and what to say of the rest."""
    paths = sorted({path.resolve() for folder in folders for path in folder.glob(EVALUATIONS)})
    found = [read_json(path, "evaluate again") for path in paths]
    fresh = [_public(values) for values in found if values.get("weights_sha256") == checkpoint.weights_sha256]
    stale = len(found) - len(fresh)
    if stale:
        which = "1 evaluation is" if stale == 1 else f"{stale} evaluations are"
        return fresh, [f"{which} of other weights and left out: run didicm evaluate again"]
    return fresh, [] if fresh else ["there are no metrics: didicm evaluate adds them"]


def _public(about: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of an evaluation or a calibration, without where its images lie on this machine."""
    place = str(about.get("data", ""))
    name = place if "://" in place else Path(place).name or place
    texts = {key: about[key] for key in ("data", "split", "images") if isinstance(about.get(key), str)}
    return {**about, **{key: text.replace(place, name) for key, text in texts.items()}}


def _eval_results(evaluations: Sequence[Mapping[str, Any]]) -> list[Any]:
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="image-classification",
            dataset_type="image-classification",
            dataset_name=_condition(evaluation),
            metric_type=metric,
            metric_name=MEANINGS[ours][0],
            metric_value=evaluation["metrics"][ours],
        )
        for evaluation in evaluations
        for ours, metric in METRICS.items()
    ]


def _condition(evaluation: Mapping[str, Any]) -> str:
    corruption = evaluation.get("corruption")
    return f"{evaluation['images']}, {corruption}" if corruption else str(evaluation["images"])

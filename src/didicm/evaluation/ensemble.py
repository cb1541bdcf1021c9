"""Stored models as one: an ensemble that is saved, calibrated, served and exported as any other model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from didicm.checkpoint import CONFIG, save
from didicm.classifier import Classifier, Ensemble
from didicm.errors import UserError
from didicm.evaluation.stored import CONFIG_YAML, StoredModel, open_model
from didicm.files import write_files
from didicm.settings import TrainConfig, to_yaml

FEWEST = 2


def ensemble(sources: Sequence[str | Path], out: str | Path) -> list[str]:
    """Write the ensemble of runs, model directories or `hf://owner/name` into a new model directory.

    Members must agree on classes and input. Returns what there is to say about the images they were trained on.
    """
    if len(sources) < FEWEST:
        raise UserError(f"an ensemble takes at least {FEWEST} models: name more of them")
    if (Path(out) / CONFIG).exists():
        raise UserError(f"{out} already holds a model: give another --out")
    models = [open_model(source, device="cpu") for source in sources]
    first = models[0]
    for other in models[1:]:
        _check_alike(first, other)
    priors = [model.checkpoint.training_prior for model in models]
    save(
        Ensemble([member for model in models for member in _members(model.classifier)]),
        out,
        class_names=first.checkpoint.class_names,
        transform=first.transform.to_dict(),
        training_prior=priors[0] if all(prior == priors[0] for prior in priors) else None,
    )
    trainings = [model.training for model in models]
    split = [None if training is None else _split(training) for training in trainings]
    if trainings[0] is None or any(other != split[0] for other in split):
        return [
            "the models were not trained on the same part of the same data, or do not say: calibrate on images "
            "that none of them has seen (data_seed trains several on the same images)"
        ]
    write_files(out, {CONFIG_YAML: to_yaml(replace(trainings[0], out=str(out)))})
    return []


def _members(classifier: Classifier) -> Sequence[Classifier]:
    return classifier.members if isinstance(classifier, Ensemble) else [classifier]


def _check_alike(one: StoredModel, other: StoredModel) -> None:
    for what, a, b in (
        ("classes", one.checkpoint.class_names, other.checkpoint.class_names),
        ("input", one.transform, other.transform),
    ):
        if a != b:
            raise UserError(
                f"{one.place} and {other.place} differ in their {what}: members of an ensemble must agree"
            )


def _split(training: TrainConfig) -> tuple[object, ...]:
    """What decides which images a training held out."""
    return training.data, training.labels, training.group_by, training.val_fraction, training.image_seed

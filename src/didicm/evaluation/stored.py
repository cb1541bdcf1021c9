"""A stored model, ready to be asked: how, on which device, what is known of its training; or several as one."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from didicm.checkpoint import CONFIG, HUB, Checkpoint, load, model_directory, save
from didicm.classifier import Classifier, Ensemble, Sampler
from didicm.data import EvalTransform, ImageSet, hold_out, open_data, relabel
from didicm.data.sources import find_groups, split_uri
from didicm.data.table import find_table
from didicm.errors import UserError
from didicm.files import write_files
from didicm.settings import TrainConfig, read_config, to_yaml
from didicm.values import Pixels, coerce

CONFIG_YAML = "config.yaml"
EXPORTED = ".onnx"
FEWEST = 2


@dataclass(frozen=True)
class StoredModel:
    """A model, how it is asked, and what is known of the training it comes from."""

    place: str | Path  # directory, or its address on the hub
    checkpoint: Checkpoint
    transform: EvalTransform
    sampler: Mapping[str, Any]  # settings of the sampler to change

    @property
    def classifier(self) -> Classifier:
        """The classifier itself."""
        return self.checkpoint.classifier

    @property
    def device(self) -> torch.device:
        """Where the classifier is."""
        return next(self.classifier.parameters()).device

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes, or their numbers."""
        return self.checkpoint.class_names or [str(k) for k in range(self.classifier.num_classes)]

    @cached_property
    def posterior(self) -> dict[str, Any]:
        """All that changes a posterior but not the weights: a calibration holds for this and nothing else."""
        return {"size": self.transform.size, **self.classifier.resolve(**self.sampler)[1]}

    @property
    def resolved_sampler(self) -> Sampler | None:
        """The classifier's sampler with the settings changed; None for a classifier that has none."""
        return self.classifier.resolve(**self.sampler)[0]

    @property
    def calls(self) -> int:
        """Network calls per image, unless an early stop saves some."""
        members, settings = self.classifier.asked(self.sampler)
        resolved = [member.resolve(**settings) for member in members]
        return sum(views.get("views", 1) if sampler is None else sampler.calls for sampler, views in resolved)

    @cached_property
    def training(self) -> TrainConfig | None:
        """Settings of the run that the model lies in, if it does."""
        if str(self.place).startswith(HUB):
            return None
        for folder in (Path(self.place), Path(self.place).absolute().parent):
            if (folder / CONFIG_YAML).is_file():
                return read_config(folder / CONFIG_YAML)
        return None

    def images(
        self, uri: str, split: str | None = None, labels: str | None = None, group_by: str | None = None
    ) -> tuple[ImageSet, str]:
        """Labelled images and a few words on which they are; the training's own split is cut again.

        The training's own table of labels and groups are those of its data, unless others are given.
        """
        split = coerce(split, Literal["val", "train"] | None, "split")
        trained = self.training
        if trained is not None and not _trains_on(trained, uri, labels):
            trained = None  # other images
        settings = trained or TrainConfig(labels=labels, group_by=group_by)
        asked: dict[str, Any] = {"labels": settings.labels, "group_by": settings.group_by}
        data = open_data(uri, **asked, channels=self.transform.channels, strict=False)
        images, described = data.train, f"all of {uri}"
        if trained is not None and data.val is None:
            data = hold_out(data, trained.val_fraction, trained.image_seed)
            images, described = data.val or images, f"held out from training on {uri}"
        elif data.val is not None:
            images, described = data.val, f"validation split of {uri}"
        elif split == "val":
            raise UserError(f"--data {uri} has no validation split: leave out --split to use all of its images")
        if split == "train":
            images, described = data.train, f"training split of {uri}"
        images = self._numbered(images)
        if trained is not None and group_by is not None:  # the training's split stays as it is
            images.groups = find_groups(images, group_by)
        return images, described

    def _numbered(self, images: ImageSet) -> ImageSet:
        """Number the labels as the classifier does, by name; without names, at least the count must agree."""
        if self.checkpoint.class_names is not None:
            return relabel(images, self.checkpoint.class_names)
        known, found = self.classifier.num_classes, len(images.class_names)
        if known != found:
            raise UserError(
                f"the data has {found} classes and the model, which stores no class names, {known}: "
                "save or import the model with its class names, or give data with the same classes"
            )
        return images


def open_model(
    source: str | Path,
    *,
    device: str | torch.device = "auto",
    size: int | None = None,
    sampler: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
) -> StoredModel:
    """Load a run's best model, a model directory or `hf://owner/name`, to be asked in a certain way.

    Args:
        source: where the model is.
        device: where it runs; auto takes a GPU if there is one.
        size: pixels, instead of the stored size.
        sampler: fields of `Sampler` to change, for a diffusion classifier.
        model: your own network, for a model that was saved with one.
    """
    size = coerce(size, Pixels | None, "size")
    if Path(source).suffix == EXPORTED and Path(source).is_file():
        raise UserError(
            f"{source} is an exported model, which only predicts and serves: give the run or model directory that "
            "it was exported from, or in Python open it by didicm.OnnxPredictor.load"
        )
    place = model_directory(source)
    checkpoint = load(place, model=model)
    described = checkpoint.transform or ({"channels": checkpoint.classifier.in_chans} if size else None)
    if described is None:
        raise UserError(f"{place} stores no transform: give a size for its images")
    try:
        transform = EvalTransform.from_dict({**described, "size": size} if size else described)
    except UserError as error:
        raise UserError(f"the transform in {place}/{CONFIG} cannot be used ({error}): restore it") from error
    if transform.channels != (channels := checkpoint.classifier.in_chans):
        remedy = "restore it" if model is None else "set in_chans of your network"
        raise UserError(
            f"the transform in {place}/{CONFIG} has {transform.channels} channels and the network {channels}: "
            f"{remedy}"
        )
    # Convolutions are a good deal faster channels-last, on CPUs too.
    checkpoint.classifier.to(find_device(device)).to(memory_format=torch.channels_last).eval()
    opened = StoredModel(place, checkpoint, transform, dict(sampler or {}))
    _ = opened.posterior  # a wrong setting of the sampler shows now
    return opened


def find_device(name: str | torch.device) -> torch.device:
    """A device by name; one that is not there is told in a sentence."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error


def same_place(one: str, other: str) -> bool:
    """Whether two URIs name the same data."""
    (scheme, place), (other_scheme, other_place) = split_uri(one), split_uri(other)
    paths = [Path(place).expanduser(), Path(other_place).expanduser()]
    same = place == other_place or (all(path.exists() for path in paths) and os.path.samefile(*paths))
    return scheme == other_scheme and same


def _trains_on(training: TrainConfig, uri: str, labels: str | None) -> bool:
    """Whether these are a training's images and labels; its own labels go without saying."""
    if not same_place(uri, training.data):
        return False
    if labels is None or training.labels is None:
        return labels is None
    folder = Path(split_uri(uri)[1]).expanduser()
    return same_place(str(find_table(folder, labels)), str(find_table(folder, training.labels)))


def ensemble(sources: str | Path | Sequence[str | Path], out: str | Path) -> list[str]:
    """Write the ensemble of runs, model directories or `hf://owner/name` into a new model directory.

    Members must agree on classes and input. Returns what there is to say about the images they were trained on.
    """
    sources = [sources] if isinstance(sources, (str, Path)) else sources
    if len(sources) < FEWEST:
        raise UserError(f"an ensemble takes at least {FEWEST} models: name more of them")
    if (Path(out) / CONFIG).exists():
        raise UserError(f"{out} already holds a model: give another --out")
    models = [open_model(source, device="cpu") for source in sources]
    first = models[0]
    for other in models[1:]:
        same_classes = other.checkpoint.class_names == first.checkpoint.class_names
        if not same_classes or other.transform != first.transform:
            what = "input" if same_classes else "classes"
            raise UserError(
                f"{first.place} and {other.place} differ in their {what}: members of an ensemble must agree"
            )
    known: dict[str | None, str | Path] = {}
    for model in models:
        if (same := known.get(model.checkpoint.weights_sha256)) is not None:
            raise UserError(f"{same} and {model.place} are the same model: name each model once")
        known[model.checkpoint.weights_sha256] = model.place
    priors = [model.checkpoint.training_prior for model in models]
    save(
        Ensemble([member for model in models for member in model.classifier.asked({})[0]]),
        out,
        class_names=first.checkpoint.class_names,
        transform=first.transform.to_dict(),
        training_prior=priors[0] if all(prior == priors[0] for prior in priors) else None,
    )
    trainings = [model.training for model in models]
    decides = attrgetter("data", "labels", "group_by", "val_fraction", "image_seed")  # which images are held out
    if trainings[0] is None or len({decides(x) if x is not None else None for x in trainings}) > 1:
        return [
            "the models were not trained on the same part of the same data, or do not say: calibrate on images "
            "that none of them has seen (data_seed trains several on the same images)"
        ]
    write_files(out, {CONFIG_YAML: to_yaml(replace(trainings[0], out=str(out)))})
    return []

"""Images that are likely to have the wrong label: a model that never saw them is sure of another class."""

from dataclasses import dataclass
from typing import Any

from didicm.evaluation import run
from didicm.evaluation.stored import StoredModel

SURE = 0.5  # least probability of the other class


@dataclass(frozen=True)
class Suspect:
    """An image whose label a model doubts."""

    name: str
    label: str
    likely: str  # the class that the model says instead
    probability: float  # of that class

    def __str__(self) -> str:
        return f"{self.name}: labelled {self.label}, {self.likely} with {100 * self.probability:.1f} %"


@dataclass(frozen=True)
class Suspects:
    """The suspects among the images that a model was not trained on, the most confident first."""

    found: list[Suspect]
    ranked: int  # images that were looked at
    described: str  # which they are, in a few words
    accuracy: float  # of the model on them, by the labels as they are


def find_suspects(model: StoredModel, data: str, **asked: Any) -> Suspects:
    """Look for suspects among a model's held-out images: of those it was trained on it knows the labels by heart.

    `asked` are `labels` and `group_by`, as for `StoredModel.images`.
    """
    images, described = model.images(data, **asked)
    found = run.evaluate(model.classifier, images, model.transform, {"": model.sampler})
    top, likely = found.probs[""].max(dim=1)
    doubted = ((likely != found.labels) & (top >= SURE)).nonzero().squeeze(1)
    ranked = doubted[top[doubted].argsort(descending=True, stable=True)].tolist()
    names = model.class_names
    suspects = [
        Suspect(found.image_names[i], names[int(found.labels[i])], names[int(likely[i])], float(top[i]))
        for i in ranked
    ]
    accuracy = (likely == found.labels).double().mean().item()
    return Suspects(suspects, len(images), described, accuracy)

"""The models that a run keeps: the last, the best, and where it learns in cycles, what every cycle ended with.

In cycles of the learning rate one training ends in several minima; their ensemble costs no more training than one
network (snapshot ensembles, Huang et al. 2017).
"""

from pathlib import Path

from didicm.checkpoint import load, save
from didicm.classifier import Classifier, Ensemble
from didicm.errors import UserError
from didicm.settings import TrainConfig
from didicm.training.build import RunComponents

LAST, BEST, SNAPSHOTS = "last", "best", "snapshots"
CYCLES = "cycles"  # folder of the models that `SNAPSHOTS` is made of, until it is


def keep(run: RunComponents, classifier: Classifier, *places: Path) -> None:
    """Write a classifier into model directories."""
    for place in places:
        save(
            classifier,
            place,
            class_names=run.class_names,
            transform=run.eval_transform.to_dict(),
            training_prior=run.training_prior,
        )


def check_cycles(config: TrainConfig, classifier: Classifier) -> None:
    """Refuse snapshots of a network that no ensemble can be saved with, before it is trained."""
    if config.optimizer.snapshots and getattr(classifier.model, "recipe", None) is None:
        raise UserError(
            "optimizer.snapshots: an ensemble with a network of your own cannot be saved; leave it out"
        )


def ended_cycle(config: TrainConfig, epochs: int) -> int | None:
    """The cycle, counted from 1, that ends after so many epochs, if one does."""
    if config.optimizer.snapshots is None:
        return None
    cycle, rest = divmod(epochs, config.epochs // config.optimizer.snapshots)
    return None if rest else cycle


def join_cycles(config: TrainConfig, run: RunComponents, folder: Path) -> None:
    """Make one model of what the cycles ended with: the later first, as first members may be asked alone."""
    if (folder / CYCLES).is_dir():
        cycles = range(config.optimizer.snapshots or 0, 0, -1)
        members = [load(folder / CYCLES / str(cycle)).classifier for cycle in cycles]
        keep(run, Ensemble(members), folder / SNAPSHOTS)

"""Posteriors put to use where classes differ from those of training: exact arithmetic on plain arrays.

By Bayes' rule p(class | image) is proportional to p(image | class) p(class). If images of a class look as they did
in training, other frequencies change the posterior by the ratio of the priors and by nothing else; a class that
cannot occur has the frequency 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from didicm.errors import UserError, did_you_mean
from didicm.evaluation.label_sets import ConformalRule, Floats
from didicm.files import read_yaml
from didicm.values import NonNegative, Positive, coerce

Bools: TypeAlias = npt.NDArray[np.bool_]
Prior: TypeAlias = Mapping[str, float] | str  # frequencies by class, or one of `PRIORS`
Taxonomy: TypeAlias = Mapping[str, Sequence[str]]  # classes by their coarser name
PRIORS = ("uniform", "training")
SAME = 1e-9  # difference of two ratios of frequencies that is rounding error
TINY = float(np.finfo(np.float32).tiny)
UNKNOWN_PRIOR = (
    "the model does not say how frequent each class was in its training, which a prior is relative to: add "
    '"training_prior": {"images": [as many numbers as classes], "balance": "none"} to its config.json'
)


@dataclass(frozen=True)
class Adjustment:
    """From a posterior over K classes to one over M names; `make_adjustment` makes one."""

    names: list[str]  # (M,)
    possible: npt.NDArray[np.int64]  # (C,), classes that can occur
    factors: npt.NDArray[np.float64]  # (C,), how much more frequent they are than they were to the network
    group: npt.NDArray[np.int64]  # (C,), which of the names each belongs to
    restricted: bool  # some classes cannot occur
    other_prior: bool  # those that can occur are not as frequent as they were to the network

    def probs(self, probs: Floats) -> Floats:
        """Probabilities (N, M) of (N, K); one that was rounded to 0 counts as the smallest number."""
        weighted = np.maximum(probs[:, self.possible].astype(np.float64), TINY) * self.factors
        weighted /= weighted.sum(1, keepdims=True)
        found = np.zeros((len(self.names), len(probs)))
        np.add.at(found, self.group, weighted.T)
        return np.ascontiguousarray(found.T, dtype=probs.dtype)

    def sets(self, inside: Bools, probs: Floats) -> Bools:
        """Which names are in the sets (N, M) of classes (N, K), and at least the most probable one of (N, M)."""
        grouped = np.zeros((len(self.names), len(inside)), dtype=bool)
        np.logical_or.at(grouped, self.group, inside[:, self.possible].T)
        found = np.ascontiguousarray(grouped.T)
        empty = np.flatnonzero(~found.any(1))
        found[empty, probs[empty].argmax(1)] = True
        return found


def kept_rule(rule: ConformalRule | None, adjustment: Adjustment | None) -> ConformalRule | None:
    """A conformal rule if it still covers the truth as often: under other frequencies only one per class does."""
    shifted = adjustment is not None and adjustment.other_prior
    return None if rule is None or (shifted and not rule.per_class) else rule


def note_on_sets(rule: ConformalRule | None, adjustment: Adjustment | None) -> str:
    """What to add to the note on a calibration whose sets are not kept, or promise less than they did."""
    if rule is None or rule.per_class or adjustment is None:
        return ""
    if adjustment.other_prior:
        return "; without conformal sets, which this prior makes void: calibrate --per-class makes some that hold"
    if adjustment.restricted:
        return (
            "; conformal sets promise their coverage for images of all classes together, and perhaps less for "
            "those possible here: calibrate --per-class makes some that hold for any classes"
        )
    return ""


def claim(rule: ConformalRule | None, adjustment: Adjustment | None) -> str | None:
    """What a conformal set is said to hold; None where there is none."""
    if rule is None:
        return None
    text = f"the set that holds the truth for {100 * (1 - rule.alpha):g} % of images"
    if rule.per_class:
        return f"{text} of every class"
    restricted = adjustment is not None and adjustment.restricted
    return f"{text} of all classes together, without the classes impossible here" if restricted else text


def make_adjustment(
    class_names: Sequence[str],
    training_prior: Mapping[str, Any] | None,
    *,
    classes: Sequence[str] | None = None,
    prior: Prior | None = None,
    taxonomy: Taxonomy | None = None,
) -> Adjustment | None:
    """What has to be done to a model's posterior; None if nothing.

    Args:
        class_names: of the model.
        training_prior: as a model stores it: images of each class in training, and whether they were balanced.
        classes: those that can occur; by default all.
        prior: how frequent each of them is; `uniform`, or `training`, which undoes a balanced training.
        taxonomy: coarser names and their classes, whose probabilities are summed.
    """
    if classes is None and prior is None and taxonomy is None:
        return None
    classes = coerce(classes, tuple[str, ...] | None, "classes")
    if classes is not None and not classes:
        raise UserError("classes is empty: name those that can occur, or leave it out")
    _check_known(class_names, classes or (), "classes")
    chosen = set(classes or class_names)
    possible = np.array([k for k, name in enumerate(class_names) if name in chosen])
    factors = np.ones(len(possible))
    if prior is not None:
        factors = _ratios(prior, training_prior, class_names, possible)
    names, group = [class_names[k] for k in possible], np.arange(len(possible))
    if taxonomy is not None:
        coarse = _coarser(taxonomy, class_names)
        own = [coarse[name] for name in names]
        left = set(own)
        names = [name for name in taxonomy if name in left]
        number = {name: m for m, name in enumerate(names)}
        group = np.array([number[name] for name in own])
    factors = factors / factors.max()
    restricted, other_prior = len(possible) < len(class_names), bool(factors.min() < 1 - SAME)
    return Adjustment(names, possible, factors, group, restricted, other_prior)


def adjusted(
    probs: Floats, rule: ConformalRule | None, adjustment: Adjustment | None
) -> tuple[Floats, Bools | None]:
    """What is told of posteriors (N, K): probabilities (N, M), and what is in the conformal sets (N, M).

    A rule is for the posterior it was fitted to. Its sets lose the classes that cannot occur, and become sets of
    coarser names; neither drops the truth. But a rule that is not per class covers images of all classes together:
    those of the classes that are left may be the ones that it misses more often.
    """
    inside = None if rule is None else rule.contains(probs)
    if adjustment is None:
        return probs, inside
    found = adjustment.probs(probs)
    return found, None if inside is None else adjustment.sets(inside, found)


def read_prior(text: str | None) -> Prior | None:
    """A prior as the command line has it: one of the words, or a file of names and frequencies."""
    if text is None or text in PRIORS:
        return text
    return _read(text, "--prior", "uniform, training, or a YAML file with a line such as cat: 0.2 for every class")


def read_taxonomy(path: str | Path | None) -> Taxonomy | None:
    """A taxonomy from a file."""
    if path is None:
        return None
    return _read(path, "--taxonomy", "a YAML file with lines such as animal: [cat, dog]")


def _read(path: str | Path, option: str, remedy: str) -> dict[str, Any]:
    content = read_yaml(Path(path), f"for {option} give {remedy}")
    return {str(name): value for name, value in content.items()}  # classes may be called by numbers


def _ratios(
    prior: Prior,
    training_prior: Mapping[str, Any] | None,
    class_names: Sequence[str],
    possible: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """How much more frequent the possible classes are here than they were to the network (C,), up to a factor."""
    if training_prior is None:
        raise UserError(UNKNOWN_PRIOR)
    images = np.array(coerce(training_prior.get("images"), tuple[NonNegative, ...], "training_prior.images"))
    if len(images) != len(class_names):
        raise UserError(f"training_prior has {len(images)} numbers for {len(class_names)} classes: restore it")
    images, names = images[possible], [class_names[k] for k in possible]
    if not images.all():
        name = names[int(images.argmin())]
        raise UserError(f"training had no image of class {name!r}, which no prior can make up for: leave it out")
    seen = images if training_prior.get("balance", "none") == "none" else np.ones(len(images))
    wanted = images if isinstance(prior, str) and prior == "training" else _wanted(prior, names, class_names)
    return np.asarray(wanted / wanted.max() / seen)


def _wanted(prior: Prior, names: Sequence[str], class_names: Sequence[str]) -> npt.NDArray[np.float64]:
    """How frequent classes are here, by their names."""
    if isinstance(prior, str) and prior == "uniform":
        return np.ones(len(names))
    if not isinstance(prior, Mapping):
        raise UserError(f"prior must be uniform, training, or a frequency for every class, got {prior!r}")
    _check_known(class_names, list(prior), "prior")
    if missing := [name for name in names if name not in prior]:
        raise UserError(
            f"the prior has no frequency for class {missing[0]!r}: give every possible class its frequency"
        )
    return np.array([coerce(prior[name], Positive, f"the prior of class {name!r}") for name in names])


def _coarser(taxonomy: Taxonomy, class_names: Sequence[str]) -> dict[str, str]:
    """The coarser name of every class."""
    found: dict[str, str] = {}
    taxonomy = coerce(taxonomy, Mapping[str, Any], "taxonomy")
    for coarse, members in taxonomy.items():
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise UserError(f"taxonomy: {coarse} must be a list of classes, got {members!r}")
        for name in map(str, members):
            if name in found:
                raise UserError(f"the taxonomy has class {name!r} twice: give each class one coarser name")
            found[name] = coarse
    _check_known(class_names, list(found), "the taxonomy")
    if missing := [name for name in class_names if name not in found]:
        raise UserError(f"the taxonomy lacks class {missing[0]!r}: give each class a coarser name")
    return found


def _check_known(class_names: Sequence[str], given: Sequence[str], what: str) -> None:
    known = set(class_names)
    if unknown := [name for name in given if name not in known]:
        name = unknown[0][:40]
        raise UserError(f"{what}: there is no class {name!r}: {did_you_mean(name, class_names)}")

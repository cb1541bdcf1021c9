"""Calibration on held-out images: a temperature that makes a posterior sharper or flatter, and conformal sets.

A calibration is stored beside the weights it was fitted to, and holds for them and one sampler alone.

Conformal sets hold the true class with a chosen probability, whatever the model. The threshold of a
split-conformal rule is the ceil((n + 1) (1 - alpha))-th smallest score of the true classes of n held-out images;
then a new image's set holds its true class with probability at least 1 - alpha, on average over images alike. With
a threshold per class (Mondrian; Vovk 2012), from the n images of that class, this holds for the images of every
class, and so whatever the frequencies of the classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from didicm.checkpoint import CALIBRATION, CONFIG, HUB, OUTLIERS, local_directory
from didicm.errors import UserError
from didicm.evaluation.label_sets import ConformalRule, Floats, Method, class_scores, conformal_rank
from didicm.evaluation.metrics import TINY, check, check_probs
from didicm.evaluation.outliers import OutlierRule, load_rule
from didicm.files import Write, read_json, sha256, to_json, write_files
from didicm.values import Positive, Settings, renamed

FORMAT = 1
AGAIN = "calibrate again, or leave the calibration out with --no-calibration"

LOWEST, HIGHEST = 0.05, 20.0
WEAK_PRIOR = 10.0  # images that confirm the posterior: few are held out where there are few
FLAT = 1e-12  # a slope of the NLL that is rounding error


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature, above 1 for a posterior that was overconfident."""

    value: float
    warning: str | None  # set where the best value lies outside of what we allow


def fit_temperature(probs: Tensor, labels: Tensor, prior: float = 0.0) -> Temperature:
    """Minimise the NLL of softmax(log p / T) over T in [0.05, 20], for held-out probabilities (N, K).

    The NLL is convex in 1 / T, so its slope has one root, or the minimum lies at a bound. A dozen images that
    happen to be all right would ask for T = 0; `prior` counts as so many more images that confirm the posterior.
    """
    probs, labels = check(probs, labels)
    logits = _log(probs)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    target = (len(probs) * own + prior * (probs * logits).sum(-1)) / (len(probs) + prior)

    def slopes(beta: float) -> tuple[float, float]:
        """First and second derivative of the NLL."""
        p = (logits * beta).softmax(-1)
        mean = (p * logits).sum(-1)
        variance = (p * (logits - mean.unsqueeze(-1)).square_()).sum(-1)
        return (mean - target).mean().item(), variance.mean().item()

    start, _ = slopes(1.0)
    if abs(start) <= FLAT:  # no temperature matters, as for a uniform posterior
        return Temperature(1.0, None)
    bound, way = (LOWEST, "sharper") if start < 0 else (HIGHEST, "flatter")
    if slopes(1 / bound)[0] * start > 0:
        told = f"the temperature stopped at its bound {bound}: these images ask for a still {way} posterior"
        return Temperature(bound, told)
    return Temperature(1 / _root(slopes, 1 / HIGHEST, 1 / LOWEST), None)


def apply_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Rescale probabilities (N, K) to softmax(log p / T), in their own precision; the ranking stays."""
    if not temperature > 0:
        raise UserError(f"a temperature must be above 0, got {temperature}")
    return temperature_scaled(check_probs(probs), temperature)


def temperature_scaled(probs: Tensor, temperature: float) -> Tensor:
    """`apply_temperature` without its checks, as an exported graph needs it."""
    return (_log(probs) / temperature).softmax(-1).to(probs.dtype)


class Conformal(ConformalRule):
    """A rule that turns a posterior into a set of classes."""

    def sets(self, probs: Tensor) -> Tensor:
        """`contains` of tensors: classes in the set of each image, bool (N, K), from probabilities (N, K)."""
        return torch.from_numpy(self.contains(check_probs(probs).numpy()))


def fit_conformal(
    method: Method, probs: Tensor, labels: Tensor, alpha: float, *, per_class: bool = False
) -> Conformal:
    """Fit a rule on held-out probabilities (N, K).

    LAC has the smallest sets on average; those of APS adapt to how hard an image is.
    """
    probs, labels = check(probs, labels)
    truth = labels.numpy()
    scores = class_scores(method, probs.numpy())[np.arange(len(truth)), truth]

    def threshold(scores: Floats, of: str = "") -> float:
        return float(np.sort(scores)[conformal_rank(len(scores), alpha, of) - 1])

    ranked_ties = method != "lac"
    if not per_class:
        return Conformal(method, alpha, threshold(scores), len(truth), ranked_ties)
    limits = tuple(threshold(scores[truth == k], f" of every class (class {k})") for k in range(probs.shape[1]))
    return Conformal(method, alpha, max(limits), len(truth), ranked_ties, limits)


def coverage(sets: Tensor, labels: Tensor) -> float:
    """Share of images whose set (N, K) holds the label (N,)."""
    _check_sets(sets)
    if labels.shape != sets.shape[:1] or labels.min() < 0 or labels.max() >= sets.shape[1]:
        raise UserError(f"labels must be {len(sets)} of the {sets.shape[1]} classes, one per set")
    return sets.gather(1, labels.unsqueeze(1)).double().mean().item()


def mean_size(sets: Tensor) -> float:
    """Mean number of classes in the sets (N, K)."""
    _check_sets(sets)
    return sets.sum(-1).double().mean().item()


def _check_sets(sets: Tensor) -> None:
    if sets.dim() != 2 or sets.dtype != torch.bool or not len(sets):
        raise UserError("sets must be a table of yes and no, one row per image")


@dataclass(frozen=True)
class Calibration(Settings):
    """A temperature and rules for sets of classes, fitted to one posterior on held-out images."""

    temperature: Positive
    conformal: dict[str, Conformal]  # by method; for probabilities after the temperature
    posterior: dict[str, Any]  # size and sampler of the posterior it was fitted to
    fitted_on: dict[str, Any]  # data, images and how many, corruption
    check: dict[str, Any]  # what other held-out images say of it
    outliers: OutlierRule | None = None  # which images it does not hold for; None where there were too few

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := next((name for name, rule in self.conformal.items() if rule.method != name), None):
            raise UserError(f"conformal has under {wrong} a rule of method {self.conformal[wrong].method}")


def save_calibration(directory: str | Path, calibration: Calibration) -> Path:
    """Write a calibration into a model directory, tied to the weights there; an outlier score has its own file."""
    directory, outliers = Path(directory), calibration.outliers
    values = {"format": FORMAT, "weights_sha256": weights_digest(directory)}
    values |= asdict(replace(calibration, outliers=None))

    def write_values(path: Path) -> None:
        if outliers is not None:
            values["outliers"] = {**outliers.to_dict(), "sha256": sha256(path.with_name(OUTLIERS))}
        path.write_text(to_json(values), encoding="utf-8")

    tensors: dict[str, Write] = {} if outliers is None else {OUTLIERS: outliers.save_tensors}
    write_files(directory, {**tensors, CALIBRATION: write_values})
    return directory / CALIBRATION


def is_calibration(path: Path) -> bool:
    """Whether a file is one that `save_calibration` wrote, of whatever format."""
    try:
        stored = read_json(path, AGAIN)
    except UserError:
        return False
    return isinstance(stored, dict) and {"format", "weights_sha256", "temperature"} <= stored.keys()


def load_calibration(directory: str | Path) -> Calibration | None:
    """Read the calibration of a model directory, None if there is none; one of other weights is refused."""
    directory = local_directory(directory) if str(directory).startswith(HUB) else Path(directory)
    path = directory / CALIBRATION
    if not path.is_file():
        return None
    values = read_json(path, AGAIN)
    try:
        if values.pop("format") != FORMAT:
            raise ValueError("this version of didicm does not read its format")
        weights, posterior = values.pop("weights_sha256"), renamed(values.pop("posterior"))
        if (outliers := values.pop("outliers", None)) is not None:
            values["outliers"] = load_rule(directory / OUTLIERS, outliers)
        calibration = Calibration.from_dict({**values, "posterior": posterior})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} cannot be used ({detail}): {AGAIN}") from error
    if weights != weights_digest(directory):
        raise UserError(f"{path} belongs to other weights: {AGAIN}")
    return calibration


def find_calibration(directory: str | Path, posterior: Mapping[str, Any]) -> tuple[Calibration | None, str]:
    """The calibration stored with a model if it was fitted to this posterior, and a sentence that says so."""
    calibration = load_calibration(directory)
    if calibration is None:
        return None, "not calibrated; didicm calibrate fits a temperature and conformal sets"
    path, fitted = f"{directory}/{CALIBRATION}", calibration.posterior
    changed = [name for name in {**fitted, **posterior} if fitted.get(name) != posterior.get(name)]
    if changed:
        detail = ", ".join(f"{name} {fitted.get(name, 'unset')}" for name in changed)
        return None, f"{path} is left out: it was fitted with {detail}"
    source = calibration.fitted_on
    return calibration, (
        f"calibrated by {path}: temperature {calibration.temperature:.3g} and conformal sets from "
        f"{source.get('images')} images of {source.get('data')}"
    )


def _root(slopes: Callable[[float], tuple[float, float]], low: float, high: float) -> float:
    """Where a rising function is 0, from its value and slope: Newton's method, held inside a bracket."""
    x = 1.0
    for _ in range(100):
        value, slope = slopes(x)
        low, high = (x, high) if value < 0 else (low, x)
        if abs(value) < FLAT or high / low < 1 + 1e-9:
            break
        newton = x - value / slope if slope > 0 else low
        x = newton if low < newton < high else (low * high) ** 0.5
    return x


def _log(probs: Tensor) -> Tensor:
    return probs.double().clamp_min(TINY).log()


def weights_digest(directory: Path) -> str:
    """Digest of the weights that the config names; loading a model checks that it is theirs."""
    return str(read_json(directory / CONFIG, "restore it from a copy")["weights_sha256"])

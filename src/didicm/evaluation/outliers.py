"""How unlike the training images an input is: its distance from held-out images, in what the network sees of them.

The features of held-out images are described by their mean and covariance (a Mahalanobis distance); the threshold
is set on other held-out images, of which a chosen share lies beyond it. Only the image itself decides its score.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from didicm.errors import UserError, reason
from didicm.files import sha256
from didicm.values import Count, Fraction, NonNegative, coerce

FEWEST = 50  # images to describe: fewer say nothing of how features vary together
DEAD = 1e-3  # least spread of a feature, over the mean one: a channel that no held-out image uses


@dataclass(frozen=True, eq=False)
class OutlierRule:
    """A score, about 1 for images like those of training, and the value above which an image is flagged."""

    center: Tensor  # (D,), mean features of held-out images
    whiten: Tensor  # (D, D), makes their covariance the identity
    threshold: float
    false_alarms: float  # share of images like those of training that are flagged all the same
    n: int  # images that the threshold was set on

    def scores(self, features: Tensor) -> Tensor:
        """Scores (B,), in float64 on the CPU, of features (B, D)."""
        features = features.double().cpu()
        if features.shape[1:] != self.center.shape:
            raise UserError(
                f"the network has {features.shape[1]} features and the stored outlier score {len(self.center)}: "
                "calibrate again"
            )
        return self.distance(features)

    def distance(self, features: Tensor) -> Tensor:
        """`scores` without its checks and where the features are, as an exported graph needs it."""
        return ((features.double() - self.center.double()) @ self.whiten.double()).square().mean(1).sqrt()

    def save_tensors(self, path: Path) -> None:
        """Write the tensors, which have a file of their own."""
        save_file({"center": self.center, "whiten": self.whiten.contiguous()}, path)

    def to_dict(self) -> dict[str, Any]:
        """Its numbers, for JSON."""
        return {"threshold": self.threshold, "false_alarms": self.false_alarms, "n": self.n}


def fit_outliers(features: Tensor, others: Tensor, false_alarms: float = 0.05) -> OutlierRule | None:
    """Describe the features (N, D) of held-out images, and set the threshold on `others` (n, D); None if too few.

    A new image like them is flagged with probability `false_alarms` at most, whatever the features.
    """
    rank = math.ceil((len(others) + 1) * (1 - false_alarms) - 1e-9)
    if len(features) < FEWEST or rank > len(others):
        return None
    features, others = features.double().cpu(), others.double().cpu()
    center, spread = features.mean(0), features.std(0, correction=0)
    spread = spread.clamp_min(DEAD * spread.mean().item() + torch.finfo(torch.float32).tiny)
    covariance = shrunk_covariance((features - center) / spread)
    values, vectors = torch.linalg.eigh(covariance)
    # In float32, as it is stored: the threshold is then of the very numbers that are used.
    whiten = (vectors / values.sqrt() / spread.unsqueeze(1)).float()
    rule = OutlierRule(center.float(), whiten, math.inf, false_alarms, len(others))
    return replace(rule, threshold=rule.distance(others).sort().values[rank - 1].item())


def shrunk_covariance(x: Tensor) -> Tensor:
    """Covariance (D, D) of centred x (N, D), shrunk to a multiple of the identity as Ledoit and Wolf (2004) do."""
    count, width = x.shape
    sample = x.T @ x / count
    scaled = torch.eye(width, dtype=x.dtype) * sample.trace() / width
    away = (sample - scaled).square().sum()
    error = (x.square().sum(1).square().sum() / count - sample.square().sum()) / count
    share = (error / away).clamp(0, 1).item() if away > 0 else 1.0
    # A little of the identity even where no shrinkage is asked for: a feature may repeat another.
    return share * scaled + (1 - share) * sample + 1e-6 * scaled


def load_rule(path: Path, numbers: dict[str, Any]) -> OutlierRule:
    """A rule from the file of its tensors and its numbers."""
    if not path.is_file() or sha256(path) != numbers["sha256"]:
        raise ValueError(f"the {path.name} that belongs to it is missing")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is damaged: {reason(error)}") from error
    if set(tensors) != {"center", "whiten"} or tensors["whiten"].shape != 2 * tensors["center"].shape:
        raise ValueError(f"{path.name} does not hold an outlier score")
    if not all(bool(x.isfinite().all()) for x in tensors.values()):
        raise ValueError(f"{path.name} holds numbers that are not finite")
    return OutlierRule(
        **tensors,
        threshold=coerce(numbers["threshold"], NonNegative, "outliers.threshold"),
        false_alarms=coerce(numbers["false_alarms"], Fraction, "outliers.false_alarms"),
        n=coerce(numbers["n"], Count, "outliers.n"),
    )

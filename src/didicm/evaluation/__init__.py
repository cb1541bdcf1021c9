"""What a posterior is worth: metrics, intervals, calibration, conformal sets, from stored probabilities."""

from didicm.evaluation.calibration import Temperature, apply_temperature, fit_temperature
from didicm.evaluation.conformal import Conformal, coverage, fit_aps, fit_lac, mean_size
from didicm.evaluation.diagnostics import (
    ClassRow,
    EntropyHistogram,
    Reliability,
    RiskCoverage,
    confusion,
    entropy_histogram,
    per_class,
    reliability,
    risk_coverage,
)
from didicm.evaluation.intervals import bootstrap, paired_difference, seed_interval
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.store import Posteriors, load_posteriors, save_posteriors

__all__ = [
    "ClassRow",
    "Conformal",
    "EntropyHistogram",
    "Posteriors",
    "Reliability",
    "RiskCoverage",
    "Temperature",
    "apply_temperature",
    "bootstrap",
    "confusion",
    "coverage",
    "entropy_histogram",
    "evaluate_probs",
    "fit_aps",
    "fit_lac",
    "fit_temperature",
    "load_posteriors",
    "mean_size",
    "paired_difference",
    "per_class",
    "reliability",
    "risk_coverage",
    "save_posteriors",
    "seed_interval",
]

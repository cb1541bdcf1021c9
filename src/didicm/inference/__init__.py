"""A trained classifier in use: predictions for image files, and the same answers faster."""

from didicm.inference.fuse import optimize_for_inference
from didicm.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor", "optimize_for_inference"]

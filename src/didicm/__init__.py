"""Image classification with a posterior you can trust.

Importing the package registers its networks with timm: `timm.create_model("didirn50")` works from then on.
"""

__version__ = "0.1.0"

from didicm.checkpoint import load, push, save
from didicm.classifier import Classifier, DiffusionClassifier, Sampler, StandardClassifier
from didicm.diffusion import Posterior, UniformProcess
from didicm.errors import UserError
from didicm.inference import optimize_for_inference
from didicm.models import create_model, list_models

__all__ = [
    "Classifier",
    "DiffusionClassifier",
    "Posterior",
    "Sampler",
    "StandardClassifier",
    "UniformProcess",
    "UserError",
    "create_model",
    "list_models",
    "load",
    "optimize_for_inference",
    "push",
    "save",
]

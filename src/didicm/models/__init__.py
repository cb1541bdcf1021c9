"""Networks that answer `encode` and `score`, and the plain classifiers they are compared with."""

from didicm.models.backbone import BackbonePlain, BackboneScore
from didicm.models.didirn import DiDiRN
from didicm.models.registry import Cost, cost, create_model, list_models, plain_counterpart
from didicm.models.resnet import ResNet
from didicm.models.score import ScoreModel

__all__ = [
    "BackbonePlain",
    "BackboneScore",
    "Cost",
    "DiDiRN",
    "ResNet",
    "ScoreModel",
    "cost",
    "create_model",
    "list_models",
    "plain_counterpart",
]

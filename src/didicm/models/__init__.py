"""Networks that answer `encode` and `score`, and the baselines they are compared with."""

from didicm.models.backbone import BackboneBaseline, BackboneScore
from didicm.models.registry import Cost, baseline_name, cost, create_model, head_cost, list_models
from didicm.models.resnet import ResNet
from didicm.models.score import DiDiRN, ScoreModel

__all__ = [
    "BackboneBaseline",
    "BackboneScore",
    "Cost",
    "DiDiRN",
    "ResNet",
    "ScoreModel",
    "baseline_name",
    "cost",
    "create_model",
    "head_cost",
    "list_models",
]

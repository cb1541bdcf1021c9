"""Image classification with a posterior you can trust.

Names are imported when they are first used, so that `import didicm` and `didicm --help` do not wait for PyTorch.
Importing `didicm.models` registers our networks with timm: `timm.create_model("didirn50")` works from then on.
"""

from typing import TYPE_CHECKING

from didicm.lazy import import_on_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from didicm.checkpoint import load as load
    from didicm.checkpoint import load_weights as load_weights
    from didicm.checkpoint import save as save
    from didicm.classifier import Classifier as Classifier
    from didicm.classifier import DiffusionClassifier as DiffusionClassifier
    from didicm.classifier import Ensemble as Ensemble
    from didicm.classifier import Sampler as Sampler
    from didicm.classifier import StandardClassifier as StandardClassifier
    from didicm.cli.compare import compare as compare
    from didicm.data import open_data as open_data
    from didicm.diffusion import Posterior as Posterior
    from didicm.diffusion import UniformProcess as UniformProcess
    from didicm.errors import UserError as UserError
    from didicm.evaluation.assess import evaluate as evaluate
    from didicm.evaluation.assess import evaluate_shift as evaluate_shift
    from didicm.evaluation.fitting import calibrate as calibrate
    from didicm.evaluation.stored import ensemble as ensemble
    from didicm.inference.bulk import predict as predict
    from didicm.inference.export import export as export
    from didicm.inference.hub import push as push
    from didicm.inference.optimize import optimize_for_inference as optimize_for_inference
    from didicm.inference.predictor import Predictor as Predictor
    from didicm.models import create_model as create_model
    from didicm.models import list_models as list_models
    from didicm.training.loop import train as train

_HOME = {
    "Classifier": "classifier",
    "DiffusionClassifier": "classifier",
    "Ensemble": "classifier",
    "Posterior": "diffusion",
    "Predictor": "inference.predictor",
    "Sampler": "classifier",
    "StandardClassifier": "classifier",
    "UniformProcess": "diffusion",
    "UserError": "errors",
    "calibrate": "evaluation.fitting",
    "compare": "cli.compare",
    "create_model": "models",
    "ensemble": "evaluation.stored",
    "evaluate": "evaluation.assess",
    "evaluate_shift": "evaluation.assess",
    "export": "inference.export",
    "list_models": "models",
    "load": "checkpoint",
    "load_weights": "checkpoint",
    "open_data": "data",
    "optimize_for_inference": "inference.optimize",
    "predict": "inference.bulk",
    "push": "inference.hub",
    "save": "checkpoint",
    "train": "training.loop",
}
__all__ = sorted(_HOME)
__getattr__ = import_on_use(__name__, _HOME)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

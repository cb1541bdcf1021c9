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
    from didicm.inference.onnx import OnnxPredictor as OnnxPredictor
    from didicm.inference.optimize import optimize_for_inference as optimize_for_inference
    from didicm.inference.predictor import Predictor as Predictor
    from didicm.models import create_model as create_model
    from didicm.models import list_models as list_models
    from didicm.training.loop import train as train

_NAMES = {
    "checkpoint": ["load", "load_weights", "save"],
    "classifier": ["Classifier", "DiffusionClassifier", "Ensemble", "Sampler", "StandardClassifier"],
    "cli.compare": ["compare"],
    "data": ["open_data"],
    "diffusion": ["Posterior", "UniformProcess"],
    "errors": ["UserError"],
    "evaluation.assess": ["evaluate", "evaluate_shift"],
    "evaluation.fitting": ["calibrate"],
    "evaluation.stored": ["ensemble"],
    "inference.bulk": ["predict"],
    "inference.export": ["export"],
    "inference.hub": ["push"],
    "inference.onnx": ["OnnxPredictor"],
    "inference.optimize": ["optimize_for_inference"],
    "inference.predictor": ["Predictor"],
    "models": ["create_model", "list_models"],
    "training.loop": ["train"],
}
__all__ = sorted(name for names in _NAMES.values() for name in names)
__getattr__ = import_on_use(__name__, _NAMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

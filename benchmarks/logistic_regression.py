"""scikit-learn's logistic regression on the frozen features of a study's runs, as one more method of its results.

python -m benchmarks.logistic_regression studies/finetune-cpu

It sees the images that the study's frozen linear layer sees, without augmentation; its regularisation is chosen by
cross-validation on the training images, and its temperature on the held-out ones, as for every method.
"""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from didicm.data import ImageSet, make_loader
from didicm.evaluation.calibration import WEAK_PRIOR, apply_temperature, fit_temperature
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.store import save_posteriors
from didicm.experiments.execute import prepare
from didicm.experiments.results import (
    Measurement,
    Plan,
    RunResult,
    append_result,
    read_plan,
    read_results,
    write_plan,
)
from didicm.experiments.spec import MEASURED, ONE_CALL, Method, Run
from didicm.models import cost
from didicm.settings import TrainConfig
from didicm.training.build import RunComponents
from didicm.values import override

METHOD = Method("logistic regression", "frozen", settings={"method": "standard"})
STRENGTHS = np.logspace(-6, 1, 15)  # inverse, of the regularisation


def add_logistic_regression(folder: Path) -> None:
    """Fit and measure one for every run of the frozen linear layer, and add them to the study's results."""
    plan = read_plan(folder)
    assert plan is not None, f"{folder} holds no study"
    done = {result.key for result in read_results(folder)}
    made: dict[str, str] = {}
    for run in _frozen_runs(plan):
        made[key := re.sub("^[a-z]+", "sklearn", run.key)] = str(METHOD)
        if key not in done:
            append_result(folder, _fit(run, key, folder))
            print(run, flush=True)
    methods = {str(method): method for method in (*plan.study.methods, METHOD)}
    study = replace(plan.study, methods=tuple(methods.values()))
    write_plan(folder, replace(plan, study=study, runs={**plan.runs, **made}))


def _frozen_runs(plan: Plan) -> Iterator[Run]:
    """The runs of the frozen linear layer, as they were carried out."""
    study = plan.study
    method = next(m for m in study.methods if m.baseline and m.settings.get("model_args.frozen"))
    for condition, seed in product(study.conditions, range(study.seeds)):
        config = override(TrainConfig(), plan.settings[f"{method}, {condition}"], {"seed": seed})
        run = Run(method, condition, seed, config, held_out=study.held_out)
        if run.key in plan.runs:
            yield run


def _fit(run: Run, key: str, folder: Path) -> RunResult:
    components, test = prepare(run)
    begun = time.monotonic()
    train, train_labels = _features(components, components.train)
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    folds = min(5, int(np.bincount(train_labels).min()))
    search = GridSearchCV(regression, {"logisticregression__C": STRENGTHS}, scoring="neg_log_loss", cv=folds)
    search.fit(train.numpy(), train_labels.numpy())
    seconds = time.monotonic() - begun

    def ask(features: Tensor) -> Tensor:
        return torch.from_numpy(search.predict_proba(features.numpy())).float()

    held, held_labels = _features(components, components.val)
    tested, test_labels = _test_features(run.config.data, components, test)
    temperature = fit_temperature(ask(held), held_labels, WEAK_PRIOR).value
    probs, price = ask(tested), cost(components.classifier.model, components.eval_transform.size)
    stored = f"{MEASURED}/{key}/posteriors-0.safetensors"
    save_posteriors(folder / stored, probs, test_labels, components.class_names)
    measurement = Measurement(
        sampler=ONE_CALL,
        group=ONE_CALL,
        settings={},
        calls=1,
        multiply_adds=price.total(1),
        metrics=evaluate_probs(probs, test_labels),
        temperature=temperature,
        scaled_metrics=evaluate_probs(apply_temperature(probs, temperature), test_labels),
        posteriors=stored,
    )
    return RunResult(
        key=key,
        method=str(METHOD),
        condition=run.condition,
        seed=run.seed,
        num_train=len(components.train),
        num_held_out=len(components.val),
        num_test=len(test_labels),
        num_classes=len(components.class_names),
        parameters=price.parameters,
        train_seconds=seconds,
        measurements=(measurement,),
        versions={package: version(package) for package in ("didicm", "torch", "timm", "scikit-learn")},
    )


_KEPT: dict[tuple[str, float], tuple[Tensor, Tensor]] = {}


def _test_features(data: str, components: RunComponents, test: ImageSet) -> tuple[Tensor, Tensor]:
    """Computed once where all runs have the same pretrained backbone."""
    key = data, sum(float(x.double().sum()) for x in components.classifier.model.backbone.parameters())
    if key not in _KEPT:
        _KEPT[key] = _features(components, test)
    return _KEPT[key]


@torch.no_grad()
def _features(components: RunComponents, images: ImageSet) -> tuple[Tensor, Tensor]:
    """Features (N, D) and labels (N,)."""
    network = components.classifier.model.eval()
    loader = make_loader(images, components.eval_transform, 100, train=False, seed=0)
    found = [(network.embed(image), label) for image, label in loader]
    features, labels = zip(*found, strict=True)
    return torch.cat(features), torch.cat(labels)


if __name__ == "__main__":
    add_logistic_regression(Path(sys.argv[1]))

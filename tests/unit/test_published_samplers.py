"""`euler` and `official` on a trained network: Algorithms 2 and 3, and the released sampler, matrices and all."""

import numpy as np
import pytest
import torch

from didicm import DiffusionClassifier, Sampler, UniformProcess, load, open_data
from didicm.data import EvalTransform
from didicm.diffusion.solver import ExactScore
from didicm.settings import load_recipe
from didicm.training.loop import train
from didicm.values import override
from tests.oracle import matrices
from tests.oracle.posteriors import all_kinds, sigma, total_variation

LITERAL = {"euler": matrices.paper_cp, "official": matrices.released_cp}
SETTINGS = {
    "data": "fashion-mini",
    "model_args": {"width": 0.125, "parameterization": "score"},
    "image.size": 8,
    "fraction": 0.1,
    "batch_size": 60,
    "epochs": 16,
    "run.validate_epochs": 16,
    "sampler.method": "readout",
    "mask": 0.0,
    "draws_per_image": 2,
}


@pytest.fixture(scope="module")
def trained(once):
    """A classifier that has seen a few images several times, whose scores no process has; and images new to it."""
    out = once("published", lambda out: train(override(load_recipe("small"), {**SETTINGS, "out": str(out)})))
    checkpoint = load(out)
    test, transform = open_data("fashion-mini").val, EvalTransform.from_dict(checkpoint.transform)
    images = torch.stack([transform(test.with_channels(1).load(i)) for i in range(8)])
    return DiffusionClassifier(checkpoint.classifier.model, checkpoint.classifier.process).eval(), images


def column(classifier, image):
    """The network as the transcriptions ask it: from a label and a time to a score column, in float64."""

    def scores(label, t):
        total = torch.tensor([classifier.process.schedule.at(t).total])
        with torch.no_grad():
            return classifier.model(image[None], torch.tensor([label]), total)[0].double().exp()

    return scores


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("solver", LITERAL)
def test_cp_is_the_literal_algorithm(trained, solver, steps):
    classifier, images = trained
    process = classifier.process
    probs = classifier.posterior(images, solver=solver, steps=steps).probs
    for image, p in zip(images, probs, strict=True):
        scores = column(classifier, image)
        literal = LITERAL[solver](scores, process.num_classes, lambda t: sigma(process, t), steps)
        assert total_variation(p, literal) < 1e-4
    floored = classifier.posterior(images, solver=solver, steps=steps, floor=True).probs
    assert total_variation(floored, probs).max() > 0.002  # this network falls below the floor


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("solver", LITERAL)
def test_cl_moves_by_the_literal_transition_probabilities(trained, solver, steps):
    """The state after a step is the mean of what the chains' labels may become."""
    classifier, images = trained
    process, trajectory = classifier.process, []
    settings = {"method": "cl", "solver": solver, "steps": steps, "chains": 4}
    classifier.posterior(images[:6], callback=trajectory.append, **settings)
    last = 1e-5 if solver == "official" else 1 / steps
    for t, step in zip(np.linspace(1, last, steps), trajectory, strict=True):
        for image, p, labels in zip(images, step.probs, step.label.tolist(), strict=False):
            scores, dt = column(classifier, image), 1 / steps if solver == "euler" else (1 - 1e-5) / steps
            ends = [matrices.cl_step(j, scores(j, t), sigma(process, t), dt).clamp_min(0) for j in labels]
            literal = torch.stack([end / end.sum() for end in ends]).mean(0)
            assert total_variation(p, literal) < 1e-4


@pytest.mark.parametrize("method", ["cp", "cl"])
def test_the_floor_is_for_scores_that_no_process_has(method):
    """What the true process allows is left alone, and `exact` has no use for it."""
    truth, process = all_kinds(10), UniformProcess(10)
    for solver in ("euler", "official", "exact"):
        sampler = Sampler(method, steps=4, solver=solver)
        plain, floored = (sampler.changed(floor=x)(ExactScore(), truth, process).probs for x in (False, True))
        assert total_variation(plain, floored).max() < 1e-9
    rough = ExactScore(error=1.0)
    for solver, same in (("euler", False), ("official", False), ("exact", True)):
        answers = []
        for floor in (False, True):
            torch.manual_seed(0)
            answers.append(Sampler(method, steps=4, solver=solver, floor=floor)(rough, truth, process).probs)
        assert torch.equal(*answers) == same

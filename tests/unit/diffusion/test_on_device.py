"""What a GPU asks of sampling: no waiting inside the steps, one graph, a free batch size, and no float64."""

import logging
import weakref
from functools import cache
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from didicm import DiffusionClassifier, Sampler, StandardClassifier, create_model
from didicm.diffusion import UniformProcess, sample_cp, sampling
from tests.oracle.waits import host_waits

SMALL = {"num_classes": 7, "in_chans": 1}
TRUNK = {**SMALL, "width": 0.125, "stem": "small"}
NETWORKS = {
    "score": lambda: create_model("didirn8", **TRUNK),
    "masked": lambda: create_model(
        "didirn8", layout="official", parameterization="posterior", noise_embedding="log", **TRUNK
    ),
    "backbone": lambda: create_model("backbone_score", backbone="test_resnet", **SMALL),
    "standard": lambda: create_model("didirn8_baseline", **TRUNK),
}
CP = [
    Sampler(steps=3, solver=solver, score_time=score_time, select=select)
    for solver, score_time, select in product(
        ["exact", "euler", "official"], ["start", "midpoint"], ["argmin", "argmax", "sample"]
    )
]
OTHERS = [Sampler("cl", steps=2, chains=3), Sampler("cl", steps=2, average="one-hot"), Sampler("readout")]


@pytest.fixture(scope="module")
def make_classifier():
    """A classifier that says something, as after training."""

    def make(kind="score", sampler=None):
        torch.manual_seed(0)
        model = NETWORKS[kind]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if kind == "standard":
            return StandardClassifier(model).eval()
        mask = 0.5 if kind == "masked" else 0.0
        return DiffusionClassifier(model, sampler=sampler or Sampler(steps=2), mask=mask).eval()

    return make


@pytest.fixture(scope="module")
def images():
    return lambda batch: torch.randn(batch, 1, 12, 12, generator=torch.Generator().manual_seed(batch))


@pytest.fixture(scope="module")
def exported(make_classifier, images):
    """A classifier and its graph for any number of images, made once: a graph takes seconds."""

    @cache
    def export(kind):
        classifier, batch = make_classifier(kind), {0: torch.export.Dim("batch")}
        graph = torch.export.export(classifier, (images(2),), dynamic_shapes={"image": batch})
        return classifier, graph.module()

    return export


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    """Forget the graphs of other tests; pytest would write down each of the thousands of steps to a graph."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()


class Looks(TorchDispatchMode):
    """Counts how often the host would wait for a GPU to finish its work, as where it reads a number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += host_waits(function, args)
        return function(*args, **(kwargs or {}))


class NoFloat64(TorchDispatchMode):
    """Refuses float64 wherever it would lie; Apple's GPUs have none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            assert not isinstance(x, torch.Tensor) or x.dtype != torch.float64, function
        return result


@pytest.mark.parametrize("sampler", [*CP, *OTHERS], ids=str)
def test_a_number_is_read_once_after_the_last_step(make_classifier, images, sampler):
    classifier = make_classifier(sampler=sampler)
    with Looks() as looks:
        classifier(images(2))
    assert looks.count == 1


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("select", ["argmin", "sample"])
def test_the_one_check_names_the_step(make_classifier, images, select, value, broken):
    model, calls = make_classifier().model, []
    score = model.score

    def break_once(features, label, total):
        calls.append(total)
        log_score = score(features, label, total)
        log_score[1, 3] = value if len(calls) == broken + 1 else 0
        return log_score

    model.score = break_once
    with pytest.raises(FloatingPointError, match=f"at t = {[0.8333, 0.5, 0.1667][broken]}:"):
        sample_cp(model, images(2), UniformProcess(7), steps=3, select=select)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        *(("score", sampler) for sampler in [*CP, *OTHERS]),
        ("backbone", Sampler()),
        ("masked", Sampler()),
        ("masked", Sampler("readout")),
    ],
    ids=str,
)
def test_no_tensor_is_float64(make_classifier, images, kind, sampler):
    classifier, image = make_classifier(kind, sampler), images(2)
    with NoFloat64():
        classifier(image)


@pytest.mark.parametrize("kind", ["score", "masked", "backbone"])
def test_a_posterior_is_one_graph(make_classifier, images, kind):
    """Of one step: that more of them make no more graphs is seen below, with a network that is quickly traced."""
    classifier = make_classifier(kind, Sampler(steps=1))
    found = torch._dynamo.explain(classifier)(images(2))
    assert (found.graph_count, found.graph_break_count) == (1, 0)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside of it take at once."""

    def __init__(self):
        super().__init__()
        self.live = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.live += storage.nbytes()
                weakref.finalize(storage, self.freed, storage.nbytes())
        self.bytes = max(self.bytes, self.live)
        return result

    def freed(self, size):
        self.live -= size


@pytest.mark.parametrize("kind", ["score", "masked", "backbone"])
def test_memory_bounds_the_chains_of_cl_and_not_their_number(make_classifier, images, kind, monkeypatch):
    few, many = (make_classifier(kind, Sampler("cl", steps=2, chains=chains)) for chains in (2, 64))
    features = few.model.encode(images(1))
    features = features if isinstance(features, tuple) else (features,)
    per_chain = 4 * 7 + sum(x.numel() * 4 for x in features)
    # In chunks of 8, many chains take no more than 8 do, but for their labels and random numbers.
    monkeypatch.setattr(sampling, "CHUNK_BYTES", 8 * per_chain + per_chain // 2)
    score, batches = many.model.score, []
    many.model.score = lambda features, label, total: batches.append(len(label)) or score(features, label, total)
    peaks = []
    for classifier, settings in ((few, {}), (many, {}), (many, {"chunk": 128})):
        with Peak() as peak:
            classifier.posterior(images(2), **settings)
        peaks.append(peak.bytes)
    assert batches == [8] * (2 * 128 // 8) + [128, 128]
    assert peaks[1] < 2.5 * peaks[0] + 100 * 128
    assert peaks[2] > 10 * peaks[0]


@pytest.mark.parametrize("average", ["probs", "one-hot"])
def test_the_chunk_changes_nothing(make_classifier, images, average):
    classifier = make_classifier(sampler=Sampler("cl", steps=2, chains=6, average=average))
    whole = classifier(images(3))
    for chunk in (1, 4, 5, 18):
        assert torch.allclose(classifier.posterior(images(3), chunk=chunk).probs, whole, atol=1e-5)
    assert classifier.sampler.changed(chunk=4).identity() == classifier.sampler.identity()


class Toy(nn.Module):
    """The least that a sampler can work with: a graph of it is quickly made."""

    num_classes = 7

    def __init__(self):
        super().__init__()
        self.image, self.label = nn.Linear(144, 7), nn.Embedding(7, 7)

    def encode(self, image):
        return self.image(image.flatten(1))

    def score(self, features, label, total):
        log_q = features * total.cos().unsqueeze(-1) + self.label(label)
        return log_q - log_q.gather(-1, label.unsqueeze(-1))


@pytest.mark.parametrize(
    ("solver", "score_time", "select"),
    [("exact", "start", "argmax"), ("exact", "midpoint", "sample"), ("euler", "start", "argmin"),
     ("official", "midpoint", "sample")],
)  # fmt: skip
def test_every_kind_of_cp_is_one_graph(images, solver, score_time, select):
    sampler = Sampler(steps=2, solver=solver, score_time=score_time, select=select)
    classifier = DiffusionClassifier(Toy(), sampler=sampler)
    compiled = torch.compile(classifier, fullgraph=True, backend="eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for batch in (2, 5):
        image = images(batch)
        torch._dynamo.mark_dynamic(image, 0)
        assert torch.equal(compiled(image), classifier(image))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("kind", NETWORKS)
def test_it_is_exported_for_any_batch(exported, images, kind):
    classifier, graph = exported(kind)
    for size in (1, 2, 5):
        assert torch.allclose(graph(images(size)), classifier(images(size)), atol=1e-6)


def test_a_graph_answers_nan_where_it_cannot_raise(exported, images):
    (classifier, graph), image = exported("score"), images(3)
    image[1, 0, 5, 5] = torch.inf
    with pytest.raises(FloatingPointError, match=r"non-finite log-scores at t = 0\.75"):
        classifier(image)
    probs = graph(image)
    assert probs[1].isnan().all()
    assert torch.equal(probs[::2], classifier(image[::2]))

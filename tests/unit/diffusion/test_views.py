import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from didicm import DiffusionClassifier, Ensemble, Predictor, Sampler, StandardClassifier, UserError, load, save
from didicm.data import Augment, EvalTransform, TrainTransform
from didicm.diffusion import UniformProcess, readout, sample_cp
from didicm.diffusion.sampler import Views
from didicm.diffusion.solver import ExactScore
from didicm.evaluation.run import evaluate
from didicm.evaluation.stored import open_model
from didicm.inference.export import export
from didicm.models import cost
from tests.oracle.posteriors import all_kinds

VIEWS = Views(shift=2, hflip=True, fill=(0.5, -0.5, 0.25))


def some(count=5, size=8):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def classifiers(tiny_network):
    """One of each kind that knows views."""
    cp, other = (DiffusionClassifier(tiny_network(seed), sampler=Sampler(steps=4)) for seed in (0, 2))
    standard = StandardClassifier(tiny_network(1, "didirn8_baseline"))
    for classifier in (cp, other, standard):
        classifier.views = VIEWS
    return {"cp": cp, "standard": standard, "ensemble": Ensemble([standard, other])}


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_views_are_crops_of_the_padded_image_and_every_other_one_is_mirrored(shift):
    image = some(40, 6)
    views = Views(shift, True, (0.5, -0.5, 0.25))(image, 4)
    assert views[0] is image
    canvas = torch.tensor([0.5, -0.5, 0.25]).view(3, 1, 1).repeat(40, 1, 6 + 2 * shift, 6 + 2 * shift)
    canvas[:, :, shift : shift + 6, shift : shift + 6] = image
    places = set()
    for number, view in enumerate(views[1:], start=1):
        seen = view.flip(-1) if number % 2 else view
        for i in range(40):
            found = [
                (y, x)
                for y in range(2 * shift + 1)
                for x in range(2 * shift + 1)
                if torch.equal(canvas[i, :, y : y + 6, x : x + 6], seen[i])
            ]
            assert found
            places.add(found[0])
    assert len(places) == (2 * shift + 1) ** 2  # all of them occur


@pytest.mark.parametrize("pad_mode", ["black", "edge"])
def test_views_are_those_of_the_training(pad_mode):
    seen = EvalTransform(12, 1, mean=(0.3,), std=(0.2,))
    transform = TrainTransform(Augment(pad=2, pad_mode=pad_mode, hflip=0.5), seen)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 1, 12, 12), dtype=np.uint8))
    shown = {bytes(transform.finish(pixels, np.array([key], np.uint64)).numpy().round(4)) for key in range(600)}
    views = transform.views(seen.finish(pixels), 40)
    assert all(bytes(view.numpy().round(4)) in shown for view in views)
    assert TrainTransform(Augment(), seen).views is None
    assert TrainTransform(Augment(scale=(0.3, 1)), EvalTransform(64)).views == Views(4, False)
    edge = Views(4, False)(some(1, 16), 2)[1]
    assert torch.isin(edge, some(1, 16)).all()


@settings(max_examples=15, deadline=None)
@given(parts=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 2**63 - 1))
def test_no_view_depends_on_the_batch(parts, seed):
    image = some(sum(parts))
    whole = VIEWS(image, 3, seed)
    split = [VIEWS(part, 3, seed) for part in image.split(parts)]
    for number, view in enumerate(whole):
        assert torch.equal(view, torch.cat([views[number] for views in split]))
    more = VIEWS(image, 5, seed)
    assert all(torch.equal(*pair) for pair in zip(whole, more, strict=False))


def test_the_steps_take_turns_with_the_views():
    truth, process = all_kinds(10), UniformProcess(10)
    found = readout(ExactScore(), truth, process, views=[truth, truth.flip(-1)])
    assert torch.allclose(found.probs, (truth + truth.flip(-1)) / 2, atol=1e-6)
    assert found.nfe == 2

    class Recording(ExactScore):
        seen, encoded = [], 0

        def encode(self, image):
            self.encoded += 1
            return image

        def score(self, features, label, total):
            self.seen.append(features)
            return super().score(features, label, total)

    model, views = Recording(), [truth, truth.roll(1, -1), truth.flip(-1)]
    sample_cp(model, truth, process, steps=5, views=views)
    assert [next(i for i, view in enumerate(views) if view is seen) for seen in model.seen] == [0, 1, 2, 0, 1]
    assert model.encoded == 3


@pytest.mark.parametrize("kind", ["cp", "standard", "ensemble"])
@pytest.mark.parametrize("asked", [{"views": 3}, {"views": 3, "seed": 5}])
def test_a_posterior_of_views_does_not_depend_on_the_batch(classifiers, kind, asked):
    classifier, image = classifiers[kind], some(4)
    one, many = classifier.posterior(image), classifier.posterior(image, **asked)
    assert torch.equal(one.probs, classifier.posterior(image, views=1).probs)
    assert not torch.allclose(one.probs, many.probs, atol=1e-4)
    assert torch.equal(one.features, many.features)  # of the image itself
    alone = torch.cat([classifier.posterior(x[None], **asked).probs for x in image])
    assert torch.allclose(many.probs, alone, atol=1e-5)
    assert torch.allclose(many.probs.sum(-1), torch.ones(4))


@pytest.mark.parametrize("method", ["cl", "readout"])
def test_other_samplers_look_at_views_too(classifiers, method):
    classifier, image = classifiers["cp"], some(4)
    one, many = (classifier.posterior(image, method=method, views=n) for n in (1, 2))
    assert not torch.allclose(one.probs, many.probs, atol=1e-4)
    if method == "readout":
        flipped = [classifier.posterior(view, method=method).probs for view in VIEWS(image, 2)]
        assert torch.allclose(many.probs, sum(flipped) / 2, atol=1e-6)


def test_calls_and_multiply_adds_count_the_views(classifiers):
    image = some(2)
    standard, diffusion, ensemble = (classifiers[kind] for kind in ("standard", "cp", "ensemble"))
    once, each = (cost(diffusion.model, 8).per_image, cost(diffusion.model, 8).per_call)
    assert standard.posterior(image, views=3).nfe == 3
    assert standard.multiply_adds(8, 3, views=3) == 3 * standard.multiply_adds(8, 1)
    assert diffusion.posterior(image, views=3).nfe == 4
    assert diffusion.multiply_adds(8, 4, views=3) == 3 * once + 4 * each
    assert diffusion.multiply_adds(8, 4, views=8) == 4 * once + 4 * each
    assert diffusion.multiply_adds(8, 3, method="readout", views=3) == 3 * (once + each)
    assert ensemble.multiply_adds(8, 3, views=3, members=1) == standard.multiply_adds(8, 3, views=3)
    assert ensemble.posterior(image, views=3).nfe == 7
    assert ensemble.resolve(views=3, members=1)[1] == {"views": 3, "members": 1}


def test_what_does_not_go_together_is_refused(classifiers, tiny_network):
    image = some(2)
    with pytest.raises(UserError, match=r"has no views of an image: train one with augment\.pad"):
        StandardClassifier(tiny_network(1, "didirn8_baseline")).posterior(image, views=2)
    with pytest.raises(UserError, match="has no views"):
        DiffusionClassifier(tiny_network()).resolve(views=2)
    with pytest.raises(UserError, match=r"leave it out, or sampler\.views"):
        classifiers["cp"].posterior(image, views=2, tolerance=0.1)
    with pytest.raises(UserError, match="views must be at least 1"):
        classifiers["standard"].posterior(image, views=0)
    with pytest.raises(UserError, match="views are made of images"):
        VIEWS(torch.zeros(2, 7), 2)
    with pytest.raises(UserError, match="the ensemble has 2: ask for fewer"):
        classifiers["ensemble"].posterior(image, members=3)


@pytest.mark.parametrize("kind", ["cp", "standard", "ensemble"])
def test_a_stored_model_keeps_its_views(classifiers, kind, tmp_path, some_images):
    described = EvalTransform(8, 3, crop_pct=1.0)
    save(classifiers[kind], tmp_path / "model", class_names=["ant", "bee", "cat"], transform=described.to_dict())
    loaded, image = load(tmp_path / "model").classifier, some()
    expected = classifiers[kind].posterior(image, views=4).probs
    assert torch.equal(loaded.posterior(image, views=4).probs, expected)
    predictor = Predictor.load(tmp_path / "model", "cpu", views=4)
    pixels = described.restore(image)
    seen = described.finish(pixels)
    found = torch.stack([prediction.probs for prediction in predictor(list(pixels))])
    assert torch.allclose(found, classifiers[kind].posterior(seen, views=4).probs, atol=1e-5)
    assert predictor.model.posterior["views"] == 4
    assert "views" not in open_model(tmp_path / "model", sampler={"views": 1}).posterior
    images = some_images().with_channels(3)
    result = evaluate(loaded, images, described, {"": {"views": 4}}, batch_size=7)
    other = evaluate(loaded, images, described, {"": {"views": 4}}, batch_size=20)
    assert torch.allclose(result.probs[""], other.probs[""], atol=1e-5)
    with pytest.raises(UserError, match=r"cannot be exported: leave out sampler\.views"):
        export(open_model(tmp_path / "model", device="cpu", sampler={"views": 2}), tmp_path / "model.onnx")


def test_models_that_store_no_views_load(classifiers, tmp_path):
    save(classifiers["standard"], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["views"] == {"shift": 2, "hflip": True, "fill": [0.5, -0.5, 0.25]}
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "views"}))
    classifier = load(tmp_path).classifier
    assert torch.equal(classifier(some()), classifiers["standard"](some()))
    with pytest.raises(UserError, match="has no views"):
        classifier.posterior(some(), views=8)
    for wrong in ({"shift": -1}, {"fill": [1.0]}, {"rotate": 3}, 7):
        path.write_text(json.dumps({**config, "views": wrong}))
        with pytest.raises(UserError, match="does not describe a model"):
            load(tmp_path)


def test_padding_of_training_is_as_it_was():
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 6, 6), dtype=np.uint8))
    transform = TrainTransform(Augment(pad=1), EvalTransform(6, 3, mean=(0, 0, 0), std=(1, 1, 1)))
    seen = transform.finish(pixels, np.arange(3, dtype=np.uint64)) * 255
    padded = F.pad(pixels, [1] * 4)
    for before, after in zip(padded, seen.round().byte(), strict=True):
        crops = [before[:, y : y + 6, x : x + 6] for y in range(3) for x in range(3)]
        assert any(torch.equal(crop, after) for crop in crops)

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from didicm import DiffusionClassifier, StandardClassifier, UserError, create_model, load, save
from didicm.checkpoint import Checkpoint
from didicm.data import ArraySet, Corruptions, EvalTransform
from didicm.evaluation import Conformal, apply_temperature
from didicm.evaluation.run import (
    Calibration,
    describe_posterior,
    evaluate,
    find_calibration,
    load_calibration,
    model_directory,
    save_calibration,
)
from didicm.models import cost

NAMES = ["ant", "bee", "cat"]


def make(kind, names=NAMES, transform=True):
    torch.manual_seed(0)
    if kind == "diffusion":
        model = create_model("didirn18", num_classes=3, in_chans=1, width=0.125, stem="small")
        classifier = DiffusionClassifier(model)
    else:
        model = create_model("didirn18_baseline", num_classes=3, in_chans=1, width=0.125, stem="small")
        classifier = StandardClassifier(model)
    with torch.no_grad():
        for parameter in model.parameters():  # networks start by saying nothing
            parameter.add_(0.1 * torch.randn_like(parameter))
    view = EvalTransform(8, 1, crop_pct=1.0).to_dict() if transform else None
    return Checkpoint(classifier.eval(), names, view)


def some_images(count=20, names=NAMES, classes=3):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    return ArraySet(pixels, np.arange(count) % classes, names, channels=1)


@pytest.mark.parametrize("kind", ["diffusion", "standard"])
def test_it_says_what_the_classifier_says(kind):
    checkpoint, images = make(kind), some_images()
    seen = []
    result = evaluate(checkpoint, images, batch_size=8, progress=lambda *numbers: seen.append(numbers))
    view = EvalTransform(8, 1, crop_pct=1.0)
    expected = checkpoint.classifier(torch.stack([view(images.load(i)) for i in range(20)]))
    assert torch.allclose(result.probs, expected, atol=1e-5)
    assert result.probs.std(0).max() > 1e-4  # not all the same, by far more than the tolerance
    assert result.labels.tolist() == images.labels.tolist()
    assert result.image_names == [f"array[{i}]" for i in range(20)]
    assert result.class_names == NAMES
    assert result.nfe == (8 if kind == "diffusion" else 1)
    assert result.multiply_adds == cost(checkpoint.classifier.model, 8).total(result.nfe)
    assert result.images_per_second > 0
    assert seen == [(8, 20), (16, 20), (20, 20)]


@pytest.mark.parametrize("settings", [{}, {"method": "cl", "steps": 2, "chains": 3}, {"select": "sample"}])
def test_the_batch_size_changes_nothing(settings):
    checkpoint = make("diffusion")
    whole, single = (
        evaluate(
            checkpoint, some_images(9), settings=settings, batch_size=n, corruption=Corruptions.parse("noise:3")
        )
        for n in (9, 2)
    )
    assert torch.allclose(whole.probs, single.probs, atol=1e-5)


def test_settings_temperature_and_corruption_reach_the_posterior():
    checkpoint, images = make("diffusion"), some_images()
    plain = evaluate(checkpoint, images)
    assert evaluate(checkpoint, images, settings={"steps": 3}).nfe == 3
    assert evaluate(checkpoint, images, settings={"method": "cl", "steps": 2, "chains": 5}).nfe == 10
    assert evaluate(checkpoint, images, settings={"method": "readout"}).nfe == 1
    warm = evaluate(checkpoint, images, temperature=2.0)
    assert torch.allclose(warm.probs, apply_temperature(plain.probs, 2.0))
    noisy = [
        evaluate(checkpoint, images, corruption=Corruptions.parse("noise:5"), seed=seed).probs
        for seed in (0, 0, 1)
    ]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])
    assert not torch.equal(noisy[0], plain.probs)


def test_classes_are_matched_by_name():
    checkpoint = make("diffusion")
    straight = evaluate(checkpoint, some_images())
    turned = evaluate(checkpoint, some_images(names=["cat", "ant", "bee"]))
    assert torch.equal(straight.probs, turned.probs)
    assert turned.labels.tolist() == [[2, 0, 1][k] for k in straight.labels]
    some = evaluate(checkpoint, some_images(names=["cat", "bee"], classes=2))  # no ant in the data
    assert set(some.labels.tolist()) == {1, 2}
    with pytest.raises(UserError, match="'dog'"):
        evaluate(checkpoint, some_images(names=["ant", "bee", "dog"]))


def test_without_class_names_the_number_of_classes_must_agree():
    checkpoint = make("diffusion", names=None)
    assert evaluate(checkpoint, some_images()).class_names == NAMES
    with pytest.raises(UserError, match="the data has 2 classes and the model, which stores no class names, 3"):
        evaluate(checkpoint, some_images(names=["a", "b"], classes=2))


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("standard", {"steps": 2, "method": "cp"}, "no sampler to set: leave out steps, sampler"),
        ("diffusion", {"chains": 2}, "sampler cp has no chains: leave it out or choose sampler cl"),
        ("diffusion", {"method": "readout", "steps": 2}, "sampler readout has no steps: .* cp or cl"),
        ("diffusion", {"speed": 2}, "no setting 'speed'"),
        ("diffusion", {"steps": 0}, "steps must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_get_one_sentence(kind, settings, says):
    with pytest.raises(UserError, match=says):
        evaluate(make(kind), some_images(), settings=settings)


def test_a_model_without_a_transform_needs_a_size():
    with pytest.raises(UserError, match="stores no transform"):
        evaluate(make("diffusion", transform=False), some_images())


class Torn(ArraySet):
    def original(self, i):
        if i in (1, 4):
            raise OSError("torn")
        return super().original(i)


def test_unreadable_images_are_left_out_and_named():
    images = some_images()
    torn = Torn(images.images, images.labels, NAMES, channels=1)
    result = evaluate(make("diffusion"), torn, batch_size=6)
    assert len(result.skipped) == 2
    assert "array[1] cannot be read as an image (torn)" in result.skipped[0]
    assert result.image_names == [f"array[{i}]" for i in range(20) if i not in (1, 4)]
    assert result.labels.tolist() == [images.labels[i] for i in range(20) if i not in (1, 4)]
    only = Torn(images.images[:5], images.labels[:5], NAMES, channels=1).select(np.array([1, 4]))
    with pytest.raises(UserError, match="none of the 2 images can be read"):
        evaluate(make("diffusion"), only)


@pytest.fixture
def calibrated(tmp_path):
    checkpoint = make("diffusion")
    save(checkpoint.classifier, tmp_path, class_names=NAMES, transform=checkpoint.transform)
    rules = {"lac": Conformal("lac", 0.1, 0.7, 20), "aps": Conformal("aps", 0.1, 0.9, 20)}
    calibration = Calibration(1.5, rules, describe_posterior(checkpoint, {}), {"data": "x", "images": 20}, {})
    assert save_calibration(tmp_path, calibration) == tmp_path / "calibration.json"
    return tmp_path, calibration


def test_a_calibration_returns_as_it_was_saved(calibrated):
    folder, calibration = calibrated
    assert load_calibration(folder) == calibration
    found, sentence = find_calibration(folder, load(folder), {})
    assert found == calibration
    assert "temperature 1.5 and conformal sets from 20 images of x" in sentence


def test_a_calibration_is_for_one_way_of_asking(calibrated):
    folder, _ = calibrated
    checkpoint = load(folder)
    found, sentence = find_calibration(folder, checkpoint, {"steps": 2})
    assert found is None
    assert "left out: it was fitted with steps 8" in sentence
    larger = replace(checkpoint, transform={**checkpoint.transform, "size": 16})
    assert find_calibration(folder, larger, {})[0] is None
    assert find_calibration(folder, checkpoint, {"seed": 3})[0] is not None
    (folder / "calibration.json").unlink()
    assert find_calibration(folder, checkpoint, {})[1].startswith("not calibrated")
    assert load_calibration("hf://owner/name") is None


def test_a_calibration_of_other_weights_is_refused(calibrated):
    folder, _ = calibrated
    other = make("diffusion").classifier
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    save(other, folder, class_names=NAMES)
    with pytest.raises(UserError, match=r"calibration.json belongs to other weights: calibrate again"):
        load_calibration(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: "{",
        lambda values: "[]",
        lambda values: json.dumps({**values, "format": 2}),
        lambda values: json.dumps({**values, "temperature": "warm"}),
        lambda values: json.dumps({**values, "temperature": -1.0}),
        lambda values: json.dumps({**values, "speed": 1}),
        lambda values: json.dumps({**values, "conformal": {"lac": {"alpha": 3}}}),
        lambda values: json.dumps({key: x for key, x in values.items() if key != "posterior"}),
    ],
)
def test_a_damaged_calibration_is_named(spoil, calibrated):
    folder, _ = calibrated
    path = folder / "calibration.json"
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.raises(UserError, match=r"calibration.json cannot be used .*: calibrate again"):
        load_calibration(folder)


def test_the_model_of_a_run_or_a_model_directory(tmp_path):
    (tmp_path / "run" / "best").mkdir(parents=True)
    with pytest.raises(UserError, match="neither a run nor a model directory"):
        model_directory(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(UserError, match="no best model yet"):
        model_directory(tmp_path / "run")
    (tmp_path / "run" / "best" / "config.json").touch()
    assert model_directory(tmp_path / "run") == tmp_path / "run" / "best"
    assert model_directory(tmp_path / "run" / "best") == tmp_path / "run" / "best"
    assert model_directory("hf://owner/name") == "hf://owner/name"
    with pytest.raises(UserError, match="does not exist"):
        model_directory(tmp_path / "nowhere")

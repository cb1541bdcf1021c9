import numpy as np
import pytest
import torch
from PIL import Image

import didicm
from didicm import DiffusionClassifier, Predictor, Sampler, StandardClassifier, UserError, load, save
from didicm.cli.__main__ import main
from didicm.data import EvalTransform
from didicm.evaluation.stored import open_model
from didicm.settings import TrainConfig, to_yaml

NAMES = ["ant", "bee", "cat"]


@pytest.fixture
def folder(tmp_path):
    """Images of three classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 12, 12, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        (tmp_path / "data" / NAMES[i % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "data" / NAMES[i % 3] / f"{i}.png")
    return tmp_path / "data"


@pytest.fixture
def runs(tmp_path, tiny_network, folder):
    """Two runs on the same images, as far as their folders tell."""
    made = {
        "diffusion": DiffusionClassifier(tiny_network(), sampler=Sampler(steps=2)),
        "standard": StandardClassifier(tiny_network(1, "didirn8_baseline")),
    }
    for seed, (name, classifier) in enumerate(made.items()):
        described = EvalTransform(12, crop_pct=1.0).to_dict()
        save(classifier, tmp_path / name / "best", class_names=NAMES, transform=described)
        config = TrainConfig(data=str(folder), val_fraction=0.5, seed=seed, data_seed=7)
        (tmp_path / name / "config.yaml").write_text(to_yaml(config))
    return [tmp_path / name for name in made]


def test_an_ensemble_is_used_as_any_model(runs, folder, tmp_path, capsys):
    out = tmp_path / "both"
    assert main(["ensemble", *map(str, runs), "--out", str(out)]) == 0
    assert "ensemble of 2 models" in capsys.readouterr().out
    files = sorted(map(str, folder.rglob("*.png")))[:3]
    ours, one, other = (Predictor.load(place, "cpu")(files) for place in (out, *runs))
    for mean, a, b in zip(ours, one, other, strict=True):
        assert torch.allclose(mean.probs, (a.probs + b.probs) / 2, atol=1e-5)
    first = Predictor.load(out, "cpu", members=1)(files)
    assert all(torch.allclose(a.probs, b.probs, atol=1e-5) for a, b in zip(first, one, strict=True))
    # It knows which images its members held out, and learns a temperature after averaging.
    made = didicm.calibrate(out, str(folder), fraction=0.7)
    assert "held out from training" in made.images
    measured = didicm.evaluate(out, str(folder))
    assert measured.nfe == 3
    assert measured.calibration.temperature == made.calibration.temperature
    assert didicm.evaluate(open_model(out, device="cpu", sampler={"members": 1}), str(folder)).calibration is None


def test_members_of_ensembles_are_members(runs, tmp_path):
    didicm.ensemble(runs, tmp_path / "both")
    didicm.ensemble([tmp_path / "both", runs[0]], tmp_path / "three")
    assert len(load(tmp_path / "three").classifier.members) == 3


def test_trainings_on_other_images_are_told(runs, tmp_path, folder):
    config = TrainConfig(data=str(folder), val_fraction=0.5, seed=7, data_seed=8)
    (runs[0] / "config.yaml").write_text(to_yaml(config))
    (note,) = didicm.ensemble(runs, tmp_path / "both")
    assert "calibrate on images that none of them has seen" in note
    assert open_model(tmp_path / "both").training is None


def test_what_does_not_fit_is_refused(runs, tmp_path, tiny_network):
    with pytest.raises(UserError, match="at least 2 models"):
        didicm.ensemble(runs[:1], tmp_path / "both")
    for one in (runs[0], str(runs[0])):
        with pytest.raises(UserError, match="at least 2 models"):
            didicm.ensemble(one, tmp_path / "both")
    with pytest.raises(UserError, match=r"diffusion/best and .*diffusion/best are the same model: name each"):
        didicm.ensemble([*runs, runs[0] / "best"], tmp_path / "both")
    with pytest.raises(UserError, match="already holds a model"):
        didicm.ensemble(runs, runs[0] / "best")
    other = StandardClassifier(tiny_network(1, "didirn8_baseline"))
    save(other, tmp_path / "other", class_names=NAMES[::-1], transform=EvalTransform(12, crop_pct=1.0).to_dict())
    with pytest.raises(UserError, match="differ in their classes"):
        didicm.ensemble([*runs, tmp_path / "other"], tmp_path / "both")
    save(other, tmp_path / "other", class_names=NAMES, transform=EvalTransform(16, crop_pct=1.0).to_dict())
    with pytest.raises(UserError, match="differ in their input"):
        didicm.ensemble([*runs, tmp_path / "other"], tmp_path / "both")
    assert not (tmp_path / "both").exists()

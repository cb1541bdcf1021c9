"""The outlier score: its arithmetic, its promise of false alarms, and what it does to predictions."""

import json

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf

from didicm import Predictor, UserError
from didicm.data import ArraySet, EvalTransform
from didicm.evaluation import run
from didicm.evaluation.calibration import Calibration, Conformal, load_calibration, save_calibration
from didicm.evaluation.label_sets import fewest_images
from didicm.evaluation.outliers import fit_outliers, shrunk_covariance
from didicm.evaluation.stored import open_model
from didicm.inference.bulk import BulkSettings, predict


def features(count, seed=0, width=12):
    """Correlated features of very different spread."""
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(9)).double()
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).double()
    return x @ mix * torch.logspace(-1, 1, width).double() + 5


@pytest.mark.parametrize("count", [8, 40, 2000])
def test_covariance_is_that_of_scikit_learn(count):
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(count)).double() @ torch.randn(5, 5).double()
    x = x - x.mean(0)
    expected = LedoitWolf(assume_centered=True).fit(x.numpy()).covariance_
    np.testing.assert_allclose(shrunk_covariance(x).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_score_is_the_mahalanobis_distance():
    x, other = features(4000), features(50, 1)
    rule = fit_outliers(x, features(500, 2))
    spread = x.std(0, correction=0)
    precision = torch.linalg.inv(shrunk_covariance((x - x.mean(0)) / spread))
    for row, score in zip((other - x.mean(0)) / spread, rule.scores(other), strict=True):
        assert score.item() == pytest.approx((row @ precision @ row / len(row)).sqrt().item(), rel=1e-3)
    torch.testing.assert_close(torch.cat([rule.scores(row[None]) for row in other]), rule.scores(other))


@pytest.mark.parametrize("false_alarms", [0.05, 0.2])
def test_false_alarms_are_as_many_as_were_allowed(false_alarms):
    flagged = []
    for seed in range(60):  # of fits and thresholds: the promise is about their mean
        rule = fit_outliers(features(60, 3 * seed), features(99, 3 * seed + 1), false_alarms)
        flagged.append((rule.scores(features(500, 3 * seed + 2)) > rule.threshold).double().mean().item())
    assert np.mean(flagged) == pytest.approx(false_alarms, abs=0.02)


def test_too_few_images_give_no_score():
    assert fit_outliers(features(49), features(500, 1)) is None
    assert fit_outliers(features(500), features(18, 1)) is None
    assert fit_outliers(features(500), features(19, 1)) is not None
    for false_alarms in (0.05, 0.07, 0.1, 0.3):
        enough = fewest_images(false_alarms)
        assert fit_outliers(features(50), features(enough - 1, 1), false_alarms) is None
        assert fit_outliers(features(50), features(enough, 1), false_alarms) is not None


def test_channels_that_no_held_out_image_uses_count():
    x = torch.cat([features(200), torch.zeros(200, 1)], 1)
    rule = fit_outliers(x[:100], x[100:])
    odd = x[:1].clone()
    odd[0, -1] = 1e4
    assert torch.isfinite(rule.scores(odd)).all()
    assert rule.scores(odd) > 10 * rule.threshold


@pytest.fixture(params=["diffusion", "standard"])
def stored(request, save_model, tmp_path):
    """A model whose training images were dim, and its calibration with an outlier score."""
    folder = save_model(tmp_path / "model", request.param)
    pixels = np.random.default_rng(0).integers(0, 60, (200, 8, 8), dtype=np.uint8)
    images = ArraySet(pixels, np.arange(200) % 3, ["ant", "bee", "cat"], channels=1)
    model = open_model(folder)
    found = run.evaluate(model.classifier, images, EvalTransform(8, 1, crop_pct=1.0), features=True)
    rules = {"lac": Conformal("lac", 0.1, 0.9, 100), "aps": Conformal("aps", 0.1, 0.9, 100)}
    outliers = fit_outliers(found.features[:100], found.features[100:])
    save_calibration(folder, Calibration(1.3, rules, model.posterior, {"data": "x"}, {}, outliers))
    return folder, pixels


def test_what_is_unlike_the_training_images_is_flagged_and_has_no_set(stored, tmp_path):
    folder, pixels = stored
    predictor = Predictor.load(folder)
    like, white = predictor([pixels[0], np.full((8, 8), 255, np.uint8)])
    assert (like.unlike_training, white.unlike_training) == (False, True)
    assert like.outlier_score < predictor.calibration.outliers.threshold < white.outlier_score
    assert like.conformal_set
    assert white.conformal_set is None
    assert predictor(pixels[0]).outlier_score == pytest.approx(like.outlier_score, rel=1e-4)
    optimized = Predictor.load(folder, optimize=True)
    assert optimized(pixels[0]).outlier_score == pytest.approx(like.outlier_score, rel=1e-2)
    assert Predictor.load(folder, calibrated=False)(pixels[0]).outlier_score is None


def test_rows_say_the_same_in_every_format(stored, tmp_path):
    import csv

    import pyarrow.parquet
    from PIL import Image

    folder, pixels = stored
    for name, image in {"a": pixels[0], "b": np.full((8, 8), 255, np.uint8)}.items():
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    (tmp_path / "c.png").write_text("no image")
    names = [str(tmp_path / f"{name}.png") for name in "abc"]
    for file in ("rows.jsonl", "rows.csv", "rows.parquet"):
        predict(Predictor.load(folder), names, tmp_path / file, settings=BulkSettings(batch_size=2))
    like, white, broken = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (like["unlike_training"], white["unlike_training"], broken["unlike_training"]) == (False, True, None)
    assert like["conformal_set"]
    assert white["conformal_set"] is None
    with open(tmp_path / "rows.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["unlike_training"] for row in table] == ["false", "true", ""]
    assert [row["conformal_set"] == "" for row in table] == [False, True, True]
    columns = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert columns["unlike_training"] == [False, True, None]
    assert columns["outlier_score"] == pytest.approx([like["outlier_score"], white["outlier_score"], None])
    assert columns["conformal_set"][1:] == [None, None]


def test_a_score_that_does_not_belong_to_the_calibration_is_refused(stored):
    folder, _ = stored
    path = folder / "outliers.safetensors"
    assert load_calibration(folder).outliers.n == 100
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(UserError, match=r"that belongs to it is missing.*calibrate again"):
        load_calibration(folder)
    path.unlink()
    with pytest.raises(UserError, match="calibrate again"):
        load_calibration(folder)

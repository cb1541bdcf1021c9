import math

import numpy as np
import pytest
import torch
from hypothesis import given
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_fscore_support

from didicm.errors import UserError
from didicm.evaluation.diagnostics import entropy_histogram, per_class, reliability, risk_coverage
from didicm.evaluation.metrics import evaluate_probs
from tests.oracle.simulated import posteriors, simulate


def test_reliability_agrees_with_scikit_learn():
    probs, labels = simulate(800, 4, seed=0, temperature=0.6)
    curve = reliability(probs, labels)
    accuracy, confidence = calibration_curve(probs.argmax(1) == labels, probs.amax(1), n_bins=15)
    filled = curve.count > 0
    assert curve.accuracy[filled].tolist() == pytest.approx(accuracy.tolist())
    assert curve.confidence[filled].tolist() == pytest.approx(confidence.tolist())
    assert not filled[:3].any()  # the most probable of four classes has at least 1/4
    assert curve.accuracy[~filled].isnan().all()


@given(posteriors())
def test_gaps_of_the_reliability_make_the_ece(case):
    curve = reliability(*case)
    gap = ((curve.confidence - curve.accuracy).abs() * curve.count).nansum() / curve.count.sum()
    assert gap.item() == pytest.approx(evaluate_probs(*case)["cal/ECE"], abs=1e-12)
    assert curve.count.sum() == len(case[0])


def test_reliability_of_certain_answers_is_the_last_bin():
    curve = reliability(torch.eye(3), torch.tensor([0, 1, 0]), bins=10)
    assert curve.count.tolist() == [0] * 9 + [3]
    assert curve.accuracy[-1].item() == pytest.approx(2 / 3)


@given(posteriors())
def test_risk_coverage_ends_with_all_images_and_the_error(case):
    curve, found = risk_coverage(*case), evaluate_probs(*case)
    assert curve.coverage[-1] == 1
    assert curve.risk[-1].item() == pytest.approx(1 - found["cls/Acc"])
    assert (curve.coverage.diff() > 0).all()
    assert len(curve.risk) == len(case[0].amax(1).unique())
    allowed = curve.coverage[curve.risk <= 0.05]
    assert found["sc/Cov@5Risk"] == pytest.approx(allowed.max().item() if len(allowed) else 0)


def test_risk_coverage_by_hand():
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.8, 0.2], [0.6, 0.4]])
    curve = risk_coverage(probs, torch.tensor([0, 0, 0, 0]))
    assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 3, 1 / 4])


def test_entropy_histogram_counts_right_and_wrong_apart():
    probs = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0, 1.0, 0, 0]])
    histogram = entropy_histogram(probs, torch.tensor([0, 1, 0, 0]), bins=4)
    assert histogram.edges.tolist() == pytest.approx([k * math.log(4) / 4 for k in range(5)])
    assert histogram.right.tolist() == [1, 0, 0, 1]  # certain, and uniform at the very end
    assert histogram.wrong.tolist() == [1, 0, 1, 0]  # certain, and halves, whose tie goes to the first


def test_the_class_table_agrees_with_scikit_learn():
    probs, labels = simulate(300, 5, seed=1)
    answer = probs.argmax(1)
    rows = per_class(probs, labels, list("abcde"))
    precision, recall, _, support = precision_recall_fscore_support(labels, answer)
    assert [row.name for row in rows] == list("abcde")
    assert [row.support for row in rows] == support.tolist()
    assert [row.precision for row in rows] == pytest.approx(precision.tolist())
    assert [row.recall for row in rows] == pytest.approx(recall.tolist())
    for k, row in enumerate(rows):
        mine = probs[labels == k]
        assert row.confidence == pytest.approx(mine.amax(1).mean().item())
        assert row.nll == pytest.approx(-mine[:, k].log().mean().item())
    assert np.average([row.nll for row in rows], weights=support) == pytest.approx(
        evaluate_probs(probs, labels)["cls/NLL"]
    )


def test_a_class_without_images_has_no_means():
    rows = per_class(torch.tensor([[0.7, 0.3, 0.0]]), torch.tensor([0]), ["a", "b", "c"])
    assert (rows[0].recall, rows[0].precision, rows[0].support) == (1, 1, 1)
    assert rows[1].support == 0
    assert all(math.isnan(x) for x in (rows[1].recall, rows[1].precision, rows[1].confidence, rows[1].nll))


def test_names_must_fit_the_classes():
    with pytest.raises(UserError, match="2 class names for 3 classes"):
        per_class(torch.eye(3), torch.arange(3), ["a", "b"])

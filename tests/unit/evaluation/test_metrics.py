import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from didicm.errors import UserError
from didicm.evaluation.metrics import evaluate_probs
from tests.oracle.simulated import posteriors, simulate

TINY_COST = -math.log(torch.finfo(torch.float32).tiny)
NAMES = {
    *("cls/Acc", "cls/Acc5", "cls/NLL", "cls/Brier", "cls/Entropy", "cal/ECE", "cal/aECE", "cal/cwECE"),
    *("sc/AURC", "sc/AURC-pNorm", "sc/AUGRC", "sc/Cov@5Risk", "sc/Cov@1Risk"),
}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("classes", [2, 3, 12])
def test_agrees_with_scikit_learn(classes, temperature):
    probs, labels = simulate(1003, classes, seed=classes, temperature=temperature)
    found = evaluate_probs(probs, labels)
    every = list(range(classes))
    correct, confidence = (probs.argmax(1) == labels).double(), probs.amax(1)
    accuracy, confident = calibration_curve(correct, confidence, n_bins=15)  # of the bins that are not empty
    counts, _ = np.histogram(confidence, np.linspace(0, 1, 16))
    ece = (counts[counts > 0] * abs(accuracy - confident)).sum() / len(labels)
    classwise = [
        _binned_gap(probs[:, k], (labels == k).double(), np.linspace(0, 1, 16).tolist()) for k in range(classes)
    ]
    assert set(found) == NAMES
    assert found["cls/Acc"] == pytest.approx(sk.accuracy_score(labels, probs.argmax(1)))
    assert found["cls/NLL"] == pytest.approx(sk.log_loss(labels, probs, labels=every))
    assert found["cls/Brier"] == pytest.approx(
        sk.brier_score_loss(labels, probs, labels=every, scale_by_half=False)
    )
    assert found["cls/Entropy"] == pytest.approx(torch.distributions.Categorical(probs).entropy().mean().item())
    assert found["cal/ECE"] == pytest.approx(ece)
    assert found["cal/cwECE"] == pytest.approx(np.mean(classwise))
    assert found["cal/aECE"] == pytest.approx(_equal_mass_gap(confidence, correct))
    if classes > 5:
        assert found["cls/Acc5"] == pytest.approx(sk.top_k_accuracy_score(labels, probs, k=5, labels=every))
    else:
        assert found["cls/Acc5"] == 1


def test_selective_metrics_agree_with_curves_drawn_point_by_point():
    probs, labels = simulate(501, 4, seed=1)
    found = evaluate_probs(probs, labels)
    wrong = (probs.argmax(1) != labels).double()[probs.amax(1).argsort(descending=True)].numpy()
    answered = np.arange(1, 502)
    risk, share = wrong.cumsum() / answered, answered / 501
    assert found["sc/AURC"] == pytest.approx(sk.auc(share, risk) / (1 - 1 / 501))
    assert found["sc/AUGRC"] == pytest.approx(sk.auc(share, risk * share) / (1 - 1 / 501))
    assert found["sc/Cov@5Risk"] == share[risk <= 0.05].max()
    assert found["sc/Cov@1Risk"] == share[risk <= 0.01].max()


def test_logit_normalised_confidence_agrees_with_an_image_by_image_count():
    probs, labels = simulate(301, 6, seed=2)
    confidence = []
    for row in probs.tolist():
        logits = [math.log(x) for x in row]
        mean = sum(logits) / len(logits)
        norm = sum(abs(z - mean) ** 4 for z in logits) ** (1 / 4)
        confidence.append((max(logits) - mean) / norm)
    order = np.argsort(confidence)[::-1]
    wrong = (probs.argmax(1) != labels).numpy()[order]
    answered = np.arange(1, 302)
    expected = sk.auc(answered / 301, wrong.cumsum() / answered) / (1 - 1 / 301)
    assert evaluate_probs(probs, labels)["sc/AURC-pNorm"] == pytest.approx(expected)


def test_logit_normalised_confidence_knows_no_temperature_and_leaves_two_classes_alone():
    probs, labels = simulate(400, 5, seed=3)
    sharper = torch.nn.functional.normalize(probs.double() ** 3, p=1, dim=-1)
    found = [evaluate_probs(p, labels)["sc/AURC-pNorm"] for p in (probs.double(), sharper)]
    assert found[0] == pytest.approx(found[1])
    two = evaluate_probs(*simulate(100, 2, seed=4))
    assert two["sc/AURC-pNorm"] == two["sc/AURC"]


def test_posteriors_that_say_nothing_or_all_have_a_logit_normalised_confidence():
    certain = torch.eye(4)[torch.tensor([0, 1, 2, 3])]
    probs, labels = torch.cat([certain, torch.full((4, 4), 0.25)]), torch.tensor([0, 1, 2, 3, 1, 2, 3, 1])
    found = evaluate_probs(probs, labels)  # the certain ones are right and come first, all equal
    assert found["sc/AURC-pNorm"] == found["sc/AURC"]


def test_a_case_by_hand():
    probs = torch.tensor([[0.8, 0.2, 0.0], [0.6, 0.3, 0.1], [0.3, 0.7, 0.0], [0.0, 0.5, 0.5]]).double()
    found = evaluate_probs(probs, torch.tensor([0, 1, 1, 2]))
    # Confidences .8, .6, .7, .5, each in a bin of its own; right, wrong, right, wrong (the tie goes to class 1).
    assert found["cls/Acc"] == 0.5
    assert found["cls/NLL"] == pytest.approx(-math.log(0.8 * 0.3 * 0.7 * 0.5) / 4)
    assert found["cls/Brier"] == pytest.approx((0.08 + 0.36 + 0.49 + 0.01 + 0.18 + 0.5) / 4)
    assert found["cal/ECE"] == pytest.approx((0.2 + 0.6 + 0.3 + 0.5) / 4)
    assert found["cal/aECE"] == pytest.approx((0.2 + 0.6 + 0.3 + 0.5) / 4)
    # Risks 0, 0, 1/3, 1/2 at coverages 1/4 .. 1.
    assert found["sc/AURC"] == pytest.approx((0 + 1 / 6 + 5 / 12) / 3)
    assert found["sc/AUGRC"] == pytest.approx((0 + 1 / 8 + 3 / 8) / 3)
    assert found["sc/Cov@5Risk"] == found["sc/Cov@1Risk"] == 0.5
    # Class by class, every probability is in a bin of its own, except the zeros of the third, which cost nothing.
    first = (1 - 0.8) + 0.6 + 0.3 + 0
    second = 0.2 + (1 - 0.3) + (1 - 0.7) + 0.5
    third = 0 + 0.1 + 0 + (1 - 0.5)
    assert found["cal/cwECE"] == pytest.approx((first + second + third) / 12)


def test_certain_and_right_is_perfect():
    found = evaluate_probs(torch.eye(4), torch.arange(4))
    best = {"cls/Acc", "cls/Acc5", "sc/Cov@5Risk", "sc/Cov@1Risk"}
    assert found == {name: 1.0 if name in best else 0.0 for name in NAMES}


def test_certain_and_wrong_costs_the_tiny_probability_and_not_infinity():
    found = evaluate_probs(torch.eye(6), torch.arange(6).roll(1))
    assert found["cls/NLL"] == pytest.approx(TINY_COST)
    assert found["cls/Brier"] == 2
    assert found["cal/ECE"] == found["cal/aECE"] == found["sc/AURC"] == 1
    assert found["sc/AUGRC"] == pytest.approx((1 / 6 + 1) / 2)
    assert found["cls/Acc"] == found["sc/Cov@5Risk"] == 0


def test_confidence_one_shares_the_last_bin_and_zero_the_first():
    # .95 is right and 1 is wrong. In one bin: |1.95 - 1| = .95; in two: .05 + 1.
    probs = torch.tensor([[0.95, 0.05], [1.0, 0.0]])
    found = evaluate_probs(probs, torch.tensor([0, 1]))
    assert found["cal/ECE"] == pytest.approx((1.95 - 1) / 2)
    # Class 1: .05 and 0 share the first bin and one of the two is of the class: |.05 - 1|, not .05 + 1.
    assert found["cal/cwECE"] == pytest.approx((1.95 - 1) / 2)


def test_a_confidence_on_an_edge_belongs_to_the_bin_above():
    # With 10 bins, .6 shares [.6, .7) with .65; both are right. Alone below it, .55 is wrong.
    probs = torch.tensor([[0.6, 0.4], [0.65, 0.35], [0.55, 0.45]])
    found = evaluate_probs(probs, torch.tensor([0, 0, 1]), bins=10)
    assert found["cal/ECE"] == pytest.approx((0.4 + 0.35 + 0.55) / 3)


def test_a_risk_of_just_the_limit_is_allowed():
    probs = torch.tensor([[1 - 0.01 * i, 0.01 * i] for i in range(30)])
    found = evaluate_probs(probs, torch.tensor([0] * 19 + [1] + [0] * 5 + [1] * 5))
    assert found["sc/Cov@5Risk"] == 25 / 30  # 1 of 20 errs, then 1 of 25
    found = evaluate_probs(probs, torch.tensor([0] * 19 + [1] * 11))
    assert found["sc/Cov@5Risk"] == 20 / 30  # 1 of 20 is 5 %
    assert found["sc/Cov@1Risk"] == 19 / 30


def test_ties_count_with_their_expectation_over_random_order():
    confidence, wrong = [0.9, 0.6, 0.6, 0.6, 0.6, 0.55], [0, 1, 0, 0, 1, 1]
    probs = torch.tensor([[c, 1 - c] for c in confidence]).double()
    found = evaluate_probs(probs, torch.tensor(wrong))
    orders = [[wrong[0], *(wrong[i] for i in middle), wrong[5]] for middle in permutations(range(1, 5))]
    curves = np.array(orders).cumsum(1) / np.arange(1, 7)
    share = np.arange(1, 7) / 6
    assert found["sc/AURC"] == pytest.approx(np.mean([sk.auc(share, c) for c in curves]) * 6 / 5)
    assert found["sc/AUGRC"] == pytest.approx(np.mean([sk.auc(share, c * share) for c in curves]) * 6 / 5)
    assert found["sc/Cov@5Risk"] == pytest.approx(1 / 6)  # no threshold parts the four


@given(posteriors(), st.randoms(use_true_random=False))
def test_the_order_of_the_images_changes_nothing(case, random):
    probs, labels = case
    order = list(range(len(probs)))
    random.shuffle(order)
    assert evaluate_probs(probs[order], labels[order]) == pytest.approx(evaluate_probs(probs, labels), abs=1e-12)


@given(posteriors(), st.randoms(use_true_random=False))
def test_the_order_of_the_classes_changes_nothing(case, random):
    probs, labels = case
    order = list(range(probs.shape[1]))
    random.shuffle(order)
    probs = (probs + 0.01 * torch.rand(probs.shape, generator=torch.Generator().manual_seed(0))).double()
    probs /= probs.sum(-1, keepdim=True)  # a tie between classes is decided by their order, so none here
    assume(all(len(row.unique()) == len(row) for row in probs))
    moved = torch.tensor(order).argsort()[labels]
    assert evaluate_probs(probs[:, order], moved) == pytest.approx(evaluate_probs(probs, labels), abs=1e-12)


@given(posteriors())
def test_metrics_stay_in_their_bounds(case):
    probs, labels = case
    found = evaluate_probs(probs, labels)
    highest = {"cls/NLL": TINY_COST, "cls/Brier": 2, "cls/Entropy": math.log(probs.shape[1])}
    for name, value in found.items():
        assert 0 <= value <= highest.get(name, 1) + 1e-9, name
    assert found["cls/Acc"] <= found["cls/Acc5"]
    assert found["sc/Cov@1Risk"] <= found["sc/Cov@5Risk"]
    assert found["cal/ECE"] >= abs(probs.amax(1).mean().item() - found["cls/Acc"]) - 1e-9
    assert found["cal/aECE"] >= abs(probs.amax(1).mean().item() - found["cls/Acc"]) - 1e-9


@given(posteriors())
def test_single_precision_and_rounding_above_one_are_fine(case):
    probs, labels = case
    exact, rounded = evaluate_probs(probs, labels), evaluate_probs((probs * (1 + 1e-6)).float(), labels)
    for name in ("cls/Acc", "cls/NLL", "cls/Brier", "cls/Entropy"):
        assert rounded[name] == pytest.approx(exact[name], abs=1e-5)
    assert rounded["cls/NLL"] >= 0


GOOD = torch.tensor([[0.5, 0.5], [0.9, 0.1]])


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (GOOD + 0.01, [0, 1], "image 0 do not sum to 1"),
        (torch.tensor([[0.5, 0.5], [1.1, -0.1]]), [0, 1], "image 1 are partly negative"),
        (torch.tensor([[0.5, 0.5], [float("nan"), 1]]), [0, 1], "image 1 are not all finite"),
        (torch.tensor([[float("inf"), 0.5], [0.5, 0.5]]), [0, 1], "image 0 are not all finite"),
        (GOOD, [0, 2], "label of image 1 is 2, outside the 2 classes"),
        (GOOD, [-1, 0], "label of image 0 is -1"),
        (GOOD, [0], "labels must be 2 whole numbers"),
        (GOOD, [0.0, 1.0], "labels must be 2 whole numbers"),
        (GOOD[:0], [], "at least one image"),
        (GOOD[:, :1], [0, 0], "two classes"),
        (GOOD[0], [0], "at least one image and two classes"),
        (GOOD.long(), [0, 1], "floating-point"),
    ],
)
def test_invalid_input_is_one_sentence(probs, labels, message):
    with pytest.raises(UserError, match=message) as caught:
        evaluate_probs(probs, torch.tensor(labels))
    assert "\n" not in str(caught.value)


def test_bins_can_be_one_but_not_none():
    probs, labels = simulate(50, 3, seed=0)
    found = evaluate_probs(probs, labels, bins=1)
    assert found["cal/ECE"] == pytest.approx(abs(probs.amax(1).mean().item() - found["cls/Acc"]))
    with pytest.raises(UserError, match="bins"):
        evaluate_probs(probs, labels, bins=0)


def _binned_gap(confidence, correct, edges):
    gaps = [
        abs((confidence - correct)[(low <= confidence) & (confidence < high)].sum().item())
        for low, high in pairwise(edges)
    ]
    return sum(gaps) / len(confidence)


def _equal_mass_gap(confidence, correct):
    order = confidence.argsort()
    return sum(part.sum().abs().item() for part in (confidence - correct)[order].tensor_split(15)) / len(order)

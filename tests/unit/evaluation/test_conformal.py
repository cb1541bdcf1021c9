import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from sklearn.base import BaseEstimator, ClassifierMixin

from didicm.errors import UserError
from didicm.evaluation.calibration import Conformal, coverage, fit_conformal, mean_size
from didicm.evaluation.label_sets import class_scores
from tests.oracle.simulated import posteriors, simulate


class Given(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are its answers, to hand MAPIE our probabilities."""

    def __init__(self, classes):
        self.classes = classes
        self.classes_ = np.arange(classes)

    def __sklearn_is_fitted__(self):
        return True

    def fit(self, inputs, labels):
        return self

    def predict_proba(self, inputs):
        return inputs

    def predict(self, inputs):
        return inputs.argmax(1)


def mapie(method, alpha, held, labels, new, **settings):
    """Threshold and sets by MAPIE."""
    rule = SplitConformalClassifier(
        Given(held.shape[1]), confidence_level=1 - alpha, conformity_score=method, random_state=7
    )
    rule.conformalize(held.numpy(), labels.numpy())
    _, sets = rule.predict_set(new.numpy(), conformity_score_params=settings)
    threshold = rule._mapie_classifier.conformity_score_function_.quantiles_.item()
    return threshold, torch.from_numpy(sets[:, :, 0])


def plain_sets(rule, probs):
    """Sets by the plain definition, some of them empty."""
    limits = rule.threshold if rule.class_thresholds is None else np.array(rule.class_thresholds)
    return torch.from_numpy(class_scores(rule.method, probs.numpy(), rule.ranked_ties) <= limits)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("classes", [3, 8])
def test_lac_agrees_with_mapie(classes, alpha):
    held, labels = simulate(237, classes, seed=1)
    new, _ = simulate(400, classes, seed=2)
    threshold, sets = mapie("lac", alpha, held, labels, new)
    rule = fit_conformal("lac", held, labels, alpha)
    assert rule.threshold == pytest.approx(threshold, abs=1e-12)
    assert torch.equal(plain_sets(rule, new), sets)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("classes", [3, 8])
def test_aps_is_its_definition(classes, alpha):
    """MAPIE has it in its randomised form alone, so class by class."""
    held, labels = simulate(237, classes, seed=3)
    new, _ = simulate(400, classes, seed=4)

    def score(probs, label):
        return sum(p for p in probs if p >= probs[label])

    scores = sorted(score(probs, label) for probs, label in zip(held.tolist(), labels.tolist(), strict=True))
    rule = fit_conformal("aps", held, labels, alpha)
    assert rule.threshold == pytest.approx(scores[math.ceil(238 * (1 - alpha) - 1e-9) - 1], abs=1e-11)
    found = torch.tensor([[score(p, k) for k in range(classes)] for p in new.tolist()], dtype=torch.float64)
    clear = (found - rule.threshold).abs() > 1e-9  # all classes together have 1, but for rounding
    assert torch.equal(plain_sets(rule, new)[clear], (found <= rule.threshold)[clear])


def one_hot(seed, count, accuracy, classes=10):
    """Answers without a doubt, and labels that agree with so many of them."""
    random = np.random.default_rng(seed)
    answers = random.integers(0, classes, count)
    wrong = (answers + random.integers(1, classes, count)) % classes
    labels = np.where(random.random(count) < accuracy, answers, wrong)
    return torch.eye(classes)[answers], torch.from_numpy(labels)


def test_aps_of_one_hot_posteriors_is_the_answer_alone_as_mapie_has_it():
    (held, labels), (new, _) = one_hot(0, 300, 0.97), one_hot(1, 300, 0.97)
    _, sets = mapie("aps", 0.1, held.double(), labels, new.double(), include_last_label=True)
    rule = fit_conformal("aps", held, labels, 0.1)
    assert torch.equal(rule.sets(new), sets)
    assert mean_size(sets) == 1


def test_aps_of_one_hot_posteriors_that_are_often_wrong_covers_without_every_class():
    (held, labels), (new, truth) = one_hot(2, 4000, 0.7), one_hot(3, 4000, 0.7)
    sets = fit_conformal("aps", held, labels, 0.1).sets(new)
    assert 0.88 < coverage(sets, truth) < 0.96  # a rank more or less is a thirtieth of the images
    assert mean_size(sets) < 9


def test_rules_of_version_0_1_0_keep_their_meaning():
    old = Conformal.from_dict({"method": "aps", "alpha": 0.1, "threshold": 1.0, "n": 50})
    assert bool(old.sets(torch.eye(3)).all())


def test_aps_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.4, 0.35]]).double()
    rule = fit_conformal("aps", probs, torch.tensor([1, 2, 0]), alpha=0.5)
    assert (rule.method, rule.n) == ("aps", 3)
    assert rule.threshold == pytest.approx(0.8)  # the second of .8, .7, 1
    assert rule.sets(probs).tolist() == [[True, True, False], [False, False, True], [False, True, True]]


@given(posteriors(), st.floats(0.05, 0.95))
def test_threshold_is_the_corrected_quantile(case, alpha):
    probs, labels = case
    n = len(probs)
    if math.ceil((n + 1) * (1 - alpha) - 1e-9) > n:
        with pytest.raises(UserError, match="at least"):
            fit_conformal("lac", probs, labels, alpha)
        return
    scores = sorted(1 - probs[i, y].item() for i, y in enumerate(labels))
    rule = fit_conformal("lac", probs, labels, alpha)
    assert rule.threshold == scores[math.ceil((n + 1) * (1 - alpha) - 1e-9) - 1]


def test_rounding_of_the_level_does_not_move_the_threshold():
    probs = torch.tensor([[1 - 0.05 * i, 0.05 * i] for i in range(9)]).double()
    rule = fit_conformal("lac", probs, torch.zeros(9, dtype=torch.long), alpha=0.7)
    assert rule.threshold == pytest.approx(0.1)  # the third of nine, though 10 x (1 - 0.7) exceeds 3 in floats


@given(posteriors(), st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.sampled_from([plain_sets, Conformal.sets]))
def test_sets_are_nested_as_alpha_falls_and_never_empty(case, a, b, sets):
    probs, labels = case
    if min(a, b) * (len(probs) + 1) < 1:
        return
    for method in ("lac", "aps"):
        loose, strict = (
            sets(fit_conformal(method, probs, labels, alpha), probs) for alpha in (max(a, b), min(a, b))
        )
        assert (loose <= strict).all()
        assert sets is plain_sets or loose.any(-1).all()
        assert (loose.any(-1) <= loose.gather(1, probs.argmax(-1, keepdim=True)).squeeze(1)).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.1, 0.2])
def test_sets_cover_as_often_as_they_promise(alpha, temperature):
    """On average over held-out sets, for right and for far too sure posteriors; 200 x 200 labels leave 0.5 %."""
    found = {"lac": [], "aps": []}
    for seed in range(200):
        probs, labels = simulate(300, 6, seed, temperature=temperature)
        for method, shares in found.items():
            rule = fit_conformal(method, probs[:100], labels[:100], alpha)
            shares.append(coverage(plain_sets(rule, probs[100:]), labels[100:]))
    for method, shares in found.items():
        assert 1 - alpha - 0.015 <= np.mean(shares) <= 1 - alpha + 1 / 101 + 0.015, method


@pytest.mark.filterwarnings("ignore:WARNING. your conformalization dataset has less labels")
def test_per_class_it_is_a_rule_of_mapie_for_each_class():
    held, labels = simulate(300, 3, seed=1)
    new, _ = simulate(200, 3, seed=2)
    rule = fit_conformal("lac", held, labels, 0.1, per_class=True)
    for k in range(3):
        threshold, sets = mapie("lac", 0.1, held[labels == k], labels[labels == k], new)
        assert rule.class_thresholds[k] == pytest.approx(threshold, abs=1e-12)
        assert torch.equal(plain_sets(rule, new)[:, k], sets[:, k])
    assert rule.threshold == max(rule.class_thresholds)
    assert rule.sets(new).any(-1).all()


@pytest.fixture(scope="module")
def unequal():
    """Posteriors of classes of frequencies 16 to 1, as they know; to draw them takes longer than any rule."""
    weights, cases = torch.tensor([16.0, 4.0, 1.0]), []
    for seed in range(100):
        probs, labels = simulate(9000, 3, seed, signal=1.5)
        drawn = torch.multinomial(weights[labels], 1800, generator=torch.Generator().manual_seed(seed))
        probs = probs[drawn] * weights / (probs[drawn] @ weights.double()).unsqueeze(1)
        cases.append((probs, labels[drawn]))
    return cases


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_per_class_every_class_is_covered_also_where_one_rule_for_all_leaves_one_out(method, unequal):
    """100 x 900 labels leave 0.5 % to most."""
    found = {False: [], True: []}
    for probs, labels in unequal:
        for per_class, shares in found.items():
            rule = fit_conformal(method, probs[:900], labels[:900], 0.1, per_class=per_class)
            sets = plain_sets(rule, probs[900:])
            shares.append([coverage(sets[labels[900:] == k], labels[900:][labels[900:] == k]) for k in range(3)])
    assert min(np.mean(found[False], 0)) < 0.85
    for share in np.mean(found[True], 0):
        # The last class of APS always has the score 1: of the rare class more is covered than has to be.
        assert 0.9 - 0.015 <= share <= (0.94 if method == "lac" else 1)


def test_an_empty_set_gets_the_most_probable_class():
    rule = Conformal("lac", 0.5, 0.3, 9)
    probs = torch.tensor([[0.5, 0.4, 0.1], [0.8, 0.1, 0.1]])
    assert rule.sets(probs).tolist() == [[True, False, False], [True, False, False]]
    assert plain_sets(rule, probs).tolist() == [[False] * 3, [True, False, False]]


@given(posteriors())
def test_a_stored_rule_gives_the_same_sets(case):
    probs, labels = case
    if len(probs) < 2:
        return
    for method in ("lac", "aps"):
        rule = fit_conformal(method, probs, labels, 0.5)
        again = Conformal.from_dict(json.loads(json.dumps(rule.to_dict())))
        assert again == rule
        assert torch.equal(again.sets(probs), rule.sets(probs))


def test_coverage_and_size_by_hand():
    sets = torch.tensor([[True, False], [True, True], [False, False]])
    assert coverage(sets, torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)
    assert mean_size(sets) == 1


GOOD = {"method": "lac", "alpha": 0.1, "threshold": 0.9, "n": 100}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "no key 'extra'"),
        ({"method": "raps"}, "one of lac, aps"),
        ({"alpha": 1.5}, "between 0 and 1"),
        ({"alpha": "much"}, "alpha must be a number"),
        ({"threshold": math.nan}, "threshold must be a number"),
        ({"n": 3}, "at least 9 held-out images"),
        ({"class_thresholds": [0.5, 0.95]}, "class_thresholds must be in"),
        ({"class_thresholds": ["x"]}, "class_thresholds must be a list"),
        ({"n": True}, "conformal.n must be a whole number"),
    ],
)
def test_a_bad_rule_is_one_sentence(change, message):
    assert Conformal.from_dict(GOOD).n == 100
    with pytest.raises(UserError, match=message):
        Conformal.from_dict({**GOOD, **change})


def test_bad_requests_are_one_sentence():
    probs, labels = simulate(8, 3, seed=0)
    for call, message in (
        (lambda: fit_conformal("lac", probs, labels, 0.1), "need at least 9 held-out images, got 8"),
        (lambda: fit_conformal("aps", probs, labels, 0.01), "need at least 99 held-out images"),
        (
            lambda: fit_conformal("lac", probs, labels, 0.3, per_class=True),
            r"at least 3 held-out images of every class \(class",
        ),
        (lambda: Conformal("lac", 0.3, 1.0, 8, class_thresholds=(0.5, 1.0)).sets(probs), "is for another model"),
        (lambda: fit_conformal("lac", probs, labels, 0.0), "between 0 and 1"),
        (lambda: Conformal.from_dict({k: GOOD[k] for k in GOOD if k != "n"}), "n must be given"),
        (lambda: coverage(probs > 0.5, labels[1:]), "one per set"),
        (lambda: coverage(probs > 0.5, labels + 3), "one per set"),
        (lambda: mean_size(probs), "yes and no"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    assert fit_conformal("lac", *simulate(9, 3, seed=0), 0.1).n == 9

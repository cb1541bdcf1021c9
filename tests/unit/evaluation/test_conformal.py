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
from didicm.evaluation.calibration import Conformal, coverage, fit_aps, fit_lac, mean_size
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


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("classes", [3, 8])
def test_lac_agrees_with_mapie(classes, alpha):
    held, labels = simulate(237, classes, seed=1)
    new, _ = simulate(400, classes, seed=2)
    threshold, sets = mapie("lac", alpha, held, labels, new)
    rule = fit_lac(held, labels, alpha)
    assert rule.threshold == pytest.approx(threshold, abs=1e-12)
    assert torch.equal(rule.sets(new, allow_empty=True), sets)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("classes", [3, 8])
def test_randomised_aps_agrees_with_mapie(classes, alpha):
    held, labels = simulate(237, classes, seed=3)
    new, _ = simulate(400, classes, seed=4)
    threshold, sets = mapie("aps", alpha, held, labels, new, include_last_label="randomized")
    u = [torch.from_numpy(np.random.RandomState(7).uniform(size=n)) for n in (237, 400)]
    rule = fit_aps(held, labels, alpha, u=u[0])
    assert rule.method == "aps-randomised"
    assert rule.threshold == pytest.approx(threshold, abs=1e-12)
    assert torch.equal(rule.sets(new, u[1], allow_empty=True), sets)


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
    rule = fit_aps(held, labels, 0.1)
    assert torch.equal(rule.sets(new), sets)
    assert mean_size(sets) == 1


def test_aps_of_one_hot_posteriors_that_are_often_wrong_covers_without_every_class():
    (held, labels), (new, truth) = one_hot(2, 4000, 0.7), one_hot(3, 4000, 0.7)
    for u in (None, torch.rand(4000, generator=torch.Generator().manual_seed(0))):
        sets = fit_aps(held, labels, 0.1, u=u).sets(new, u)
        assert 0.88 < coverage(sets, truth) < 0.96  # a rank more or less is a thirtieth of the images
        assert mean_size(sets) < 9


def test_rules_of_version_0_1_0_keep_their_meaning():
    old = Conformal.from_dict({"method": "aps", "alpha": 0.1, "threshold": 1.0, "n": 50})
    assert bool(old.sets(torch.eye(3)).all())


def test_aps_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.4, 0.35]]).double()
    rule = fit_aps(probs, torch.tensor([1, 2, 0]), alpha=0.5)
    assert (rule.method, rule.n) == ("aps", 3)
    assert rule.threshold == pytest.approx(0.8)  # the second of .8, .7, 1
    assert rule.sets(probs).tolist() == [[True, True, False], [False, False, True], [False, True, True]]
    u = torch.tensor([0.0, 0.5, 1.0])
    rule = fit_aps(probs, torch.tensor([1, 2, 0]), alpha=0.5, u=u)
    assert rule.threshold == pytest.approx(0.75)  # the second of .8, .35, .75
    assert rule.sets(probs, u).tolist() == [[True, False, False], [False, False, True], [True, True, True]]


@given(posteriors(), st.floats(0.05, 0.95))
def test_threshold_is_the_corrected_quantile(case, alpha):
    probs, labels = case
    n = len(probs)
    if math.ceil((n + 1) * (1 - alpha) - 1e-9) > n:
        with pytest.raises(UserError, match="at least"):
            fit_lac(probs, labels, alpha)
        return
    scores = sorted(1 - probs[i, y].item() for i, y in enumerate(labels))
    rule = fit_lac(probs, labels, alpha)
    assert rule.threshold == scores[math.ceil((n + 1) * (1 - alpha) - 1e-9) - 1]


def test_rounding_of_the_level_does_not_move_the_threshold():
    probs = torch.tensor([[1 - 0.05 * i, 0.05 * i] for i in range(9)]).double()
    rule = fit_lac(probs, torch.zeros(9, dtype=torch.long), alpha=0.7)
    assert rule.threshold == pytest.approx(0.1)  # the third of nine, though 10 x (1 - 0.7) exceeds 3 in floats


@given(posteriors(), st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.booleans())
def test_sets_are_nested_as_alpha_falls_and_never_empty(case, a, b, allow_empty):
    probs, labels = case
    u = torch.rand(len(probs), generator=torch.Generator().manual_seed(0))
    if min(a, b) * (len(probs) + 1) < 1:
        return
    for fit, random in ((fit_lac, ()), (fit_aps, ()), (fit_aps, (u,))):
        loose, strict = (
            fit(probs, labels, alpha, *random).sets(probs, *random, allow_empty=allow_empty)
            for alpha in (max(a, b), min(a, b))
        )
        assert (loose <= strict).all()
        assert allow_empty or loose.any(-1).all()
        assert (loose.any(-1) <= loose.gather(1, probs.argmax(-1, keepdim=True)).squeeze(1)).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.1, 0.2])
def test_sets_cover_as_often_as_they_promise(alpha, temperature):
    """On average over held-out sets, for right and for far too sure posteriors; 200 x 200 labels leave 0.5 %."""
    found = {"lac": [], "aps": [], "aps-randomised": []}
    for seed in range(200):
        probs, labels = simulate(300, 6, seed, temperature=temperature)
        u = torch.rand(300, generator=torch.Generator().manual_seed(seed))
        rules = (
            fit_lac(probs[:100], labels[:100], alpha),
            fit_aps(probs[:100], labels[:100], alpha),
            fit_aps(probs[:100], labels[:100], alpha, u=u[:100]),
        )
        for rule in rules:
            random = (u[100:],) if rule.method == "aps-randomised" else ()
            sets = rule.sets(probs[100:], *random, allow_empty=True)
            found[rule.method].append(coverage(sets, labels[100:]))
    for method, shares in found.items():
        assert 1 - alpha - 0.015 <= np.mean(shares) <= 1 - alpha + 1 / 101 + 0.015, method


@pytest.mark.filterwarnings("ignore:WARNING. your conformalization dataset has less labels")
def test_per_class_it_is_a_rule_of_mapie_for_each_class():
    held, labels = simulate(300, 3, seed=1)
    new, _ = simulate(200, 3, seed=2)
    rule = fit_lac(held, labels, 0.1, per_class=True)
    for k in range(3):
        threshold, sets = mapie("lac", 0.1, held[labels == k], labels[labels == k], new)
        assert rule.class_thresholds[k] == pytest.approx(threshold, abs=1e-12)
        assert torch.equal(rule.sets(new, allow_empty=True)[:, k], sets[:, k])
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


@pytest.mark.parametrize("fit", [fit_lac, fit_aps])
def test_per_class_every_class_is_covered_also_where_one_rule_for_all_leaves_one_out(fit, unequal):
    """100 x 900 labels leave 0.5 % to most."""
    found = {False: [], True: []}
    for probs, labels in unequal:
        for per_class, shares in found.items():
            sets = fit(probs[:900], labels[:900], 0.1, per_class=per_class).sets(probs[900:], allow_empty=True)
            shares.append([coverage(sets[labels[900:] == k], labels[900:][labels[900:] == k]) for k in range(3)])
    assert min(np.mean(found[False], 0)) < 0.85
    for share in np.mean(found[True], 0):
        # The last class of APS always has the score 1: of the rare class more is covered than has to be.
        assert 0.9 - 0.015 <= share <= (0.94 if fit is fit_lac else 1)


def test_an_empty_set_gets_the_most_probable_class_unless_allowed():
    rule = Conformal("lac", 0.5, 0.3, 9)
    probs = torch.tensor([[0.5, 0.4, 0.1], [0.8, 0.1, 0.1]])
    assert rule.sets(probs).tolist() == [[True, False, False], [True, False, False]]
    assert rule.sets(probs, allow_empty=True).tolist() == [[False] * 3, [True, False, False]]


@given(posteriors())
def test_a_stored_rule_gives_the_same_sets(case):
    probs, labels = case
    if len(probs) < 2:
        return
    for fit in (fit_lac, fit_aps):
        rule = fit(probs, labels, 0.5)
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
    u = torch.zeros(8)
    for call, message in (
        (lambda: fit_lac(probs, labels, 0.1), "need at least 9 held-out images, got 8"),
        (lambda: fit_aps(probs, labels, 0.01), "need at least 99 held-out images"),
        (
            lambda: fit_lac(probs, labels, 0.3, per_class=True),
            r"at least 3 held-out images of every class \(class",
        ),
        (lambda: Conformal("lac", 0.3, 1.0, 8, class_thresholds=(0.5, 1.0)).sets(probs), "is for another model"),
        (lambda: fit_lac(probs, labels, 0.0), "between 0 and 1"),
        (lambda: fit_aps(probs, labels, 0.5, u=u[1:]), "u must be 8 numbers"),
        (lambda: fit_aps(probs, labels, 0.5, u=u + 2), "u must be 8 numbers"),
        (lambda: fit_aps(probs, labels, 0.5, u=u).sets(probs), "aps-randomised"),
        (lambda: fit_aps(probs, labels, 0.5).sets(probs, u), "aps-randomised"),
        (lambda: Conformal.from_dict({k: GOOD[k] for k in GOOD if k != "n"}), "n must be given"),
        (lambda: coverage(probs > 0.5, labels[1:]), "one per set"),
        (lambda: coverage(probs > 0.5, labels + 3), "one per set"),
        (lambda: mean_size(probs), "yes and no"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    assert fit_lac(*simulate(9, 3, seed=0), 0.1).n == 9

"""Posteriors of other classes, frequencies and names: against Bayes' rule on joint tables."""

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from didicm import Predictor
from didicm.errors import UserError
from didicm.evaluation.label_sets import ConformalRule
from didicm.inference.adjust import adjusted, kept_rule, make_adjustment, note_on_sets
from didicm.inference.onnx import OnnxPredictor

NAMES = ["ant", "bee", "cat", "dog"]
RULE = ConformalRule("lac", 0.1, 0.6, 20)
TAXONOMY = {"insect": ["ant", "bee"], "pet": ["dog", "cat"]}

frequencies = st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4).map(np.array)


@st.composite
def joints(draw):
    """p(image | class) of 4 classes and some images."""
    likelihood = np.array(draw(st.lists(frequencies, min_size=1, max_size=4)))  # (images, classes)
    return likelihood / likelihood.sum(0)


def posterior(likelihood, prior):
    """p(class | image) by Bayes' rule from the whole joint table."""
    joint = likelihood * prior / prior.sum()
    return joint / joint.sum(1, keepdims=True)


def stored(counts, balance="none"):
    return {"images": np.asarray(counts).tolist(), "balance": balance}


def named(values):
    return dict(zip(NAMES, np.asarray(values).tolist(), strict=True))


@given(joints(), frequencies, st.sets(st.sampled_from(NAMES), min_size=1))
def test_classes_are_bayes_rule_with_a_restricted_support(likelihood, prior, classes):
    adjustment = make_adjustment(NAMES, None, classes=list(classes))
    impossible = np.array([name not in classes for name in NAMES])
    expected = posterior(likelihood, np.where(impossible, 0, prior))[:, ~impossible]
    assert adjustment.names == [name for name in NAMES if name in classes]
    np.testing.assert_allclose(adjustment.probs(posterior(likelihood, prior)), expected, rtol=1e-9, atol=1e-30)


@given(joints(), frequencies, frequencies)
def test_another_prior_gives_the_posterior_of_the_shifted_joint(likelihood, before, after):
    seen = posterior(likelihood, before)
    there = make_adjustment(NAMES, stored(before), prior=named(after))
    found = there.probs(seen)
    np.testing.assert_allclose(found, posterior(likelihood, after), rtol=1e-9)
    back = make_adjustment(NAMES, stored(after), prior=named(before))
    np.testing.assert_allclose(back.probs(found), seen, rtol=1e-9)


@given(joints(), frequencies)
def test_a_balanced_training_is_undone(likelihood, counts):
    uniform = posterior(likelihood, np.ones(4))
    for balance in ("sampling", "weights"):
        training = make_adjustment(NAMES, stored(counts, balance), prior="training")
        np.testing.assert_allclose(training.probs(uniform), posterior(likelihood, counts), rtol=1e-9)
    unbalanced = make_adjustment(NAMES, stored(counts), prior="uniform")
    np.testing.assert_allclose(unbalanced.probs(posterior(likelihood, counts)), uniform, rtol=1e-9)


@given(joints(), frequencies, frequencies, st.sets(st.sampled_from(NAMES), min_size=1))
def test_a_taxonomy_sums_after_classes_and_prior(likelihood, before, after, classes):
    asked = {"classes": sorted(classes), "prior": named(after)}
    seen = posterior(likelihood, before)
    fine = make_adjustment(NAMES, stored(before), **asked)
    coarse = make_adjustment(NAMES, stored(before), **asked, taxonomy=TAXONOMY)
    found = dict(zip(coarse.names, coarse.probs(seen).T, strict=True))
    single = dict(zip(fine.names, fine.probs(seen).T, strict=True))
    assert list(found) == [name for name, members in TAXONOMY.items() if classes & set(members)]
    for name, members in TAXONOMY.items():
        if name in found:
            expected = sum(single[member] for member in members if member in single)
            np.testing.assert_allclose(found[name], expected, rtol=1e-9)


@given(joints(), st.sets(st.sampled_from(NAMES), min_size=1), st.booleans(), st.floats(0, 1))
def test_sets_drop_no_class_that_can_occur(likelihood, classes, coarser, threshold):
    probs, rule = posterior(likelihood, np.ones(4)), ConformalRule("lac", 0.1, threshold, 20)
    asked = {"classes": sorted(classes), "taxonomy": TAXONOMY if coarser else None}
    adjustment = make_adjustment(NAMES, None, **asked)
    _, sets = adjusted(probs, rule, adjustment)
    for row, inside in zip(sets, rule.contains(probs), strict=True):
        kept = {name for name, is_in in zip(NAMES, inside, strict=True) if is_in} & classes
        told = {name for name, is_in in zip(adjustment.names, row, strict=True) if is_in}
        expected = {name for name, m in TAXONOMY.items() if kept & set(m)} if coarser else kept
        assert told == expected if kept else len(told) == 1


def test_under_another_prior_no_coverage_is_claimed():
    shifted = make_adjustment(NAMES, stored([1, 2, 3, 4]), prior="uniform")
    assert kept_rule(RULE, shifted) is None
    per_class = replace(RULE, class_thresholds=(0.2, 0.3, 0.6, 0.1))  # which hold for any frequencies
    assert kept_rule(per_class, shifted) is per_class
    assert kept_rule(RULE, make_adjustment(NAMES, None, classes=["ant"])) is RULE
    assert kept_rule(RULE, None) is RULE


def test_probabilities_that_were_rounded_to_0_say_nothing_between_classes():
    probs = np.array([[1, 0, 0, 0]], dtype=np.float32)
    adjustment = make_adjustment(NAMES, stored([1, 1, 1, 1]), classes=["bee", "cat"], prior={"bee": 3, "cat": 1})
    found = adjustment.probs(probs)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0.75, 0.25]])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"classes": []}, "classes is empty"),
        ({"classes": ["ant", "doge"]}, "there is no class 'doge': did you mean dog?"),
        ({"prior": named([1, 1, 0, 1])}, "the prior of class 'cat' must be above 0, got 0"),
        ({"prior": named([1, -2, 1, 1])}, "the prior of class 'bee' must be above 0, got -2"),
        ({"prior": {"ant": 1, "bee": 1, "cat": 1}}, "has no frequency for class 'dog'"),
        ({"prior": {**named([1, 1, 1, 1]), "cow": 1}}, "there is no class 'cow'"),
        ({"prior": {**named([1, 1, 1, 1]), "ant": "many"}}, "must be a number"),
        ({"prior": "uniforn"}, "must be uniform, training, or a frequency"),
        ({"taxonomy": {"insect": ["ant", "bee"], "pet": ["dog"]}}, "the taxonomy lacks class 'cat'"),
        ({"taxonomy": {**TAXONOMY, "other": ["ant"]}}, "has class 'ant' twice"),
        ({"taxonomy": {**TAXONOMY, "other": ["cow"]}}, "there is no class 'cow'"),
        ({"taxonomy": {"ant": "insect"}}, "ant must be a list of classes, got 'insect'"),
    ],
)
def test_mistakes_are_one_sentence(asked, says):
    with pytest.raises(UserError, match=re.escape(says)):
        make_adjustment(NAMES, stored([1, 2, 3, 4]), **asked)


@pytest.mark.parametrize(
    ("training_prior", "says"),
    [
        (None, "does not say how frequent each class was"),
        (stored([1, 2, 3]), "training_prior has 3 numbers for 4 classes"),
        (stored([1, 2, 0, 3]), "training had no image of class 'cat'"),
        ({}, "training_prior.images must be a list"),
    ],
)
def test_a_prior_needs_that_of_training(training_prior, says):
    with pytest.raises(UserError, match=re.escape(says)):
        make_adjustment(NAMES, training_prior, prior="uniform")
    if training_prior and len(training_prior["images"]) == 4:
        assert make_adjustment(NAMES, training_prior, classes=["ant", "bee"], prior="uniform").factors[0] == 1


def test_a_prior_that_changes_nothing_leaves_conformal_sets_as_they_are():
    for training_prior, prior, kept in (
        (stored([7, 7, 7, 7]), "uniform", True),
        (stored([1, 2, 3, 4]), "training", True),
        (stored([1, 2, 3, 4]), "uniform", False),
        (stored([1, 2, 3, 4], "sampling"), "uniform", True),
        (stored([1, 2, 3, 4], "sampling"), "training", False),
    ):
        adjustment = make_adjustment(NAMES, training_prior, prior=prior)
        assert (kept_rule(RULE, adjustment) is not None) == kept
        assert (note_on_sets(RULE, adjustment) == "") == kept


def test_both_ways_to_run_a_model_adjust_alike(calibrated_model, onnx_model, picture):
    plain = Predictor.load(calibrated_model)
    images = [picture(seed) for seed in range(3)]
    p = np.stack([prediction.probs.numpy() for prediction in plain(images)])
    prior = {"ant": 5, "bee": 1, "cät": 1}
    weighted = p * np.array([5, 1, 1]) / np.array([10, 20, 70])
    weighted /= weighted.sum(1, keepdims=True)
    for asked, expected, names in (
        ({"classes": ["bee", "ant"]}, p[:, :2] / p[:, :2].sum(1, keepdims=True), ["ant", "bee"]),
        ({"prior": prior}, weighted, ["ant", "bee", "cät"]),
        (
            {"taxonomy": {"pet": ["cät"], "insect": ["bee", "ant"]}},
            np.c_[p[:, 2], p[:, 0] + p[:, 1]],
            ["pet", "insect"],
        ),
    ):
        for predictor in (Predictor.load(calibrated_model, **asked), OnnxPredictor.load(onnx_model, **asked)):
            predictions = predictor(images)
            np.testing.assert_allclose(np.stack([np.asarray(x.probs) for x in predictions]), expected, atol=1e-5)
            assert all(sorted(name for name, _ in x.classes) == sorted(names) for x in predictions)
            assert all((x.conformal_set is None) == ("prior" in asked) for x in predictions)
            assert ("without conformal sets" in predictor.note) == ("prior" in asked)
            assert ("images of all classes together" in predictor.note) == ("classes" in asked)
    path = Predictor.load(calibrated_model, classes=["ant", "bee"])(images[0], trajectory=True).trajectory
    assert torch.allclose(path[0][1], torch.tensor([0.5, 0.5]))
    assert Predictor.load(calibrated_model, classes=["ant"]).changed(steps=1)(images[0]).classes == [("ant", 1.0)]


def test_predict_with_classes_prior_and_taxonomy(calibrated_model, tmp_path, write, works, fails):
    photo = write(tmp_path / "photo.png")
    (tmp_path / "prior.yaml").write_text("ant: 5\nbee: 1\ncät: 1\n")
    (tmp_path / "taxonomy.yaml").write_text(yaml.safe_dump({"insect": ["ant", "bee"], "pet": ["cät"]}))
    asked = ["--prior", tmp_path / "prior.yaml", "--taxonomy", tmp_path / "taxonomy.yaml", "--classes", "ant,cät"]
    told = json.loads(works("predict", calibrated_model, photo, "--json", *asked).out)
    p = Predictor.load(calibrated_model)(photo).probs
    insect = p[0] * 5 / 10 / (p[0] * 5 / 10 + p[2] / 70)
    assert {x["name"]: x["probability"] for x in told["classes"]}["insect"] == pytest.approx(
        insect.item(), rel=1e-4
    )
    assert told["conformal_set"] is None
    works("predict", calibrated_model, photo, "--out", tmp_path / "rows.jsonl", "--all-probs", *asked)
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["probabilities"] == pytest.approx({"insect": insect.item(), "pet": 1 - insect.item()}, rel=1e-4)
    assert told["conformal_claim"] is None
    claimed = (
        "the set that holds the truth for 90 % of images of all classes together, without the classes impossible"
    )
    assert claimed in works("predict", calibrated_model, photo, "--classes", "ant,bee").out
    told = json.loads(works("predict", calibrated_model, photo, "--json", "--classes", "ant,bee").out)
    assert told["conformal_claim"].startswith(claimed)
    assert "for --prior give uniform, training, or a YAML file" in fails(
        "predict", calibrated_model, photo, "--prior", "none.yaml"
    )
    assert "there is no class 'dog'" in fails("predict", calibrated_model, photo, "--classes", "dog")


def test_a_taxonomy_of_very_many_names_takes_no_time():
    names = [f"a class of number {k}" for k in range(1000)]
    taxonomy = {"all": names, **{f"another name {i}": [] for i in range(100_000)}}
    start = time.process_time()
    assert make_adjustment(names, None, taxonomy=taxonomy).names == ["all"]
    assert time.process_time() - start < 1

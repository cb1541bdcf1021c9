from dataclasses import replace

import pytest
import torch

from didicm.checkpoint import load
from didicm.errors import UserError
from didicm.evaluation.store import load_posteriors
from didicm.experiments import execute
from didicm.experiments.execute import prepare
from didicm.experiments.results import read_results
from didicm.experiments.run import forecast, run_study
from didicm.report.records import Entry

BASELINES = {
    "seeds": 1,
    "methods": [
        {"name": "standard", "method": "standard"},
        {"name": "standard", "variant": "ensemble", "method": "standard", "members": 2},
    ],
    "baseline_samplers": {"1 call": {}, "3 views": {"views": 3}},
}


@pytest.fixture(scope="module")
def fought(tiny, few_images, tmp_path_factory):
    """Folder of a study with baselines at the same inference cost."""
    out = tmp_path_factory.mktemp("fought")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("didicm.data.sources.FASHION_MINI", few_images)
        run_study(tiny(**BASELINES), out)
    return out


def test_views_and_ensembles_are_measured_with_what_they_cost(tiny, fought):
    single, ensemble = read_results(fought)
    once, views = single.measurements
    assert (once.sampler, once.calls) == ("1 call", 1)
    assert (views.sampler, views.calls) == ("3 views", 3)
    assert views.multiply_adds == 3 * once.multiply_adds
    assert views.metrics != once.metrics
    both, first = ensemble.measurements
    assert (both.sampler, both.calls, both.multiply_adds) == ("2 members", 2, 2 * once.multiply_adds)
    assert (first.sampler, first.calls, first.multiply_adds) == ("1 member", 1, once.multiply_adds)
    assert first.metrics == once.metrics  # the first member is the single training
    assert both.temperature not in (None, first.temperature)  # fitted after averaging
    assert ensemble.parameters == 2 * single.parameters
    # Two epochs of 80 of the 90 images, forward and twice that backward.
    assert single.train_multiply_adds == 3 * once.multiply_adds * 2 * 80
    assert ensemble.train_multiply_adds == 2 * single.train_multiply_adds
    expected = forecast({run.key: run for run in tiny(**BASELINES).runs("fashion-mini", 1)})
    for result in (single, ensemble):
        assert expected[result.key].multiply_adds == result.measurements[0].multiply_adds
        assert expected[result.key].training == result.train_multiply_adds


def test_members_see_the_same_images_with_other_weights(tiny, fought):
    run = tiny(**BASELINES).runs("fashion-mini", 1)[1]
    assert [(config.seed, config.image_seed) for config in run.members] == [(0, 0), (1000, 0)]
    one, other = (prepare(replace(run, config=config), fought)[0] for config in run.members)
    assert [one.train.name(i) for i in range(90)] == [other.train.name(i) for i in range(90)]
    members = load(fought / "runs" / run.key / "last").classifier.members
    assert (members[0].model.fc.weight != members[1].model.fc.weight).any()


@pytest.mark.usefixtures("few_tested")
def test_an_ensemble_that_was_interrupted_goes_on(tiny, fought, tmp_path, monkeypatch):
    study, train, trained = tiny(**{**BASELINES, "methods": BASELINES["methods"][1:]}), execute.train, []

    def stop_at_the_second(config, **options):
        if len(trained) == 1:
            trained.append("stopped")
            raise KeyboardInterrupt
        trained.append(config.out)
        return train(config, **options)

    monkeypatch.setattr(execute, "train", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    run_study(study, tmp_path)
    (result,) = read_results(tmp_path)
    whole = next(other for other in read_results(fought) if other.key == result.key)
    one, other = (
        load_posteriors(out / x.measurements[0].posteriors) for out, x in ((tmp_path, result), (fought, whole))
    )
    assert torch.equal(one.probs, other.probs)
    assert result.train_seconds is None


@pytest.mark.usefixtures("few_tested")
def test_snapshots_of_one_training_are_measured_as_an_ensemble(tiny, tmp_path):
    methods = [{"name": "standard", "variant": "snapshots", "method": "standard", "optimizer.snapshots": 2}]
    study = tiny(seeds=1, methods=methods)
    run_study(study, tmp_path)
    (result,) = read_results(tmp_path)
    both, first = result.measurements
    assert [(m.sampler, m.calls) for m in (both, first)] == [("2 members", 2), ("1 member", 1)]
    assert both.metrics != first.metrics
    assert result.train_multiply_adds == 3 * first.multiply_adds * 2 * 80  # as of one network
    expected = forecast({run.key: run for run in study.runs("fashion-mini", 1)})[result.key]
    assert expected.training == result.train_multiply_adds
    assert (expected.multiply_adds, expected.parameters) == (both.multiply_adds, result.parameters)


def test_names_and_mistakes(tiny):
    study = tiny(**BASELINES)
    single, ensemble = study.methods
    assert str(Entry(single, "1 call")) == "standard"
    assert str(Entry(single, "3 views")) == "standard, 3 views"
    assert str(Entry(ensemble, "2 members")) == "standard, ensemble, 2 members"
    trial = replace(study.runs("fashion-mini", 1)[1], trial=0)
    assert len(trial.members) == 1
    with pytest.raises(UserError, match="a standard classifier has no steps"):
        tiny(**{**BASELINES, "baseline_samplers": {"x": {"steps": 2}}})
    with pytest.raises(UserError, match="members must be at least 1"):
        tiny(methods=[{"name": "standard", "method": "standard", "members": 0}])

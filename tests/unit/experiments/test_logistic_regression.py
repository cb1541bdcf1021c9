"""scikit-learn's logistic regression stands beside the methods of a study."""

import pytest

from didicm.experiments.results import read_plan, read_results, write_plan
from didicm.experiments.run import plan_runs
from didicm.experiments.study_file import make_study
from didicm.report.records import rows_of

pytest.importorskip("sklearn")

STUDY = {
    "name": "few", "title": "Few", "question": "Why?", "layout": "uncertainty", "recipe": "finetune", "seeds": 1,
    "fractions": [4, 10], "settings": {"image.size": 16, "image.channels": 3, "batch_size": 10},
    "methods": [
        {"name": "linear", "method": "standard", "model_args.frozen": True},
        {"name": "DiDiCM", "model_args.frozen": True},
    ],
}  # fmt: skip


@pytest.mark.usefixtures("few_tested")
def test_it_joins_the_results_of_a_study_once(tmp_path, run_module):
    user = {"model_args.backbone": "test_resnet", "model_args.pretrained": False}
    write_plan(tmp_path, plan_runs(make_study(STUDY, "few"), "fashion-mini", None, user)[1])
    for _ in range(2):
        assert run_module("benchmarks.logistic_regression", tmp_path) == 0
    results, plan = read_results(tmp_path), read_plan(tmp_path)
    assert len(results) == len({result.key for result in results}) == 2
    assert {result.num_train + result.num_held_out for result in results} == {40, 100}
    assert all(plan.runs[result.key] == "logistic regression, frozen" for result in results)
    rows = rows_of(results, plan.study)
    assert {str(row.method) for row in rows} == {"logistic regression, frozen"}
    assert len(rows.entries()) == 1  # so that tables show it
    assert all((tmp_path / row.measured.posteriors).is_file() for row in rows)
    assert all(row.measured.metrics["cls/Acc"] > 0.2 for row in rows)  # far above chance, on random features

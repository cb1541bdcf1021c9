import json
from dataclasses import asdict, replace

import pytest

from didicm.errors import UserError
from didicm.experiments.results import (
    RESULTS,
    STUDY,
    Measurement,
    Plan,
    RunResult,
    append_result,
    read_plan,
    read_results,
    write_plan,
)
from didicm.experiments.spec import Condition
from didicm.experiments.study_file import make_study
from didicm.settings import load_recipe
from didicm.values import flatten, override

METRICS = {"cls/Acc": 0.5, "cls/NLL": 1.0}
SIZES = 90, 10, 1000, 10, 5000  # images to train, held out and to test; classes; parameters
MEASURED = Measurement("8 steps", "8 steps", {"steps": 8}, 8, 1000, METRICS, 1.5, METRICS, "measured/a/p")
RESULT = RunResult("a", "DiDiCM", Condition(7, 0.05, "noise:3"), 0, *SIZES, None, (MEASURED,), {"didicm": "0.1"})


@pytest.fixture
def plan(tiny):
    study = tiny(samplers={"exact": {"steps": [8, 1]}})
    return Plan(study, "didicm study tiny", "fashion-mini", {"DiDiCM, here": {"epochs": 2}}, {"a": "DiDiCM"})


def test_results_are_read_as_they_were_written(tmp_path):
    results = [RESULT, replace(RESULT, key="b", final_epochs_gain=0.1)]
    for result in results:
        append_result(tmp_path, result)
    assert read_results(tmp_path) == results


def test_results_are_appended_once(tmp_path):
    append_result(tmp_path, RESULT)
    append_result(tmp_path, replace(RESULT, seed=1))
    assert read_results(tmp_path) == [RESULT]


def test_a_torn_last_line_is_ignored_and_cut_off(tmp_path):
    append_result(tmp_path, RESULT)
    with open(tmp_path / RESULTS, "ab") as file:
        file.write(b'{"key": "b", "x"')
    assert read_results(tmp_path) == [RESULT]
    append_result(tmp_path, replace(RESULT, key="c"))
    assert [result.key for result in read_results(tmp_path)] == ["a", "c"]
    assert (tmp_path / RESULTS).read_bytes().count(b"\n") == 2


CHANGES = [{"colour": "red"}, {"seed": None, "-": "seed"}, {"condition": {"x": 1}}]


@pytest.mark.parametrize("damage", ["nonsense", "[]", "{}", '{"format": 3}', *CHANGES])
def test_a_damaged_line_is_named_with_its_remedy(tmp_path, damage):
    append_result(tmp_path, RESULT)
    if isinstance(damage, dict):
        values = {**RESULT.to_dict(), **damage}
        values.pop(values.pop("-", ""), None)
        damage = json.dumps(values)
    with open(tmp_path / RESULTS, "a") as file:
        file.write(f"{damage}\n")
    with pytest.raises(UserError, match=r"line 2 of .*results.jsonl is damaged \(.+\): delete that line"):
        read_results(tmp_path)


def test_a_plan_is_read_as_it_was_written(tmp_path, plan):
    assert read_plan(tmp_path) is None
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan


@pytest.mark.parametrize("damage", ["nonsense", "[]", '{"format": 1}', '{"format": 2}'])
def test_a_damaged_plan_is_named_with_its_remedy(tmp_path, damage):
    (tmp_path / STUDY).write_text(damage)
    with pytest.raises(UserError, match=r"study.json is damaged \(.+\): restore it, or use another --out"):
        read_plan(tmp_path)


# Format 1, as version 0.1 wrote it

MAIN = {"name": "1 call", "group": "1 call", "settings": {}, "calls": 1, "multiply_adds": 7, "metrics": METRICS}
MAIN |= {"temperature": 1.2, "tempered": METRICS, "posteriors": "measured/x/posteriors-0.safetensors"}


def old_settings(**changes):
    """Resolved settings by the names that they had."""
    new = flatten(override(load_recipe("small"), {"data": "fashion-mini", "image.channels": 1, **changes}))
    names = {"label_proposal": "redraw", "sampler.score_time": "sampler.query"}
    old = {names.get(k, k): v for k, v in new.items() if k != "out" and not k.startswith("run.")}
    arguments = {"prediction" if k == "parameterization" else k: v for k, v in old["model_args"].items()}
    query = {"midpoint": "middle"}.get(old["sampler.query"], old["sampler.query"])
    return {**old, "model_args": arguments, "sampler.query": query, "precision": "32-true", "held_out": 0.1}


def old_record(key, method, condition, seed, readings):
    counts = {"num_train": 9, "num_held_out": 1, "num_test": 5, "num_classes": 10, "parameters": 3}
    rest = {"seed": seed, **counts, "train_seconds": 1.5, "readings": readings, "versions": {"didicm": "0.1.0"}}
    return {"key": key, "method": method, "standard": method.startswith("standard"), **condition, **rest}


@pytest.fixture
def old_comparison(tmp_path):
    """A folder that `didicm compare` of version 0.1 left half done."""
    condition = {"resolution": 14, "fraction": 0.25, "corruption": "noise:3"}
    name = "14 px, 25 % of the images, noise:3"
    cells = {
        "standard-didirn8_14px-0.25_noise-3_seed0_0123456789": "standard-smooth",
        "diffusion-didirn8_14px-0.25_noise-3_seed0_abcdef0123": "didicm-score",
    }
    plan = {
        "title": "Mine",
        "command": "didicm compare",
        "note": "Mind the gap.",
        "data": "fashion-mini",
        "model": "didirn8",
        "settings": old_settings(),
        "overrides": {
            f"standard-smooth, {name}": {"method": "standard", "augment.label_smoothing": 0.1},
            f"didicm-score, {name}": {"method": "diffusion", "model_args.prediction": "score", "epochs": 7},
        },
        "readings": [],
        "cells": cells,
    }
    first = next(iter(cells))
    record = old_record(first, "standard-smooth", condition, 0, [MAIN])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / RESULTS).write_text(json.dumps(record) + "\n")
    return tmp_path


def test_an_old_comparison_is_read_without_being_touched(old_comparison):
    before = {path.name: path.read_bytes() for path in old_comparison.iterdir()}
    plan, (result,) = read_plan(old_comparison), read_results(old_comparison)
    assert [str(method) for method in plan.study.methods] == ["standard, smoothed labels", "DiDiCM, score"]
    assert (plan.study.layout, plan.study.title, plan.study.note) == ("comparison", "Mine", "Mind the gap.")
    assert plan.study.conditions == (result.condition,) == (Condition(14, 0.25, "noise:3"),)
    assert result.method == "standard, smoothed labels"
    assert asdict(result.measurements[0]) == {
        **{name: MAIN[name] for name in ("group", "settings", "calls", "multiply_adds", "metrics", "temperature")},
        "sampler": "1 call",
        "scaled_metrics": METRICS,
        "posteriors": MAIN["posteriors"],
    }
    own = plan.settings["DiDiCM, score, 14 px, 25 % of the images, noise:3"]
    assert (own["epochs"], own["model_args"]["parameterization"], own["corrupt_eval"]) == (7, "score", "noise:3")
    assert own["sampler.score_time"] == "midpoint"
    assert {path.name: path.read_bytes() for path in old_comparison.iterdir()} == before


def test_an_old_comparison_has_the_keys_of_the_same_trainings_today(old_comparison):
    plan, (result,) = read_plan(old_comparison), read_results(old_comparison)
    today = {run.key: str(run.method) for run in plan.study.runs(plan.data, 1, {"image.channels": 1})}
    assert plan.runs[result.key] == today[result.key] == result.method
    assert sum(key in today for key in plan.runs) == 1  # the other one had epochs of its own


def test_an_old_folder_is_migrated_once_it_is_written_to(old_comparison):
    plan, results = read_plan(old_comparison), read_results(old_comparison)
    append_result(old_comparison, RESULT)
    assert {path.name for path in old_comparison.iterdir()} == {STUDY, RESULTS}
    assert read_plan(old_comparison) == plan
    assert read_results(old_comparison) == [*results, RESULT]


def test_a_crash_between_the_two_files_of_a_migration_loses_nothing(old_comparison):
    plan, results = read_plan(old_comparison), read_results(old_comparison)
    old = (old_comparison / "plan.json").read_bytes()
    write_plan(old_comparison, plan)
    (old_comparison / STUDY).unlink()
    (old_comparison / "plan.json").write_bytes(old)
    assert read_plan(old_comparison) == plan
    assert read_results(old_comparison) == results


def test_an_old_study_is_read_by_todays_names(tmp_path):
    contestants = {
        "standard, Weak Aug": {"method": "standard"},
        "DiDiCM-CP, Weak Aug": {"model_args.prediction": "score", "redraw": 0.5, "recipe": "weak"},
        "score, free labels, 4 draws": {"draws_per_image": 4},
    }
    study = {
        "name": "old",
        "title": "Old",
        "question": "Why?",
        "layout": "metrics",
        "contestants": contestants,
        "resolutions": [7],
        "by_fraction": {"1.0": {"epochs": 3}},
        "readings": {"exact, asked mid-step": {"method": "cp", "query": "middle", "steps": [8, 4]}},
        "curves": {"exact, asked at the start": {"method": "cp", "query": "start"}},
    }
    (tmp_path / "plan.json").write_text(json.dumps({"study": study}))
    reading = {**MAIN, "name": "exact, asked mid-step, 8 steps", "group": "exact, asked mid-step"}
    reading |= {"settings": {"method": "cp", "query": "middle", "steps": 8}}
    condition = {"resolution": 7, "fraction": 1.0, "corruption": None}
    record = old_record("k", "score, free labels, 4 draws", condition, 0, [reading])
    (tmp_path / RESULTS).write_text(json.dumps(record) + "\n")
    new, (result,) = read_plan(tmp_path).study, read_results(tmp_path)
    assert [(m.name, m.variant, m.recipe) for m in new.methods] == [
        ("standard", "Weak Aug", None),
        ("DiDiCM-CP", "Weak Aug", "weak"),
        ("score, importance-sampled labels, 4 draws", "", None),
    ]
    assert new.methods[1].settings == {"model_args.parameterization": "score", "label_proposal": 0.5}
    assert [spec.name for spec in new.samplers] == [
        "exact, midpoint, 8 steps",
        "exact, midpoint, 4 steps",
        "exact, start",
    ]
    assert result.method == str(new.methods[2])
    assert result.measurements[0].sampler == new.samplers[0].name
    assert result.measurements[0].settings == new.samplers[0].settings


def test_sizes_of_an_old_study_are_apart_from_names(tmp_path):
    contestants = {
        f"{line}, {size}": {"line": line, "column": size, "method": method}
        for line, method in (("standard", "standard"), ("DiDiCM-CP", "diffusion"))
        for size in (8, 10)
    }
    content = {"name": "old", "title": "Old", "question": "Why?", "layout": "sizes", "contestants": contestants}
    (tmp_path / "plan.json").write_text(json.dumps({"study": content}))
    study = read_plan(tmp_path).study
    assert [(m.name, m.size, str(m)) for m in study.methods][1] == ("standard", "10", "standard, 10")
    assert make_study(asdict(study), "here") == study

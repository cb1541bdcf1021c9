from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pytest
import yaml

from didicm import Sampler
from didicm.errors import UserError
from didicm.settings import TrainConfig, load_recipe, read_recipe, read_yaml, recipes, to_yaml
from didicm.values import Count, Natural, Range, coerce, flatten, is_mapping, override, setting_types


@pytest.mark.parametrize("method", ["diffusion", "standard"])
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_survives_yaml(name, method, tmp_path):
    config = load_recipe(name, method)
    assert config.method == method
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert override(TrainConfig(), read_yaml(tmp_path / "config.yaml")) == config


def test_what_one_does_with_a_recipe_is_unseen_by_others():
    """Its file is read once."""
    said = read_recipe("finetune", "diffusion")
    assert said["model_args"]["backbone"]
    said["model_args"]["backbone"] = "resnet18"
    config = load_recipe("finetune")
    config.model_args.clear()
    assert read_recipe("finetune", "diffusion")["model_args"]["backbone"] != "resnet18"
    assert load_recipe("finetune") != config


def test_names_may_be_dotted_nested_and_dashed_and_later_changes_win():
    one = override(TrainConfig(), {"optimizer.lr": 1, "batch-size": 7}, {"optimizer": {"lr": "1e-2"}})
    assert (one.optimizer.lr, one.batch_size) == (0.01, 7)
    assert one.optimizer.name == TrainConfig().optimizer.name


def test_free_mappings_merge_and_null_removes_an_entry():
    recipe = load_recipe("finetune")
    changed = override(recipe, {"model_args": {"backbone": "resnet18"}})
    assert changed.model_args == {**recipe.model_args, "backbone": "resnet18"}
    assert changed.model_args["pretrained"] is True
    dotted = override(recipe, {"model_args.backbone": "resnet18"}, {"model_args.pretrained": None})
    kept = {"standardize": True, "layout": "linear", "parameterization": "posterior"}
    assert dotted.model_args == {"backbone": "resnet18", **kept}


def test_another_schedule_starts_anew():
    config = override(TrainConfig(), {"schedule": {"eps": 1e-4}})
    assert config.schedule == {"name": "log-linear", "eps": 1e-4}
    changed = override(config, {"schedule": {"name": "geometric"}}, {"schedule.max": 30})
    assert changed.schedule == {"name": "geometric", "max": 30}


def test_settings_that_exclude_each_other_may_change_places_at_once():
    config = override(TrainConfig(), {"augment.pad": 2})
    assert override(config, {"augment.scale": [0.5, 1]}, {"augment.pad": 0}).augment.scale == (0.5, 1.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epoch": 3}, "no setting 'epoch': did you mean epochs"),
        ({"optimizer": {"rate": 3}}, "no setting 'optimizer.rate'"),
        ({"optimizer": 3}, "optimizer must be a set of names and values, got 3"),
        ({"model_args": 3}, "model_args must be a set of names and values, got 3"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": True}, "epochs must be a whole number, got True"),
        ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ({"fraction": 0}, r"fraction must be in \(0, 1\] or a whole number from 2 \(images per class\), got 0"),
        ({"fraction": 1.0000001}, r"fraction must be in \(0, 1\] or a whole number .*, got 1.0000001"),
        ({"epochs": 1_000_001}, "epochs must be at most 1000000, got 1000001"),
        ({"image.size": 0}, r"image.size must be at least 1, got 0"),
        ({"image.size": "big"}, "image.size must be a whole number or null, got 'big'"),
        ({"image.channels": 33}, "image.channels must be at most 32, got 33"),
        ({"optimizer.clip": -1}, "optimizer.clip must be above 0, got -1"),
        ({"optimizer.lr": "fast"}, "optimizer.lr must be a number, got 'fast'"),
        ({"optimizer.lr": float("nan")}, "optimizer.lr must be a number"),
        ({"run.precision": "8"}, "run.precision must be one of 32-true"),
        ({"run.devices": 0}, "run.devices must be at least 1"),
        ({"run.workers": -1}, "run.workers must be at least 0"),
        ({"sampler.steps": 0}, "steps must be at least 1"),
        ({"sampler.solver": "rk4"}, "sampler.solver must be one of exact, euler, official, got 'rk4'"),
        ({"augment.scale": [2, 3]}, "scale must be two fractions"),
        ({"augment.scale": [1]}, "augment.scale must be a list"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence_that_names_the_setting(change, says):
    with pytest.raises(UserError, match=says) as error:
        override(TrainConfig(), change)
    assert "\n" not in str(error.value)


def test_made_in_python_settings_are_checked_too():
    with pytest.raises(UserError, match="epochs must be at least 1"):
        TrainConfig(epochs=0)


def test_flat_names_are_the_settings_and_plain_values(tmp_path):
    flat = flatten(load_recipe("strong"))
    assert flat.keys() == setting_types(TrainConfig).keys()
    assert yaml.safe_load(yaml.safe_dump(flat)) == flat
    assert override(TrainConfig(), flat) == load_recipe("strong")


def test_a_run_of_version_010_is_understood(tmp_path):
    old = {
        "redraw": 0.5,
        "model_args": {"width": 0.25, "prediction": "posterior"},
        "sampler": {"method": "cp", "query": "middle"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    config = override(TrainConfig(), read_yaml(tmp_path / "config.yaml"))
    assert config.label_proposal == 0.5
    assert config.model_args == {"width": 0.25, "parameterization": "posterior"}
    assert config.sampler.score_time == "midpoint"


@pytest.mark.parametrize("content", ["- a list", "{unclosed", "", "\x00"])
def test_files_that_hold_no_settings_are_named(content, tmp_path):
    (tmp_path / "my.yaml").write_text(content)
    with pytest.raises(UserError, match=r"my\.yaml"):
        read_yaml(tmp_path / "my.yaml")


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("1e-3", float, 1e-3),
        (3, float, 3.0),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([0.1, 1], tuple[float, float] | None, (0.1, 1.0)),
        (None, tuple[float, float] | None, None),
        ("a", Literal["a", "b"], "a"),
        ({"x": 1}, dict[str, Any], {"x": 1}),
        (3, Annotated[int, Range(1, 3)], 3),
    ],
    ids=str,
)
def test_values_take_their_declared_type(value, kind, expected):
    found = coerce(value, kind, "x")
    assert found == expected
    assert type(found) is type(expected)


# What may be 0; and what may be any number, because others bound it or it only counts seconds.
ZERO = {
    "feature_views", "label_noise", "label_proposal", "mask", "sampler.seed", "sampler.tolerance", "augment.pad",
    "augment.hflip", "augment.color_jitter",
    "augment.mixup", "augment.cutmix", "augment.label_smoothing", "optimizer.weight_decay",
    "optimizer.warmup_epochs", "optimizer.ema", "optimizer.momentum", "seed", "data_seed", "run.workers",
    "run.save_seconds", "run.log_seconds",
}  # fmt: skip
LARGE = {
    "sampler.seed", "sampler.chunk", "seed", "data_seed", "batch_size", "accumulate", "optimizer.warmup_epochs",
    "optimizer.clip", "run.validate_epochs", "run.save_seconds", "run.log_seconds",
}  # fmt: skip


@pytest.mark.parametrize("name", setting_types(TrainConfig))
def test_every_setting_has_a_range(name):
    kind = setting_types(TrainConfig)[name]
    told = []
    for value in (-1, -1e-9, float("nan"), float("inf"), "", [], {}, 0, 10**12, 10**30, 1e99):
        may = (
            (str in (kind, *get_args(kind)) and not is_mapping(kind) and value == "")
            or (kind == Mapping[str, Any] and value == {})
            or (name in ZERO and value == 0)
            or (name in LARGE and value == 10**12)
            or (
                name in LARGE
                and kind not in (Count, Count | None, Natural, Natural | None)
                and value in (10**30, 1e99)
            )
        )
        if may:
            override(TrainConfig(), {name: value})
        else:
            with pytest.raises(UserError, match=name.rpartition(".")[2]) as refused:
                override(TrainConfig(), {name: value})
            told.append(str(refused.value))
    assert len(told) >= 5
    assert not any("\n" in sentence for sentence in told)


def test_a_part_of_a_group_of_settings_is_merged_or_refused():
    recipe = load_recipe("small")
    changed = load_recipe("small", data=Path("photos"), optimizer={"lr": np.float32(0.5)}, epochs=np.int64(3))
    assert changed == override(recipe, {"data": "photos", "optimizer.lr": 0.5, "epochs": 3})
    assert (type(changed.data), type(changed.epochs), type(changed.optimizer.lr)) == (str, int, float)
    assert load_recipe("small", sampler=Sampler(steps=3)) == replace(recipe, sampler=Sampler(steps=3))
    with pytest.raises(UserError, match=r"optimizer as names and values, \{'lr': 0.5\}, would reset the rest"):
        replace(recipe, optimizer={"lr": 0.5})

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from didicm import Sampler, official
from didicm.errors import UserError
from didicm.experiments.execute import prepare
from didicm.experiments.results import read_results
from didicm.experiments.spec import Condition, Run
from didicm.experiments.study_file import METHODS, USUAL, compare_study, list_studies, load_study, make_study
from didicm.settings import load_recipe
from didicm.training.build import build_classifier
from didicm.values import flatten, override

GIVEN = (
    "finetune-cpu",
    "fair-cpu",
    "labels-cpu",
    "steps-cpu",
    "steps-classes-cpu",
    "ensembles-cpu",
    "training-cpu",
    "training-short-cpu",
    "batches-cpu",
    "batches-strong-cpu",
    "lengths-strong-cpu",
    "equal-strong-cpu",
    "breadth-cpu",
    "many-cpu",
    "classes-border-cpu",
    "classes-cpu",
    "strong-cpu",
    "strong-labels-cpu",
    "mask-cpu",
    "mask-strong-cpu",
    "borders-cpu",
    "borders-strong-cpu",
    "strong-breadth-cpu",
    "strong-many-cpu",
    "strong-classes-cpu",
    "holdouts-cpu",
    "parameterization-cpu",
)  # on images that do not ship
SHIPPED = ("recipe-cpu", "lamb-cpu", "noise-cpu", "fashion-cpu", "strong-fashion-cpu")  # on the bundled images
SMALL = {
    "name": "mine",
    "title": "A study",
    "question": "Why?",
    "layout": "metrics",
    "methods": [{"name": "standard", "method": "standard"}, {"name": "DiDiCM"}],
}
STEPS = {"layout": "steps", "methods": [{"name": "b"}]}


@cache
def runs_of(name):
    """Runs of a study that ships, with one seed: several tests look at those of the large ones."""
    return load_study(name).runs("fashion-mini", 1)


def keys(name, method):
    return {run.key for run in runs_of(name) if str(run.method) == method}


def test_every_study_has_both_forms():
    names = ("main", "selection", "sizes", "efficiency", "solvers", "schedules", "objectives", "released", "stems")
    both = {f"{name}-{form}" for name in names for form in ("cpu", "imagenet")}
    assert set(list_studies()) == {*both, *GIVEN, *SHIPPED}


@pytest.mark.parametrize("name", list_studies())
def test_every_study_can_be_made_into_runs_and_stored(name):
    study = load_study(name)
    runs = study.runs("fashion-mini", 2)
    assert len({run.key for run in runs}) == len(runs)
    assert make_study(json.loads(json.dumps(asdict(study))), "stored") == study
    assert Run.from_dict(json.loads(json.dumps(runs[-1].to_dict()))) == runs[-1]
    assert (study.data is None) == (name.endswith("imagenet") or name in GIVEN)


def test_the_imagenet_form_is_the_papers_recipe():
    runs = runs_of("main-imagenet")
    assert len(runs) == 4 * 9
    wanted = {  # table tab:aug and the text of the appendix
        "standard, Weak Aug": (2e-3, True, 1024, 0.0, 0.0, "cross-entropy"),
        "standard, Strong Aug": (5e-3, True, 2048, 0.2, 0.1, "multi-label"),  # A1 of ResNet strikes back
        "DiDiCM-CP, Weak Aug": (2e-3, True, 1024, 0.0, 0.0, None),
        "DiDiCM-CP, Strong Aug": (3.5e-3, False, 2048, 0.2, 0.1, None),
    }
    for run in runs:
        config = run.config
        lr, scaled, batch, mixup, smoothing, objective = wanted[str(run.method)]
        assert (config.optimizer.lr, config.optimizer.scale_lr, config.batch_size) == (lr, scaled, batch)
        assert config.augment.mixup == mixup
        assert config.augment.label_smoothing == smoothing
        assert config.epochs == 600
        assert config.optimizer.weight_decay == 0.1
        assert config.model == "didirn50"
        assert config.image.size == run.condition.resolution
        assert (config.label_proposal, config.draws_per_image) == (0, 1)
        assert config.model_args.get("parameterization", "score") == "score"
        assert objective in (None, config.objective)
        assert config.model_args.get("drop_path_rate", 0) == (0.05 if objective == "multi-label" else 0)
    assert {run.condition.resolution for run in runs} == {56, 112, 224}
    assert {run.condition.fraction for run in runs} == {0.25, 0.5, 1.0}


def test_the_released_form_is_the_released_recipes_and_sampler():
    """Nothing of the study but the size and number of images departs from what produced the published numbers."""
    runs = runs_of("released-imagenet")
    assert len(runs) == 4 * 9
    for run in runs:
        recipe = {"Weak Aug": "official-weak", "Strong Aug": "official-strong"}[run.method.variant]
        changed = {"data": "fashion-mini", **run.condition.settings}
        # How it is carried out is the study's business, but for the precision.
        changed |= {f"run.{name}": x for name, x in vars(run.config.run).items() if name != "precision"}
        assert run.config == override(load_recipe(recipe, run.config.method), changed)
        if run.config.method == "diffusion":
            (spec,) = run.samplers
            asked = Sampler().changed(**spec.settings).identity()
            assert asked == official.SAMPLER.identity() | {"score_time": "start"}  # which only `exact` may choose
        else:
            strong = recipe == "official-strong"
            assert run.config.objective == ("multi-label" if strong else "cross-entropy")
            assert run.config.model_args == ({"drop_path_rate": 0.05} if strong else {})


@pytest.mark.parametrize("form", ["cpu", "imagenet"])
def test_stems_differ_in_the_stem_alone_and_two_of_them_are_the_released_ones(form):
    released = {name: keys(f"released-{form}", f"{name}, Strong Aug") for name in ("standard", "DiDiCM-CP")}
    assert keys(f"stems-{form}", "standard, 7x7 stem") == released["standard"]
    assert keys(f"stems-{form}", "DiDiCM-CP, 3x3 stem") == released["DiDiCM-CP"]
    others, stems = {}, {}
    for run in runs_of(f"stems-{form}"):
        network = run.config.method, run.config.model, str(run.config.model_args)  # which conditions share
        if network not in stems:
            with torch.device("meta"):
                stems[network] = build_classifier(run.config, 1000, 3).model.stem.conv
        stem = stems[network]
        assert run.method.variant == "{0}x{0} stem".format(stem.kernel_size[0])
        assert stem.stride == {3: (1, 1), 7: (2, 2)}[stem.kernel_size[0]]
        rest = {name: x for name, x in run.settings.items() if name != "model_args"}
        rest |= {name: x for name, x in run.config.model_args.items() if name != "stem"}
        assert others.setdefault((run.method.name, run.condition), rest) == rest


@pytest.mark.parametrize("form", ["cpu", "imagenet"])
def test_studies_share_the_networks_that_they_have_in_common(form):
    ours = keys(f"main-{form}", "DiDiCM-CP, Strong Aug")
    assert ours
    assert keys(f"selection-{form}", "DiDiCM-CP, Strong Aug") == ours
    assert keys(f"efficiency-{form}", "DiDiCM, Strong Aug") == ours
    assert keys(f"efficiency-{form}", "standard, Strong Aug") == keys(f"main-{form}", "standard, Strong Aug")


def test_chains_are_many_only_where_the_papers_figure_needs_them():
    for run in runs_of("efficiency-imagenet"):
        if run.method.baseline:
            assert not run.samplers  # they are of DiDiCM's networks
            continue
        labels = [spec for spec in run.samplers if spec.settings["method"] == "cl"]
        assert "CL, 2 steps, 16 chains" in [spec.name for spec in labels]
        in_figure = (run.condition.resolution, run.condition.fraction) == (56, 1.0)
        assert len(labels) == (12 if in_figure else 1)


def test_published_results_belong_to_todays_runs():
    """A new setting may not change the keys of runs that do not use it: they would all be run again."""
    study = load_study("solvers-cpu")
    stored = read_results(Path(__file__).parents[3] / "docs" / "results" / study.name)
    assert {result.key for result in stored} == {run.key for run in study.runs(study.data, study.seeds)}


def test_a_key_tells_trainings_apart_and_nothing_else(tiny):
    def key(**settings):
        return tiny(settings).runs("fashion-mini", 1)[0].key

    assert key() == key(**{"run.workers": 3, "out": "elsewhere"})
    runs = tiny().runs("fashion-mini", 2)
    corrupted = tiny(corruptions=["noise:3"]).runs("fashion-mini", 1)
    other = [
        key(epochs=3),
        key(**{"run.precision": "bf16-mixed"}),
        tiny(held_out=0).runs("fashion-mini", 1)[0].key,
    ]
    assert len({*(run.key for run in (*runs, *corrupted)), *other}) == 4 + 2 + 3


def test_a_list_of_steps_makes_a_sampler_each_and_only_the_first_keeps_posteriors():
    samplers = {"exact": {"steps": [4, 1]}, "labels": {"method": "cl", "steps": 2, "chains": [2, 8]}}
    made = make_study({**SMALL, "samplers": samplers, "curves": {"exact": {"steps": [1, 2]}}}, "here").samplers
    assert [(spec.name, spec.stored, spec.group) for spec in made] == [
        ("exact, 4 steps", True, "exact"),
        ("exact, 1 step", False, "exact"),
        ("labels, 2 chains", True, "labels"),
        ("labels, 8 chains", False, "labels"),
        ("exact, 2 steps", False, "exact"),
    ]
    assert made[3].settings == {"method": "cl", "steps": 2, "chains": 8}
    listed = [{"name": "first", "settings": {"steps": 4}}]
    beside = make_study({**SMALL, "samplers": listed, "curves": {"exact": {"steps": [1, 2]}}}, "here").samplers
    assert [(spec.name, spec.stored) for spec in beside] == [
        ("first", True),
        ("exact, 1 step", False),
        ("exact, 2 steps", False),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "there is no key 'colour'"),
        ({"": 1}, "there is no key ''"),
        ({"method": []}, "there is no key 'method': did you mean methods?"),
        ({"layout": "round"}, "layout must be one of"),
        ({"layout": "sizes"}, "every method needs a size"),
        ({"methods": []}, "methods is empty"),
        ({"methods": {"a": {}}}, "methods must be a list"),
        ({"methods": ["a"]}, "methods must be a set of names and values"),
        ({"methods": [{"method": "standard"}]}, "name must be given"),
        ({"methods": [{"name": 8}]}, "name must be text, got 8"),
        ({"methods": [{"name": "a"}, {"name": "a", "epochs": 3}]}, "two methods are called 'a'"),
        ({"published": "tab:best"}, "published must be one of tab:main_results"),
        ({"published": "tab:all_resnet"}, "published must be one of tab:main_results, tab:selection, tab:nfe"),
        ({"samplers": {"a": {"speed": 2}}}, "no setting 'speed'"),
        ({"samplers": {"a": {"solver": "eulr"}}}, "solver must be one of exact, euler, official, got 'eulr'"),
        ({"samplers": {"a": {"steps": 0}}}, "steps must be at least 1"),
        ({"samplers": {"a": {"steps": "8"}}}, "steps must be a whole number, got '8'"),
        ({"samplers": {"a": None}}, "samplers: a must be a set of names and values"),
        ({"samplers": "a"}, "samplers must be a set of names and values"),
        ({"curves": {"a": {"steps": 2}}}, "curves need samplers"),
        ({"samplers": {"a": {"steps": 2, "at": {"size": 7}}}}, "at has no 'size'"),
        ({"samplers": {"a": {"steps": 2, "at": {"fraction": 0.3}}}}, "which no condition is"),
        ({"samplers": {"a": {"steps": 2, "at": {"fraction": 1.0}}}}, "at is for curves"),
        ({"baseline_samplers": {"a": {"views": 2, "at": {"size": 7}}}}, "at has no 'size'"),
        ({"baseline_samplers": {"a": {"views": 2, "at": {"fraction": 1.0}}}}, "at is for curves"),
        ({"baseline_samplers": {"a": {"steps": 2}}}, "a standard classifier has no steps: it may have views"),
        ({"corruptions": ["fog:3"]}, "fog"),
        ({"corruptions": "none"}, "corruptions must be a list"),
        ({"conditions": [{"pixels": 3}]}, "there is no key 'pixels'"),
        ({"by_fraction": {"half": {}}}, "a name in by_fraction must be a number, got 'half'"),
        ({"by_fraction": {0.5: {"epochs": 1}}}, "by_fraction has .0.5., which no condition has"),
        ({"resolutions": 28}, "resolutions must be a list"),
        ({"resolutions": ["7"]}, "must be a whole number or null, got '7'"),
        ({"resolutions": [0]}, "resolution must be at least 1"),
        ({"resolutions": []}, "at least one entry each"),
        ({"fractions": [1.5]}, r"fractions must be in \(0, 1\]"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seeds": "3"}, "seeds must be a whole number"),
        ({"held_out": "a tenth"}, "held_out must be a number"),
        ({"held_out": 1}, "held_out must be below 1"),
        ({"layout": "steps"}, "layout steps needs samplers"),
        ({**STEPS, "samplers": {"a": {"select": "argmax"}}}, "needs steps"),
        ({**STEPS, "samplers": {"a": {"method": "cl", "steps": [1], "chains": [4, 8]}}}, "a has .* steps twice"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(UserError, match=rf"^mine.yaml: .*{message}"):
        make_study({**SMALL, **change}, "mine.yaml")


def test_unknown_and_unreadable_studies_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no study and no YAML file 'magic': didicm study lists those that ship"):
        load_study("magic")
    with pytest.raises(UserError, match=r"'main-cpv': did you mean main-cpu\?"):
        load_study("main-cpv")
    with pytest.raises(UserError, match=r"nowhere.yaml cannot be read"):
        load_study("nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    for content, message in (
        ("a: [", "cannot be read"),
        ("- a", "holds no names and values: give a YAML file with title"),
        ("title: only a title", "question, layout, methods must be given"),
    ):
        broken.write_text(content)
        with pytest.raises(UserError, match=rf"broken.yaml:? {message}"):
            load_study(str(broken))


def test_a_study_of_ones_own_is_named_after_its_file(tmp_path):
    path = tmp_path / "scans.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "name"}))
    assert load_study(str(path)).name == "scans"


def test_a_setting_that_does_not_exist_is_named():
    study = make_study({**SMALL, "settings": {"epoch": 3}}, "here")
    with pytest.raises(UserError, match=r"no setting 'epoch': did you mean epochs\?"):
        study.runs("fashion-mini", 1)


def test_the_users_settings_win_over_recipes_and_study_but_not_over_what_makes_a_method():
    content = {
        **SMALL,
        "fractions": [0.5],
        "by_fraction": {0.5: {"epochs": 7}},
        "settings": {"optimizer": {"lr": 1}},
        "methods": [{"name": "weak", "recipe": "weak"}, {"name": "few", "batch_size": 9}],
    }

    def made(**asked):
        return [run.config for run in make_study(content, "here").runs("fashion-mini", 1, asked)]

    assert (made()[0].epochs, made()[0].optimizer.lr, made()[0].batch_size) == (7, 1.0, 1024)
    asked = made(**{"epochs": 3, "optimizer.lr": "1e-3", "batch_size": 5})
    assert [config.epochs for config in asked] == [3, 3]
    assert [config.optimizer.lr for config in asked] == [1e-3, 1e-3]
    assert [config.batch_size for config in asked] == [5, 9]


def test_a_comparison_leaves_out_what_the_recipe_makes_the_same():
    assert [str(method) for method in compare_study().methods] == [str(METHODS[name]) for name in USUAL]
    smoothed = compare_study(settings={"augment.label_smoothing": 0.1})
    assert METHODS["standard-smooth"] not in smoothed.methods
    assert METHODS["standard-smooth"] in compare_study(recipe="weak").methods
    on_backbone = [name for name, method in METHODS.items() if method in compare_study(recipe="finetune").methods]
    assert on_backbone == ["standard", "standard-smooth", "didicm-score", "didicm-posterior"]
    first = next(method for method in compare_study(recipe="finetune").methods if not method.baseline)
    assert first == METHODS["didicm-posterior"]  # as the recipe trains it; the verdict is on the first
    repeated = compare_study(methods=["standard", "standard"], resolutions=[7, 7], corruptions=["none", "noise:3"])
    assert len(repeated.methods) == 1
    assert repeated.conditions == (Condition(7), Condition(7, 1.0, "noise:3"))


def test_label_noise_is_an_axis_of_comparisons_and_studies(tiny):
    study = compare_study(methods=["standard"], label_noises=[0.0, 0.4, "confusion.csv"])
    named = [str(condition) for condition in study.conditions]
    assert named == [
        "100 % of the images",
        "100 % of the images, 40 % label noise",
        "100 % of the images, label noise of confusion.csv",
    ]
    runs = tiny(label_noises=[0, 0.4]).runs("fashion-mini", 1)
    assert [run.config.label_noise for run in runs] == [0.0, 0.0, 0.4, 0.4]
    assert [run.condition for run in map(Run.from_dict, (run.to_dict() for run in runs))] == [
        run.condition for run in runs
    ]
    (clean, test), (noisy, same_test) = prepare(runs[0]), prepare(runs[2])
    assert np.array_equal(test.labels, same_test.labels)
    right = {**labels_by_name(clean.train), **labels_by_name(clean.val)}
    for images in (noisy.train, noisy.val):  # a temperature is fitted on labels as they are
        wrong = np.mean([right[name] != label for name, label in labels_by_name(images).items()])
        assert wrong > 0
    with pytest.raises(UserError, match=r"label_noise must be in \[0, 1\], got 1.5"):
        compare_study(label_noises=[1.5])


def labels_by_name(images):
    return {images.name(i): images.labels[i] for i in range(len(images))}


def test_conditions_may_differ_in_their_table_of_labels(tiny):
    conditions = [{"resolution": 7, "labels": name} for name in ("worse.csv", "aggre.csv", None)]
    study = make_study({**asdict(tiny()), "conditions": conditions}, "here")
    runs = study.runs("photos", 1, {"labels": "all.csv"})
    assert [run.config.labels for run in runs[::2]] == ["worse.csv", "aggre.csv", "all.csv"]
    assert len({run.key for run in runs}) == 6
    assert str(study.conditions[0]) == "7 px, 100 % of the images, labels of worse.csv"
    assert sorted(study.conditions, key=lambda c: c.noise_order)[0].labels is None


def test_recipe_few_is_what_its_study_recommends():
    """But for what that study varies, its images, and the sampler that it compares with others."""
    run = next(r for r in load_study("parameterization-cpu").runs("data", 1) if r.method.variant == "posterior")
    recipe = flatten(load_recipe("few"))
    own = {
        "data",
        "seed",
        "fraction",
        "epochs",
        "image.size",
        "image.limit",
        "run.validate_epochs",
        "sampler.method",
    }
    differ = {name for name, value in flatten(run.config).items() if recipe[name] != value}
    assert differ <= own, differ - own


@pytest.mark.parametrize("recipe", ["small", "few", "weak", "strong", "finetune"])
def test_a_comparison_by_default_has_different_methods_under_every_recipe(recipe):
    runs = compare_study(recipe=recipe, settings={"model_args.pretrained": False}).runs("fashion-mini", 1)
    assert len({run.key for run in runs}) == len(runs) > 2
    if recipe == "few":  # the recipe's own stands for DiDiCM
        assert [str(run.method) for run in runs] == ["standard", "DiDiCM, ResNet blocks", "DiDiCM, score"]


def test_a_method_for_another_network_is_refused_if_it_was_asked_for():
    with pytest.raises(UserError, match="didicm-few has the blocks of a DiDiRN, the model is backbone_score"):
        compare_study(recipe="finetune", methods=("standard", "didicm-few"))


@pytest.mark.parametrize("recipe", ["few", "small"])
def test_the_method_few_of_a_comparison_is_the_recipe_of_that_name(recipe):
    """Under recipe few to the letter; under another in all but its length, batches, images and augmentation.

    How many labels to mask, and what to predict, goes with the augmentation.
    """
    run = compare_study(methods=["didicm-few"], recipe=recipe).runs("fashion-mini", 1)[0]
    few = override(load_recipe("few"), {"data": "fashion-mini"})
    differ = {name for name, value in flatten(run.config).items() if flatten(few)[name] != value}
    shared = {
        "epochs",
        "batch_size",
        "mask",
        "model_args",
        "augment.auto_augment",
        "augment.mixup",
        "augment.cutmix",
    }
    assert differ <= {"run.validate_epochs", *(shared if recipe == "small" else ())}

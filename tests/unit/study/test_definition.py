import pytest
import yaml

from didicm.errors import UserError
from didicm.experiments.definition import load_study, make_study, read_study, studies
from didicm.settings import TrainConfig, override

SMALL = {
    "name": "mine",
    "title": "A study",
    "question": "Why?",
    "layout": "metrics",
    "contestants": {"standard": {"method": "standard"}, "DiDiCM": {}},
}


def configs(name, **settings):
    study = load_study(name)
    base = study.base("fashion-mini", settings)
    return {(cell.method, cell.setting): cell.config(base) for cell in study.cells(1)}


def keys(name, method):
    study = load_study(name)
    base = study.base("fashion-mini", {})
    return {cell.key(base) for cell in study.cells(1) if cell.method == method}


def test_every_study_has_both_forms():
    names = ("main", "selection", "sizes", "efficiency", "solvers", "schedules", "objectives")
    assert set(studies()) == {f"{name}-{form}" for name in names for form in ("cpu", "imagenet")}


@pytest.mark.parametrize("name", studies())
def test_every_study_can_be_made_into_trainings(name):
    study = load_study(name)
    base = study.base("fashion-mini", {})
    cells = study.cells(2)
    assert len({cell.key(base) for cell in cells}) == len(cells)
    assert make_study(study.__dict__, "a plan") == study
    assert (study.data is None) == name.endswith("imagenet")


def test_the_imagenet_form_is_the_papers_recipe():
    made = configs("main-imagenet")
    assert len(made) == 4 * 9
    wanted = {  # table tab:aug and the text of the appendix
        "standard, Weak Aug": (2e-3, True, 1024, 0.0, 0.0, "cross-entropy"),
        "standard, Strong Aug": (5e-3, True, 2048, 0.2, 0.1, None),
        "DiDiCM-CP, Weak Aug": (2e-3, True, 1024, 0.0, 0.0, None),
        "DiDiCM-CP, Strong Aug": (3.5e-3, False, 2048, 0.2, 0.1, None),
    }
    for (method, setting), config in made.items():
        lr, scaled, batch, mixup, smoothing, objective = wanted[method]
        assert (config.optimizer.lr, config.optimizer.scale_lr, config.batch_size) == (lr, scaled, batch)
        assert config.augment.mixup == mixup
        assert config.augment.label_smoothing == smoothing
        assert config.epochs == 600
        assert config.optimizer.weight_decay == 0.1
        assert config.model == "didirn50"
        assert config.image.size == setting.resolution
        assert (config.label_proposal, config.draws_per_image) == (0, 1)
        assert config.model_args.get("parameterization", "score") == "score"
        assert objective in (None, config.objective)
    assert {s.resolution for _, s in made} == {56, 112, 224}
    assert {s.fraction for _, s in made} == {0.25, 0.5, 1.0}


@pytest.mark.parametrize("form", ["cpu", "imagenet"])
def test_studies_share_the_networks_that_they_have_in_common(form):
    ours = keys(f"main-{form}", "DiDiCM-CP, Strong Aug")
    assert keys(f"selection-{form}", "DiDiCM-CP, Strong Aug") == ours
    assert keys(f"efficiency-{form}", "DiDiCM, Strong Aug") == ours
    assert keys(f"efficiency-{form}", "standard, Strong Aug") == keys(f"main-{form}", "standard, Strong Aug")


def test_a_list_of_steps_makes_a_reading_each_and_only_the_first_keeps_posteriors():
    readings = {"exact": {"steps": [4, 1]}, "labels": {"method": "cl", "steps": 2, "chains": [2, 8]}}
    curves = {"exact": {"steps": [1, 2]}}
    made = make_study({**SMALL, "readings": readings, "curves": curves}, "here").cells(1)[0].readings
    assert [(reading.name, reading.stored) for reading in made] == [
        ("exact, 4 steps", True),
        ("exact, 1 step", False),
        ("labels, 2 chains", True),
        ("labels, 8 chains", False),
        ("exact, 2 steps", False),
    ]
    assert made[3].settings == {"method": "cl", "steps": 2, "chains": 8}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"colour": 1}, "there is no key 'colour'"),
        ({"layout": "round"}, "layout must be one of"),
        ({"layout": "sizes"}, "every contestant needs a column"),
        ({"contestants": {}}, "contestants is empty"),
        ({"published": "tab:best"}, "published must be one of tab:main_results"),
        ({"published": "tab:all_resnet"}, "published must be one of tab:main_results, tab:selection, tab:nfe"),
        ({"readings": {"a": {"speed": 2}}}, "no setting 'speed'"),
        ({"readings": {"a": {"solver": "eulr"}}}, "solver must be one of exact, euler, official, got 'eulr'"),
        ({"readings": {"a": {"steps": 0}}}, "needs at least one step"),
        ({"readings": {"a": {"steps": "8"}}}, "steps must be a whole number, got '8'"),
        ({"readings": {"a": None}}, "readings: a must be a set of names and values"),
        ({"readings": ["a"]}, "readings must be a set of names and values"),
        ({"curves": {"a": {"steps": 2}}}, "curves need readings"),
        ({"corruptions": ["fog:3"]}, "fog"),
        ({"corruptions": "none"}, "corruptions must be a list"),
        ({"by_fraction": {"half": {}}}, "a name in mine.yaml: by_fraction must be a number, got 'half'"),
        ({"by_fraction": {0.5: {"epochs": 1}}}, "by_fraction has .0.5., which fractions lacks"),
        ({"contestants": ["a"]}, "contestants must be a set"),
        ({"contestants": {8: {}}}, "a name in mine.yaml: contestants must be text, got 8"),
        ({"resolutions": 28}, "resolutions must be a list"),
        ({"resolutions": ["7"]}, "must be a whole number or nothing, got '7'"),
        ({"fractions": [2]}, r"fractions must lie in \(0, 1\]"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seeds": "3"}, "seeds must be a whole number"),
        ({"held_out": "a tenth"}, "held_out must be a number"),
        ({"layout": "steps"}, "layout steps needs readings"),
        ({"layout": "steps", "readings": {"a": {"select": "argmax"}}, "contestants": {"b": {}}}, "needs steps"),
    ],
)
def test_mistakes_are_named(change, says):
    with pytest.raises(UserError, match=says):
        make_study({**SMALL, **change}, "mine.yaml")


def test_unknown_and_unreadable_studies_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no study 'magic': choose one of efficiency-cpu, .* or give a YAML file"):
        load_study("magic")
    with pytest.raises(UserError, match=r"nowhere.yaml cannot be read"):
        load_study("nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(UserError, match=r"broken.yaml cannot be read"):
        load_study(str(broken))
    broken.write_text("- a")
    with pytest.raises(UserError, match=r"broken.yaml is no study"):
        load_study(str(broken))
    broken.write_text("title: only a title")
    with pytest.raises(UserError, match="question, layout, contestants must be given"):
        load_study(str(broken))


def test_a_setting_that_does_not_exist_is_named():
    study = make_study({**SMALL, "settings": {"epoch": 3}}, "here")
    with pytest.raises(UserError, match="no setting 'epoch'"):
        study.base("fashion-mini", {})


def test_the_users_settings_win_over_recipes_and_study_but_not_over_what_makes_a_contestant():
    content = {
        **SMALL,
        "fractions": [0.5],
        "by_fraction": {0.5: {"epochs": 7}},
        "settings": {"optimizer": {"lr": 1}},
    }
    content["contestants"] = {"weak": {"recipe": "weak"}, "few": {"batch_size": 9}}
    study = make_study(content, "here")

    def made(**asked):
        base = study.base("fashion-mini", asked)
        return {cell.method: cell.config(base) for cell in study.cells(1, asked)}

    assert (made()["weak"].epochs, made()["weak"].optimizer.lr, made()["weak"].batch_size) == (7, 1.0, 1024)
    asked = made(**{"epochs": 3, "optimizer.lr": "1e-3", "batch_size": 5})
    assert [config.epochs for config in asked.values()] == [3, 3]
    assert [config.optimizer.lr for config in asked.values()] == [1e-3, 1e-3]
    assert [config.batch_size for config in asked.values()] == [5, 9]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("method", "Standard", "method must be one of diffusion, standard"),
        ("epochs", "many", "epochs must be a whole number"),
        ("epochs", True, "epochs must be a whole number"),
        ("optimizer.lr", "fast", "optimizer.lr must be a number"),
        ("optimizer.lr", float("nan"), "optimizer.lr must be a number"),
        ("data", 5, "data must be text"),
        ("augment", {"flip": 1}, "no setting 'augment.flip'"),
        ("augment.scale", [1, 2, 3], "augment.scale must be"),
    ],
)
def test_values_are_checked_and_not_only_names(name, value, says):
    with pytest.raises(UserError, match=says):
        override(TrainConfig(), {name: value})


def test_a_study_of_ones_own_is_named_after_its_file(tmp_path):
    path = tmp_path / "scans.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "name"}))
    assert read_study(path).name == "scans"

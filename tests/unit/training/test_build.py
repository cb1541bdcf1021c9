import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from didicm import DiffusionClassifier, StandardClassifier, UserError, load, official, save
from didicm.models.backbone import START
from didicm.settings import load_recipe
from didicm.training.build import build, build_classifier, check_batches, estimate
from didicm.training.steps import make_optimizer
from didicm.values import override

TINY = {"data": "fashion-mini", "model_args.width": 0.125, "fraction": 0.1, "image.size": 8, "batch_size": 20}


def config(**changes):
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe("small"), {**TINY, **settings})


def test_both_kinds_have_the_same_trunk_and_weights_depend_on_the_seed_alone():
    ours, theirs = (build_classifier(config(method=method), 10, 1) for method in ("diffusion", "standard"))
    assert isinstance(ours, DiffusionClassifier)
    assert isinstance(theirs, StandardClassifier)
    trunk = {name: x.shape for name, x in theirs.model.state_dict().items()}
    assert trunk.items() <= {name: x.shape for name, x in ours.model.state_dict().items()}.items()
    again = build_classifier(config(), 10, 1)
    other = build_classifier(config(seed=1), 10, 1)
    first = "stem.conv.weight"
    assert (again.model.state_dict()[first] == ours.model.state_dict()[first]).all()
    assert (other.model.state_dict()[first] != ours.model.state_dict()[first]).any()


@pytest.mark.parametrize("name", ["official-weak", "official-strong"])
def test_released_settings_give_each_method_its_own_network(name):
    """What produced the published numbers: DiDiRN-50 with a 3 x 3 stem beside ResNet-50 with its 7 x 7 one."""
    with torch.device("meta"):
        ours, theirs = (
            build_classifier(load_recipe(name, method), 1000, 3).model for method in ("diffusion", "standard")
        )
    assert (ours.layout, ours.stem.conv.kernel_size, ours.stem.conv.stride) == ("official", (3, 3), (1, 1))
    assert (theirs.stem.conv.kernel_size, theirs.stem.conv.stride) == ((7, 7), (2, 2))
    assert theirs.drop_path_rates[-1] == pytest.approx(0.05 if name == "official-strong" else 0)
    assert {load_recipe(name, method).optimizer.weight_decay for method in ("diffusion", "standard")} == {0.01}
    assert load_recipe(name).sampler == official.SAMPLER


@pytest.mark.parametrize("stem", ["resnet", "small"])
@pytest.mark.parametrize("method", ["diffusion", "standard"])
@pytest.mark.parametrize("recipe", ["official-strong", "strong"])
def test_both_methods_take_both_stems_on_small_images(recipe, method, stem):
    small = {"model": "didirn8", "model_args": {"width": 0.125, "stem": stem}}
    classifier = build_classifier(override(load_recipe(recipe, method), small), 10, 1)
    assert classifier.model.stem.conv.kernel_size == {"resnet": (7, 7), "small": (3, 3)}[stem]
    image, target = torch.randn(4, 1, 7, 7), torch.full((4, 10), 0.1)
    assert classifier.loss(image, target).isfinite()
    assert classifier.eval()(image).shape == (4, 10)


def test_the_default_schedule_is_near_uniform_for_any_number_of_classes():
    for count in (2, 10, 5000):
        process = build_classifier(config(), count, 1).process
        assert process.schedule.eps == min(1e-3, 1 / count)


def test_the_images_decide_about_size_and_colour_and_the_data_is_opened_once(write, tmp_path, monkeypatch):
    for k, name in enumerate("ab"):
        for i in range(5):
            write(tmp_path / name / f"{i}.png", seed=10 * k + i, size=(30, 20), mode="L")
    opened = []
    import didicm.data.sources as sources

    real = sources.open_folder
    monkeypatch.setattr(sources, "open_folder", lambda *a: opened.append(a) or real(*a))
    made = build(config(data=str(tmp_path), fraction=1, image__size=None, image__channels=None))
    assert (made.eval_transform.size, made.eval_transform.channels) == (20, 1)
    assert made.train.channels == made.val.channels == 1
    assert len(opened) == 1


@pytest.mark.parametrize("empty", [False, True])
def test_class_weights_are_of_mean_one_over_the_images(empty, make_folder, write, tmp_path):
    make_folder(tmp_path / "data", ["cat", "dog", "emu"], count=4)
    for i in range(12):
        write(tmp_path / "data" / "cat" / f"more{i}.png", seed=50 + i)
    table = tmp_path / "noise.csv"
    table.write_text("label,cat,dog,emu\ncat,1,0,0\ndog,0,1,0\nemu,1,0,0\n")  # every emu is called a cat
    noise = str(table) if empty else 0.0
    made = build(config(data=str(tmp_path / "data"), fraction=1, balance="weights", label_noise=noise))
    counts = np.bincount(made.train.labels, minlength=len(made.class_names))
    assert made.training_prior == {"images": counts.tolist(), "balance": "weights"}
    assert (counts == 0).any() == empty
    assert made.class_weight[0] < made.class_weight[1]
    assert (made.class_weight.numpy() * counts).sum() / counts.sum() == pytest.approx(1)


def test_batches_must_divide_evenly():
    made = build(config())
    assert check_batches(config(batch_size=20, accumulate=2), made, 2) == 5
    with pytest.raises(UserError, match="choose a multiple of 3"):
        check_batches(config(), made, 3)
    with pytest.raises(UserError, match=r"200 training images, fewer than one batch of 400: .* such as to 32,"):
        check_batches(config(batch_size=400), made, 1)
    backbone = {"backbone": "test_resnet", "pretrained": False, "frozen": True}
    frozen = override(load_recipe("finetune"), {**TINY, "model_args.width": None, "model_args": backbone})
    with pytest.raises(
        UserError, match=r"a single image: raise batch_size, or set model_args\.standardize to false"
    ):
        check_batches(override(frozen, {"batch_size": 2, "accumulate": 2}), build(frozen), 1)
    with pytest.raises(UserError, match="feature_views is for one process"):
        check_batches(frozen, build(frozen), 2)
    frozen = override(frozen, {"model_args.standardize": False})
    assert check_batches(override(frozen, {"batch_size": 2, "accumulate": 2}), build(frozen), 1) == 1


@pytest.mark.parametrize("method", ["diffusion", "standard"])
@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 3e-3), ("lamb", 5e-3), ("sgd", 0.1)])
def test_a_head_on_standardised_features_leaves_its_small_start(optimizer, lr, method):
    """LAMB scales a step with the norm of the weights: those that start small need to be outside of that."""
    backbone = {"backbone": "test_resnet", "pretrained": False, "frozen": True}
    own = {
        **TINY,
        "model_args.width": None,
        "model_args": backbone,
        "optimizer.name": optimizer,
        "optimizer.lr": lr,
    }
    own = override(load_recipe("finetune", method), own)
    torch.manual_seed(0)
    classifier = build_classifier(own, 4, 3).train()
    image, target = torch.randn(80, classifier.model.num_features), torch.eye(4).repeat(20, 1)
    image[:, :4] += 3 * target
    steps = make_optimizer(own, classifier.model)
    for _ in range(100):
        steps.zero_grad()
        classifier.loss(image, target, classifier.random_numbers(80)).backward()
        steps.step()
    assert (classifier.eval()(image).argmax(1) == target.argmax(1)).float().mean() > 0.9
    assert classifier.model.fc.weight.std() > 5 * START


def test_an_estimate_grows_with_what_it_is_of():
    made = build(config())
    one, two = (estimate(config(batch_size=n), made, 1, gpu=False) for n in (20, 40))
    assert one.steps_per_epoch == 10
    assert two.activations_mb == pytest.approx(2 * one.activations_mb)
    assert one.weights_mb == pytest.approx(5 * 4 * one.cost.parameters / 2**20)  # with averaged weights
    for precision, copies in (("bf16-mixed", 9), ("16-mixed", 5)):  # a GPU keeps all but the gradients twice
        there = estimate(config(run__precision=precision), made, 1, gpu=True)
        assert there.weights_mb == pytest.approx(copies * 4 * one.cost.parameters / 2**20)


def test_gradient_checkpointing_shows_in_the_estimate_and_some_networks_refuse_it():
    settings = [config(run__grad_checkpointing=enable) for enable in (False, True)]
    plain, again = (estimate(made, build(made), 1, gpu=False) for made in settings)
    assert again.activations_mb < 0.6 * plain.activations_mb
    network = {"model": "backbone_score", "model_args": {"backbone": "dla46_c", "width": None, "stem": None}}
    with pytest.raises(UserError, match=r"does not support run\.grad_checkpointing"):
        build(config(run__grad_checkpointing=True, **network))


@pytest.mark.parametrize(("name", "value"), [("tensorboard", True), ("wandb", "project")])
def test_a_writer_that_is_not_installed_is_told_with_what_to_install(name, value, monkeypatch):
    monkeypatch.setattr("didicm.training.build.find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"run\.{name} needs {name}: pip install 'didicm\[{name}\]'"):
        build(config(**{f"run__{name}": value}))


def test_an_optimiser_that_timm_lacks_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="'adamv' is not an optimiser of timm's: did you mean adam"):
        build(config(optimizer__name="adamv"))
    build(config(optimizer__name="LAMB"))


def test_weights_start_a_training_and_leave_no_trace_in_its_model(tmp_path):
    torch.manual_seed(7)
    theirs = timm.create_model("tf_efficientnet_lite0")
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    arguments = {"backbone": "tf_efficientnet_lite0", "weights": str(tmp_path / "theirs.safetensors")}
    own = {"data": "fashion-mini", "image.channels": 3, "image.size": 8, "fraction": 0.1, "model_args": arguments}
    for method in ("diffusion", "standard"):
        run = build(override(load_recipe("finetune", method), own))  # which would fetch pretrained ones
        assert torch.equal(run.classifier.model.backbone.conv_stem.weight, theirs.conv_stem.weight)
        # What timm says that these weights were trained with.
        assert run.eval_transform.mean == run.train_transform.eval_transform.mean == (0.5, 0.5, 0.5)
        assert "weights" not in save(run.classifier, tmp_path / method).joinpath(
            "config.json"
        ).read_text().replace("weights_sha256", "")
    (tmp_path / "theirs.safetensors").unlink()
    with pytest.raises(UserError, match=r"theirs.safetensors does not exist: give a file"):
        build(override(load_recipe("finetune"), own))
    assert load(tmp_path / "diffusion").classifier.num_classes == 10


def test_a_model_directory_may_not_name_weights(tmp_path):
    save(build_classifier(config(), 10, 1), tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"arguments": {', '"arguments": {"weights": "/etc/passwd",')
    )
    with pytest.raises(UserError, match="no argument 'weights'"):
        load(tmp_path)


def test_label_noise_is_of_training_labels_alone(tmp_path, tiny_config):
    clean, low, high = (
        build(tiny_config(tmp_path / "run", label_noise=share, fraction=0.5)) for share in (0.0, 0.2, 0.4)
    )
    assert [clean.train.name(i) for i in range(9)] == [high.train.name(i) for i in range(9)]
    wrong = [run.train.labels != clean.train.labels for run in (low, high)]
    assert 0.1 < wrong[0].mean() < 0.3 < wrong[1].mean() < 0.5
    assert not np.any(wrong[0] & ~wrong[1])
    assert np.array_equal(clean.val.labels, high.val.labels)
    part = build(tiny_config(tmp_path / "run", label_noise=0.4, fraction=0.1))
    whole = {high.train.name(i): high.train.labels[i] for i in range(len(high.train))}
    assert all(whole[part.train.name(i)] == part.train.labels[i] for i in range(len(part.train)))


def test_other_seeds_can_see_the_same_images():
    """Members of a deep ensemble differ in weights and order, not in what there is to learn."""

    def seen(**changes):
        made = build(config(label_noise=0.3, **changes))
        names = [made.train.name(i) for i in range(len(made.train))]
        return names, made.train.labels.tolist(), made.classifier.model.state_dict()["stem.conv.weight"]

    one, other, apart = seen(seed=0), seen(seed=1, data_seed=0), seen(seed=1)
    assert one[:2] == other[:2]
    assert one[:2] != apart[:2]
    assert (one[2] != other[2]).any()
    assert torch.equal(other[2], apart[2])

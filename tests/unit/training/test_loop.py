import re
from dataclasses import replace
from functools import partial
from io import StringIO
from signal import SIGINT, raise_signal
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from timm.optim import list_optimizers
from torch._dynamo.utils import counters

from didicm import DiffusionClassifier, UserError, create_model
from didicm.data import EvalTransform, open_data, subset, target_distribution
from didicm.settings import load_recipe, recipes
from didicm.training import loop, steps
from didicm.training.devices import agree, gather, make_fabric, scatter
from didicm.training.state import load_state
from didicm.training.steps import make_optimizer, make_scheduler
from didicm.values import override


@pytest.mark.slow
def test_a_compiled_network_learns_the_same(train, weights_of, assert_same, monkeypatch):
    # What is captured is ours; the C++ that would be made of it is PyTorch's, and takes minutes.
    torch._dynamo.reset()  # after other tests' batches it would take their number for a variable
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled = train("plain"), train("compiled", run__compile=True, run__grad_checkpointing=True)
    assert_same(weights_of(plain), weights_of(compiled), atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"run__precision": "bf16-mixed", "draws_per_image": 2},
        {
            "model_args__parameterization": "score",
            "model_args__layout": "official",
            "label_proposal": 0,
            "model_args__noise_embedding": "log",
        },
        {"method": "standard", "objective": "generalized-cross-entropy", "augment__mixup": 0.2},
    ],
    ids=str,
)
def test_a_compiled_loss_is_one_graph_in_all_steps(changes, train, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    train(run__compile=True, **changes)
    assert len(graphs) == 1
    assert not counters["graph_break"]


BACKBONE = {"model": "backbone_score", "model_args": {"backbone": "test_resnet", "width": None, "stem": None}}


@pytest.mark.parametrize("network", [{}, {"method": "standard"}, {"image__size": 32, **BACKBONE}], ids=str)
def test_gradient_checkpointing_learns_the_very_same(network, train, weights_of, assert_same):
    """Batch statistics included: what is computed again counts once."""
    plain, again = (train(str(enable), run__grad_checkpointing=enable, **network) for enable in (False, True))
    assert_same(weights_of(plain), weights_of(again))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "clamb", "sgd"])
def test_the_condition_of_a_diffusion_classifier_grows_from_zero(optimizer, train, tmp_path, weights_of):
    """LAMB scales a step with the norm of the weights: those that start at zero need to be outside of that."""
    train(optimizer__name=optimizer, optimizer__lr=5e-3, epochs=4, optimizer__weight_decay=0.1)
    assert weights_of(tmp_path / "run")["project.weight"].square().mean().sqrt() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 3e-3), ("lamb", 1e-2)])
def test_a_deep_trunk_learns_few_images_while_its_condition_grows(optimizer, lr, tiny_config, tmp_path):
    """With AdamW only if the condition starts at zero; with LAMB only if it leaves zero, but not in long steps."""
    settings = {"optimizer__name": optimizer, "optimizer__lr": lr, "epochs": 1, "optimizer__warmup_epochs": 0.1}
    config, total = tiny_config(tmp_path, **settings), 120
    data = open_data("fashion-mini", channels=1).train
    chosen = subset(data.labels, 2, seed=0)
    transform = EvalTransform(14, 1, crop_pct=1.0)
    image = torch.stack([transform(data.load(int(i))) for i in chosen])
    label = torch.from_numpy(data.labels[chosen])
    torch.manual_seed(0)
    model = create_model("didirn18", num_classes=10, in_chans=1, width=0.125, stem="small")
    classifier = DiffusionClassifier(model).train()
    moving = make_optimizer(config, model)
    scheduler = make_scheduler(config, moving, total, total)
    for step in range(total):
        scheduler.step_update(step)
        classifier.loss(image, target_distribution(label, 10)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        moving.step()
        moving.zero_grad()
    probs = classifier.eval()(image)
    assert -probs.gather(1, label.unsqueeze(1)).log().mean() < 1.1  # log 10 = 2.30 is what knows nothing
    assert model.project.weight.square().mean().sqrt() > 3e-3


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [("fusedadam", r"optimizer\.name fusedadam does not work here \(CUDA"), ("adahessian", "not an optimiser")],
)
def test_an_optimiser_that_cannot_be_used_is_refused_before_anything_is_written(
    optimizer, says, train, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=says):
        train(optimizer__name=optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("renamed", [True, False])
def test_a_run_whose_data_has_other_classes_is_not_resumed(renamed, tiny_config, make_folder, tmp_path):
    data = make_folder(tmp_path / "data")
    config = tiny_config(tmp_path / "run", data=str(data), fraction=1.0, batch_size=4, run__workers=0)
    loop.train(config)
    if renamed:  # as many as before: the weights would fit
        (data / "dog").rename(data / "emu")
    else:
        make_folder(data, ["emu"])
    with pytest.raises(UserError, match=f"new or gone: {'dog, ' * renamed}emu"):
        loop.train(config)


def test_a_run_whose_data_has_more_images_goes_on_and_says_so(tiny_config, make_folder, tmp_path):
    data, screen = make_folder(tmp_path / "data"), Console(file=StringIO(), width=200)
    config = tiny_config(tmp_path / "run", data=str(data), fraction=1.0, batch_size=4, run__workers=0)
    loop.train(config)
    make_folder(data, count=16)
    loop.train(replace(config, epochs=config.epochs + 1), extend=True, console=screen)
    now, before = map(int, re.search(r", on (\d+) images, (\d+) before", screen.file.getvalue()).groups())
    assert 2 * before < now < 32


def test_a_run_whose_optimiser_was_made_otherwise_is_not_resumed(train, monkeypatch):
    """As one of an earlier version, whose parameters were grouped in another way."""

    def stop(done, total):
        raise_signal(SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(optimizer__name="lamb", on_step=stop)
    monkeypatch.setattr(steps, "LAYERWISE", re.compile("none"))
    with pytest.raises(UserError, match=r"holds an optimiser's state with other groups .* in another --out"):
        train(optimizer__name="lamb")


@pytest.mark.parametrize("name", [name for name in list_optimizers("*la[mr]*") if "fused" not in name])
@pytest.mark.parametrize("prefix", ["", "Lookahead_"])
def test_optimisers_that_adapt_to_each_layer_leave_out_what_starts_at_zero(name, prefix, tiny_config, tmp_path):
    settings = {"optimizer__name": prefix + name, "optimizer__lr": 1e-3, "optimizer__weight_decay": 0.1}
    model = create_model("didirn8", num_classes=3, width=0.125, stem="tiny")
    optimizer = make_optimizer(tiny_config(tmp_path, **settings), model)
    for _ in range(60):
        model.project.weight.grad = torch.ones_like(model.project.weight)
        optimizer.step()
    assert model.project.weight.abs().min() > 0.02  # scaled with its norm: 0.01 at most, what its first step adds


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd"])
def test_every_optimiser_learns_with_noise_embedded_otherwise_and_masked_labels(
    optimizer, train, metrics_of, tmp_path
):
    settings = {"model_args__noise_embedding": "log", "mask": 0.3, "draws_per_image": 4, "batch_size": 10}
    settings |= {"epochs": 10, "run__validate_epochs": 10, "run__workers": 0, "optimizer__warmup_epochs": 0}
    train(
        optimizer__name=optimizer, optimizer__lr={"adamw": 3e-3, "lamb": 1e-2, "sgd": 0.05}[optimizer], **settings
    )
    assert metrics_of(tmp_path / "run")[-1]["val/cls/NLL"] < 2.28  # log 10 = 2.30 is what knows nothing


def test_on_step_is_told_every_step_and_parts_of_a_step_change_nothing(
    tmp_path, make_folder, weights_of, assert_same, tiny_config
):
    seen = []
    # Without batch statistics, so that the parts see what the whole does.
    network = {"model": "backbone_score", "model_args": {"backbone": "test_vit", "width": None, "stem": None}}
    network |= {"method": "standard", "image__size": 160, "optimizer__name": "sgd", "val_fraction": 0.2}
    network |= {"data": str(make_folder(tmp_path / "data", count=10)), "fraction": 1, "batch_size": 4}
    for parts in (1, 2):
        made = tiny_config(tmp_path / str(parts), accumulate=parts, **network)
        loop.train(made, on_step=lambda *numbers: seen.append(numbers))
    assert seen == 2 * [(k, 4) for k in range(1, 5)]
    assert_same(weights_of(tmp_path / "1"), weights_of(tmp_path / "2"), atol=1e-5)


def test_best_holds_the_weights_of_the_validation_with_the_lowest_nll(train, metrics_of, weights_of):
    settings = {"optimizer__lr": 0.05, "augment__pad_mode": "black", "run__workers": 0, "run__validate_epochs": 1}
    run = train(method="standard", epochs=8, **settings)
    found = [x for x in metrics_of(run) if "val/cls/NLL" in x]
    best = min(found, key=lambda x: x["val/cls/NLL"])
    assert best is not found[-1]  # it overfits
    assert best["val/cls/Acc"] < max(x["val/cls/Acc"] for x in found)  # as accuracy would not have chosen
    assert load_state(run)[0].best == pytest.approx([best["val/cls/Acc"], best["val/cls/NLL"]])
    assert not torch.equal(weights_of(run, "best")["fc.weight"], weights_of(run)["fc.weight"])


def test_devices_that_do_not_go_together_are_one_sentence():
    for wrong, says in (
        ({"accelerator": "tpu"}, "run.accelerator tpu: there is no TPU device here; available: cpu"),
        ({"strategy": "magic"}, "run.accelerator, devices, strategy or precision does not work here"),
    ):
        settings = override(load_recipe("small"), {f"run.{name}": value for name, value in wrong.items()})
        with pytest.raises(UserError, match=re.escape(says)) as error:
            make_fabric(settings.run)
        assert "\n" not in str(error.value)


def test_a_single_process_agrees_with_itself_and_has_nothing_to_gather():
    assert agree(SimpleNamespace(world_size=1), True, False) == [True, False]
    assert gather({"a": torch.ones(2), "b": [torch.zeros(1), 3]})["b"][1] == 3


def test_a_restored_optimiser_has_its_state_as_the_weights_lie_in_memory():
    """Files hold it in one order, and the last digit of a norm depends on the order of its sum."""
    weights = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(weights.parameters())
    weights(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    first = saved["state"][0]
    stored = {**saved, "state": {0: {**first, "exp_avg": first["exp_avg"].contiguous()}}}
    restored = scatter(stored, optimizer)["state"][0]
    assert restored["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(restored["exp_avg"], first["exp_avg"])
    assert restored["step"] is first["step"]


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_uses_a_gpu_where_there_is_one(name, monkeypatch):
    monkeypatch.setattr("lightning_fabric.accelerators.cuda.num_cuda_devices", lambda: 1)
    settings = override(load_recipe(name), {"run.precision": "32-true"}).run
    assert type(make_fabric(settings).accelerator).__name__ == "CUDAAccelerator"


def test_a_run_needs_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no --out: say where"):
        loop.train(load_recipe("small", data="fashion-mini"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").touch()
    with pytest.raises(UserError, match="thesis is not empty and holds no run"):
        loop.train(load_recipe("small", data="fashion-mini", out=tmp_path / "thesis"))
    with pytest.raises(UserError, match="train takes what load_recipe"):
        loop.train({"data": "fashion-mini"})
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "text"]

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from didicm import UserError
from didicm.settings import load_recipe, recipes
from didicm.training import loop
from didicm.training.devices import agree, gather, make_fabric, scatter
from didicm.training.state import load_state
from didicm.values import override


def config(out, **changes):
    tiny = {
        "data": "fashion-mini", "model_args.width": 0.125, "fraction": 0.05, "image.size": 8, "batch_size": 20,
        "epochs": 1, "out": str(out), "run.log_seconds": 0, "optimizer.ema": None, "draws_per_image": 1,
    }  # fmt: skip
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe("small"), {**tiny, **settings})


@pytest.fixture
def train(tmp_path):
    return lambda name="run", **changes: loop.train(config(tmp_path / name, **changes))


@pytest.mark.slow
def test_a_compiled_network_learns_the_same(train, weights_of, assert_same, monkeypatch):
    # What is captured is ours; the C++ that would be made of it is PyTorch's, and takes minutes.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled = train("plain"), train("compiled", run__compile=True)
    assert_same(weights_of(plain), weights_of(compiled), atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lambc", "sgd"])
def test_the_condition_of_a_diffusion_classifier_grows_from_zero(optimizer, train, tmp_path, weights_of):
    """LAMB scales a step with the norm of the weights: those that start at zero need to be outside of that."""
    train(optimizer__name=optimizer, optimizer__lr=5e-3, epochs=4, optimizer__weight_decay=0.1)
    assert weights_of(tmp_path / "run")["project.weight"].square().mean().sqrt() > 1e-4


class FakeScaler:
    """A gradient scaler that finds an overflow on chosen steps, as float16 does on a GPU."""

    def __init__(self, overflows):
        self.overflows, self.taken, self.factor = overflows, 0, 2.0**16

    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer, **options):
        return None if self.taken in self.overflows else optimizer.step(**options)

    def update(self):
        self.factor = self.factor / 2 if self.taken in self.overflows else self.factor
        self.taken += 1

    def get_scale(self):
        return self.factor


@pytest.fixture
def scaled_fabric(monkeypatch):
    """Mixed precision with such a scaler."""

    def use(overflows):
        scaler, made = FakeScaler(overflows), make_fabric

        def make(settings):
            fabric = made(settings)
            fabric.strategy.precision.scaler = scaler
            return fabric

        monkeypatch.setattr(loop, "make_fabric", make)

    return use


def test_steps_that_half_precision_skips_are_counted(train, tmp_path, scaled_fabric):
    scaled_fabric({1, 3})
    train(run__precision="bf16-mixed")
    assert load_state(tmp_path / "run")[0].skipped_steps == 2


def test_too_many_skipped_steps_in_a_row_end_the_run_with_advice(train, tmp_path, scaled_fabric):
    scaled_fabric(set(range(1000)))
    with pytest.raises(UserError, match=r"training cannot go on; try a lower optimizer\.lr"):
        train(epochs=20, run__precision="bf16-mixed")
    assert load_state(tmp_path / "run")[0].skipped_steps == loop.MAX_SKIPPED


def test_a_gradient_that_is_not_finite_is_skipped_and_counted_in_bfloat16(train, tmp_path, monkeypatch):
    clip, calls = loop.Fabric.clip_gradients, []

    def broken(self, *arguments, **options):
        calls.append(norm := clip(self, *arguments, **options))
        return torch.tensor(math.nan) if len(calls) in (2, 4) else norm

    monkeypatch.setattr(loop.Fabric, "clip_gradients", broken)
    train("half", run__precision="bf16-mixed")
    progress = load_state(tmp_path / "half")[0]
    assert (progress.step, progress.skipped_steps, progress.finished) == (5, 2, True)

    # In full precision it ends the run, but a resumed one goes past the step.
    calls.clear()
    with pytest.raises(UserError, match="step 2 has a loss of"):
        train("full")
    assert load_state(tmp_path / "full")[0].step == 2
    calls += [None] * 10
    train("full")
    assert load_state(tmp_path / "full")[0].finished


def test_on_step_is_told_every_step_and_parts_of_a_step_change_nothing(
    tmp_path, make_folder, weights_of, assert_same
):
    seen = []
    # Without batch statistics, so that the parts see what the whole does.
    network = {"model": "backbone_score", "model_args": {"backbone": "test_vit", "width": None, "stem": None}}
    network |= {"method": "standard", "image__size": 160, "optimizer__name": "sgd", "val_fraction": 0.2}
    network |= {"data": str(make_folder(tmp_path / "data", count=10)), "fraction": 1, "batch_size": 4}
    for parts in (1, 2):
        made = config(tmp_path / str(parts), accumulate=parts, **network)
        loop.train(made, on_step=lambda *numbers: seen.append(numbers))
    assert seen == 2 * [(k, 4) for k in range(1, 5)]
    assert_same(weights_of(tmp_path / "1"), weights_of(tmp_path / "2"), atol=1e-5)


def test_devices_that_do_not_go_together_are_one_sentence():
    for wrong in ({"accelerator": "warp"}, {"accelerator": "tpu"}, {"strategy": "magic"}):
        settings = override(load_recipe("small"), {f"run.{name}": value for name, value in wrong.items()})
        with pytest.raises(UserError, match=r"run\.accelerator, devices, strategy and precision") as error:
            make_fabric(settings.run)
        assert "\n" not in str(error.value)


def test_a_single_process_agrees_with_itself_and_has_nothing_to_gather():
    fabric = SimpleNamespace(world_size=1)
    assert agree(fabric, True, False) == [True, False]
    state = {"a": torch.ones(2), "b": [torch.zeros(1), 3]}
    assert gather(state)["b"][1] == 3
    weights = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(weights.parameters())
    weights(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert scatter(saved, optimizer)["state"][0]["exp_avg"] is saved["state"][0]["exp_avg"]


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_uses_a_gpu_where_there_is_one(name, monkeypatch):
    monkeypatch.setattr("lightning_fabric.accelerators.cuda.num_cuda_devices", lambda: 1)
    settings = override(load_recipe(name), {"run.precision": "32-true"}).run
    assert type(make_fabric(settings).accelerator).__name__ == "CUDAAccelerator"

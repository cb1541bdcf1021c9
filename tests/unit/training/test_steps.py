"""Steps that cannot be taken, and how seldom the host waits for the device to find them."""

import math
import sys
from signal import SIGINT, raise_signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from didicm import UserError
from didicm.classifier import Loss
from didicm.data import EvalTransform
from didicm.evaluation.run import stream
from didicm.experiments.measure import highest
from didicm.training import loop, steps
from didicm.training.devices import make_fabric
from didicm.training.state import load_state
from didicm.training.tracking import METRICS
from tests.oracle.waits import host_waits


@pytest.fixture
def behind(monkeypatch):
    """Train as on a GPU, where reading a number waits for all work that is queued."""
    return lambda: monkeypatch.setattr(steps, "works_behind", lambda device: True)


class DeviceWatch(TorchDispatchMode):
    """Counts how often the host waits for the device, and refuses float64, which Apple's GPUs do not have.

    The optimisers' counts of steps are no such numbers: PyTorch and timm keep them on the host (`_get_value`).
    """

    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        wide = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor) and x.dtype == torch.float64]
        assert not wide, function
        if host_waits(function, args):
            frame, readers = sys._getframe(), set()
            while frame := frame.f_back:
                readers.add(frame.f_code.co_name)
            self.reads += "_get_value" not in readers
        return result


SCORE = {"model_args__parameterization": "score", "label_proposal": 0}
KINDS = {"posterior": {}, "score": SCORE, "standard": {"method": "standard"}}


@pytest.mark.parametrize(
    ("kind", "optimizer", "other"),
    [("posterior", "adamw", "lamb"), ("score", "lamb", "sgd"), ("standard", "sgd", "adamw")],
)
def test_between_two_readings_the_host_reads_nothing_and_no_number_is_float64(
    kind, optimizer, other, train, behind
):
    behind()
    for name, precision in ((optimizer, "32-true"), (other, "bf16-mixed")):
        watch, seen = DeviceWatch(), []

        def count(done, total, watch=watch, seen=seen):
            if done == 1:
                watch.__enter__()
            seen.append(watch.reads)
            if done == total:
                watch.__exit__(None, None, None)

        changes = {"optimizer__name": name, "run__precision": precision, "optimizer__ema": 0.9, **KINDS[kind]}
        changes |= {"augment__mixup": 0.2, "augment__cutmix": 1.0, "balance": "weights", "accumulate": 2}
        train(precision, on_step=count, run__log_seconds=1e9, **changes)
        assert seen[:4] == [0, 0, 0, 0]
        assert seen[4] > 0  # the last step of an epoch is read


def state_of(run):
    progress, weights, optimizer = load_state(run)
    tensors = {f"{part}/{name}": x for part, state in weights.items() for name, x in state.items()}
    for i, own in optimizer["state"].items():
        tensors |= {f"optimizer/{i}/{name}": x for name, x in own.items() if isinstance(x, torch.Tensor)}
    return progress, tensors, [group.get("step") for group in optimizer["param_groups"]]


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd"])
def test_a_step_found_late_is_skipped_as_exactly_as_one_found_at_once(
    optimizer, train, behind, tmp_path, monkeypatch, assert_same, metrics_of
):
    """Half precision goes on: two steps of seven, one after the other, have no finite gradient."""
    batch = loop._batch

    def broken(image, label, number, *others):
        image, target, u, _ = batch(image, label, number, *others)
        return image, target, u, Loss.bits(torch.full((len(image),), math.nan)) if number in (2, 3) else None

    monkeypatch.setattr(loop, "_batch", broken)
    changes = {"optimizer__name": optimizer, "run__precision": "bf16-mixed", "optimizer__ema": 0.9}
    train("read", batch_size=14, **changes)
    behind()
    train("trusted", batch_size=14, run__log_seconds=1e9, **changes)
    (read, one, counts), (trusted, other, others) = (state_of(tmp_path / name) for name in ("read", "trusted"))
    assert vars(read) == vars(trusted)
    assert (read.step, read.skipped_steps, read.finished) == (7, 2, True)
    assert counts == others
    assert_same(one, other)
    assert len(metrics_of(tmp_path / "trusted")) == 2  # the last step, and the validation


@pytest.mark.parametrize("method", ["diffusion", "standard"])
def test_in_full_precision_it_ends_the_run_with_advice_and_a_resumed_run_goes_past_it(
    method, train, behind, tmp_path, monkeypatch
):
    batch = loop._batch

    def broken(image, label, number, *others):
        return batch(image * math.nan if number == 2 else image, label, number, *others)

    monkeypatch.setattr(loop, "_batch", broken)
    told = []
    for name in ("read", "trusted"):
        with pytest.raises(UserError, match="step 3 has a loss of nan") as error:
            train(name, run__log_seconds=1e9, method=method)
        told.append(str(error.value).replace(name, ""))
        assert load_state(tmp_path / name)[0].step == 3
        behind()
    assert told[0] == told[1]
    train("trusted", run__log_seconds=1e9, method=method)
    assert load_state(tmp_path / "trusted")[0].finished


@pytest.fixture
def scaled_fabric(monkeypatch):
    """Mixed precision with PyTorch's own gradient scaler, as float16 has it on a GPU."""

    def use(scale):
        def make(settings):
            fabric = make_fabric(settings)
            fabric.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            return fabric

        monkeypatch.setattr(loop, "make_fabric", make)

    return use


@pytest.mark.parametrize("device", ["read", "behind"])
def test_steps_that_a_gradient_scaler_skips_are_counted(
    device, train, behind, tmp_path, scaled_fabric, metrics_of, capsys
):
    scaled_fabric(2.0**127)  # nearly all of float32: it has to be halved a few times
    if device == "behind":
        behind()
    train(run__precision="bf16-mixed", run__log_seconds=0 if device == "read" else 1e9, epochs=4)
    progress, weights, _ = load_state(tmp_path / "run")
    assert 0 < progress.skipped_steps < 18
    assert progress.finished
    assert metrics_of(tmp_path / "run")[-2]["skipped_steps"] == highest(
        tmp_path / "run" / METRICS, "skipped_steps"
    )
    assert highest(tmp_path / "run" / METRICS, "skipped_steps") == progress.skipped_steps
    assert f"  {progress.skipped_steps} steps skipped  lr" in capsys.readouterr().out
    assert all(x.isfinite().all() for x in weights["model"].values())


def test_a_resumed_run_goes_on_with_its_gradient_scaler(train, tmp_path, scaled_fabric, weights_of, assert_same):
    """One that started again at its first scale would skip steps which the run at one go takes."""

    def stop(done, total):
        if done == 15:
            raise_signal(SIGINT)

    settings = {"run__precision": "bf16-mixed", "epochs": 4}
    scaled_fabric(2.0**127)
    train("whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train("resumed", on_step=stop, **settings)
    train("resumed", **settings)
    whole, resumed = (load_state(tmp_path / name)[0] for name in ("whole", "resumed"))
    assert vars(whole) == vars(resumed)
    assert whole.scaler["scale"] < 2.0**127
    assert_same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed"))


@pytest.mark.parametrize(("limit", "writes"), [(None, 0), (1e9, 1), (1e-3, 1)])
def test_a_gradient_is_left_alone_where_there_is_no_limit_to_its_norm(limit, writes, train, monkeypatch):
    """Where there is one, all are multiplied; a norm that is logged but not limited must not cost that."""
    clip, seen = steps.Steps.clip, []

    def look(self, module):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        before, versions = torch.cat([x.flatten() for x in gradients]).norm(), [x._version for x in gradients]
        norm = clip(self, module)
        assert torch.allclose(norm, before)
        assert {x._version - version for x, version in zip(gradients, versions, strict=True)} == {writes}
        seen.append(torch.cat([x.flatten() for x in gradients]).norm() / before)
        return norm

    monkeypatch.setattr(steps.Steps, "clip", look)
    train(optimizer__clip=limit)
    assert len(seen) == 5
    assert all(ratio < 0.5 if limit == 1e-3 else ratio == 1 for ratio in seen)


def test_sampling_has_no_number_in_float64_even_where_it_stops_early(make_checkpoint, some_images):
    classifier, transform = make_checkpoint().classifier, EvalTransform(8, 1, crop_pct=1.0)
    samplers = {"whole": {}, "early": {"tolerance": 0.08}, "labels": {"method": "cl", "chains": 2}}
    with DeviceWatch():
        ((_, found),) = stream(classifier, some_images(), transform, samplers)
    assert found.nfe["early"] < found.nfe["whole"]


def test_too_many_skipped_steps_in_a_row_end_the_run_with_advice(train, tmp_path, scaled_fabric, monkeypatch):
    monkeypatch.setattr(steps, "MAX_SKIPPED", 7)
    scaled_fabric(math.inf)
    with pytest.raises(UserError, match=r"training cannot go on; try a lower optimizer\.lr"):
        train(epochs=4, run__precision="bf16-mixed", run__validate_epochs=4)
    assert load_state(tmp_path / "run")[0].skipped_steps == steps.MAX_SKIPPED

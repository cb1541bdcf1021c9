"""Snapshot ensembles: cycles of the learning rate, and the models at their ends."""

import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

from didicm.checkpoint import load
from didicm.classifier import StandardClassifier
from didicm.errors import UserError
from didicm.evaluation.stored import open_model
from didicm.settings import to_yaml
from didicm.training import loop
from didicm.training.build import build, check_settings
from didicm.training.state import resume
from didicm.training.steps import make_scheduler

QUICK = {"fraction": 0.025, "epochs": 4, "run__validate_epochs": 4, "run__workers": 0, "run__save_seconds": 1e6}
CYCLE = 4  # steps, of two epochs


def test_every_cycle_anneals_the_learning_rate_from_the_top(tiny_config, tmp_path):
    config = tiny_config(tmp_path, optimizer__snapshots=3, optimizer__warmup_epochs=1, epochs=12)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], config.optimizer.lr)
    scheduler = make_scheduler(config, optimizer, steps_per_epoch=5, total_steps=60)
    rates = []
    for step in range(60):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"] / config.optimizer.lr)
    first, second, third = rates[:20], rates[20:40], rates[40:]
    assert first[0] < 0.01  # warm-up, once
    assert second == third
    assert second == pytest.approx([0.5 + 0.5 * math.cos(math.pi * i / 20) for i in range(20)])
    assert first[5:] == second[5:]


def test_a_training_of_one_step_needs_no_comment(tiny_config, tmp_path, caplog):
    config = tiny_config(tmp_path, epochs=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], config.optimizer.lr)
    make_scheduler(config, optimizer, steps_per_epoch=1, total_steps=1)
    assert not caplog.records


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd"])
def test_a_run_keeps_what_every_cycle_ended_with_as_one_model(optimizer, train, weights_of, tmp_path):
    kept = {}

    def look(step, total):
        if step == CYCLE + 1:
            kept.update(weights_of(tmp_path / "run", "cycles/1"))

    run = train(on_step=look, optimizer__name=optimizer, optimizer__snapshots=2, **QUICK)
    late, early = load(run / "snapshots").classifier.members
    last = weights_of(run)
    for name, x in early.model.state_dict().items():
        assert torch.equal(late.model.state_dict()[name], last[name])
        assert torch.equal(x, kept[name])
    assert any((x != last[name]).any() for name, x in early.model.state_dict().items())
    assert not (run / "cycles").exists()
    assert open_model(run / "snapshots", device="cpu").training.optimizer.snapshots == 2


def test_a_run_that_is_stopped_in_its_second_cycle_ends_with_the_same_snapshots(train, weights_of, assert_same):
    def stop(step, total):
        if step == CYCLE + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {**QUICK, "optimizer__snapshots": 2, "optimizer__ema": 0.9}
    whole = train("whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train("stopped", stop, **settings)
    stopped = train("stopped", **settings)
    for model in ("snapshots", "last", "best"):
        assert_same(weights_of(stopped, model), weights_of(whole, model))


def test_what_cannot_be_is_refused_before_training(tiny_config, tmp_path):
    with pytest.raises(UserError, match="snapshots 3 needs equal cycles: make epochs a multiple of 3"):
        check_settings(tiny_config(tmp_path, epochs=4, optimizer__snapshots=3))
    with pytest.raises(UserError, match="snapshots"):
        tiny_config(tmp_path, optimizer__snapshots=1)
    config = tiny_config(tmp_path / "own", method="standard", optimizer__snapshots=2, epochs=2)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    network.num_classes = 10
    own = StandardClassifier(network)
    with pytest.raises(UserError, match="a network of your own cannot be saved"):
        loop.train(config, components=replace(build(config), classifier=own))
    assert not (tmp_path / "own" / "config.yaml").exists()
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(UserError, match="--extend would change the cycles"):
        resume(tmp_path, replace(config, epochs=4), extend=True)

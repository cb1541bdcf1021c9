"""Stochastic weight averaging: which steps count, and at which rate."""

import json
import os
import signal

import pytest
import torch

from didicm import UserError
from didicm.training.build import build, check_settings
from didicm.training.devices import make_fabric
from didicm.training.state import TrainState
from didicm.training.tracking import METRICS


def test_the_average_is_the_mean_of_the_last_steps(tiny_config, tmp_path):
    config = tiny_config(tmp_path, method="standard", optimizer__swa=0.4)
    classifier = build(config).classifier
    state = TrainState.make(config, classifier, make_fabric(config.run))
    assert state.annealing(10) == 6
    seen = []
    for step in range(10):
        classifier.model.fc.bias.data.fill_(step**2)
        seen.append(classifier.model.fc.bias.detach().clone())
        state.average()
        state.progress.step += 1
    with state.as_saved():
        torch.testing.assert_close(classifier.model.fc.bias.detach(), torch.stack(seen[6:]).mean(0))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd"])
def test_the_rate_stays_while_weights_are_averaged_and_a_stopped_run_ends_alike(
    optimizer, train, weights_of, assert_same
):
    def stop(step, total):
        if step == total - 2:  # some are averaged already
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"optimizer__swa": 0.4, "epochs": 2, "optimizer__warmup_epochs": 0, "optimizer__name": optimizer}
    whole = train("whole", **settings)
    lines = map(json.loads, (whole / METRICS).read_text().splitlines())
    rates = [line["lr"] for line in lines if "lr" in line]
    assert len(rates) == 10
    assert len(set(rates[-4:])) == 1
    assert rates == sorted(rates, reverse=True)
    assert rates[5] > rates[6]
    with pytest.raises(KeyboardInterrupt):
        train("stopped", stop, **settings)
    assert_same(weights_of(train("stopped", **settings)), weights_of(whole))


@pytest.mark.parametrize(
    ("other", "told"), [("ema", "set optimizer.ema none"), ("snapshots", "optimizer.swa and optimizer.snapshots")]
)
def test_swa_goes_with_no_other_average(other, told, tiny_config, tmp_path):
    value = {"ema": 0.9, "snapshots": 2}[other]
    with pytest.raises(UserError, match=told):
        check_settings(tiny_config(tmp_path, epochs=2, optimizer__swa=0.5, **{f"optimizer__{other}": value}))

import pytest
import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from didicm import UserError
from didicm.training.state import Progress, has_state, load_state, save_state

WEIGHTS = {"model": {"w": torch.ones(3)}, "ema": {"w": torch.zeros(3)}}
OPTIMIZER = {
    "state": {0: {"step": torch.tensor(1.0), "moments": [torch.ones(2), 3]}},
    "param_groups": [{"lr": 0.1}],
}


def test_everything_returns_as_it_was_saved(tmp_path):
    assert not has_state(tmp_path)
    progress = Progress(step=7, best=[0.5, 1.25], skipped_steps=2, unreadable=1)
    save_state(tmp_path, progress, WEIGHTS, OPTIMIZER)
    assert has_state(tmp_path)
    found, weights, optimizer = load_state(tmp_path)
    assert found == progress
    assert {part: {k: x.tolist() for k, x in own.items()} for part, own in weights.items()} == {
        "model": {"w": [1, 1, 1]},
        "ema": {"w": [0, 0, 0]},
    }
    assert optimizer["param_groups"] == OPTIMIZER["param_groups"]
    assert torch.equal(optimizer["state"][0]["moments"][0], torch.ones(2))
    assert optimizer["state"][0]["moments"][1] == 3


def test_the_best_validation_has_the_lowest_nll_and_accuracy_decides_between_equals():
    assert Progress().improved_by(0.1, 9.0)
    progress = Progress(best=[0.5, 1.25])  # accuracy and NLL, in this order since version 0.1.0
    for accuracy, nll, better in [
        (0.4, 1.2, True),
        (0.9, 1.3, False),
        (0.6, 1.25, True),
        (0.5, 1.25, False),
        (0.4, 1.25, False),
    ]:
        assert progress.improved_by(accuracy, nll) is better


def test_tensors_that_share_memory_are_saved_apart(tmp_path):
    shared = torch.arange(4.0)
    save_state(tmp_path, Progress(), {"model": {"a": shared, "b": shared[:2]}}, {})
    weights = load_state(tmp_path)[1]["model"]
    assert (weights["a"].tolist(), weights["b"].tolist()) == ([0, 1, 2, 3], [0, 1])


@pytest.mark.parametrize("content", [b"", b"x" * 50])
def test_a_damaged_state_is_named(content, tmp_path):
    save_state(tmp_path, Progress(), WEIGHTS, {})
    (tmp_path / "state" / "state.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"state.safetensors is damaged, .*, delete the run"):
        load_state(tmp_path)


NOT_HERE = ["fused*", "bnb*", "kron*", "adahessian"]  # need a GPU, or draw random numbers of their own


@pytest.mark.parametrize("name", list_optimizers(exclude_filters=NOT_HERE))
def test_the_state_of_every_optimiser_of_timm_returns(name, tmp_path):
    def make():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
        return network, create_optimizer_v2(network, opt=name, lr=1e-2, weight_decay=0.01)

    def step(network, optimizer):
        network(torch.linspace(0, 1, 32).view(2, 1, 4, 4)).square().sum().backward()
        optimizer.step()
        network.zero_grad()

    (whole, first), (network, resumed) = make(), make()
    step(whole, first)
    save_state(tmp_path, Progress(), {"network": whole.state_dict()}, first.state_dict())
    _, weights, state = load_state(tmp_path)
    network.load_state_dict(weights["network"])
    resumed.load_state_dict(state)
    for one, optimizer in ((whole, first), (network, resumed)):
        step(one, optimizer)
    for ours, theirs in zip(network.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)

"""Devices and processes through lightning-fabric; with fsdp every process holds a part of each weight."""

import os
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from didicm.errors import UserError, reason
from didicm.settings import RunConfig


def make_fabric(config: RunConfig) -> Fabric:
    """Describe where the run is carried out; processes that torchrun started know it better than the settings."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or config.devices
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 0)) or config.nodes
    strategy: Any = config.strategy
    if is_sharded(config):
        count = devices if isinstance(devices, int) else max(1, torch.cuda.device_count())
        strategy = ModelParallelStrategy(_shard, data_parallel_size=count * nodes, tensor_parallel_size=1)
    try:
        return Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            precision=config.precision,
        )
    except Exception as error:  # fabric's own, and those of the libraries a device needs
        raise UserError(
            f"run.accelerator, devices, strategy and precision cannot be used so here: {reason(error)}"
        ) from error


def is_sharded(config: RunConfig) -> bool:
    """Whether the weights are split over the processes."""
    return config.strategy == "fsdp"


def agree(fabric: Fabric, *wishes: bool) -> list[bool]:
    """What any process wishes, all do: their clocks and signals differ, but saving needs all of them."""
    if fabric.world_size == 1:
        return list(wishes)
    votes = _reduce_max(fabric, torch.tensor([float(wish) for wish in wishes], device=fabric.device))
    return [vote > 0 for vote in votes.tolist()]


def gather(state: Any) -> Any:
    """Join the parts of every sharded tensor in a nested state; all processes must take part."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: gather(value) for key, value in state.items()}
    return [gather(value) for value in state] if isinstance(state, list) else state


def gather_rows(fabric: Fabric, probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Join the rows of all processes, whose number may differ by one."""
    if fabric.world_size > 1:
        probs, labels = probs.to(fabric.device), labels.to(fabric.device)
        longest = _reduce_max(fabric, torch.tensor(float(len(labels)), device=labels.device))
        pad = int(longest) - len(labels)
        labels = _all_gather(fabric, nn.functional.pad(labels, (0, pad), value=-1)).flatten()
        probs = _all_gather(fabric, nn.functional.pad(probs, (0, 0, 0, pad))).flatten(0, 1)
        probs, labels = probs[labels >= 0], labels[labels >= 0]
    return probs.cpu(), labels.cpu()


def scatter(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Split an optimiser's joined state as its parameters are split."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    split = {i: {name: _like(x, parameters[i]) for name, x in own.items()} for i, own in state["state"].items()}
    return {**state, "state": split}


def _reduce_max(fabric: Fabric, x: Tensor) -> Tensor:
    return cast(Tensor, fabric.all_reduce(x, reduce_op="max"))


def _all_gather(fabric: Fabric, x: Tensor) -> Tensor:
    return cast(Tensor, fabric.all_gather(x))


def _like(x: Any, parameter: Tensor) -> Any:
    if isinstance(parameter, DTensor) and isinstance(x, Tensor) and x.shape == parameter.shape:
        return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements)
    return x


def _shard(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh["data_parallel"])
    return module

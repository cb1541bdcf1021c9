"""Devices and processes through lightning-fabric; with fsdp every process holds a part of each weight."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.accelerators import ACCELERATOR_REGISTRY
from lightning_fabric.strategies import STRATEGY_REGISTRY, ModelParallelStrategy
from timm.layers import convert_sync_batchnorm
from timm.utils import distribute_bn
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from didicm.errors import UserError, did_you_mean, reason
from didicm.settings import RunConfig

AVX512_FLOATS = 16  # places of the widest vector registers


def make_fabric(config: RunConfig) -> Fabric:
    """Describe where the run is carried out; processes that torchrun started know it better than the settings."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or config.devices
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 0)) or config.nodes
    strategy: Any = config.strategy
    check_accelerator(config.accelerator)
    if is_sharded(config):
        count = devices if isinstance(devices, int) else max(1, torch.cuda.device_count())
        strategy = ModelParallelStrategy(_shard, data_parallel_size=count * nodes, tensor_parallel_size=1)
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            precision=config.precision,
        )
    except Exception as error:  # fabric's own, and those of the libraries a device needs
        raise UserError(
            f"run.accelerator, devices, strategy or precision does not work here ({reason(error)}): change it"
        ) from error
    if config.sync_batch_norm and fabric.world_size > 1 and fabric.device.type == "cpu":
        raise UserError("run.sync_batch_norm needs GPUs: PyTorch cannot join batch statistics of CPUs")
    return fabric


def check_names(config: RunConfig) -> None:
    """Refuse accelerators and strategies that fabric does not know; whether they are here, a run will tell."""
    for name, given, known in (
        ("accelerator", config.accelerator, {"auto", "gpu", *ACCELERATOR_REGISTRY.available_accelerators()}),
        ("strategy", config.strategy, {"auto", *STRATEGY_REGISTRY.available_strategies()}),
    ):
        if given not in known:
            usual = "such as auto, ddp or fsdp" if name == "strategy" else "such as auto, cpu or gpu"
            raise UserError(f"there is no run.{name} {given!r}: {did_you_mean(given, known, usual)}")


def check_accelerator(name: str) -> None:
    """Refuse a kind of device that is not here."""
    here = {known for known in ACCELERATOR_REGISTRY if ACCELERATOR_REGISTRY[known]["accelerator"].is_available()}
    if name != "auto" and not here & ({"cuda", "mps"} if name == "gpu" else {name}):
        raise UserError(
            f"run.accelerator {name}: there is no {name.upper()} device here; available: {', '.join(sorted(here))}"
        )


def is_sharded(config: RunConfig) -> bool:
    """Whether the weights are split over the processes."""
    return config.strategy == "fsdp"


def works_behind(device: torch.device) -> bool:
    """Whether a device works on a queue behind the host's back, so that reading a number waits for all of it."""
    return device.type != "cpu"


def tune(device: torch.device) -> None:
    """Let cuDNN time its convolutions: a run's shapes stay the same. Not where results must not depend on time."""
    deterministic = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    if device.type == "cuda" and not deterministic:
        torch.backends.cudnn.benchmark = True


def seed_device(device: torch.device, seed: int) -> None:
    """Seed a device and the host; `torch.manual_seed` takes milliseconds to prepare all that are not in use."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def prepare_network(network: nn.Module, config: RunConfig, fabric: Fabric) -> nn.Module:
    """Lay weights out as images will be; join batch statistics if the run wants it.

    Else those saved are the first process's: DDP hands them to the others before every step.
    """
    if config.sync_batch_norm and fabric.world_size > 1:
        network = convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    # FSDP divides contiguous weights only.
    return network if is_sharded(config) else network.to(memory_format=image_layout(network, fabric.device))


def image_layout(network: nn.Module, device: torch.device) -> torch.memory_format:
    """How images lie in memory in training: channels last, which is faster, unless that would break the training.

    On CPUs, oneDNN's gradient of a strided 1 x 1 convolution writes past its memory if images have channels last
    and fewer of them than a vector register has places: uxlfoundation/oneDNN#6035.
    """
    breaking = device.type == "cpu" and any(map(_overruns, network.modules()))
    return torch.contiguous_format if breaking else torch.channels_last


def _overruns(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Conv2d) or layer.in_channels // layer.groups >= AVX512_FLOATS:
        return False
    return layer.kernel_size == (1, 1) and layer.stride != (1, 1)


def share_statistics(network: nn.Module, fabric: Fabric) -> None:
    """Give all processes the first one's batch statistics, so that they validate what will be saved."""
    if fabric.world_size > 1:
        distribute_bn(network, fabric.world_size)  # type: ignore[no-untyped-call]


@contextmanager
def fixed_statistics(network: nn.Module) -> Iterator[None]:
    """Leave running batch statistics alone: those of activations that are computed again would count twice."""
    kept = [(module, dict(module._buffers)) for module in network.modules()]
    for module, buffers in kept:
        module._buffers.update({name: x if x is None else x.clone() for name, x in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)


def agree(fabric: Fabric, *wishes: bool) -> list[bool]:
    """What any process wishes, all do: their clocks and signals differ, but saving needs all of them."""
    if fabric.world_size == 1:
        return list(wishes)
    votes = torch.tensor(wishes, dtype=torch.int32)
    distributed.all_reduce(votes, distributed.ReduceOp.MAX, group=_hosts())
    return [bool(vote) for vote in votes.tolist()]


@lru_cache(maxsize=1)
def _hosts() -> Any:
    """A group of the processes' hosts: what they agree on never waits for a GPU."""
    return distributed.new_group(backend="gloo")


def first_alone(fabric: Fabric, act: Callable[[], object]) -> None:
    """Let the first process do something while the others wait; if it cannot, all end, and it alone says why."""
    failure: UserError | None = None
    if fabric.is_global_zero:
        try:
            act()
        except UserError as error:
            failure = error
    if agree(fabric, failure is not None)[0]:
        raise failure or SystemExit(2)


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
        longest = fabric.all_reduce(torch.tensor(float(len(labels)), device=labels.device), reduce_op="max")
        pad = int(cast(Tensor, longest)) - len(labels)
        labels = cast(Tensor, fabric.all_gather(nn.functional.pad(labels, (0, pad), value=-1))).flatten()
        probs = cast(Tensor, fabric.all_gather(nn.functional.pad(probs, (0, 0, 0, pad)))).flatten(0, 1)
        probs, labels = probs[labels >= 0], labels[labels >= 0]
    return probs.cpu(), labels.cpu()


def gather_texts(fabric: Fabric, texts: Iterable[str]) -> list[str]:
    """Join the texts of all processes, each once."""
    if fabric.world_size == 1:
        return list(texts)
    own = torch.frombuffer(bytearray(json.dumps(list(texts)).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(fabric.world_size)]
    distributed.all_gather(sizes, torch.tensor([len(own)]), group=_hosts())
    parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    distributed.all_gather(parts, nn.functional.pad(own, (0, len(parts[0]) - len(own))), group=_hosts())
    joined = (json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, sizes, strict=True))
    return list(dict.fromkeys(text for found in joined for text in found))


def is_first() -> bool:
    """Whether this is the process that speaks, of those that train together."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def scatter(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Split an optimiser's joined state as its parameters are split, and lay it out in memory as they are.

    The order of a sum is that of the memory, and with it its last digit.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def like(x: Any, parameter: Tensor) -> Any:
        if not isinstance(x, Tensor) or x.shape != parameter.shape:
            return x
        if isinstance(parameter, DTensor):
            return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements)
        return torch.empty_like(parameter, dtype=x.dtype, requires_grad=False).copy_(x)

    split = {i: {name: like(x, parameters[i]) for name, x in own.items()} for i, own in state["state"].items()}
    return {**state, "state": split}


def _shard(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh["data_parallel"])
    return module

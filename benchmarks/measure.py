"""Measure time as ratios within one run, and memory as the peak of live tensors."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Result:
    """One claim: what was measured, and the bound it must keep."""

    name: str
    value: float
    unit: str  # "x faster", "x the cost", "MB", ...
    bound: float | None = None  # None: for information
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.bound is None or (self.value >= self.bound if self.at_least else self.value <= self.bound)

    @property
    def value_text(self) -> str:
        number = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.3g}"
        return f"{number} {self.unit}".strip()

    @property
    def bound_text(self) -> str:
        if self.bound is None:
            return ""
        return f"{'at least' if self.at_least else 'at most'} {self.bound:,g} {self.unit}".strip()


def seconds(function: Callable[[], Any], budget: float = 1.0, least: int = 3) -> float:
    """Best time of one call: the least disturbed one on a shared machine."""
    best, spent, calls = float("inf"), 0.0, 0
    while calls < least or spent < budget:
        start = time.perf_counter()
        function()
        took = time.perf_counter() - start
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best


def ratio(slow: Callable[[], Any], fast: Callable[[], Any], rounds: int = 5, budget: float = 0.2) -> float:
    """How many calls of `fast` one call of `slow` costs: both timed in turns, so that noise hits both alike."""
    best_slow = best_fast = float("inf")
    for _ in range(rounds):
        best_slow = min(best_slow, seconds(slow, budget, least=1))
        best_fast = min(best_fast, seconds(fast, budget, least=1))
    return best_slow / best_fast


class PeakMemory(TorchDispatchMode):
    """Peak of the memory of all tensors made inside the block, in MB."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                storage = x.untyped_storage()
                known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, size: int) -> None:
        self.live -= size

    @property
    def megabytes(self) -> float:
        return self.peak / 2**20

"""Names that a package imports when they are first used, so that it opens at once and without PyTorch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from didicm.errors import torch_required


def import_on_use(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`: finds the names in their modules, which are relative to the package."""
    homes = {name: module for module, own in names.items() for name in own}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with torch_required(f"{package}.{name}"):
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # asked once
        return value

    return find

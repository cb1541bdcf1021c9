"""Values from YAML files and flags, checked against the type that a setting is declared with."""

import math
from collections.abc import Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from didicm.errors import UserError

NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "nothing"}


def coerce(value: Any, kind: Any, name: str) -> Any:
    """The value as its type asks for; else one sentence on what it must be."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Literal and value in parts:
        return value
    if origin in (Union, UnionType):
        for part in parts:
            try:
                return coerce(value, part, name)
            except UserError:
                continue
    elif origin is tuple and isinstance(value, (list, tuple)):
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(coerce(x, part, name) for x, part in zip(value, kinds, strict=True))
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {
            coerce(k, parts[0], f"a name in {name}"): coerce(x, parts[1], f"{name}: {k}") for k, x in value.items()
        }
    elif kind is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:  # to YAML, 1e-3 is text
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    elif kind in NAMES and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UserError(f"{name} must be {describe(kind)}, got {value!r}")


@lru_cache
def kinds_of(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields."""
    return get_type_hints(cls)


def describe(kind: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in NAMES:
        return NAMES[kind]
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe(part) for part in parts))
    if origin is tuple:
        return f"a list, each entry {describe(parts[0])}"
    return "a set of names and values"

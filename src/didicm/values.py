"""Values of settings: checked against declared types and ranges, changed by dotted names.

A settings class is a frozen dataclass; its fields may be other such classes, or free mappings of names and values.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from didicm.errors import UserError, did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
_RENAMED = {"redraw": "label_proposal", "query": "score_time", "prediction": "parameterization"}


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `open` leaves out the lower one, and `also` says what else may be given."""

    least: float = -math.inf
    most: float = math.inf
    open: bool = False
    also: str = ""

    def __contains__(self, x: float) -> bool:
        return self.least <= x <= self.most and not (self.open and x == self.least)

    def missed_by(self, x: float) -> str:
        """What a number outside must be."""
        if self.most <= 1:
            return f"in {'(' if self.open else '['}{self.least:g}, {self.most:g}]{self.also}"
        if x > self.most:
            return f"at most {self.most:.12g}"
        return f"above {self.least:g}" if self.open else f"at least {self.least:g}"


Natural = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Few = Annotated[int, Range(1, 1000)]  # of what takes time, memory or a process each
Workers = Annotated[int, Range(0, 1000)]
Pixels = Annotated[int, Range(1, 4096)]  # a side of what a network sees
Positive = Annotated[float, Range(0, open=True)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, open=True)]
# Of images: so many per class, or a part of them
Amount = (
    Annotated[int, Range(2, 1_000_000)]
    | Annotated[float, Range(0, 1, open=True, also=" or a whole number from 2 (images per class)")]
)


class Settings:
    """A dataclass of settings: every field is checked when it is made, one inside it from names and values too."""

    prefix: ClassVar[str] = ""

    @classmethod
    def from_dict(cls: type[S], values: Mapping[str, Any]) -> S:
        """Make it from names and values; what is unknown or missing is told."""
        known = {item.name: item.default is item.default_factory is MISSING for item in fields(cls)}  # type: ignore[arg-type]
        if unknown := [name for name in values if name not in known]:
            raise UserError(f"there is no key {unknown[0]!r}: {did_you_mean(str(unknown[0]), known)}")
        if missing := [name for name, needed in known.items() if needed and name not in values]:
            raise UserError(f"{', '.join(missing)} must be given")
        return cls(**values)

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            object.__setattr__(self, name, coerce(getattr(self, name), kind, self.prefix + name))


# Changing settings by name


def override(config: T, *changes: Mapping[str, Any]) -> T:
    """Replace settings, given by their dotted names or nested; later changes win, free mappings merge.

    All at once: halfway between two recipes, settings may exclude each other.
    """
    values, kinds = _leaves(config), setting_types(type(config))
    for change in changes:
        for name, value in _named(change, kinds):
            setting, _, key = (name, "", "") if name in kinds else name.rpartition(".")
            if not is_mapping(kinds[setting]):
                values[setting] = coerce(value, kinds[setting], setting)
            else:
                values[setting] = _merged(values[setting], {key: value} if key else value, setting)
    return _rebuilt(type(config), values)


def flatten(config: Any) -> dict[str, Any]:
    """Settings by their dotted names, as plain values."""
    return {name: plain(value) for name, value in _leaves(config).items()}


@cache
def _hints(cls: type) -> dict[str, Any]:
    """To find them takes longer than to check a value, and studies store thousands of records."""
    return get_type_hints(cls, include_extras=True)


def field_types(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, with their ranges."""
    hints = _hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}


def setting_types(cls: type) -> dict[str, Any]:
    """Types of all settings of a dataclass and those inside it, by dotted name."""
    found: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        nested = isinstance(kind, type) and is_dataclass(kind)
        found |= {f"{name}.{key}": x for key, x in setting_types(kind).items()} if nested else {name: kind}
    return found


def is_mapping(kind: Any) -> bool:
    """Whether a setting holds names and values of its own."""
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _named(change: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Changes by full dotted names; what no setting is called is told with the nearest name."""
    found: list[tuple[str, Any]] = []
    for given, value in change.items():
        name = str(given).replace("-", "_")
        parent = name.rpartition(".")[0]
        if name in kinds or (parent in kinds and is_mapping(kinds[parent])):
            found.append((name, value))
        elif any(kind.startswith(f"{name}.") for kind in kinds):
            value = vars(value) if isinstance(value, Settings) else value
            if not isinstance(value, Mapping):
                raise UserError(f"{name} must be a set of names and values, got {value!r}")
            found += _named({f"{name}.{key}": x for key, x in value.items()}, kinds)
        else:
            raise UserError(f"there is no setting {given!r}: {did_you_mean(name, kinds)}")
    return found


def _merged(old: Mapping[str, Any], new: Any, name: str) -> dict[str, Any]:
    """A free mapping with some of its entries changed; `null` removes one, and another `name` starts anew."""
    new = coerce(new, Mapping[str, Any], name)
    old = {} if new.get("name", old.get("name")) != old.get("name") else old
    return {key: value for key, value in {**old, **new}.items() if value is not None}


def _leaves(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        nested = is_dataclass(value)
        found |= {f"{item.name}.{k}": x for k, x in _leaves(value).items()} if nested else {item.name: value}
    return found


def _rebuilt(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    made = {
        name: _rebuilt(kind, values, f"{prefix}{name}.")
        if isinstance(kind, type) and is_dataclass(kind)
        else values[prefix + name]
        for name, kind in field_types(cls).items()
    }
    try:
        return cls(**made)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{prefix.rstrip('.') or 'settings'}: {error}") from error


def plain(value: Any) -> Any:
    """Settings as plain values, for YAML and JSON."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# Values and their types

MOST = 2**53  # whole numbers that every library below can take

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def coerce(value: Any, kind: Any, name: str) -> Any:
    """The value as its type asks for; else one sentence on what it must be."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = coerce(value, parts[0], name)
        if value not in parts[1]:
            raise UserError(f"{name} must be {parts[1].missed_by(value)}, got {value:.12g}")
        return value
    if kind is Any or (isinstance(kind, type) and is_dataclass(kind) and isinstance(value, kind)):
        return value
    if isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, Mapping):
        return kind.from_dict(value)
    if origin is Literal and value in parts and not isinstance(value, bool):
        return value
    if origin in (Union, UnionType):
        return _coerce_union(value, parts, kind, name)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(coerce(x, part, name) for x, part in zip(value, kinds, strict=True))
    elif is_mapping(kind) and isinstance(value, Mapping):
        return {
            coerce(k, parts[0], f"a name in {name}"): coerce(x, parts[1], f"{name}: {k}") for k, x in value.items()
        }
    elif kind is float and not isinstance(value, bool) and isinstance(value, (Real, str)):
        try:  # to YAML, 1e-3 is text
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    elif kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    elif kind is int and isinstance(value, Integral) and not isinstance(value, bool):
        if abs(number := int(value)) <= MOST:
            return number
        raise UserError(f"{name} must be a whole number of at most {len(str(MOST))} digits")
    elif kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    elif kind in _WORDS and kind is not int and isinstance(value, kind):
        return value
    raise UserError(f"{name} must be {describe(kind)}, got {value!r}")


def _coerce_union(value: Any, parts: tuple[Any, ...], kind: Any, name: str) -> Any:
    told: UserError | None = None
    for part in parts:
        try:
            return coerce(value, part, name)
        except UserError as error:
            # Of the right type but out of range: that says more than a list of the types.
            if get_origin(part) is Annotated and f"must be {describe(part)}" not in str(error):
                told = error
    raise told or UserError(f"{name} must be {describe(kind)}, got {value!r}")


def describe(kind: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if origin is Annotated:
        return describe(parts[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(describe(part) for part in parts))
    if origin is tuple:
        return f"a list, each entry {describe(parts[0])}"
    return "a path" if kind is Path else "a set of names and values"


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that version 0.1 stored, nested or dotted, by today's names."""
    new: dict[str, Any] = {}
    for old, value in settings.items():
        head, dot, last = str(old).rpartition(".")
        value = "midpoint" if (last, value) == ("query", "middle") else value
        new[head + dot + _RENAMED.get(last, last)] = renamed(value) if isinstance(value, dict) else value
    return new

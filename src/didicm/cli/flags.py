"""The one grammar of all commands: the fields of a dataclass are its options, as `--dashed.names`.

`--name value` and `--name=value` are the same, underscores are dashes, a true-or-false option needs no value. Free
mappings take `--name key=value`, `--name.key value` or YAML, and may be repeated.
"""

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin

from didicm.errors import UserError, did_you_mean, reason
from didicm.files import parse_yaml
from didicm.values import coerce, describe, field_types, is_mapping, setting_types

T = TypeVar("T")


def parse(
    argv: Sequence[str], options: type[T], *, command: str, positional: Sequence[str] = (), description: str = ""
) -> T:
    """Read a command's arguments into its options; --help shows them and exits.

    Args:
        argv: what follows the command.
        options: a flat dataclass, whose docstring is the help; a field without a default must be given.
        command: name of the command.
        positional: fields that are given without a name; the last one takes all that are left if it is a tuple.
        description: what the command does, if the docstring cannot say it.
    """
    kinds = field_types(options)
    given, rest = read_flags(argv, kinds, command)
    if given.pop("help", False):
        description = description or " ".join((options.__doc__ or "").partition("Args:\n")[0].split())
        print(show_help(command, description, options, positional=positional))
        sys.exit(0)
    for i, name in enumerate(positional):
        if get_origin(kinds[name]) is tuple:
            given |= {name: rest[i:]} if rest[i:] else {}
            rest = rest[:i]
        elif i < len(rest):
            given[name] = rest[i]
    if len(rest) > len(positional):
        raise UserError(f"didicm {command} does not take {rest[len(positional)]!r}: see didicm {command} --help")
    for item in fields(options):  # type: ignore[arg-type]
        if item.default is MISSING and item.default_factory is MISSING and item.name not in given:
            name = item.name.upper() if item.name in positional else f"--{_dashed(item.name)}"
            raise UserError(f"didicm {command} needs {name}: {help_of(options)[item.name]}")
    return options(**{name: coerce(value, kinds[name], f"--{_dashed(name)}") for name, value in given.items()})


def read_flags(argv: Sequence[str], kinds: Mapping[str, Any], command: str) -> tuple[dict[str, Any], list[str]]:
    """Values by option, and what was given without a name; an unknown option is told with the nearest one."""
    given: dict[str, Any] = {}
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == "--":
            return given, rest + tokens
        if token in ("-h", "--help"):
            return {"help": True}, []
        if not token.startswith("--"):
            rest.append(token)
            continue
        flag, equals, text = token[2:].partition("=")
        name = flag.replace("-", "_")
        negated = name.startswith("no_") and kinds.get(name[3:]) is bool
        name = name[3:] if negated else name
        # Of --set.optimizer.lr the setting is `set`.
        setting = next((kind for kind in kinds if name == kind or name.startswith(f"{kind}.")), "")
        if not setting or (setting != name and not is_mapping(kinds[setting])):
            known = [f"--{_dashed(kind)}" for kind in kinds]
            section, _, rest_of_name = flag.partition(".")
            if rest_of_name and not any(x.startswith(f"--{section}.") for x in known):  # of a free mapping, any
                known += [f"--{_dashed(kind)}.{rest_of_name}" for kind in kinds if is_mapping(kinds[kind])]
            raise UserError(f"didicm {command} has no option --{flag}: {did_you_mean(f'--{flag}', known)}")
        if kinds[setting] is bool:
            if not equals:
                text = tokens.pop(0) if tokens and tokens[0].lower() in ("true", "false") else "true"
            value = read_value(text, bool, flag)
            given[name] = not value if negated and isinstance(value, bool) else value
            continue
        if not equals:
            if not tokens or tokens[0].startswith("--"):  # what looks like an option is one, or needs --name=value
                raise UserError(f"--{flag} needs a value: {describe(kinds[setting])}")
            text = tokens.pop(0)
        if is_mapping(kinds[setting]):
            given[setting] = {**given.get(setting, {}), **_entries(flag, name[len(setting) + 1 :], text)}
        else:
            given[name] = read_value(text, kinds[name], flag)
    return given, rest


def read_value(text: str, kind: Any, flag: str) -> Any:
    """A value from the command line, by its type: text stays as it is, lists may do without brackets."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    parts = get_args(base) if get_origin(base) not in (None, tuple) else (base,)
    if NoneType in parts and text.lower() in ("null", "none"):
        return None
    if set(parts) <= {str, Path, NoneType}:
        if not text and Path in parts:  # of a variable that is not set; it would be this folder
            raise UserError(f"--{flag} is empty: give a path")
        return text
    listed = next((part for part in parts if get_origin(part) is tuple), None)
    if listed is not None and not text.startswith("["):
        return [read_value(part.strip(), get_args(listed)[0], flag) for part in text.split(",") if part.strip()]
    return _yaml(text, flag)


def _entries(flag: str, key: str, text: str) -> dict[str, Any]:
    """What one use of a free mapping says: of one entry, or several as YAML."""
    name, equals, value = text.partition("=")
    if key:
        return {key: _yaml(text, flag)}
    if equals and re.fullmatch(r"[\w.-]+", name):
        return {name: _yaml(value, flag)}
    content = _yaml(text, flag)
    if not isinstance(content, dict):
        raise UserError(f"--{flag} needs NAME=VALUE, as in --{flag} batch_size=32, got {text!r}")
    return {str(name): value for name, value in content.items()}


def _yaml(text: str, flag: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"--{flag}: {text!r} cannot be read ({reason(error)})") from error


def show_help(command: str, description: str, *options: type, positional: Sequence[str] = ()) -> str:
    """What --help prints: the fields of all `options`."""
    usage = " ".join([f"usage: didicm {command}", *(name.upper() for name in positional), "[--OPTION VALUE ...]"])
    lines = [usage, "", *textwrap.wrap(description, 100, break_on_hyphens=False), ""]
    for cls in options:
        words = help_of(cls)
        for name, kind in setting_types(cls).items():
            default = _default(cls, name)
            value = ",".join(map(str, default)) if isinstance(default, tuple) else default
            shown = "" if default in (None, "", (), {}, False, MISSING) else f" (default {value})"
            left = name.upper() if name in positional else f"--{_dashed(name)}"
            text = f"{words.get(name, describe(kind))}{shown}"
            lines += textwrap.wrap(text, 110, initial_indent=f"  {left:<28} ", subsequent_indent=" " * 31)
    return "\n".join(lines)


def help_of(cls: type) -> dict[str, str]:
    """What the Args of a class and its bases say of each setting, nested ones by dotted name."""
    texts = [textwrap.dedent((base.__doc__ or "").partition("Args:\n")[2]) for base in reversed(cls.__mro__)]
    entries = re.finditer(r"^(\w+): (.*(?:\n +.*)*)", "\n".join(texts), re.MULTILINE)
    found = {entry[1]: " ".join(entry[2].split()) for entry in entries}
    for name, kind in field_types(cls).items():
        if is_dataclass(kind):
            found |= {f"{name}.{key}": x for key, x in help_of(kind).items()}  # type: ignore[arg-type]
    return found


def _default(cls: Any, name: str) -> Any:
    head, _, rest = name.partition(".")
    item: Field[Any] = next(item for item in fields(cls) if item.name == head)
    made = item.default_factory() if item.default_factory is not MISSING else item.default
    for part in rest.split(".") if rest else []:
        made = getattr(made, part)
    return made


def _dashed(name: str) -> str:
    return name.replace("_", "-")

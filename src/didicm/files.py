"""Files that are either as they were or as they should be: one way to write, to read JSON and YAML, to digest."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from didicm.errors import UserError, reason

Write = Callable[[Path], object]


def write_files(directory: str | Path, writers: Mapping[str, Write | str | bytes]) -> None:
    """Write all files under temporary names, then move them in place: a full disk or a crash leaves the old ones.

    A value is the content, or a function that writes the file at the path it is given.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as scratch:
        for name, content in writers.items():
            part = Path(scratch) / name
            if isinstance(content, str):
                part.write_text(content, encoding="utf-8")
            elif isinstance(content, bytes):
                part.write_bytes(content)
            else:
                content(part)
            part.chmod(0o666 & ~_umask())  # some libraries write files that only their owner may read
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        for name in writers:
            os.replace(Path(scratch) / name, directory / name)


def to_json(values: Any) -> str:
    """Readable JSON that ends with a line break; a number that is not finite is an error."""
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file; a damaged one is told with what to do about it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({reason(error)}): {remedy}") from error


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """The names and values of a YAML file; anything else is told with what to do about it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}): {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no names and values: {remedy}")
    return content


def sha256(path: Path) -> str:
    """Digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _umask() -> int:
    """The process's umask, which the system only tells while it is being changed."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

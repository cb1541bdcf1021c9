"""Files that are either as they were or as they should be: one way to write, to read JSON and YAML, to digest."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from didicm.errors import UserError, reason
from didicm.processes import lock, opened

# What a file that we read may have: enough for any of ours, and too little to fill the memory.
JSON_BYTES, YAML_BYTES, YAML_VALUES, DEPTH = 64 * 2**20, 2**18, 100_000, 50
_TIMESTAMP, _TEXT = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str"

Write = Callable[[Path], object]
SAVING = ".saving-"


def write_files(directory: str | Path, writers: Mapping[str, Write | str | bytes]) -> None:
    """Write all files under temporary names, then move them in place: a full disk or a crash leaves the old ones.

    A value is the content, or a function that writes the file at the path it is given. A link is replaced, not
    followed.
    """
    directory = Path(directory)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _scratch(directory) as scratch:
            for name, content in writers.items():
                part = scratch / name
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
                os.replace(scratch / name, directory / name)


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """What keeps a file from being written, told with what to do about it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        full = any(os.strerror(number) in told for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        remedy = "make room, then run the same command again" if full else "give another place to write to"
        raise UserError(f"{place} cannot be written ({told}): {remedy}") from error


def clear_leftovers(directory: Path) -> None:
    """Remove what killed processes left of files they were writing here, unless somebody is writing now."""
    with suppress(OSError), opened(directory) as handle:
        _clear(directory, handle)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A folder for files that are not whole yet; as long as it is in use, nobody takes it for a leftover."""
    with opened(directory) as handle:
        with suppress(OSError):  # not every file system can lock a folder: then leftovers stay
            _clear(directory, handle)
            lock(handle, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=SAVING, dir=directory) as scratch:
            yield Path(scratch)


def _clear(directory: Path, handle: int) -> None:
    if lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for left in directory.glob(f"{SAVING}*"):
            shutil.rmtree(left, ignore_errors=True)


# Nothing of a user's is replaced: what a command may replace, it knows by its content.

SOFTWARE = {"Software": "didicm"}  # stands in every PNG that a command writes


def check_replaceable(path: Path, is_ours: Callable[[Path], bool], option: str, *, force: bool) -> None:
    """Refuse to replace a file that is not of the kind that the command writes, and any link."""
    if not force and os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not is_ours(path)):
        remedy = f"give another {option}" if option else "move it away"
        raise UserError(f"{path} was not made by this command: {remedy}, or replace it with --force")


def is_our_picture(path: Path) -> bool:
    """Whether a command wrote this PNG."""
    with open(path, "rb") as file:
        head = file.read(4096)
    return head.startswith(b"\x89PNG") and b"Software\0didicm" in head


def to_json(values: Any) -> str:
    """Readable JSON that ends with a line break; a number that is not finite is an error."""
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file; a damaged one is told with what to do about it."""
    try:
        return parse_json(read_text(path, JSON_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({reason(error)}): {remedy}") from error


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """The names and values of a YAML file; anything else is told with what to do about it."""
    try:
        content = parse_yaml(read_text(path, YAML_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}): {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no names and values: {remedy}")
    return content


def read_text(path: Path, most: int) -> str:
    """The content of a file of at most so many bytes; nothing but a file is opened, for a pipe would never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"it has {size} bytes, more than the {most} that such a file may have")
    return path.read_text(encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """Plain values from JSON; ValueError for what is none, is nested too deeply or holds what no text can."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _check_plain(content)


def parse_yaml(text: str) -> Any:
    """Plain values from YAML; ValueError also for aliases that unfold to far more than was written."""
    try:
        loader = _ShallowLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_node(root, {})
        return _check_plain(loader.construct_document(root))
    except yaml.YAMLError as error:
        raise ValueError(reason(error)) from error
    except (LookupError, AttributeError, TypeError) as error:  # a value that is not what its tag says
        raise ValueError("a value does not fit its tag") from error


def sha256(path: Path) -> str:
    """Digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


class _ShallowLoader(yaml.SafeLoader):
    """Stops at what is nested too deeply, for which PyYAML would take a time that grows with its square."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > DEPTH:
            raise ValueError(f"it is nested more than {DEPTH} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _check_node(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """How many values a YAML node stands for; one that contains itself has too many."""
    if node in sizes:
        return sizes[node]
    if node.tag == _TIMESTAMP:  # settings know no dates
        node.tag = _TEXT
    sizes[node] = YAML_VALUES + 1
    inside = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
    size = 1 + sum(_check_node(part, sizes) for part in parts)
    if size > YAML_VALUES:
        raise ValueError(f"its aliases unfold to more than {YAML_VALUES} values")
    sizes[node] = size
    return size


def _check_plain(value: Any, depth: int = 0) -> Any:
    """Return what consists of names, numbers and text alone, none of it nested too deeply."""
    if depth > DEPTH:
        raise ValueError(f"it is nested more than {DEPTH} deep")
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair could not be shown or stored
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, depth + 1)
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise ValueError(f"it holds a {type(value).__name__}, but only names, numbers and text are allowed")
    return value


def _umask() -> int:
    """The process's umask, which the system only tells while it is being changed."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

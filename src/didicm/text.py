"""Text from outside, such as names of files and classes: shown so that it cannot steer what shows it."""

import shlex
import unicodedata
from typing import Any

from rich.console import Console
from rich.text import Text

_JOINERS = "\u200c\u200d"  # invisible, but several scripts cannot be written without them
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, marks that turn the direction, half characters, line breaks


def readable(text: str) -> str:
    """On one line, with nothing in it that acts instead of being shown; bytes that are no UTF-8 become U+FFFD."""
    return "".join(_shown(c) for c in text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def quoted(argument: object) -> str:
    """An argument of a command as a shell takes it, to be pasted."""
    text = str(argument)
    if all(c == _shown(c) for c in text):
        return shlex.quote(text)
    return "$'" + "".join(_as_bytes(c) for c in text) + "'"


def count(n: float, thing: str) -> str:
    """So many things, as in 1 image, 2.5 images, 2,000 processes."""
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{n:,.10g} {thing if n == 1 else plural}"


class SafeConsole(Console):
    """Rich's console without markup, emoji and highlighting, which passes on line breaks as the only controls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed comes by here, in tables too."""
        return super().render_str("".join(c if c in "\n\t" else _shown(c) for c in text), **options)


def _shown(c: str) -> str:
    unsafe = unicodedata.category(c) in _UNSAFE and c not in _JOINERS
    return c.encode("unicode_escape", "surrogatepass").decode() if unsafe else c


def _as_bytes(c: str) -> str:
    if c in "\\'":
        return f"\\{c}"
    return c if c == _shown(c) else "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogateescape"))

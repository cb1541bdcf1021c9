"""Mutations of bytes and of plain values, all drawn from one generator: a case is its seed."""

from copy import deepcopy
from random import Random

# Numbers and texts that programs trip over.
TEXTS = [
    "", " ", "-1", "0", "nan", "inf", "1e99", "null", "true", "../..", "/dev/zero", "/etc/passwd", "hf://", "a\nb",
    "=1+1", "\x1b[31m", "[bold]x", "$x$", "%s{}", "é" * 40, "x" * 5000, "--", "--help", "@", "\u202e", "1:2:3",
    "{a: [}", "*a", "🦆",
]  # fmt: skip
VALUES = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e308, -1e308, float("nan"),
    float("inf"), [], {}, [[]], [None], {"": None}, {"name": "x"}, [1, 2, 3], ["a", "a"], *TEXTS,
]  # fmt: skip
MOST = 20_000  # bytes to insert


def mutate_bytes(content: bytes, rng: Random) -> bytes:
    """Damage a file in one to four places."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        # Headers are where most decisions fall.
        at = min(len(content), rng.choice((rng.randrange(64), rng.randrange(len(content) + 1))))
        end = min(len(content), at + rng.choice((1, 2, 4, 8, 64)))
        head, part, tail = content[:at], content[at:end], content[end:]
        content = rng.choice((
            head,
            tail,
            head + tail,
            head + part + content[at:],
            head + rng.randbytes(len(part)) + tail,
            head + rng.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * len(part) + tail,
            head + bytes(byte ^ (1 << rng.randrange(8)) for byte in part) + tail,
            head + rng.randbytes(rng.choice((1, 16, 400))) + part + tail,
            head + part * rng.choice((2, 50, MOST // max(1, len(part)))) + tail,
        ))  # fmt: skip
    return content


def mutate_plain(value: object, rng: Random) -> object:
    """Change one to three entries of JSON-like values, in place."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(places)
        action = rng.random()
        if action < 0.7:
            holder[key] = _other(holder[key], rng)
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice((*TEXTS[:14], f"{key}s", str(key).upper()))] = holder[key]
        else:
            holder *= rng.choice((0, 2, 30))
    return value


def mutate_arguments(arguments: list[str], words: list[str], rng: Random) -> list[str]:
    """Change, drop, repeat, swap and add words of a command."""
    arguments = list(arguments)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(arguments) + 1)
        action, word = rng.random(), rng.choice((*words, *TEXTS))
        if action < 0.4 or at == len(arguments):
            arguments[at : at + 1] = [word]
        elif action < 0.6:
            name, equals, _ = arguments[at].partition("=")
            arguments[at] = f"{name}={word}" if equals else word
        elif action < 0.75:
            del arguments[at]
        elif action < 0.85:
            arguments.insert(at, arguments[at])
        else:
            arguments[at:at] = [word, rng.choice((*words, *TEXTS))]
    return [argument.replace("\0", "") for argument in arguments]


def _places(value: object) -> "list[tuple[object, object]]":
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in list(entries) for place in ((value, key), *_places(item))]


def _other(value: object, rng: Random) -> object:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and rng.random() < 0.3:
        return rng.choice((-value, value * 10, value + 1, value / 3, str(value)))
    if rng.random() < 0.05:
        deep: object = value
        for _ in range(rng.choice((20, 60, 300))):
            deep = [deep]
        return deep
    return deepcopy(rng.choice(VALUES))

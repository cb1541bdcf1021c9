"""Look at data before training on it: what cannot be read, what is lopsided, what leaks."""

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from didicm.data.examples import save_examples
from didicm.data.images import ImageSet, UnreadableImageError
from didicm.data.sources import open_data
from didicm.data.transforms import TrainTransform

TINY_CLASS = 10
IMBALANCED = 10.0


@dataclass(frozen=True)
class SplitFindings:
    """What one split holds."""

    images: int
    counts: dict[str, int]  # images of each class
    unreadable: list[str]  # one sentence each
    modes: dict[str, int]  # PIL's names for how the pixels are stored
    widths: tuple[int, int, int]  # smallest, median, largest
    heights: tuple[int, int, int]

    @property
    def empty(self) -> list[str]:
        """Classes without images."""
        return [name for name, count in self.counts.items() if not count]

    @property
    def tiny(self) -> list[str]:
        """Classes with some, but fewer than 10 images."""
        return [name for name, count in self.counts.items() if 0 < count < TINY_CLASS]

    @property
    def imbalance(self) -> float:
        """Images of the largest class for one of the smallest that has any."""
        counts = [count for count in self.counts.values() if count]
        return max(counts) / min(counts) if counts else 1.0


@dataclass(frozen=True)
class Findings:
    """What the doctor saw. Equal pixels count as duplicates, however they are stored."""

    uri: str
    train: SplitFindings
    val: SplitFindings | None
    leaks: list[tuple[str, str]] = field(default_factory=list)  # a training and the same validation image
    contradictions: list[tuple[str, str]] = field(default_factory=list)  # the same image, different classes
    examples: Path | None = None  # picture of what the transforms do

    @property
    def problems(self) -> list[str]:
        """What should be mended before training, the worst first."""
        splits = [("training", self.train), ("validation", self.val)]
        found = []
        if len(self.train.counts) - len(self.train.empty) < 2:
            found.append("fewer than two classes have training images; add some")
        found += [
            f"{len(split.unreadable)} {name} images cannot be read; repair or remove them"
            for name, split in splits
            if split and split.unreadable
        ]
        if self.train.empty:
            found.append(f"no training images of {_some(self.train.empty)}; add images or remove the class")
        if self.leaks:
            found.append(f"{len(self.leaks)} validation images are also training images; remove one of each")
        return found

    @property
    def advice(self) -> list[str]:
        """What does not stand in the way of training, but should be known."""
        found = []
        if self.train.tiny:
            few = _some(self.train.tiny)
            found.append(f"fewer than {TINY_CLASS} training images of {few}; expect little there")
        if self.train.imbalance >= IMBALANCED:
            found.append(f"the largest class has {self.train.imbalance:.0f} times the images of the smallest")
        if self.contradictions:
            found.append(f"{len(self.contradictions)} images appear under two classes; decide on one")
        if self.val is None:
            found.append("there is no validation split; one will be cut from the training images")
        return found

    @property
    def verdict(self) -> str:
        """What to do next, in one line."""
        if self.problems:
            return f"Mend this first: {self.problems[0]}."
        return f"Ready to train: didicm train --recipe small --data {self.uri} --out runs/mine"


@dataclass(frozen=True)
class _Look:
    """What there is to know about one image."""

    mode: str = ""
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    problem: str = ""


def examine(
    uri: str,
    *,
    channels: int = 3,
    transform: TrainTransform | None = None,
    examples: str | Path | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Findings:
    """Decode every image that `uri` names and report what was found.

    Args:
        uri: as for `open_data`.
        channels: as for `open_data`; pixels are compared after that conversion.
        transform: what training would do, for the examples.
        examples: where to save a PNG that shows it on three images.
        seed: chooses the three images and their augmentation.
        console: shows progress; None for standard error.
    """
    data = open_data(uri, channels=channels, strict=False)
    console = console or Console(file=sys.stderr)
    looks = {"train": _look_at_all(data.train, "train", console)}
    if data.val is not None:
        looks["val"] = _look_at_all(data.val, "val", console)
    sets = {"train": data.train, "val": data.val}
    where: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
    for split, seen in looks.items():
        for i, look in enumerate(seen):
            if look.digest:
                where[look.digest].append((split, i))
    picture = None
    readable = [i for i, look in enumerate(looks["train"]) if look.digest]
    if examples is not None and transform is not None and readable:
        chosen = np.random.default_rng(seed).permutation(readable)[:3]
        picture = save_examples([data.train.load(int(i)) for i in chosen], transform, examples, seed)
    return Findings(
        uri,
        _summarise(data.train, looks["train"]),
        _summarise(data.val, looks["val"]) if data.val is not None else None,
        leaks=list(_leaks(where, sets)),
        contradictions=list(_contradictions(where, sets)),
        examples=picture,
    )


def render(findings: Findings) -> Iterator[Any]:
    """Yield what to print with rich, line by line and table by table."""
    table = Table("", "train", *(["val"] if findings.val else []), title=findings.uri, title_justify="left")
    splits = [s for s in (findings.train, findings.val) if s is not None]
    table.add_row("images", *(f"{s.images:,}" for s in splits))
    table.add_row("classes with images", *(str(len(s.counts) - len(s.empty)) for s in splits))
    table.add_row("a class, min/median/max", *(_spread(list(s.counts.values())) for s in splits))
    table.add_row("largest / smallest", *(f"{s.imbalance:.1f}" for s in splits))
    table.add_row("width, min/median/max", *("/".join(map(str, s.widths)) for s in splits))
    table.add_row("height, min/median/max", *("/".join(map(str, s.heights)) for s in splits))
    table.add_row("stored as", *(", ".join(f"{m} {n:,}" for m, n in s.modes.items()) for s in splits))
    table.add_row("unreadable", *(f"{len(s.unreadable):,}" for s in splits))
    yield table
    details: list[Iterable[str]] = [
        [reason for s in splits for reason in s.unreadable],
        [f"also in validation: {a} = {b}" for a, b in findings.leaks],
        [f"two classes: {a} = {b}" for a, b in findings.contradictions],
    ]
    for lines in details:
        yield from _first(list(lines))
    for problem in findings.problems:
        yield f"[red]problem[/]  {_plain(problem)}"
    for line in findings.advice:
        yield f"[yellow]note[/]     {_plain(line)}"
    if findings.examples is not None:
        yield f"What the transforms do to three images: {_plain(str(findings.examples))}"
    yield f"[bold]{_plain(findings.verdict)}[/]"


def _look_at_all(images: ImageSet, split: str, console: Console) -> list[_Look]:
    """Look at every image, with a bar on a terminal and one line elsewhere."""
    # Threads are enough: decoding releases Python's lock.
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        looks: Iterable[_Look] = pool.map(lambda i: _look_at(images, i), range(len(images)))
        if console.is_terminal:
            from rich.progress import track

            return list(track(looks, f"looking at {split}", total=len(images), console=console, transient=True))
        console.print(f"looking at {len(images):,} images of {split}")
        return list(looks)


def _look_at(images: ImageSet, i: int) -> _Look:
    try:
        mode = images.original(i).mode
    except Exception:  # `load` says it better
        mode = ""
    try:
        image = images.load(i)
    except UnreadableImageError as error:
        return _Look(problem=str(error))
    return _Look(mode, image.size, _digest(image))


def _digest(image: Image.Image) -> bytes:
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=16).digest()


def _summarise(images: ImageSet, looks: list[_Look]) -> SplitFindings:
    seen = [look for look in looks if look.digest]
    counts = np.bincount(images.labels, minlength=len(images.class_names)).tolist()
    return SplitFindings(
        images=len(images),
        counts=dict(zip(images.class_names, counts, strict=True)),
        unreadable=[look.problem for look in looks if look.problem],
        modes=dict(Counter(look.mode for look in seen).most_common()),
        widths=_range([look.size[0] for look in seen]),
        heights=_range([look.size[1] for look in seen]),
    )


def _leaks(where: dict[bytes, list[tuple[str, int]]], sets: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for places in where.values():
        train = [i for split, i in places if split == "train"]
        for split, i in places:
            if split == "val" and train:
                yield sets["train"].name(train[0]), sets["val"].name(i)


def _contradictions(where: dict[bytes, list[tuple[str, int]]], sets: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for places in where.values():
        split, first = places[0]
        for other_split, i in places[1:]:
            if sets[split].labels[first] != sets[other_split].labels[i]:
                yield sets[split].name(first), sets[other_split].name(i)


def _range(values: list[int]) -> tuple[int, int, int]:
    return (min(values), int(np.median(values)), max(values)) if values else (0, 0, 0)


def _spread(values: list[int]) -> str:
    return "/".join(map(str, _range(values)))


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _first(lines: list[str], most: int = 10) -> Iterator[str]:
    yield from (_plain(line) for line in lines[:most])
    if len(lines) > most:
        yield f"... and {len(lines) - most:,} more like this"


def _plain(text: str) -> str:
    """File names may hold square brackets, which rich would read as colours."""
    from rich.markup import escape

    return escape(text)

"""Look at data before training on it: what cannot be read, what is lopsided, what leaks."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from didicm.data.decode import tiles
from didicm.data.folder import ARRAY, EXTENSIONS, is_hidden
from didicm.data.images import ImageSet, UnreadableImageError, some
from didicm.data.picture import Bands, Picture, from_pixels, viewable
from didicm.data.randomness import keys, preserved
from didicm.data.sources import FOLDER, Data, shared_groups, split_uri
from didicm.data.transforms import TrainTransform, to_tensor
from didicm.files import SOFTWARE, write_files
from didicm.processes import usable_cores
from didicm.text import count

# Images, in the widest sense, of kinds that we do not open.
UNSUPPORTED = frozenset((
    ".heic", ".heif", ".psd", ".xcf", ".svg", ".pdf", ".eps", ".ai", ".ico", ".exr", ".hdr", ".jxl", ".dds",
    ".dcm", ".nii", ".npy", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".mp4", ".mov",
))  # fmt: skip
TINY_CLASS = 10
IMBALANCED = 10.0
DARK = 64  # of 255: such images hold less than a quarter of the values they could, as do 12 bits in files of 16
TILE, GAP, HEADER = 160, 8, 16  # pixels of the picture of examples
COLUMNS = ("original", "training", "training", "training", "evaluation")


@dataclass(frozen=True)
class SplitFindings:
    """What one split holds."""

    images: int
    counts: dict[str, int]  # images of each class
    unreadable: list[str]  # one sentence each
    modes: dict[str, int]  # PIL's names for how the pixels are stored
    widths: tuple[int, int, int]  # smallest, median, largest
    heights: tuple[int, int, int]
    brightest: int  # value of any pixel, in the 8 bits to which deeper ones are scaled

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
        """Images of the largest class per image of the smallest that has any."""
        return _imbalance(self.counts.values())


@dataclass(frozen=True)
class Findings:
    """What the doctor saw. Equal pixels count as duplicates, however they are stored."""

    uri: str
    train: SplitFindings
    val: SplitFindings | None
    leaks: list[tuple[str, str]]  # a training and the same validation image
    shared_groups: list[str]  # with images in both splits
    unused: dict[str, list[str]]  # files of a folder that are no images we read, by the end of their names
    contradictions: list[tuple[str, str]]  # the same image, different classes
    copies: list[tuple[str, str]]  # the same image, the same class and split

    @property
    def problems(self) -> list[str]:
        """What to fix before training, the worst first."""
        found = []
        if len(self.train.counts) - len(self.train.empty) < 2:
            found.append("fewer than two classes have training images; add some")
        for name, split in (("training", self.train), ("validation", self.val)):
            if split and split.unreadable:
                found.append(f"{count(len(split.unreadable), f'unreadable {name} image')} to repair or remove")
        if self.train.empty:
            found.append(f"no training images of {some(self.train.empty)}; add images or remove the class")
        if self.leaks:
            found.append(
                f"{count(len(self.leaks), 'validation image')} duplicated in training; remove one of each pair"
            )
        if self.shared_groups:
            found.append(
                f"training and validation share the groups {some(self.shared_groups)}; keep each on one side"
            )
        return found

    @property
    def advice(self) -> list[str]:
        """What does not stand in the way of training, but should be known."""
        found = []
        if self.train.tiny:
            few = some(self.train.tiny)
            found.append(f"fewer than {TINY_CLASS} training images of {few}; expect low accuracy there")
        if self.imbalance >= IMBALANCED:
            found.append(f"the largest class has {self.imbalance:.0f} times the images of the smallest")
        # What training lacks as well was told as a problem.
        if self.val and (missing := [name for name in self.val.empty if name not in self.train.empty]):
            found.append(f"no validation images of {some(missing)}; nothing is measured there")
        for suffix, files in self.unused.items():
            remedy = "; pip install pillow-heif reads them" if suffix in (".heic", ".heif") else ""
            found.append(f"{count(len(files), f'{suffix} file')} not read, such as {files[0]}{remedy}")
        if self.contradictions:
            found.append(f"{count(len(self.contradictions), 'image')} under two classes; decide on one")
        if self.copies:
            several = f"{len(self.copies):,} images are copies of others of their class"
            told = several if len(self.copies) > 1 else "1 image is a copy of another of its class"
            apart = ", or the same image may come into both training and validation" if self.val is None else ""
            found.append(f"{told}, such as {self.copies[0][1]}; delete copies{apart}")
        for names in self.alike:
            found.append(f"the classes {some(names)} differ only in case or spaces; if they are one, rename them")
        if self.train.brightest < DARK:
            found.append(
                f"no training image has a value above {self.train.brightest} of 255, to which the range of its "
                "type is scaled: save images in 8 bits that use them all"
            )
        if self.val is None:
            found.append("there is no validation split; one will be held out from the training images")
        return found

    @property
    def alike(self) -> list[list[str]]:
        """Names of classes that a slip of the hand may have made two of one."""
        found: dict[str, list[str]] = {}
        for name in self.train.counts:
            found.setdefault(" ".join(name.casefold().split()), []).append(repr(name))
        return [names for names in found.values() if len(names) > 1]

    @property
    def imbalance(self) -> float:
        """Images of the largest class per image of the smallest that has any, over all splits."""
        both = [split.counts for split in (self.train, self.val) if split is not None]
        return _imbalance(sum(split[name] for split in both) for name in self.train.counts)


@dataclass(frozen=True)
class Look:
    """What there is to know about one image."""

    mode: str = ""
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""  # of the decoded pixels
    brightest: int = 255  # of their values, in 8 bits
    problem: str = ""  # why it cannot be read


Track = Callable[[Iterable[Look], str, int], Iterable[Look]]


def examine(data: Data, track: Track = lambda looks, split, count: looks) -> Findings:
    """Decode every image and report what was found; `track` may show progress through a split, given its size."""
    splits = {"train": data.train} | ({"val": data.val} if data.val is not None else {})
    # Threads are enough: decoding releases Python's lock.
    with ThreadPoolExecutor(min(8, usable_cores())) as pool:
        looks = {
            split: list(track(pool.map(partial(_look_at, images), range(len(images))), split, len(images)))
            for split, images in splits.items()
        }
    found = {split: _summarise(images, looks[split]) for split, images in splits.items()}
    first: dict[bytes, tuple[str, int]] = {}
    leaks, contradictions, copies = [], [], []
    for split, images in splits.items():  # train comes first, so a leak is always (train, val)
        for i, look in enumerate(looks[split]):
            if not look.digest:
                continue
            place, j = first.setdefault(look.digest, (split, i))
            pair = splits[place].name(j), images.name(i)
            if place != split:
                leaks.append(pair)
            if splits[place].labels[j] != images.labels[i]:
                contradictions.append(pair)
            elif place == split and j != i:
                copies.append(pair)
    shared, unused = shared_groups(data.train, data.val), unused_files(data.uri)
    return Findings(data.uri, found["train"], found.get("val"), leaks, shared, unused, contradictions, copies)


def unused_files(uri: str) -> dict[str, list[str]]:
    """Files below a folder that look like images and are not read, by the end of their names."""
    found: dict[str, list[str]] = {}
    scheme, place = split_uri(uri)
    for folder, below, files in os.walk(Path(place).expanduser()) if scheme == FOLDER else ():
        below[:] = [name for name in below if not is_hidden(name)]
        suffixes = {name: os.path.splitext(name)[1].lower() for name in sorted(files) if not is_hidden(name)}
        read = EXTENSIONS if EXTENSIONS.intersection(suffixes.values()) else EXTENSIONS | {ARRAY}
        for name, suffix in suffixes.items():
            if suffix in UNSUPPORTED - read:
                found.setdefault(suffix, []).append(os.path.join(folder, name))
    return dict(sorted(found.items()))


def save_examples(images: ImageSet, transform: TrainTransform, path: Path, seed: int = 0) -> None:
    """Save a PNG of three images: the original, three augmented views, and what evaluation sees."""
    rows: list[Picture] = []
    for i in np.random.default_rng(seed).permutation(len(images)):
        with suppress(UnreadableImageError):
            rows.append(images.load(int(i)))
        if len(rows) == 3:
            break
    sheet = Image.new("RGB", (len(COLUMNS) * (TILE + GAP) + GAP, HEADER + len(rows) * (TILE + GAP) + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(COLUMNS):
        draw.text((GAP + column * (TILE + GAP), 4), title, fill="black")
    for row, image in enumerate(rows):
        for column, tile in enumerate([image, *_views(image, transform, keys(seed, row, np.arange(3)))]):
            scale = TILE / max(tile.size)
            width, height = (max(1, round(side * scale)) for side in tile.size)
            method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
            left = GAP + column * (TILE + GAP) + (TILE - width) // 2
            top = HEADER + GAP + row * (TILE + GAP) + (TILE - height) // 2
            sheet.paste(viewable(tile).convert("RGB").resize((width, height), method), (left, top))
    about = PngInfo()
    for name, value in SOFTWARE.items():
        about.add_text(name, value)
    write_files(path.parent, {path.name: lambda part: sheet.save(part, "PNG", pnginfo=about)})


def _look_at(images: ImageSet, i: int) -> Look:
    try:
        image = images.load(i)
    except UnreadableImageError as error:
        return Look(problem=str(error))
    pixels, brightest = hashlib.blake2b(repr(image.size).encode(), digest_size=16), 0
    for plane in image.planes if isinstance(image, Bands) else [image]:
        for _, tile in tiles(plane):
            content = tile.tobytes()
            pixels.update(content)
            brightest = max(brightest, int(np.frombuffer(content, np.uint8).max(initial=0)))
    return Look(images.original(i).mode, image.size, pixels.digest(), brightest)


def _summarise(images: ImageSet, looks: list[Look]) -> SplitFindings:
    seen = [look for look in looks if look.digest]
    counts = np.bincount(images.labels, minlength=len(images.class_names)).tolist()
    return SplitFindings(
        images=len(images),
        counts=dict(zip(images.class_names, counts, strict=True)),
        unreadable=[look.problem for look in looks if look.problem],
        modes=dict(Counter(look.mode for look in seen).most_common()),
        widths=spread([look.size[0] for look in seen]),
        heights=spread([look.size[1] for look in seen]),
        brightest=max((look.brightest for look in seen), default=255),
    )


def spread(values: list[int]) -> tuple[int, int, int]:
    """Smallest, median, largest."""
    return (min(values), int(np.median(values)), max(values)) if values else (0, 0, 0)


def _imbalance(counts: Iterable[int]) -> float:
    some = list(filter(None, counts))
    return max(some) / min(some) if some else 1.0


def _views(image: Picture, transform: TrainTransform, key: np.ndarray) -> list[Picture]:
    """Through the very transforms that training and evaluation use, and back to pixels."""
    with preserved():
        prepared = to_tensor([transform.prepare(image, int(k)) for k in key])
    seen = torch.cat([transform.finish(prepared, key), transform.eval_transform(image)[None]])
    pixels = transform.eval_transform.restore(seen).permute(0, 2, 3, 1).numpy()
    return [from_pixels(view) for view in pixels]

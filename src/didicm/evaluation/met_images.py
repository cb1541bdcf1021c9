"""Which images a model has met before: by training, by the choice of its weights, by calibration.

On any of them it looks better than it is. A calibration knows its images by the bytes of their files, and those
that lie in no file of their own by their names. The images of a training, which may be a million, are known by
their names, without symbolic links on the way, and copies of them by their bytes where that is soon found out.
"""

import base64
import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from didicm.data import Data, DataError, ImageSet, hold_out, open_data
from didicm.data.randomness import subset
from didicm.data.sources import split_uri
from didicm.errors import UserError
from didicm.evaluation.calibration import AGAIN, Calibration
from didicm.evaluation.stored import StoredModel, same_place
from didicm.files import sha256
from didicm.text import quoted

DIGEST = 6  # bytes per image: a set of a million holds one in 280 million others by mistake
BEST = "best"
# What is compared to find copies, in some seconds; of a larger training they pass for other images.
MOST_FILES, MOST_BYTES = 100_000, 2**30


def refuse_training_images(images: ImageSet, uri: str, model: StoredModel) -> list[str]:
    """Stop when the model was trained on any of the images; say what is not known."""
    if model.training is None:
        return ["this model does not say what it was trained on; make sure it is not these images"]
    data = _training_data(model)
    if data is None:
        return [f"the training images {model.training.data} are gone; make sure that these are others"]
    if known := _count_shared(names_of(images), data.train):
        raise UserError(
            f"the model was trained on {known} of the {len(images)} images of {uri}: calibrate on others, "
            f"such as --data {quoted(model.training.data)}, of which the held-out images are taken"
        )
    return []


def note_met(names: Sequence[str], uri: str, model: StoredModel) -> list[str]:
    """Say how many images of these names trained the model, and how many chose its weights.

    best/ has those of the lowest NLL on its validation images.
    """
    if model.training is None:
        return []
    trained_on = model.training.data
    if not same_place(uri, trained_on) and not Path(split_uri(trained_on)[1]).expanduser().exists():
        return []  # nothing is fetched to find out
    data, notes = _training_data(model), list[str]()
    if data is None or data.val is None:
        return []
    if known := _count_shared(names, data.train, copies=True):
        notes.append(
            f"{known} of the {len(names)} images, or copies of them, were trained on: these numbers are not of "
            "new images"
        )
    if Path(model.place).name == BEST and (chose := _count_shared(names, data.val)):
        notes.append(
            f"{chose} of the {len(names)} images chose the weights in {BEST}/ among those of all epochs, by their "
            "NLL: on them it looks a little better than it is"
        )
    return notes


def leave_out_fitted(images: ImageSet, uri: str, calibration: Calibration) -> tuple[ImageSet, list[str]]:
    """The images that a calibration was not fitted on, and what there is to say about the others."""
    source = calibration.fitted_on
    if "image_digests" not in source:  # before version 0.2.0
        told = f"the calibration was fitted on {source.get('images')} images of the same data: on those it looks "
        same = same_place(str(source.get("data")), uri)
        return images, [f"{told}a little better than it is"] if same else []
    try:
        packed = base64.b64decode(source["image_digests"], validate=True)
    except (TypeError, ValueError) as error:
        raise UserError(f"image_digests of the calibration are damaged: {AGAIN}") from error
    used = {packed[i : i + DIGEST] for i in range(0, len(packed), DIGEST)}
    # By name alone: as those of any calibration were remembered for a while
    met = (_name_digest(name) in used or _digest(name) in used for name in names_of(images))
    fresh = np.flatnonzero(~np.fromiter(met, dtype=bool))
    if len(fresh) == len(images):
        return images, []
    if not len(fresh):
        return images, ["the calibration was fitted on all of these images: it looks better than it is"]
    count = len(images) - len(fresh)
    told = f"{count} images are left out, as the calibration was fitted on them: --no-calibration measures all"
    return images.select(fresh), [told]


def pack_digests(names: Iterable[str]) -> str:
    """The images of these names, as a calibration remembers them."""
    return base64.b64encode(b"".join(sorted({_digest(name) for name in names}))).decode()


def _digest(name: str) -> bytes:
    """Of the bytes of an image's file, or of its name where it has none."""
    with suppress(OSError):  # an image that cannot be read is told elsewhere
        if Path(name).is_file():
            return bytes.fromhex(sha256(Path(name)))[:DIGEST]
    return _name_digest(name)


def _name_digest(name: str) -> bytes:
    return hashlib.blake2b(_place(name).encode("utf-8", "surrogateescape"), digest_size=DIGEST).digest()


def _training_data(model: StoredModel) -> Data | None:
    """What the run that the model lies in was trained and validated on; None if it is gone."""
    trained = model.training
    assert trained is not None
    try:
        data = open_data(
            trained.data,
            labels=trained.labels,
            group_by=trained.group_by,
            channels=model.transform.channels,
            strict=False,
        )
        data = hold_out(data, trained.val_fraction, trained.image_seed)
    except DataError:
        return None
    used = subset(data.train.labels, trained.fraction, trained.image_seed)
    return replace(data, train=data.train.select(used))


def names_of(images: ImageSet) -> list[str]:
    """Names of all images."""
    return [images.name(i) for i in range(len(images))]


def _count_shared(names: Sequence[str], others: ImageSet, *, copies: bool = False) -> int:
    """How many of the images of these names are among others, by name or, with `copies`, by the bytes of files."""
    known = {_place(name) for name in names_of(others)}
    new = [name for name in names if _place(name) not in known]
    return len(names) - len(new) + (_count_copies(new, known) if copies else 0)


def _count_copies(names: Sequence[str], others: Collection[str]) -> int:
    """How many files have the bytes of one of the others; only those of equal size are read."""
    if not names or len(others) > MOST_FILES:
        return 0
    size = {name: os.path.getsize(name) for name in (*names, *others) if os.path.isfile(name)}
    alike = {size.get(name) for name in names} & {size.get(name) for name in others} - {None}
    ours, theirs = ([name for name in part if size.get(name) in alike] for part in (names, others))
    if sum(size[name] for name in (*ours, *theirs)) > MOST_BYTES:
        return 0
    known = {_digest(name) for name in theirs}
    return sum(_digest(name) in known for name in ours)


def _place(name: str) -> str:
    """An image's name without symbolic links on the way to it."""
    folder, slash, file = name.rpartition("/")
    return os.path.join(_real(folder), file) if slash else name


@lru_cache(maxsize=2**16)
def _real(folder: str) -> str:
    return os.path.realpath(folder)

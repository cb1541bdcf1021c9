"""From uploaded bytes to answers: decode in a few threads, ask the models in batches, word the answers.

Here too are the images that the page offers.
"""

import asyncio
import io
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from didicm.data.picture import Picture
from didicm.errors import UserError
from didicm.evaluation.label_sets import Floats
from didicm.inference.adjust import Adjustment, claim, kept_rule, make_adjustment
from didicm.inference.prediction import BasePredictor, Prediction, entropy
from didicm.processes import usable_cores
from didicm.serving.batching import Batcher, Question
from didicm.serving.metrics import Metrics
from didicm.serving.security import Limits, RefusalError
from didicm.serving.uploads import MOST_VALUES, Options, check_pixels, load_pixels, open_upload
from didicm.text import readable

log = logging.getLogger("didicm.serving")

LARGE, ONE_LARGE = 5_000_000, threading.Lock()  # images of more pixels are decoded one at a time: they take memory

FETCHED = 4  # images from elsewhere that are in memory at once, before they are decoded

MOST_EXAMPLES = 12
DRAWN = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP")  # by all browsers

Source: TypeAlias = bytes | Picture | UserError  # an upload, its pixels, or why there are none
Fetch: TypeAlias = partial[Source]  # waits for an upload from elsewhere


@dataclass(frozen=True)
class Example:
    """An image that the page offers."""

    name: str
    data: bytes
    media_type: str


class Service:
    """The models that are served, the first of which is the main one, and what they share."""

    def __init__(
        self,
        models: Mapping[str, BasePredictor],
        *,
        limits: Limits | None = None,
        batch_size: int = 64,
        examples: Sequence[Example] = (),
    ) -> None:
        self.limits, self.examples, self.metrics = limits or Limits(), examples, Metrics()
        self.models = {
            name: Batcher(model, self.metrics, batch_size=batch_size, most_waiting=self.limits.waiting)
            for name, model in models.items()
        }
        self.name, *others = self.models
        self.baseline = others[0] if others else None
        self._threads = ThreadPoolExecutor(min(4, usable_cores()), thread_name_prefix="decode")
        self._fetching = asyncio.Semaphore(FETCHED)

    def start(self) -> None:
        """Start the models' threads."""
        for model in self.models.values():
            model.start()

    def close(self) -> None:
        """Finish what has begun."""
        for model in self.models.values():
            model.close()
        self._threads.shutdown()

    async def answers(
        self, images: Sequence[Source | Fetch], question: Question, name: str | None = None
    ) -> list[Prediction | UserError]:
        """What a model says of each image, or why that image has no answer."""
        model = self.models[name or self.name]
        try:
            model.check(question)
        except UserError as error:
            raise RefusalError(422, str(error)) from error
        read = await asyncio.gather(*(self._read(model.model, image) for image in images))
        good = [i for i, seen in enumerate(read) if not isinstance(seen, UserError)]
        results: list[Prediction | UserError] = list(read)
        for i, answer in zip(good, await model.predict([read[i] for i in good], question), strict=True):
            if isinstance(answer, BaseException):
                log.error("the model failed on an image", exc_info=answer)
                answer = UserError("the model failed on this image")
            results[i] = answer
        predicted = sum(isinstance(result, Prediction) for result in results)
        self.metrics.images(predicted, len(results) - predicted)
        return results

    async def _read(self, model: BasePredictor, image: Source | Fetch) -> Any:
        """Decode in one of a few threads, whose number bounds the memory."""
        run = asyncio.get_running_loop().run_in_executor
        if not isinstance(image, partial):
            return await run(self._threads, read_image, model, image, self.limits)
        async with self._fetching:  # what is fetched is not in the count of bytes under way
            fetched = await asyncio.to_thread(image)
            return await run(self._threads, read_image, model, fetched, self.limits)

    async def predict(self, images: Sequence[Source], options: Options) -> list[dict[str, Any]]:
        """Answers for a client, those of the baseline inside if it was asked for."""
        if options.baseline and self.baseline is None:
            raise RefusalError(422, "this server has no baseline: leave out baseline, or start it with --baseline")
        found = await self._describe(self.name, images, options.question, options)
        if options.baseline and self.baseline is not None:
            stepwise = self.models[self.baseline].model.has_trajectory
            question = Question(trajectory=options.trajectory and stepwise)
            others = await self._describe(self.baseline, images, question, options)
            for entry, other in zip(found, others, strict=True):
                if "error" not in entry:
                    entry["baseline"] = other
        return found

    async def _describe(
        self, name: str, images: Sequence[Source], question: Question, options: Options
    ) -> list[dict[str, Any]]:
        model = self.models[name].model
        try:
            adjustment = make_adjustment(
                model.class_names,
                model.training_prior,
                classes=options.classes or None,
                prior=options.prior or None,
                taxonomy=options.taxonomy or None,
            )
        except UserError as error:
            raise RefusalError(422, str(error)) from error
        answers = await self.answers(images, question, name)
        states = sum(1 + len(answer.trajectory or ()) for answer in answers if isinstance(answer, Prediction))
        if states * min(options.top, len(model.class_names)) > MOST_VALUES:
            remedy = "ask about fewer images, for fewer classes by top, or without the trajectory"
            raise RefusalError(422, f"the answer would hold more than {MOST_VALUES:,} probabilities: {remedy}")
        # A thousand classes at every step of many images take seconds, in which others are answered.
        return await asyncio.to_thread(
            lambda: [describe(answer, model, adjustment, options.top) for answer in answers]
        )


def read_image(model: BasePredictor, image: Source, limits: Limits) -> Any:
    """What the network sees of an upload, or what is wrong with it."""
    try:
        if isinstance(image, bytes):
            image = open_upload(image, limits.pixels)
        if isinstance(image, UserError):
            return image
        check_pixels(image, limits.pixels)
        with ONE_LARGE if image.width * image.height > LARGE else nullcontext():
            return model.read(load_pixels(image))
    except UserError as error:
        return error


def describe(
    answer: Prediction | UserError, model: BasePredictor, adjustment: Adjustment | None, top: int
) -> dict[str, Any]:
    """An answer as JSON, in terms of the classes asked for: as `Prediction.to_record`, and the steps."""
    if isinstance(answer, UserError):
        return {"error": str(answer)}
    path = answer.trajectory or []
    states: Floats = np.stack([answer.probs, *(state for _, state in path)]).astype(np.float64)  # (1 + T, K)
    names, rule, inside = model.class_names, kept_rule(model.rule, adjustment), None
    if answer.conformal_set is not None and rule is not None:
        inside = np.isin(names, answer.conformal_set)[None]
    if adjustment is not None:
        names, states = adjustment.names, adjustment.probs(states)
        inside = None if inside is None else adjustment.sets(inside, states[:1])
    outlier = answer.outlier_score, answer.unlike_training
    told = Prediction.of(states[0], names, None if inside is None else inside[0], None, *outlier)
    found = told.to_record(top, claim(rule, adjustment))
    if answer.trajectory is not None:
        best = np.argsort(-states[0], kind="stable")[:top]
        found["trajectory"] = [
            {"time": max(time, 0.0), "entropy": entropy(state.tolist()), "probabilities": state[best].tolist()}
            for (time, _), state in zip(path, states[1:], strict=True)
        ]
    return found


def find_examples(folder: Path | None, class_names: Sequence[str], limits: Limits) -> list[Example]:
    """At most a dozen images of a folder, or of those that ship with us if the classes are theirs."""
    if folder is None:
        return _shipped(class_names)
    if not folder.is_dir():
        raise UserError(f"--examples {folder} is no folder: give one with a few images")
    found: list[Example] = []
    for path in _in_turn(folder):
        try:
            if path.stat().st_size > limits.upload_bytes:  # the page could not send it
                continue
            data = path.read_bytes()
            image = load_pixels(open_upload(data, limits.pixels))
        except (OSError, UserError):
            continue  # a folder of images may hold other files
        if isinstance(image, Image.Image) and image.format in DRAWN:
            found.append(Example(readable(path.stem), data, Image.MIME[image.format]))
        if len(found) == MOST_EXAMPLES:
            break
    if not found:
        kinds = f"{', '.join(DRAWN[:-1])} or {DRAWN[-1]}"
        raise UserError(
            f"--examples {folder} holds no image that a page can show: give a folder with a few {kinds}"
        )
    return found


def _in_turn(folder: Path) -> Iterator[Path]:
    """The first file of every folder, then the second, and so on: classes often have a folder each."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    folders = groupby(sorted(files, key=lambda path: (path.parent, path.name)), key=lambda path: path.parent)
    turns = zip_longest(*(list(inside) for _, inside in folders))
    return (path for path in chain.from_iterable(turns) if path is not None)


def _shipped(class_names: Sequence[str]) -> list[Example]:
    """The first test image of each class of fashion-mini, which a model trained on it has never seen."""
    shipped = resources.files("didicm.data") / "fashion_mini.npz"
    with shipped.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        names = [str(name) for name in file["class_names"]]
        if sorted(names) != sorted(class_names):
            return []
        images, labels = file["x_test"], file["y_test"]
    found = []
    for k, name in enumerate(names[:MOST_EXAMPLES]):
        buffer = io.BytesIO()
        Image.fromarray(images[int(np.argmax(labels == k))]).save(buffer, "PNG")
        found.append(Example(name, buffer.getvalue(), "image/png"))
    return found

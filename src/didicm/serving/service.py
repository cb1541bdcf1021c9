"""From uploaded bytes to answers: decode in a few threads, ask the models in batches, word the answers."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from didicm.errors import UserError, did_you_mean
from didicm.serving.batching import Batcher
from didicm.serving.engine import Answer, Engine, Probs, Question
from didicm.serving.metrics import Metrics
from didicm.serving.refusal import RefusalError
from didicm.serving.security import Limits
from didicm.serving.uploads import Options, load_pixels, open_upload

log = logging.getLogger("didicm.serving")

LARGE, ONE_LARGE = 5_000_000, threading.Lock()  # images of more pixels are decoded one at a time: they take memory
SMALLEST = np.finfo(np.float64).tiny

Source: TypeAlias = bytes | Image.Image | UserError  # an upload, its pixels, or why there are none


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
        models: Mapping[str, Engine],
        *,
        limits: Limits | None = None,
        batch_size: int = 64,
        examples: Sequence[Example] = (),
    ) -> None:
        self.limits, self.examples, self.metrics = limits or Limits(), examples, Metrics()
        self.models = {
            name: Batcher(engine, self.metrics, batch_size=batch_size, most_waiting=self.limits.waiting)
            for name, engine in models.items()
        }
        self.name, *others = self.models
        self.baseline = others[0] if others else None
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="decode")

    def start(self) -> None:
        """Start the models' threads."""
        for model in self.models.values():
            model.start()

    def close(self) -> None:
        """Finish what has begun."""
        for model in self.models.values():
            model.close()
        self._threads.shutdown()

    @property
    def engine(self) -> Engine:
        """The main model."""
        return self.models[self.name].engine

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what would hold up others in one of a few threads, whose number bounds the memory for decoding."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def answers(
        self, images: Sequence[Source], question: Question, name: str | None = None
    ) -> list[Answer | UserError]:
        """What a model says of each image, or why that image has no answer."""
        model = self.models[name or self.name]
        try:
            model.engine.check(question)
        except UserError as error:
            raise RefusalError(422, str(error)) from error
        read = await asyncio.gather(*(self.run(read_image, model.engine, image, self.limits) for image in images))
        good = [i for i, seen in enumerate(read) if not isinstance(seen, UserError)]
        results: list[Answer | UserError] = list(read)
        for i, answer in zip(good, await model.predict([read[i] for i in good], question), strict=True):
            if isinstance(answer, BaseException):
                log.error("the model failed on an image", exc_info=answer)
                answer = UserError("the model failed on this image")
            results[i] = answer
        self.metrics.images(len(good), len(images) - len(good))
        return results

    async def predict(self, images: Sequence[Source], options: Options) -> list[dict[str, Any]]:
        """Answers for a client, those of the baseline inside if it was asked for."""
        if options.baseline and self.baseline is None:
            raise RefusalError(422, "this server has no baseline: leave out baseline, or start it with --baseline")
        factors = class_factors(self.engine.class_names, options)
        found = [
            describe(answer, self.engine.class_names, factors, options.top)
            for answer in await self.answers(images, options.question)
        ]
        if options.baseline and self.baseline is not None:
            engine = self.models[self.baseline].engine
            question = Question(trajectory=options.trajectory and engine.has_trajectory)
            factors = class_factors(engine.class_names, options)
            answers = await self.answers(images, question, self.baseline)
            for entry, answer in zip(found, answers, strict=True):
                if "error" not in entry:
                    entry["baseline"] = describe(answer, engine.class_names, factors, options.top)
        return found


def read_image(engine: Engine, image: Source, limits: Limits) -> Any:
    """What the network sees of an upload, or what is wrong with it."""
    try:
        if isinstance(image, bytes):
            image = open_upload(image, limits.pixels)
        if isinstance(image, UserError):
            return image
        with ONE_LARGE if image.width * image.height > LARGE else nullcontext():
            return engine.read(load_pixels(image))
    except UserError as error:
        return error


def class_factors(names: Sequence[str], options: Options) -> Probs | None:
    """What the posterior is multiplied by (K,): the prior, and 0 for classes that are not possible here."""
    if not options.classes and not options.prior:
        return None
    known, possible = set(names), set(options.classes or names)
    for name in (*options.classes, *options.prior):
        if name not in known:
            raise RefusalError(422, f"there is no class {name[:40]!r}: {did_you_mean(name[:40], names)}")
    if options.prior and (missing := [x for x in options.classes or names if x not in options.prior]):
        raise RefusalError(422, f"the prior says nothing of class {missing[0]!r}: give every class its frequency")
    factors = np.array([options.prior.get(name, 1.0) if name in possible else 0.0 for name in names])
    return np.asarray(factors / max(factors.max(), SMALLEST))  # large numbers must not overflow


def describe(answer: Answer | UserError, names: Sequence[str], factors: Probs | None, top: int) -> dict[str, Any]:
    """An answer as JSON: the top classes, how uncertain they are, the set that covers the truth, the steps."""
    if isinstance(answer, UserError):
        return {"error": str(answer)}
    try:
        probs = reweight(answer.probs, factors)
    except UserError as error:
        return {"error": str(error)}
    order = [k for k in np.argsort(-probs, kind="stable") if factors is None or factors[k] > 0][:top]
    found: dict[str, Any] = {
        "classes": [{"name": names[k], "probability": float(probs[k])} for k in order],
        "entropy": entropy(probs),
        # The coverage was calibrated for all classes, at the frequencies of the images it was calibrated on.
        "conformal_set": answer.conformal_set if factors is None else None,
    }
    if answer.trajectory is not None:
        states = [(time, reweight(state, factors)) for time, state in answer.trajectory]
        found["trajectory"] = [
            {"time": time, "entropy": entropy(state), "probabilities": [float(state[k]) for k in order]}
            for time, state in states
        ]
    return found


def reweight(probs: Probs, factors: Probs | None) -> Probs:
    """A posterior under other frequencies of the classes, of which some may be impossible."""
    if factors is None:
        return probs
    weighted = probs * factors
    if not weighted.sum() > 0:
        raise UserError("none of the classes that are possible here has any probability")
    return np.asarray(weighted / weighted.sum())


def entropy(probs: Probs) -> float:
    """In nats."""
    positive = probs[probs > 0]
    return max(0.0, float(-(positive * np.log(positive)).sum()))

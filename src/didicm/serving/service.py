"""From uploaded bytes to answers: decode in a few threads, ask the models in batches, word the answers."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from didicm.data.picture import Picture
from didicm.errors import UserError
from didicm.evaluation.label_sets import Floats
from didicm.inference.adjust import Adjustment, claim, kept_rule, make_adjustment
from didicm.inference.prediction import Prediction
from didicm.serving.batching import Batcher
from didicm.serving.engine import Engine, Question
from didicm.serving.metrics import Metrics
from didicm.serving.security import Limits, RefusalError
from didicm.serving.uploads import Options, load_pixels, open_upload

log = logging.getLogger("didicm.serving")

LARGE, ONE_LARGE = 5_000_000, threading.Lock()  # images of more pixels are decoded one at a time: they take memory

FETCHED = 4  # images from elsewhere that are in memory at once, before they are decoded

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

    @property
    def engine(self) -> Engine:
        """The main model."""
        return self.models[self.name].engine

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what would hold up others in one of a few threads, whose number bounds the memory for decoding."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def answers(
        self, images: Sequence[Source | Fetch], question: Question, name: str | None = None
    ) -> list[Prediction | UserError]:
        """What a model says of each image, or why that image has no answer."""
        model = self.models[name or self.name]
        try:
            model.engine.check(question)
        except UserError as error:
            raise RefusalError(422, str(error)) from error
        read = await asyncio.gather(*(self._read(model.engine, image) for image in images))
        good = [i for i, seen in enumerate(read) if not isinstance(seen, UserError)]
        results: list[Prediction | UserError] = list(read)
        for i, answer in zip(good, await model.predict([read[i] for i in good], question), strict=True):
            if isinstance(answer, BaseException):
                log.error("the model failed on an image", exc_info=answer)
                answer = UserError("the model failed on this image")
            results[i] = answer
        self.metrics.images(len(good), len(images) - len(good))
        return results

    async def _read(self, engine: Engine, image: Source | Fetch) -> Any:
        if not isinstance(image, partial):
            return await self.run(read_image, engine, image, self.limits)
        async with self._fetching:  # what is fetched is not in the count of bytes under way
            fetched = await asyncio.to_thread(image)
            return await self.run(read_image, engine, fetched, self.limits)

    async def predict(self, images: Sequence[Source], options: Options) -> list[dict[str, Any]]:
        """Answers for a client, those of the baseline inside if it was asked for."""
        if options.baseline and self.baseline is None:
            raise RefusalError(422, "this server has no baseline: leave out baseline, or start it with --baseline")
        adjustment = adjustment_for(self.engine, options)
        found = [
            describe(answer, self.engine, adjustment, options.top)
            for answer in await self.answers(images, options.question)
        ]
        if options.baseline and self.baseline is not None:
            engine = self.models[self.baseline].engine
            question = Question(trajectory=options.trajectory and engine.has_trajectory)
            adjustment = adjustment_for(engine, options)
            answers = await self.answers(images, question, self.baseline)
            for entry, answer in zip(found, answers, strict=True):
                if "error" not in entry:
                    entry["baseline"] = describe(answer, engine, adjustment, options.top)
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


def adjustment_for(engine: Engine, options: Options) -> Adjustment | None:
    """What the classes, the prior and the taxonomy of a request do to the posterior."""
    try:
        return make_adjustment(
            engine.class_names,
            engine.training_prior,
            classes=options.classes or None,
            prior=options.prior or None,
            taxonomy=options.taxonomy or None,
        )
    except UserError as error:
        raise RefusalError(422, str(error)) from error


def describe(
    answer: Prediction | UserError, engine: Engine, adjustment: Adjustment | None, top: int
) -> dict[str, Any]:
    """An answer as JSON: the top classes, how uncertain they are, the set that covers the truth, the steps."""
    if isinstance(answer, UserError):
        return {"error": str(answer)}
    states: Floats = np.stack([answer.probs, *(state for _, state in answer.trajectory or [])]).astype(
        np.float64
    )  # (1 + T, K)
    names, rule = engine.class_names, kept_rule(engine.rule, adjustment)
    inside = None
    if answer.conformal_set is not None and rule is not None:
        inside = np.isin(names, answer.conformal_set)[None]
    if adjustment is not None:
        names, states = adjustment.names, adjustment.probs(states)
        inside = None if inside is None else adjustment.sets(inside, states[:1])
    probs = states[0]
    order = np.argsort(-probs, kind="stable")
    found: dict[str, Any] = {
        "classes": [{"name": names[k], "probability": float(probs[k])} for k in order[:top]],
        "entropy": entropy(probs),
        "conformal_set": None if inside is None else [names[k] for k in order if inside[0, k]],
        "conformal_claim": None if inside is None else claim(rule, adjustment),
        "outlier_score": answer.outlier_score,
        "unlike_training": answer.unlike_training,
    }
    if answer.trajectory is not None:
        found["trajectory"] = [
            {
                "time": max(time, 0.0),
                "entropy": entropy(state),
                "probabilities": [float(state[k]) for k in order[:top]],
            }
            for (time, _), state in zip(answer.trajectory, states[1:], strict=True)
        ]
    return found


def entropy(probs: Floats) -> float:
    """In nats."""
    positive = probs[probs > 0]
    return max(0.0, float(-(positive * np.log(positive)).sum()))

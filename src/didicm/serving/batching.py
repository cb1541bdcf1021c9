"""Requests share batches: one thread asks the model about whatever is waiting, up to a batch, in order of arrival.

Nothing waits for a batch to fill: while the model is busy others arrive, and they are the next batch.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from didicm.inference.prediction import BasePredictor, Prediction
from didicm.serving.metrics import Metrics
from didicm.serving.security import busy


@dataclass(frozen=True)
class Question:
    """How images are to be asked about: those that share it can share a batch."""

    steps: int | None = None  # None: as stored with the model
    sampler: str | None = None
    trajectory: bool = False


@dataclass(frozen=True)
class Waiting:
    """An image, how it is to be asked about, and who waits for the answer."""

    image: Any
    question: Question
    future: "asyncio.Future[Prediction]"


class Batcher:
    """A model, its queue and its thread."""

    def __init__(self, model: BasePredictor, metrics: Metrics, *, batch_size: int, most_waiting: int) -> None:
        self.model, self._changed = model, lru_cache(maxsize=32)(model.changed)
        self._metrics, self._batch_size, self._most_waiting = metrics, batch_size, most_waiting
        self._queue: deque[Waiting] = deque()
        self._arrived = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer what is waiting, then stop."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        self._thread.join()

    def check(self, question: Question) -> None:
        """Complain about a question that the model cannot answer."""
        predictor = self._asked(question)
        if question.trajectory:
            predictor.check_trajectory()

    def note(self, question: Question) -> str | None:
        """Why such a question is answered without the model's calibration; None unless it is."""
        found = self._asked(question).note
        return None if found == self.model.note else found  # of its own, a model's note names files

    @property
    def waiting(self) -> int:
        """Images in the queue."""
        return len(self._queue)

    async def predict(self, images: Sequence[Any], question: Question) -> list[Prediction | BaseException]:
        """Answers in order; an exception stands where the model failed, and for that image alone."""
        loop = asyncio.get_running_loop()
        items = [Waiting(image, question, loop.create_future()) for image in images]
        with self._arrived:
            if len(self._queue) + len(items) > self._most_waiting:
                raise busy()
            self._queue.extend(items)
            self._arrived.notify()
        return await asyncio.gather(*(item.future for item in items), return_exceptions=True)

    def _run(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                batch = self._next()
            if batch:
                self._metrics.batch(len(batch))
                for item, result in zip(batch, self._ask(batch), strict=True):
                    item.future.get_loop().call_soon_threadsafe(_settle, item.future, result)

    def _next(self) -> list[Waiting]:
        """Those who wait longest and ask what the first one asks."""
        batch: list[Waiting] = []
        others: list[Waiting] = []
        while self._queue and len(batch) < self._batch_size:
            item = self._queue.popleft()
            if item.future.done():  # its client ran out of time
                continue
            same = not batch or item.question == batch[0].question
            (batch if same else others).append(item)
        self._queue.extendleft(reversed(others))
        return batch

    def _asked(self, question: Question) -> BasePredictor:
        """The model as a question wants it, calibrated if that is how it was calibrated."""
        asked = {"steps": question.steps, "method": question.sampler}
        settings = {name: value for name, value in asked.items() if value is not None}
        return self._changed(**settings) if settings else self.model

    def _ask(self, batch: Sequence[Waiting]) -> list[Prediction | BaseException]:
        question, images = batch[0].question, [item.image for item in batch]
        try:
            return list(self._asked(question).predict_batch(images, trajectory=question.trajectory))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [self._ask([item])[0] for item in batch]  # one of them is at fault: the others must not suffer


def _settle(future: "asyncio.Future[Prediction]", result: Prediction | BaseException) -> None:
    if future.done():  # its client has gone
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)

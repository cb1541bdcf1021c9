import asyncio
import threading
from copy import copy

import numpy as np
import pytest

from didicm.inference.prediction import Prediction
from didicm.serving.batching import Batcher, Question
from didicm.serving.metrics import Metrics
from didicm.serving.security import RefusalError


class Echo:
    """Answers with the number it is given, refuses negative ones, and remembers its batches."""

    def __init__(self):
        self.steps, self.batches, self.asked, self.open = None, [], threading.Event(), threading.Event()

    def changed(self, steps):
        echo = copy(self)
        echo.steps = steps
        return echo

    def predict_batch(self, images, trajectory):
        self.asked.set()
        self.open.wait(600)
        self.batches.append((list(images), Question(self.steps, trajectory=trajectory)))
        if min(images) < 0:
            raise FloatingPointError("negative")
        return [Prediction.of(np.array([float(x)]), ["it"]) for x in images]


@pytest.fixture
def echo():
    return Echo()


def run(echo, work, **options):
    async def go():
        batcher = Batcher(echo, Metrics(), **{"batch_size": 4, "most_waiting": 100, **options})
        batcher.start()
        try:
            return await work(batcher)
        finally:
            echo.open.set()
            await asyncio.get_running_loop().run_in_executor(None, batcher.close)

    return asyncio.run(go())


async def all_of(batcher, questions, echo):
    """Ask everything before the model may answer, then let it."""
    waiting = [asyncio.ensure_future(batcher.predict([x], question)) for x, question in questions]
    await asyncio.sleep(0)
    while batcher.waiting < len(waiting) - 4:  # one batch may have been taken
        await asyncio.sleep(0)
    echo.open.set()
    return [answer for (answer,) in await asyncio.gather(*waiting)]


def test_those_who_wait_share_batches_with_those_who_ask_the_same(echo):
    one, two = Question(steps=1), Question(steps=2)
    asked = [(i, one if i % 3 else two) for i in range(20)]
    answers = run(echo, lambda batcher: all_of(batcher, asked, echo))
    assert [answer.probs[0] for answer in answers] == list(range(20))
    assert all(len(images) <= 4 for images, _ in echo.batches)
    assert len(echo.batches) < 10
    for images, question in echo.batches:
        assert {dict(asked)[x] for x in images} == {question}
        assert images == sorted(images)  # in order of arrival


def test_the_model_failing_on_one_fails_no_other(echo):
    asked = [(x, Question()) for x in (1, -1, 2, 3, -2, 4)]
    answers = run(echo, lambda batcher: all_of(batcher, asked, echo))
    for (x, _), answer in zip(asked, answers, strict=True):
        assert isinstance(answer, FloatingPointError) if x < 0 else answer.probs[0] == x


def test_more_than_may_wait_is_refused_as_a_whole(echo):
    async def work(batcher):
        with pytest.raises(RefusalError) as refused:
            await batcher.predict(range(11), Question())
        assert refused.value.status_code == 503
        assert batcher.waiting == 0
        echo.open.set()
        return await batcher.predict(range(10), Question())

    assert len(run(echo, work, most_waiting=10)) == 10


def test_closing_answers_what_is_waiting(echo):
    async def work(batcher):
        waiting = asyncio.ensure_future(batcher.predict(range(9), Question()))
        await asyncio.sleep(0)
        closing = asyncio.get_running_loop().run_in_executor(None, batcher.close)
        echo.open.set()
        await closing
        return await waiting

    assert [answer.probs[0] for answer in run(echo, work)] == list(range(9))


def test_an_answer_that_nobody_waits_for_is_dropped(echo):
    async def work(batcher):
        first = asyncio.ensure_future(batcher.predict([1], Question()))
        while not echo.asked.is_set():
            await asyncio.sleep(0)
        gone = asyncio.ensure_future(batcher.predict([2], Question()))
        await asyncio.sleep(0)
        for task in (first, gone):
            task.cancel()
        await asyncio.sleep(0)
        echo.open.set()
        return await batcher.predict([3], Question())

    assert run(echo, work)[0].probs[0] == 3
    assert [images for images, _ in echo.batches] == [[1], [3]]  # nobody asks for those who have gone

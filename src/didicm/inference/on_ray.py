"""Bulk prediction on many machines: actors of Ray Data load the model once and write the parts they are given.

The machines must see the model, the images and the output under the same names.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from didicm.errors import UserError, reason
from didicm.inference.bulk import BulkJob, Tally
from didicm.inference.prediction import BasePredictor
from didicm.inference.predictor import Predictor

AHEAD = 4  # times that an actor is given work, at least: the last to finish then keeps the others waiting less


class Actor:
    """A process with a device of its own: its model is loaded once, and each call predicts some parts."""

    def __init__(self, directory: str, source: str, loading: Mapping[str, Any], job: BulkJob) -> None:
        os.chdir(directory)  # images may be named relative to where the command was given
        self._predictor, self._job = Predictor.load(source, **loading), job

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Predict and write parts; a part that an actor had begun when it died is simply written again."""
        numbers: list[int] = batch["item"].tolist()
        done = sum(self._job.run(self._predictor, numbers), Tally())
        return {name: np.array([value]) for name, value in asdict(done).items()}


def predict_on_ray(
    job: BulkJob, predictor: BasePredictor, numbers: Sequence[int], actors: int | None
) -> Iterator[Tally]:
    """Predict parts on the cluster that RAY_ADDRESS names, or on this machine."""
    try:
        import ray.data
    except ImportError:
        raise UserError('--engine ray needs Ray: pip install "didicm[ray]"') from None
    if predictor.origin is None:
        raise UserError("actors load the model themselves: make the predictor by Predictor.load")
    if not numbers:
        return
    source, loading = predictor.origin
    with ray_session("--engine ray") as session:
        found: Mapping[str, float] = session.cluster_resources()
        gpus = 0 if loading["device"] == "cpu" else int(found.get("GPU", 0))
        count = min(actors or gpus or int(found.get("CPU", 1)), len(numbers))
        at_once = max(1, len(numbers) // (AHEAD * count))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False  # our own display is enough
        work = ray.data.from_items(list(numbers), override_num_blocks=-(-len(numbers) // at_once))
        arguments = (os.getcwd(), source, {**loading, "device": "auto" if gpus else "cpu"}, job)
        done = work.map_batches(
            Actor, batch_size=at_once, compute=ray.data.ActorPoolStrategy(size=count),
            fn_constructor_args=arguments, num_gpus=1 if gpus else None, num_cpus=None if gpus else 1,
        )  # fmt: skip
        try:
            for row in done.iter_rows():
                yield Tally(**{name: int(value) for name, value in row.items()})
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            raise
        except ray.exceptions.RayError as error:
            raise UserError(f"the work on Ray failed ({reason(error)}): run it again to go on") from error


@contextmanager
def ray_session(option: str) -> Iterator[Any]:
    """Ray, on the cluster that RAY_ADDRESS names or on this machine; ended again unless it was there before."""
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # a cluster that cannot be reached, a machine too busy to start one, ...
            raise UserError(
                f"Ray cannot be started ({reason(error)}): check RAY_ADDRESS, or leave out {option}"
            ) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()

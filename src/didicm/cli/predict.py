"""`didicm predict`: what is on images, how sure the model is, and how it came to that.

An exported model (.onnx) is run by ONNX Runtime, without PyTorch; how it is asked was fixed at export.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console

from didicm.cli.flags import parse
from didicm.cli.options import WORKERS, AskOptions
from didicm.cli.predictions import (
    PredictionOptions,
    read_batches,
    show,
    show_estimate,
    standard_input,
    to_line,
    write_rows,
)
from didicm.data.decode import own_channels, to_channels
from didicm.data.listing import ImageRef, list_images
from didicm.data.picture import viewable
from didicm.errors import UserError
from didicm.files import SOFTWARE, check_replaceable, is_our_picture, write_files
from didicm.inference.adjust import claim
from didicm.inference.bulk import Engine, predict
from didicm.inference.onnx import SUFFIX, OnnxPredictor
from didicm.inference.prediction import BasePredictor, Prediction
from didicm.text import SafeConsole
from didicm.values import Natural

MOST_DRAWN = 12  # images in a picture of trajectories
FIXED = ("sampler", "size", "calibration", "optimize", "compile", "trajectory", "engine", "actors")  # at export


@dataclass(frozen=True)
class PredictOptions(PredictionOptions, AskOptions):
    """Classify images: the most probable classes, the entropy, the conformal set if calibrated.

    The probabilities assume that an image shows one of the model's classes and is like the images of training; a
    calibrated model flags images that are unlike them.

    Args:
        run: a run (its best model), a model directory, hf://owner/name, or a file of didicm export (.onnx)
        trajectory: a PNG file: draw the posterior over diffusion time
        workers: processes that decode images
        engine: local, or ray: actors of Ray Data on the cluster that RAY_ADDRESS names, or on this machine
        actors: number of Ray actors; by default one per GPU, or per CPU if there is none
    """

    trajectory: Path | None = None
    engine: Engine = "local"
    actors: Natural | None = None

    def check(self) -> None:
        """Refuse what cannot be meant."""
        super().check()
        if self.trajectory is not None:
            if self.trajectory.suffix.lower() != ".png":
                raise UserError(f"--trajectory {self.trajectory} must be a .png file")
            check_replaceable(self.trajectory, is_our_picture, "--trajectory", force=self.force)
            if self.for_rows:
                other = "--dry-run" if self.out is None else "--out"
                raise UserError(f"--trajectory draws only a few images: omit either --trajectory or {other}")
        if self.actors is not None and self.engine != "ray":
            raise UserError("--actors is for Ray: add --engine ray, or omit --actors")

    def load(self) -> BasePredictor:
        """Load the model."""
        from didicm.inference.predictor import Predictor  # it needs PyTorch, and exported models do without

        asked: dict[str, Any] = {"calibrated": self.calibration, "size": self.size, **self.sampler}
        asked |= {"optimize": self.optimize, "compile": self.compile}
        predictor = Predictor.load(self.run, self.device, **asked, **self.adjusting)
        if self.trajectory is not None:
            predictor.check_trajectory()
        return predictor


@dataclass(frozen=True)
class ExportedOptions(PredictionOptions):
    """Classify images by an exported model: the most probable classes, the entropy, the conformal set.

    Args:
        run: a file that didicm export wrote
        device: cpu or cuda; auto takes a GPU if ONNX Runtime can use one
        workers: threads that decode images
    """

    workers: Natural = WORKERS
    trajectory: ClassVar[Path | None] = None
    engine: ClassVar[Engine] = "local"
    actors: ClassVar[int | None] = None

    def load(self) -> BasePredictor:
        """Load the model."""
        return OnnxPredictor.load(self.run, self.device, **self.adjusting)


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    exported = any(argument.endswith(SUFFIX) for argument in argv)
    if exported:
        _refuse_fixed(argv)
    kind: type[PredictOptions | ExportedOptions] = ExportedOptions if exported else PredictOptions
    options = parse(argv, kind, command="predict", positional=["run", "images"])
    options.check()
    console, errors = SafeConsole(soft_wrap=True), SafeConsole(stderr=True, soft_wrap=True)
    predictor = options.load()
    errors.print(predictor.note)
    if options.dry_run:
        return show_estimate(options, predictor, console)
    if options.out is not None:
        asked = partial(predict, predictor, engine=options.engine, actors=options.actors)
        return write_rows(options, asked, predictor.calls, errors)
    return show_all(predictor, options, console, errors)


def _refuse_fixed(argv: Sequence[str]) -> None:
    for flag in (argument.partition("=")[0] for argument in argv if argument.startswith("--")):
        if flag[2:].removeprefix("no-").partition(".")[0] in FIXED:
            raise UserError(
                f"an exported model answers as it was exported: leave out {flag}, or give the run itself"
            )


def show_all(
    predictor: BasePredictor, options: PredictOptions | ExportedOptions, console: Console, errors: Console
) -> int:
    """Print every prediction; exit code 2 when an image could not be read."""
    failed, predicted = 0, 0
    drawn: list[tuple[ImageRef, Prediction]] = []
    images = list_images(options.images, standard_input())
    claimed = claim(predictor.rule, predictor.adjustment)
    for read, seen, unreadable in read_batches(images, options.batch_size, predictor.see):
        failed += unreadable
        if not seen:
            continue
        wanted = options.trajectory is not None and len(drawn) < MOST_DRAWN
        predictions = predictor.predict_batch(seen, trajectory=wanted)
        predicted += len(predictions)
        for image, prediction in zip(read, predictions, strict=True):
            if options.json:
                print(to_line(image.name, prediction, claimed, options.top))
            else:
                show(image.name, prediction, claimed, options.top, console)
        drawn += list(zip(read, predictions, strict=True))[: MOST_DRAWN - len(drawn)] if wanted else []
    if drawn and options.trajectory is not None:
        draw(drawn, predictor.class_names, options.trajectory, options.top)
        left = f", the first {len(drawn)} of {predicted} images" if predicted > len(drawn) else ""
        errors.print(f"trajectories: {options.trajectory}{left}")
    return 2 if failed else 0


def draw(drawn: Sequence[tuple[ImageRef, Prediction]], names: Sequence[str], path: Path, top: int) -> None:
    """One row per image: the image, and its most probable classes over diffusion time."""
    from didicm.report.images import Traced, trajectory_picture
    from didicm.report.style import drawing

    items = []
    for image, prediction in drawn:
        times, states = zip(*prediction.trajectory or [], strict=True)
        with image.open() as opened:
            upright = viewable(to_channels(opened, own_channels(opened)))
        items.append(Traced(Path(image.name).name, upright, times, np.stack(states), names))
    with drawing():
        figure = trajectory_picture(items, top=top)
        save = partial(figure.savefig, dpi=120, format="png", metadata=SOFTWARE)
        write_files(path.parent, {path.name: save})

"""`didicm predict`: what is on images, how sure the model is, and how it came to that."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console

from didicm.cli.flags import parse
from didicm.cli.options import AskOptions
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
from didicm.inference.adjust import claim, read_prior, read_taxonomy
from didicm.inference.bulk import Engine, estimate_bulk, predict
from didicm.inference.prediction import Prediction
from didicm.inference.predictor import Predictor
from didicm.text import SafeConsole
from didicm.values import Natural

MOST_DRAWN = 12  # images in a picture of trajectories


@dataclass(frozen=True)
class PredictOptions(PredictionOptions, AskOptions):
    """Options of `didicm predict`.

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


def main(argv: list[str]) -> int:
    """Predict all that can be read; exit code 2 when something could not."""
    text = (
        "Classify images: the most probable classes, the entropy, the conformal set if calibrated. The "
        "probabilities assume that an image shows one of the model's classes and is like the images of training; "
        "a calibrated model flags images that are unlike them."
    )
    options = parse(argv, PredictOptions, command="predict", description=text, positional=["run", "images"])
    options.check()
    console, errors = SafeConsole(soft_wrap=True), SafeConsole(stderr=True, soft_wrap=True)
    predictor = Predictor.load(
        options.run,
        options.device,
        calibrated=options.calibration,
        size=options.size,
        conformal=options.conformal,
        optimize=options.optimize,
        compile=options.compile,
        classes=options.classes,
        prior=read_prior(options.prior),
        taxonomy=read_taxonomy(options.taxonomy),
        **options.sampler,
    )
    if options.trajectory is not None:
        predictor.check_trajectory()
    errors.print(predictor.note, highlight=False)
    if options.dry_run:
        return show_estimate(options, predictor.class_names, partial(estimate_bulk, predictor), console)
    if options.out is not None:
        asked = partial(predict, predictor, engine=options.engine, actors=options.actors)
        return write_rows(options, asked, predictor.model.calls, errors)
    return show_all(predictor, options, console, errors)


def show_all(predictor: Predictor, options: PredictOptions, console: Console, errors: Console) -> int:
    """Print every prediction; exit code 2 when an image could not be read."""
    failed, predicted = 0, 0
    drawn: list[tuple[ImageRef, Prediction]] = []
    images = list_images(options.images, standard_input())
    claimed = claim(predictor.rule, predictor.adjustment)
    for read, seen, unreadable in read_batches(images, options.batch_size, predictor.model.transform):
        failed += unreadable
        if not seen:
            continue
        wanted = options.trajectory is not None and len(drawn) < MOST_DRAWN
        predictions = predictor.predict_batch(torch.stack(seen), trajectory=wanted)
        predicted += len(predictions)
        for image, prediction in zip(read, predictions, strict=True):
            if options.json:
                print(to_line(image.name, prediction, claimed, options.top))
            else:
                show(image.name, prediction, claimed, options.top, console)
        drawn += list(zip(read, predictions, strict=True))[: MOST_DRAWN - len(drawn)] if wanted else []
    if drawn and options.trajectory is not None:
        draw(drawn, options.trajectory, options.top)
        left = f", the first {len(drawn)} of {predicted} images" if predicted > len(drawn) else ""
        errors.print(f"trajectories: {options.trajectory}{left}", highlight=False)
    return 2 if failed else 0


def _upright(image: ImageRef) -> Image.Image:
    with image.open() as opened:
        return viewable(to_channels(opened, own_channels(opened)))


def draw(drawn: Sequence[tuple[ImageRef, Prediction]], path: Path, top: int) -> None:
    """One row per image: the image, and its most probable classes over diffusion time."""
    from didicm.report.images import Traced, trajectory_picture
    from didicm.report.style import drawing

    items = []
    for image, prediction in drawn:
        order = prediction.probs.argsort(descending=True, stable=True)[:top]
        times = [max(time, 0.0) for time, _ in prediction.trajectory or []]  # `official` ends a little below 0
        states = torch.stack([probs[order] for _, probs in prediction.trajectory or []]).numpy()  # (T, top)
        names = [name for name, _ in prediction.classes[:top]]
        items.append(Traced(Path(image.name).name, _upright(image), times, states, names))
    with drawing():
        figure = trajectory_picture(items)
        save = partial(figure.savefig, dpi=120, format="png", metadata=SOFTWARE)
        write_files(path.parent, {path.name: save})

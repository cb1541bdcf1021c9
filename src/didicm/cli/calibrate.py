"""`didicm calibrate`: a temperature and conformal sets, fitted on images the model was not trained on."""

import argparse
import os
from functools import lru_cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from didicm.checkpoint import HUB, Checkpoint
from didicm.cli.inputs import (
    Run,
    add_flags,
    choose_images,
    hint_corruption,
    load_model,
    open_run,
    progress_of,
    tell_skipped,
)
from didicm.data import DataError, ImageSet, hold_out, open_data, stratified_split
from didicm.errors import UserError
from didicm.evaluation import (
    Conformal,
    Temperature,
    apply_temperature,
    coverage,
    evaluate_probs,
    fit_aps,
    fit_lac,
    fit_temperature,
    mean_size,
)
from didicm.evaluation.run import (
    Calibration,
    Evaluation,
    describe_posterior,
    evaluate,
    save_calibration,
    view_of,
)


def main(argv: list[str]) -> int:
    """Fit on one part of the held-out images, report on the other, store."""
    parser = argparse.ArgumentParser(
        prog="didicm calibrate",
        description="Fit a temperature and conformal sets on held-out images, and store them with the model.",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.add_argument("--split", choices=["val", "train"], help="train is refused: the model has seen it")
    parser.add_argument("--alpha", type=float, default=0.1, help="share of sets that may miss (default 0.1)")
    parser.add_argument("--fraction", type=float, default=0.5, help="of the images to fit on (default 0.5)")
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True, markup=False)
    if arguments.split == "train":
        raise UserError("--split train is what the model was trained on: calibrate on images it has not seen")
    if arguments.run.startswith(HUB):
        raise UserError(
            f"{arguments.run} is on the hub, where nothing can be stored: download it and give its folder"
        )
    for name in ("alpha", "fraction"):
        if not 0 < getattr(arguments, name) < 1:
            raise UserError(f"--{name} must lie between 0 and 1, got {getattr(arguments, name)}")

    run = open_run(arguments.run)
    checkpoint, settings = load_model(run, arguments)
    images, described = choose_images(arguments.data, arguments.split, checkpoint, run)
    console.print(f"{len(images)} images: {described}", highlight=False)
    refuse_training_images(images, arguments.data, checkpoint, run, console)
    hint_corruption(run, arguments.corruption, console)
    if not os.access(run.model, os.W_OK):
        raise UserError(f"{run.model} may not be written to: copy the model to a folder of yours")
    seed = arguments.seed or 0
    with progress_of(console) as progress:
        result = evaluate(
            checkpoint,
            images,
            settings=settings,
            corruption=arguments.corruption,
            batch_size=arguments.batch_size,
            workers=arguments.workers,
            seed=seed,
            progress=progress,
        )
    tell_skipped(result, console)

    fit, rest = (torch.from_numpy(part) for part in split(result, arguments.fraction, seed))
    temperature, rules = fit_rules(result, fit, arguments.alpha)
    check = report(result, rest, temperature.value, rules)
    calibration = Calibration(
        temperature=temperature.value,
        conformal=rules,
        posterior=describe_posterior(checkpoint, settings),
        fitted_on={
            "data": arguments.data,
            "split": described,
            "images": len(fit),
            "fraction": arguments.fraction,
            "seed": seed,
            "corruption": None if arguments.corruption is None else str(arguments.corruption),
        },
        check=check,
    )
    path = save_calibration(run.model, calibration)
    show(calibration, temperature, console)
    console.print(f"temperature and thresholds: {path}; didicm evaluate and predict use it from now on")
    return 0


def split(result: Evaluation, fraction: float, seed: int) -> tuple[Any, Any]:
    """Indices of the images to fit on and of those to report on, with the same share of every class."""
    fit, rest = stratified_split(result.labels.numpy(), 1 - fraction, seed)
    if not len(rest):
        raise UserError(f"{len(result.labels)} held-out images are too few to fit on some and report on others")
    return fit, rest


def fit_rules(result: Evaluation, fit: torch.Tensor, alpha: float) -> tuple[Temperature, dict[str, Conformal]]:
    """Temperature, then thresholds for the probabilities after it.

    Both see the same images. The guarantee of conformal sets asks for others; a single number fitted before
    changes little, and the report on the other images shows what is left.
    """
    probs, labels = result.probs[fit], result.labels[fit]
    temperature = fit_temperature(probs, labels)
    probs = apply_temperature(probs, temperature.value)
    return temperature, {"lac": fit_lac(probs, labels, alpha), "aps": fit_aps(probs, labels, alpha)}


def report(
    result: Evaluation, rest: torch.Tensor, temperature: float, rules: dict[str, Conformal]
) -> dict[str, Any]:
    """What images that were not fitted on say: NLL and ECE before and after, coverage and size of the sets."""
    before, labels = result.probs[rest], result.labels[rest]
    after = apply_temperature(before, temperature)
    numbers: dict[str, Any] = {"images": len(rest)}
    for when, probs in (("before", before), ("after", after)):
        metrics = evaluate_probs(probs, labels)
        numbers[when] = {name: metrics[name] for name in ("cls/NLL", "cal/ECE")}
    for name, rule in rules.items():
        sets = rule.sets(after)
        numbers[name] = {"coverage": coverage(sets, labels), "mean_size": mean_size(sets)}
    return numbers


def show(calibration: Calibration, temperature: Temperature, console: Console) -> None:
    """Two small tables."""
    check = calibration.check
    way = "was too sure" if temperature.value > 1 else "was not sure enough" if temperature.value < 1 else "stays"
    console.print(f"temperature {temperature.value:.3f}: the model {way}", highlight=False)
    if temperature.warning:
        console.print(f"note: {temperature.warning}", highlight=False)
    table = Table(f"on the other {check['images']} images", "before", "after")
    table.add_row("NLL", *(f"{check[when]['cls/NLL']:.4f}" for when in ("before", "after")))
    table.add_row("ECE", *(f"{100 * check[when]['cal/ECE']:.1f} %" for when in ("before", "after")))
    console.print(table)
    table = Table("conformal sets", "threshold", "aim", "hold the truth", "classes on average")
    for name, rule in calibration.conformal.items():
        sets = check[name]
        table.add_row(
            name.upper(),
            f"{rule.threshold:.4f}",
            f"{100 * (1 - rule.alpha):g} %",
            f"{100 * sets['coverage']:.1f} %",
            f"{sets['mean_size']:.2f}",
        )
    console.print(table)


def refuse_training_images(images: ImageSet, uri: str, checkpoint: Checkpoint, run: Run, console: Console) -> None:
    """Stop when the model was trained on any of the images, whatever name leads to them."""
    if run.data is None:
        console.print("note: this model does not say what it was trained on; make sure it is not these images")
        return
    try:
        trained = open_data(run.data, channels=view_of(checkpoint).channels, strict=False)
        trained = hold_out(trained, run.val_fraction, run.seed).train
    except DataError:
        console.print(f"note: the training images {run.data} are gone; make sure that these are others")
        return
    seen = {_place(trained.name(i)) for i in range(len(trained))}
    known = sum(_place(images.name(i)) in seen for i in range(len(images)))
    if known:
        raise UserError(
            f"the model was trained on {known} of the {len(images)} images of {uri}: calibrate on others, "
            f"such as --data {run.data}, of which the held-out images are taken"
        )


def _place(name: str) -> str:
    """An image's name without symbolic links on the way to it."""
    folder, slash, file = name.rpartition("/")
    return os.path.join(_real(folder), file) if slash else name


@lru_cache(maxsize=2**16)
def _real(folder: str) -> str:
    return os.path.realpath(folder)

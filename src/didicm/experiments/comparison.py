"""DiDiCM against standard classifiers on the same trunk, as `didicm compare` and the demo run it."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from didicm.errors import UserError, did_you_mean
from didicm.experiments.spec import Condition, Method, Study
from didicm.settings import load_recipe
from didicm.values import override

# What each method changes in the recipe; all have the same trunk, epochs and batches.
METHODS = {
    "standard": Method("standard", settings={"method": "standard"}),
    "standard-smooth": Method(
        "standard", "smoothed labels", settings={"method": "standard", "augment.label_smoothing": 0.1}
    ),
    "didicm-score": Method("DiDiCM", "score", settings={"model_args.parameterization": "score"}),  # the paper's
    "didicm-posterior": Method("DiDiCM", "posterior", settings={"model_args.parameterization": "posterior"}),
}
QUESTION = "Is DiDiCM better than a standard classifier, and at what cost?"


def compare_study(
    *,
    methods: Sequence[str] = tuple(METHODS),
    resolutions: Sequence[int] = (),
    fractions: Sequence[float] = (1.0,),
    corruptions: Sequence[str] = ("none",),
    seeds: int = 3,
    recipe: str = "small",
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """The study that compares `methods`, by their names in `METHODS`, under every combination of conditions.

    Args:
        methods: names in `METHODS`.
        resolutions: pixels that the networks see; by default the recipe's.
        fractions: of the training images.
        corruptions: of all images, such as `noise:3`; `none` for clean ones.
        seeds: trainings of each kind.
        recipe: settings that all trainings start from.
        settings: of all trainings, by dotted names.
    """
    for name in methods:
        if name not in METHODS:
            raise UserError(f"--methods has no {name!r}: {did_you_mean(name, METHODS)}")
    chosen = dict.fromkeys(methods)
    if "standard" in chosen and override(load_recipe(recipe), settings or {}).augment.label_smoothing:
        chosen.pop("standard-smooth", None)  # the recipe smooths all of them
    conditions = product(resolutions or (None,), fractions, corruptions)
    return Study(
        name="comparison",
        title="DiDiCM against a standard classifier",
        question=QUESTION,
        layout="comparison",
        methods=tuple(METHODS[name] for name in chosen),
        conditions=tuple(dict.fromkeys(Condition(r, f, None if c == "none" else c) for r, f, c in conditions)),
        recipe=recipe,
        settings=settings or {},
        seeds=seeds,
    )

"""Where studies come from: YAML that ships or is the user's own, what is stored with results, and comparisons."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from didicm.data.corruptions import LabelNoise
from didicm.errors import UserError, did_you_mean
from didicm.experiments.spec import PUBLISHED, STUDIES, Condition, Method, SamplerSpec, Study
from didicm.files import read_yaml
from didicm.settings import load_recipe
from didicm.values import Amount, coerce, flatten, override

MOST = 1000  # samplers of one kind, or conditions

SMOOTHED = {"method": "standard", "augment.label_smoothing": 0.1}
# What each method of a comparison changes in the recipe; all have the same trunk, epochs and batches.
METHODS = {
    "standard": Method("standard", settings={"method": "standard"}),
    "standard-smooth": Method("standard", "smoothed labels", settings=SMOOTHED),
    "didicm-score": Method(  # the paper's
        "DiDiCM", "score", settings={"model_args.parameterization": "score", "mask": 0.0}
    ),
    "didicm-posterior": Method("DiDiCM", "posterior", settings={"model_args.parameterization": "posterior"}),
    "didicm-few": Method(  # network of recipe few, with the augmentation and length of the others
        "DiDiCM",
        "ResNet blocks",
        settings={
            "model_args.layout": "resnet",
            "model_args.parameterization": "posterior",
            "model_args.noise_embedding": "log",
            "mask": 0.5,  # with crops and flips (study fair-cpu); for mixed images see `compare_study`
            "draws_per_image": 1,
            "label_proposal": 0.5,
            "sampler.method": "readout",
            "augment.label_smoothing": 0.1,
        },
    ),
    # What a higher price buys a standard classifier
    "ensemble": Method("standard", "ensemble", settings=SMOOTHED, members=4),
    "snapshots": Method("standard", "snapshots", settings={**SMOOTHED, "optimizer.snapshots": 5}),
    "swa": Method("standard", "SWA", settings={**SMOOTHED, "optimizer.swa": 0.5, "optimizer.ema": None}),
}
USUAL = ("standard", "standard-smooth", "didicm-score", "didicm-posterior", "didicm-few")
QUESTION = "Is DiDiCM better than a standard classifier, and at what cost?"


def compare_study(
    *,
    methods: Sequence[str] = USUAL,
    resolutions: Sequence[int] = (),
    fractions: Sequence[float] = (1.0,),
    corruptions: Sequence[str] = ("none",),
    label_noises: Sequence[LabelNoise] = (0.0,),
    seeds: int = 3,
    recipe: str = "small",
    settings: Mapping[str, Any] | None = None,
    tune: int = 0,
    holdouts: int = 1,
    views: int = 1,
) -> Study:
    """The study that compares `methods`, by their names in `METHODS`, under every combination of conditions.

    `resolutions` are in pixels, by default the recipe's; `fractions` are of the training images; `corruptions`,
    such as `noise:3` or `none`, are of all images; `label_noises` are of training labels, as `label_noise` in
    TrainConfig; `settings` are of all trainings, by dotted names; `tune` trials choose learning rate, weight decay
    and epochs of every method under every condition, each judged by `holdouts` draws of held-out images; with
    several `views`, answers that look at so many augmented views of each image are measured, too.
    """
    methods, fractions = (
        coerce(methods, tuple[str, ...], "methods"), coerce(fractions, tuple[Amount, ...], "fractions")
    )  # fmt: skip
    for name in methods:
        if name not in METHODS:
            raise UserError(f"--methods has no {name!r}: {did_you_mean(name, METHODS)}")
    chosen, config = dict.fromkeys(methods), override(load_recipe(recipe), settings or {})
    if "standard" in chosen and config.augment.label_smoothing:
        chosen.pop("standard-smooth", None)  # the recipe smooths all of them
    if not config.model.startswith("didirn"):
        if "didicm-few" in chosen and methods != USUAL:
            raise UserError(f"--methods: didicm-few has the blocks of a DiDiRN, the model is {config.model}")
        chosen.pop("didicm-few", None)
        if {"didicm-score", "didicm-posterior"} <= chosen.keys():  # the recipe's own first: it stands for DiDiCM
            chosen["didicm-score"] = chosen.pop("didicm-score")
    compared = {name: METHODS[name] for name in chosen}
    if "didicm-few" in compared and (config.augment.mixup or config.augment.cutmix):
        few = compared["didicm-few"]
        compared["didicm-few"] = replace(few, settings={**few.settings, "mask": load_recipe("few").mask})
    pair = [method for name, method in compared.items() if name in ("didicm-few", "didicm-posterior")]
    resolved = [flatten(override(config, method.settings)) for method in pair]
    if len(pair) == 2 and resolved[0] == resolved[1]:  # under recipe few; it stands for DiDiCM
        del compared["didicm-posterior"]
        compared = dict(sorted(compared.items(), key=lambda item: item[0] == "didicm-score"))
    conditions = product(resolutions or (None,), fractions, corruptions, label_noises)
    return Study(
        name="comparison",
        title="DiDiCM against a standard classifier",
        question=QUESTION,
        layout="comparison",
        methods=tuple(compared.values()),
        conditions=tuple(
            dict.fromkeys(Condition(r, f, None if c == "none" else c, noise) for r, f, c, noise in conditions)
        ),
        recipe=recipe,
        settings=settings or {},
        seeds=seeds,
        tune=tune,
        holdouts=holdouts,
        views=views,
    )


def list_studies() -> list[str]:
    """Names of the studies that ship."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml") if path.name != PUBLISHED)


def load_study(name: str) -> Study:
    """A study that ships, or one of the user's own from a YAML file."""
    path = STUDIES / f"{name}.yaml" if name in list_studies() else Path(name)
    if path.suffix not in (".yaml", ".yml"):
        nearest = did_you_mean(name, list_studies(), "didicm study lists those that ship")
        raise UserError(f"there is no study and no YAML file {name!r}: {nearest}")
    content = read_yaml(path, "give a YAML file with title, question, layout and methods")
    return make_study({"name": path.stem, **content}, str(path))


def make_study(content: Mapping[str, Any], where: str) -> Study:
    """A study from YAML or stored JSON, every key and value checked: a mistake shows before the hours."""
    values = dict(content)
    names = ("resolutions", "fractions", "corruptions", "label_noises")
    axes = {name: values.pop(name) for name in names if name in values}
    curves = values.pop("curves", {})
    try:
        if axes:
            values["conditions"] = _product(axes)
        if "methods" in values:
            entries = coerce(values["methods"], tuple[Mapping[str, Any], ...], "methods")
            values["methods"] = [_method(entry) for entry in entries]
        values["samplers"] = _samplers(values.get("samplers", {}), curves)
        values["baseline_samplers"] = _samplers(values.get("baseline_samplers", {}), {})
        return Study.from_dict(values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _method(values: Mapping[str, Any]) -> Method:
    """A method; what is none of its own fields is a setting of the training."""
    own = {key: values[key] for key in ("name", "variant", "size", "recipe", "members") if key in values}
    if "size" in own:
        own["size"] = str(own["size"])  # to YAML, 18 is a number
    rest = {key: value for key, value in values.items() if key not in (*own, "settings")}
    settings = coerce(values.get("settings", {}), Mapping[str, Any], "settings of a method")
    return Method.from_dict({**own, "settings": {**settings, **rest}})


def _product(axes: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Every combination, in the order of the paper's columns: fractions, and in them resolutions."""
    resolutions = coerce(axes.get("resolutions", [None]), tuple[int | None, ...], "resolutions")
    fractions = coerce(axes.get("fractions", [1.0]), tuple[Amount, ...], "fractions")
    corruptions = coerce(axes.get("corruptions", ["none"]), tuple[str, ...], "corruptions")
    noises = coerce(axes.get("label_noises", [0.0]), tuple[LabelNoise, ...], "label_noises")
    if math.prod(map(len, (resolutions, fractions, corruptions, noises))) > MOST:
        raise UserError(
            f"resolutions, fractions, corruptions and label_noises unfold to more than {MOST} conditions"
        )
    return [
        {"resolution": r, "fraction": f, "corruption": None if c == "none" else c, "label_noise": noise}
        for noise, c, f, r in product(noises, corruptions, fractions, resolutions)
    ]


def _samplers(given: Any, curves: Any) -> Sequence[Any]:
    """Samplers by name, or a list as stored; then those that only make curves; expanded over steps and chains."""
    if isinstance(given, (list, tuple)):
        return [*given, *_samplers({}, curves)]
    made: dict[str, SamplerSpec] = {}
    for key, group, stored in (("samplers", given, True), ("curves", curves, False)):
        for name, settings in coerce(group, Mapping[str, Mapping[str, Any]], key).items():
            for spec in _expand(name, settings, stored):
                made.setdefault(spec.name, spec)
    return tuple(made.values())


def _expand(name: str, settings: Mapping[str, Any], stored: bool) -> Iterator[SamplerSpec]:
    """One sampler for each number of steps and of chains; of several, only the first keeps its posteriors."""
    settings, at = {key: x for key, x in settings.items() if key != "at"}, settings.get("at", {})
    listed = {key: settings[key] for key in ("steps", "chains") if isinstance(settings.get(key), list)}
    if math.prod(map(len, listed.values())) > MOST:
        raise UserError(f"samplers: {name} unfolds to more than {MOST}")
    for i, values in enumerate(product(*listed.values())):
        own = dict(zip(listed, values, strict=True))
        words = [f"{n} {unit if n != 1 else unit[:-1]}" for unit, n in own.items()]
        yield SamplerSpec(", ".join([name, *words]), {**settings, **own}, stored and i == 0, name, at)

"""What is compared: methods under conditions, with several seeds, each network sampled in one or several ways."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml

from didicm.classifier import Sampler
from didicm.data import Corruptions
from didicm.data.corruptions import LabelNoise
from didicm.errors import UserError, did_you_mean
from didicm.settings import TrainConfig, load_recipe
from didicm.values import Amount, Few, Pixels, Range, Settings, flatten, override

# How the table is laid out: methods by condition; as in the paper, over levels of uncertainty, model sizes or
# sampling steps; or one column per metric.
Layout: TypeAlias = Literal["comparison", "uncertainty", "sizes", "steps", "metrics"]

STUDIES = Path(__file__).with_name("studies")
PUBLISHED = "published.yaml"
MEASURED, PICTURES = "measured", "pictures.safetensors"  # folder of a study, with one per run, and a file in that
# Settings that came later: at these values a run keeps the key that it had without them.
LATER: dict[str, Any] = {
    "sampler.floor": False,
    "sampler.tolerance": 0.0,
    "sampler.chunk": None,
    "sampler.views": 1,
    "feature_views": 8,
    "labels": None,
    "group_by": None,
    "label_noise": 0.0,
    "data_seed": None,
    "mask": 0.0,
    "teacher": None,
    "teacher_sampler": {},
    "optimizer.snapshots": None,
    "optimizer.swa": None,
    "augment.pad_mode": "black",
}
MOST_RUNS = 100_000  # of a study
SEEDS_APART = 1000  # between members of an ensemble, further than seeds of a study
Trials = Annotated[int, Range(0, 1000)]
ONE_CALL = "1 call"  # name of the sampler that asks the network once


@dataclass(frozen=True)
class Condition(Settings):
    """How much the images tell."""

    resolution: Pixels | None = None  # pixels that the network sees; None for the recipe's size
    fraction: Amount = 1.0  # of the training images, or images per class
    corruption: str | None = None  # of training and test images, such as noise:3
    label_noise: LabelNoise = 0.0  # of training labels, as in TrainConfig
    labels: str | None = None  # a table of labels, as in TrainConfig: such as what other people said

    def __str__(self) -> str:
        part = (
            f"{100 * self.fraction:g} % of the images"
            if self.fraction <= 1
            else f"{self.fraction} images per class"
        )
        size = f"{self.resolution} px" if self.resolution else ""
        return ", ".join(filter(None, [size, part, self.corruption, self.noise]))

    @property
    def noise(self) -> str:
        """The label noise in words, if there is any; labels of another table are one kind of it."""
        if self.labels is not None:
            return f"labels of {self.labels}"
        if isinstance(self.label_noise, str):
            return f"label noise of {self.label_noise}"
        return f"{100 * self.label_noise:g} % label noise" if self.label_noise else ""

    @property
    def noise_order(self) -> tuple[float, str]:
        """By the share of wrong labels; confusion matrices and tables come last."""
        named = self.labels or self.label_noise
        return (math.inf, named) if isinstance(named, str) else (named, "")

    @property
    def settings(self) -> dict[str, Any]:
        """What it changes in a training."""
        own: dict[str, Any] = {
            "fraction": self.fraction,
            "image.size": self.resolution,
            "corrupt_train": self.corruption,
            "corrupt_eval": self.corruption,
            "label_noise": self.label_noise or None,
            "labels": self.labels,
        }
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class Method(Settings):
    """One of the classifiers that are compared."""

    name: str  # such as standard or DiDiCM-CP
    variant: str = ""  # tells methods of one name apart; it is compared with baselines of the same variant
    size: str = ""  # of the network, its place in layout `sizes`
    recipe: str | None = None  # if another than the study's
    settings: Mapping[str, Any] = field(default_factory=dict)  # by dotted names of TrainConfig
    members: Annotated[int, Range(1, 100)] = 1  # trainings with other seeds on the same images: a deep ensemble

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.line, self.size]))

    @property
    def line(self) -> str:
        """Name without the size."""
        return ", ".join(filter(None, [self.name, self.variant]))

    @property
    def baseline(self) -> bool:
        """Whether it is a standard classifier."""
        return self.settings.get("method") == "standard"


@dataclass(frozen=True)
class SamplerSpec(Settings):
    """One way to draw a posterior from a trained network."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the sampler
    stored: bool = True  # whether its posteriors are kept, or only its metrics
    group: str = ""  # what it shares with samplers that differ in steps or chains alone
    at: Mapping[str, Any] = field(default_factory=dict)  # fields of the conditions it is for, such as a resolution

    def suits(self, condition: Condition) -> bool:
        """Whether it is used under a condition."""
        return all(getattr(condition, name) == value for name, value in self.at.items())


@dataclass(frozen=True)
class Run(Settings):
    """One training of a study, and how its network is sampled."""

    method: Method
    condition: Condition
    seed: int
    config: TrainConfig
    samplers: tuple[SamplerSpec, ...] = ()  # of its network, the main one first; none for the usual ones
    held_out: float = 0.1  # share of the training images kept for the temperature; 0 for no temperature
    trial: int | None = None  # its number in the search of a tuned study: such a run never meets test images
    repeat: int = 0  # which draw of held-out images judges the trial, from 1; 0 if there is only one
    views: Few = 1  # augmented views of each image that further samplers look at

    def __str__(self) -> str:
        again = f", draw {self.repeat}" if self.repeat else ""
        which = f"seed {self.seed}" if self.trial is None else f"trial {self.trial}{again}"
        return f"{self.method}, {self.condition}, {which}"

    @property
    def kind(self) -> tuple[str, Condition]:
        """What its seeds and trials share."""
        return str(self.method), self.condition

    @property
    def members(self) -> list[TrainConfig]:
        """The trainings of a deep ensemble, on the same images; the run's own if it is none, or only a trial."""
        config = self.config
        if self.method.members == 1 or self.trial is not None:
            return [config]
        alike = replace(config, data_seed=config.image_seed)
        places = [config.out and str(Path(config.out) / f"member-{i}") for i in range(self.method.members)]
        return [replace(alike, seed=config.seed + i * SEEDS_APART, out=out) for i, out in enumerate(places)]

    @property
    def networks(self) -> int:
        """How many networks answer together: members, or snapshots of one training."""
        return len(self.members) if len(self.members) > 1 else self.config.optimizer.snapshots or 1

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that seeds share: how a training is carried out is no part of it, but for its precision."""
        kept = {k: v for k, v in flatten(self.config).items() if k not in ("out", "seed") and k[:4] != "run."}
        return {**kept, "run.precision": self.config.run.precision}

    @cached_property
    def key(self) -> str:
        """A name that is the same for the same training, and fit for a file."""
        known = {name: value for name, value in self.settings.items() if LATER.get(name, ...) != value}
        values = {**known, "seed": self.config.seed, "held_out": self.held_out}
        if len(self.members) > 1:
            values["members"] = len(self.members)
        values["precision"] = values.pop("run.precision")
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        condition = self.condition
        where = f"{condition.resolution or 'own'}px-{condition.fraction:g}_{condition.corruption or 'none'}"
        name = f"{values['method']}-{values['model']}_{where}_seed{self.seed}_{digest}"
        return re.sub(r"[^A-Za-z0-9._+-]", "-", name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "config": flatten(self.config)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Run":
        """Read what `to_dict` gave."""
        return super().from_dict({**values, "config": override(TrainConfig(), values["config"])})


@dataclass(frozen=True)
class Study(Settings):
    """A grid of trainings with a question."""

    name: str
    title: str
    question: str
    layout: Layout
    methods: tuple[Method, ...]
    conditions: tuple[Condition, ...] = (Condition(),)
    published: str | None = None  # the paper's table to print beside ours
    data: str | None = None  # where the images are; None: the user has to say it
    recipe: str = "small"  # settings that all methods start from
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all trainings, by dotted names
    by_fraction: Mapping[float, Mapping[str, Any]] = field(default_factory=dict)  # such as more epochs for few
    samplers: tuple[SamplerSpec, ...] = ()  # of DiDiCM, as in `Run`
    baseline_samplers: tuple[SamplerSpec, ...] = ()  # of standard classifiers, such as several views
    seeds: Few = 3
    held_out: Annotated[float, Range(0, 1)] = 0.1  # as in `Run`
    tune: Trials = 0  # of every method under every condition, see `tune.py`; 0 searches nothing
    holdouts: Few = 1  # how often held-out images are drawn anew for each trial, which is judged by all of them
    views: Few = 1  # answers that look at so many augmented views of each image are measured beside the usual ones
    prediction: str = ""  # what was expected, written down before the runs
    note: str = ""  # what a reader of the report should know

    def __post_init__(self) -> None:
        super().__post_init__()
        for wrong, message in _mistakes(self):
            if wrong:
                raise UserError(message)

    def runs(self, data: str, seeds: int, settings: Mapping[str, Any] | None = None) -> list[Run]:
        """All trainings, seed by seed, so that an early look shows the whole table.

        `settings` are the user's: they override recipes and the study, but not what makes a method.
        """
        runs, asked = [], {**(settings or {}), "data": data}
        for seed, condition, method in product(range(seeds), self.conditions, self.methods):
            specs = self.baseline_samplers if method.baseline else self.samplers
            samplers = tuple(spec for spec in specs if spec.suits(condition))
            config = self._config(method, condition, seed, asked)
            runs.append(Run(method, condition, seed, config, samplers, self.held_out, views=self.views))
        return runs

    def _config(self, method: Method, condition: Condition, seed: int, asked: Mapping[str, Any]) -> TrainConfig:
        """Settings of one training: the method's recipe, changed by the weakest wish first."""
        own = {**method.settings, "seed": seed, **condition.settings}
        recipe = load_recipe(method.recipe or self.recipe, method.settings.get("method", "diffusion"))
        config = override(recipe, self.settings, self.by_fraction.get(condition.fraction, {}), asked, own)
        # One of many trainings: nobody looks at its curve, and only its end counts.
        devices = 1 if config.run.devices == "auto" else config.run.devices
        run = replace(config.run, devices=devices, nodes=1, strategy="auto", tensorboard=False, wandb=None)
        return replace(config, run=replace(run, validate_epochs=config.epochs))


@cache
def published_tables() -> dict[str, Any]:
    """The tables of the paper."""
    tables: dict[str, Any] = yaml.safe_load((STUDIES / PUBLISHED).read_text(encoding="utf-8"))
    return tables


def _mistakes(study: Study) -> Iterator[tuple[bool, str]]:
    """What a study may not be, and how that is told."""
    labels, known = [str(method) for method in study.methods], [item.name for item in fields(Condition)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    yield not labels, "methods is empty"
    runs = len(labels) * len(study.conditions) * (study.tune * study.holdouts + study.seeds)
    yield runs > MOST_RUNS, f"methods, conditions, trials and seeds make {runs} runs, more than {MOST_RUNS}"
    yield twice is not None, f"two methods are called {twice!r}: give one of them a variant"
    yield study.held_out == 1, "held_out must be below 1, or no image is left to train on"
    yield bool(study.tune) and not study.held_out, "tune needs held-out images to judge by: set held_out above 0"
    both = study.views > 1 and bool(study.samplers or study.baseline_samplers)
    yield both, "views adds to the usual samplers: with samplers of your own, name those with views among them"
    yield not study.conditions, "resolutions, fractions, corruptions and label_noises need at least one entry each"
    for condition in study.conditions:
        if condition.corruption is not None:
            Corruptions.parse(condition.corruption)
    for spec in (*study.baseline_samplers, *study.samplers):
        override(Sampler(), spec.settings)
        unknown = next((name for name in spec.at if name not in known), None)
        yield unknown is not None, f"at has no {unknown!r}: {did_you_mean(str(unknown), known)}"
        unused = not any(map(spec.suits, study.conditions))
        yield unused, f"sampler {spec.name} is at {spec.at}, which no condition is"
        yield spec.stored and bool(spec.at), f"at is for curves: sampler {spec.name} is part of the table"
    for name in (name for spec in study.baseline_samplers for name in spec.settings):
        wrong = name not in ("views", "seed")
        yield wrong, f"baseline_samplers: a standard classifier has no {name}: it may have views"
    lost = [share for share in study.by_fraction if share not in [c.fraction for c in study.conditions]]
    yield bool(lost), f"by_fraction has {lost}, which no condition has"
    fitting = [name for name in published_tables() if (name == "tab:all_resnet") == (study.layout == "sizes")]
    yield study.published not in (None, *fitting), f"published must be one of {', '.join(fitting)}"
    stored = [spec for spec in study.samplers if spec.stored]
    yield bool(study.samplers) and not stored, "curves need samplers beside them"
    if study.layout == "sizes":
        yield not all(method.size for method in study.methods), "with layout sizes every method needs a size"
        several = max(len(study.conditions), len(study.samplers)) > 1
        yield several, "layout sizes takes one condition and one sampler"
    if study.layout == "steps":
        yield not study.samplers, "layout steps needs samplers"
        yield len(study.conditions) > 1, "layout steps takes one condition"
        yield any(method.baseline for method in study.methods), "layout steps is for DiDiCM"
        timed = all("steps" in s.settings or s.settings.get("method") == "readout" for s in study.samplers)
        yield not timed, "with layout steps every sampler needs steps"
        places = [(spec.group or spec.name, spec.settings.get("steps")) for spec in study.samplers]
        twice = next((name for name, steps in places if places.count((name, steps)) > 1), None)
        yield twice is not None, f"sampler {twice} has a number of steps twice: name one for each number of chains"

"""What a study is: a YAML file that says what to train, how to read it, and how to lay out what comes out."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from didicm.classifier import Sampler
from didicm.data import Corruptions
from didicm.errors import UserError
from didicm.experiments.cells import Cell, Reading, Setting
from didicm.settings import TrainConfig, dotted, flatten, load_recipe, override
from didicm.values import coerce, kinds_of

Layout: TypeAlias = Literal["uncertainty", "sizes", "steps", "metrics"]
PUBLISHED = "published.yaml"


@dataclass(frozen=True)
class Study:
    """A grid of trainings with a question.

    Args:
        layout: of the table: over levels of uncertainty, model sizes, or steps; or one column a metric
        published: the paper's table to print beside it
        data: where the images are; none means that the user has to say it
        recipe: settings that all contestants start from
        settings: of all trainings, by dotted names
        contestants: by name, what each changes; `recipe` takes another one, `column` is its place in `sizes`
        by_fraction: settings for a share of the training images, such as more epochs where there are fewer
        readings: of DiDiCM's networks, by name, the main one first; a list of steps makes one each
        curves: further readings, for figures alone
        held_out: share of the training images that is kept for the temperature; 0 means no temperature
    """

    name: str
    title: str
    question: str
    layout: Layout
    contestants: Mapping[str, Mapping[str, Any]]
    published: str | None = None
    data: str | None = None
    recipe: str = "small"
    settings: Mapping[str, Any] = field(default_factory=dict)
    resolutions: tuple[int | None, ...] = (None,)
    fractions: tuple[float, ...] = (1.0,)
    corruptions: tuple[str, ...] = ("none",)
    by_fraction: Mapping[float, Mapping[str, Any]] = field(default_factory=dict)
    readings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: int = 3
    held_out: float = 0.1

    def base(self, data: str, settings: Mapping[str, Any]) -> TrainConfig:
        """Settings that all trainings share."""
        return override(load_recipe(self.recipe), {**self.settings, "data": data, **settings})

    def cells(self, seeds: int, settings: Mapping[str, Any] | None = None) -> list[Cell]:
        """All trainings; seed by seed, so that an early look shows the whole table.

        `settings` are the user's: they override recipes and the study, but not what makes a contestant.
        """
        return [
            Cell(
                name,
                setting,
                seed,
                self._overrides(name, setting, settings or {}),
                self.all_readings,
                self.held_out,
            )
            for seed, setting, name in product(range(seeds), self.uncertainty, self.contestants)
        ]

    @property
    def uncertainty(self) -> list[Setting]:
        """All settings, in the order of the paper's columns: fractions, and in them resolutions."""
        spoilt = [None if name == "none" else name for name in self.corruptions]
        return [Setting(r, f, c) for c, f, r in product(spoilt, self.fractions, self.resolutions)]

    @property
    def all_readings(self) -> tuple[Reading, ...]:
        """Readings of the tables, the main one first, and of the curves."""
        tables = [x for name, settings in self.readings.items() for x in _expand(name, settings)]
        curves = [x for name, settings in self.curves.items() for x in _expand(name, settings, stored=False)]
        known = {reading.name for reading in tables}
        return (*tables, *(reading for reading in curves if reading.name not in known))

    def column(self, method: str) -> str:
        """Place of a contestant in the layout `sizes`."""
        return str(self.contestants[method]["column"])

    def line(self, method: str) -> str:
        """Name of the line that a contestant belongs to: without its place in `sizes`."""
        return str(self.contestants[method].get("line", method))

    def _overrides(self, name: str, setting: Setting, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = {k: v for k, v in self.contestants[name].items() if k not in ("recipe", "column", "line")}
        method = own.get("method", "diffusion")
        # What the contestant's recipe says otherwise than the common one.
        common = flatten(load_recipe(self.recipe))
        other = flatten(load_recipe(self.contestants[name].get("recipe", self.recipe), method))
        special = {k: v for k, v in other.items() if v != common[k]}
        by_fraction = self.by_fraction.get(setting.fraction, {})
        weakest_first = (special, self.settings, by_fraction, settings, {"method": method}, own)
        return {name: value for values in weakest_first for name, value in dotted(values).items()}


def studies() -> list[str]:
    """Names of the studies that ship."""
    names = (path.name for path in files("didicm.experiments").joinpath("studies").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml") and name != PUBLISHED)


def load_study(name: str) -> Study:
    """A study that ships, or one of the user's own from a YAML file."""
    if name in studies():
        return read_study(Path(str(files("didicm.experiments").joinpath("studies"))) / f"{name}.yaml")
    if name.endswith((".yaml", ".yml")):
        return read_study(Path(name))
    raise UserError(f"there is no study {name!r}: choose one of {', '.join(studies())}, or give a YAML file")


def read_study(path: Path) -> Study:
    """Read and check a study."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}): give a YAML file") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no study: it must have title, question, layout and contestants")
    return make_study({"name": path.stem, **content}, str(path))


def make_study(content: Mapping[str, Any], where: str) -> Study:
    """Check every key and value: a mistake shows now and not after hours."""
    kinds = kinds_of(Study)
    unknown = [key for key in content if key not in kinds]
    if unknown:
        raise UserError(f"{where}: there is no key {unknown[0]!r}; choose from {', '.join(sorted(kinds))}")
    needed = [key for key in ("title", "question", "layout", "contestants") if key not in content]
    if needed:
        raise UserError(f"{where}: {', '.join(needed)} must be given")
    study = Study(**{key: coerce(value, kinds[key], f"{where}: {key}") for key, value in content.items()})
    for wrong, says in _mistakes(study):
        if wrong:
            raise UserError(f"{where}: {says}")
    for reading in study.all_readings:
        sampler = override(Sampler(), reading.settings)
        if sampler.steps < 1 or sampler.chains < 1:
            raise UserError(f"{where}: reading {reading.name!r} needs at least one step and one chain")
    for name in study.corruptions:
        if name != "none":
            Corruptions.parse(name)
    return study


def _mistakes(study: Study) -> Iterator[tuple[bool, str]]:
    """What a study may not be, and how that is told."""
    yield not study.contestants, "contestants is empty"
    yield study.seeds < 1, f"seeds must be at least 1, got {study.seeds}"
    yield not 0 <= study.held_out < 1, f"held_out must lie in [0, 1), got {study.held_out:g}"
    yield not all(0 < share <= 1 for share in study.fractions), "fractions must lie in (0, 1]"
    yield any(r is not None and r < 1 for r in study.resolutions), "resolutions must be at least 1"
    yield not study.uncertainty, "resolutions, fractions and corruptions need at least one entry each"
    lost = [share for share in study.by_fraction if share not in study.fractions]
    yield bool(lost), f"by_fraction has {lost}, which fractions lacks"
    single = len(study.uncertainty) == 1
    tables = published_tables()
    fitting = [name for name in tables if (name == "tab:all_resnet") == (study.layout == "sizes")]
    yield study.published not in (None, *fitting), f"published must be one of {', '.join(fitting)}"
    yield bool(study.curves) and not study.readings, "curves need readings beside them"
    if study.layout == "sizes":
        placed = all("column" in own for own in study.contestants.values())
        yield not placed, "with layout sizes every contestant needs a column"
        yield not single or len(study.all_readings) > 1, "layout sizes takes one setting and one reading"
    if study.layout == "steps":
        yield not study.readings, "layout steps needs readings"
        yield not single, "layout steps takes one setting"
        yield (
            any(own.get("method") == "standard" for own in study.contestants.values()),
            "layout steps is for DiDiCM",
        )
        timed = all("steps" in s or s.get("method") == "readout" for s in study.readings.values())
        yield not timed, "with layout steps every reading needs steps"


def to_plan(study: Study) -> dict[str, Any]:
    """The study as plain values, kept with its results."""
    return asdict(study)


def published_tables() -> dict[str, Any]:
    """The tables of the paper."""
    return yaml.safe_load(
        files("didicm.experiments").joinpath("studies").joinpath(PUBLISHED).read_text(encoding="utf-8")
    )


def _expand(name: str, settings: Mapping[str, Any], stored: bool = True) -> list[Reading]:
    """One reading for each number of steps and of chains; of several, only the first keeps its posteriors."""
    steps, chains = settings.get("steps"), settings.get("chains")
    found = []
    for s, c in product(_listed(steps), _listed(chains)):
        own = {"steps": s, "chains": c}
        words = [name]
        words += [f"{s} step{'s' if s > 1 else ''}"] if isinstance(steps, list) else []
        words += [f"{c} chains"] if isinstance(chains, list) else []
        values = {**settings, **{k: v for k, v in own.items() if v is not None}}
        found.append(Reading(", ".join(words), values, stored and not found, name))
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

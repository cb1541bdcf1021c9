"""What a study is: a YAML file that says what to train, how to read it, and how to lay out what comes out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import yaml

from didicm.classifier import Sampler
from didicm.data import Corruptions
from didicm.errors import UserError
from didicm.study.cells import Cell, Reading, Setting
from didicm.training.config import TrainConfig, flatten, load_recipe, override

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

    def cells(self, seeds: int) -> list[Cell]:
        """All trainings; seed by seed, so that an early look shows the whole table."""
        spoilt = [None if name == "none" else name for name in self.corruptions]
        # Fractions outermost: the order of the paper's columns.
        settings = [Setting(r, f, c) for c, f, r in product(spoilt, self.fractions, self.resolutions)]
        return [
            Cell(name, setting, seed, self._overrides(name, setting), self._readings(), self.held_out)
            for seed, setting, name in product(range(seeds), settings, self.contestants)
        ]

    def column(self, method: str) -> str:
        """Place of a contestant in the layout `sizes`."""
        return str(self.contestants[method]["column"])

    def line(self, method: str) -> str:
        """Name of the line that a contestant belongs to: without its place in `sizes`."""
        return str(self.contestants[method].get("line", method))

    def _overrides(self, name: str, setting: Setting) -> dict[str, Any]:
        own = {k: v for k, v in self.contestants[name].items() if k not in ("recipe", "column", "line")}
        method = own.get("method", "diffusion")
        # What the contestant's recipe says otherwise than the common one; the study's settings override both.
        common = flatten(load_recipe(self.recipe))
        other = flatten(load_recipe(self.contestants[name].get("recipe", self.recipe), method))
        special = {k: v for k, v in other.items() if v != common[k] and k not in self.settings}
        return {**special, "method": method, **own, **self.by_fraction.get(setting.fraction, {})}

    def _readings(self) -> tuple[Reading, ...]:
        tables = [x for name, settings in self.readings.items() for x in _expand(name, settings)]
        curves = [x for name, settings in self.curves.items() for x in _expand(name, settings, stored=False)]
        known = {reading.name for reading in tables}
        return (*tables, *(reading for reading in curves if reading.name not in known))


def studies() -> list[str]:
    """Names of the studies that ship."""
    names = (path.name for path in files("didicm.studies").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml") and name != PUBLISHED)


def load_study(name: str) -> Study:
    """A study that ships, or one of the user's own from a YAML file."""
    if name in studies():
        return read_study(Path(str(files("didicm.studies"))) / f"{name}.yaml")
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
    """Check every key: a mistake shows now and not after hours."""
    known = {item.name for item in fields(Study)}
    unknown = [key for key in content if key not in known]
    if unknown:
        raise UserError(f"{where}: there is no key {unknown[0]!r}; choose from {', '.join(sorted(known))}")
    lists = {k: tuple(content[k]) for k in ("resolutions", "fractions", "corruptions") if k in content}
    try:
        by_fraction = {float(share): own for share, own in content.get("by_fraction", {}).items()}
        study = Study(**{**content, **lists, "by_fraction": by_fraction})
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: title, question, layout and contestants are needed ({error})") from error
    if study.layout not in get_args(Layout):
        raise UserError(f"{where}: layout must be one of {', '.join(get_args(Layout))}, got {study.layout!r}")
    if study.layout == "sizes" and not all("column" in own for own in study.contestants.values()):
        raise UserError(f"{where}: with layout sizes every contestant needs a column")
    if not study.contestants:
        raise UserError(f"{where}: contestants is empty")
    if study.published is not None and study.published not in published_tables():
        raise UserError(f"{where}: published must be one of {', '.join(published_tables())}")
    samplers = {item.name for item in fields(Sampler)}
    for name, settings in {**study.readings, **study.curves}.items():
        wrong = [key for key in settings if key not in samplers]
        if wrong:
            raise UserError(f"{where}: reading {name!r} has no setting {wrong[0]!r}; choose from {samplers}")
    for name in study.corruptions:
        if name != "none":
            Corruptions.parse(name)
    return study


def to_plan(study: Study) -> dict[str, Any]:
    """The study as plain values, kept with its results."""
    return asdict(study)


def published_tables() -> dict[str, Any]:
    """The tables of the paper."""
    return yaml.safe_load(files("didicm.studies").joinpath(PUBLISHED).read_text(encoding="utf-8"))


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
        found.append(Reading(", ".join(words), values, stored and not found))
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

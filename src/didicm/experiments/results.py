"""What a study's runs gave: `study.json` says what was asked for, `results.jsonl` has one typed record per run.

Trials of a tuned study's search are records of their own in `trials.jsonl`: no table can take them for results.

Only the owner of a study's folder writes them (`experiments/run.py`); a report only reads them.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from didicm.errors import UserError, reason
from didicm.experiments.migrate import OLD_PLAN, migrate_plan, migrate_result
from didicm.experiments.spec import LATER, Condition, Study
from didicm.experiments.study_file import make_study
from didicm.files import parse_json, read_json, to_json, write_files, writing
from didicm.settings import GONE
from didicm.values import Count, Natural, NonNegative, Positive, Settings, coerce

FORMAT = 2
STUDY, RESULTS, TRIALS = "study.json", "results.jsonl", "trials.jsonl"
S = TypeVar("S", bound="_Stored")


@dataclass(frozen=True)
class Measurement(Settings):
    """The posteriors of one sampler on the test images."""

    sampler: str  # its name in the study
    group: str  # what it shares with samplers that differ in steps or chains alone
    settings: dict[str, Any]  # of the sampler
    calls: Natural | Positive  # network calls per image, on average where an early stop saves some
    multiply_adds: Count  # per image
    metrics: dict[str, float]  # as trained
    temperature: float | None = None  # fitted on held-out training images
    scaled_metrics: dict[str, float] | None = None  # with that temperature
    posteriors: str | None = None  # file, relative to the study's folder; None if only the metrics were kept

    def __post_init__(self) -> None:
        super().__post_init__()
        place = Path(self.posteriors or "")
        if place.is_absolute() or ".." in place.parts:
            raise UserError(f"posteriors must be a file in the study's folder, got {self.posteriors!r}")


@dataclass(frozen=True)
class _Stored(Settings):
    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls: type[S], values: Mapping[str, Any]) -> S:
        """Read a record; another format, missing and unknown fields are errors."""
        if values.get("format") != FORMAT:
            raise ValueError(f"format {values.get('format')}, where this version of didicm reads {FORMAT}")
        return super().from_dict({key: value for key, value in values.items() if key != "format"})


@dataclass(frozen=True)
class RunResult(_Stored):
    """A trained network and what was measured with it."""

    key: str  # of the run
    method: str  # label of the study's method
    condition: Condition
    seed: Count
    num_train: Count
    num_held_out: Count
    num_test: Count
    num_classes: Natural
    parameters: Count
    train_seconds: NonNegative | None  # None if it was interrupted and resumed
    measurements: tuple[Measurement, ...]  # the main sampler first
    versions: dict[str, str]
    train_multiply_adds: Count | None = None  # of all its trainings, forward and backward; None in older results
    final_epochs_gain: float | None = None  # relative fall of the mean loss over the last two tenths of the epochs
    skipped_steps: Count | None = None  # of all its trainings, for want of a finite gradient; likewise
    unreadable: Count = 0  # images of training, held-out and test images that were left out

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.measurements:
            raise UserError("measurements is empty")


@dataclass(frozen=True)
class Trial(_Stored):
    """One training of a search, judged by held-out training images."""

    key: str  # of the run
    method: str  # label of the study's method
    condition: Condition
    number: Count  # 0 has the settings as they are without a search
    settings: dict[str, int | float]  # those that are searched, by dotted names
    num_train: Count
    num_held_out: Natural
    train_seconds: NonNegative | None  # None if it was interrupted and resumed
    metrics: dict[str, float] | None  # of the held-out images, as trained; None if the training diverged
    versions: dict[str, str]
    losses: tuple[float, ...] | None = None  # NLL by image or, of many, by group; None in older results
    repeat: Count = 0  # which draw of held-out images judged it, as in `Run`

    @property
    def nll(self) -> float:
        """What trials are judged by; infinite if the training diverged."""
        return math.inf if self.metrics is None else self.metrics["cls/NLL"]


@dataclass(frozen=True)
class Plan(_Stored):
    """What was asked for: a report needs nothing else, and a folder keeps to it."""

    study: Study
    command: str
    data: str
    settings: dict[str, dict[str, Any]]  # of each training but for run.*, out and seed, by "method, condition"
    runs: dict[str, str]  # label of the method by the key of each run and trial
    search: Count = 0  # the version of its search, see `tune.py`

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Plan":
        """Read a plan; those of earlier versions say whether their search went in rounds."""
        own = dict(values)
        return super().from_dict({"search": int(own.pop("rounds", 0)), **own})

    def conflict(self, new: "Plan") -> str:
        """What a new plan for the same folder changes, if anything; methods, conditions and seeds may join."""
        before, now = self.study, new.study
        for name in ("held_out", "tune", "holdouts", "views"):
            asked, wanted = getattr(before, name), getattr(now, name)
            if asked != wanted:
                return f"{name} is {asked:g}, not {wanted:g}"
        if now.tune > 1 and self.search != new.search:  # the first trial was always the same
            return "its search is of an earlier version, which drew other trials"
        by_condition = {"image.size", "fraction", "corrupt_train", "corrupt_eval", "label_noise", "labels"}
        by_condition.update(*map(_leaves, (*before.by_fraction.values(), *now.by_fraction.values())))
        for m, c, other, d in product(before.methods, before.conditions, now.methods, now.conditions):
            if str(m) != str(other) and (m.recipe, m.baseline) != (other.recipe, other.baseline):
                continue  # nothing in common
            if str(m) == str(other) and m.members != other.members:
                return f"members of {m} is {m.members}, not {other.members}"
            own = {*_leaves(m.settings), *_leaves(other.settings)} if str(m) != str(other) else set()
            own |= by_condition if c != d else set()
            values = GONE | _leaves(new.settings.get(f"{other}, {d}", {}))
            stored = _leaves(self.settings.get(f"{m}, {c}", {}))
            stored = LATER | stored if stored else stored  # an earlier version trained as if it had these values
            for name, value in stored.items():
                if name not in own and values.get(name, value) != value:
                    return f"{name} is {value}, {'no longer an option' if name in GONE else f'not {values[name]}'}"
        for name in ("samplers", "baseline_samplers"):
            asked, wanted = getattr(before, name), getattr(now, name)
            if [(s.name, s.settings) for s in asked] != [(s.name, s.settings) for s in wanted]:
                return f"{name} are {', '.join(spec.name for spec in asked) or 'the usual ones'}"
        return ""

    def extended(self, new: "Plan") -> "Plan":
        """The new plan with what was asked for earlier: a comparison may grow, a study is what its file says."""
        before, now = self.study, new.study
        if now.layout != "comparison":
            return new
        methods = {str(method): method for method in (*before.methods, *now.methods)}
        study = replace(
            now,
            methods=tuple(methods.values()),
            conditions=tuple(dict.fromkeys((*before.conditions, *now.conditions))),
            by_fraction={**before.by_fraction, **now.by_fraction},
            seeds=max(before.seeds, now.seeds),
        )
        return replace(new, study=study, settings=self.settings | new.settings, runs=self.runs | new.runs)


Record: TypeAlias = RunResult | Trial
R = TypeVar("R", RunResult, Trial)


def read_plan(folder: Path) -> Plan | None:
    """What a folder was started with; None for a new folder."""
    path = folder / (OLD_PLAN if _is_old(folder) else STUDY)
    if not path.exists():
        return None
    remedy = "restore it, or use another --out"
    stored = read_json(path, remedy)
    with _damage_told(str(path), remedy):
        values = {"format": FORMAT, **migrate_plan(stored)} if path.name == OLD_PLAN else dict(stored)
        content = coerce(values["study"], Mapping[str, Any], "study")
    study = make_study(content, str(path))
    with _damage_told(str(path), remedy):
        return Plan.from_dict({**values, "study": study})


def write_plan(folder: Path, plan: Plan) -> None:
    """Keep what was asked for; the results of an older version are rewritten in today's format."""
    writing = {STUDY: to_json(plan.to_dict())}
    if _is_old(folder):  # the results first: should the machine stop in between, they are read all the same
        writing = {RESULTS: "".join(map(_line, read_results(folder))), **writing}
    write_files(folder, writing)
    (folder / OLD_PLAN).unlink(missing_ok=True)


def read_results(folder: Path) -> list[RunResult]:
    """Finished runs, in the order in which they finished; a last line that a crash cut short is none."""
    plan = read_json(folder / OLD_PLAN, "restore it") if _is_old(folder) else {}

    def read(values: Mapping[str, Any]) -> RunResult:
        known = values if "format" in values else {"format": FORMAT, **migrate_result(values, plan)}
        return RunResult.from_dict(known)

    return _read_records(folder / RESULTS, read)


def read_trials(folder: Path) -> list[Trial]:
    """Finished trials of the search, likewise."""
    return _read_records(folder / TRIALS, Trial.from_dict)


def append_result(folder: Path, result: Record) -> None:
    """Add a finished run to its file unless it is there; on disk when this returns."""
    if _is_old(folder) and (plan := read_plan(folder)):
        write_plan(folder, plan)
    path = folder / (TRIALS if isinstance(result, Trial) else RESULTS)
    known = _whole_lines(path)
    if f'"key": {json.dumps(result.key, ensure_ascii=False)}'.encode() in known:
        return
    with writing(path), open(path, "ab") as file:
        file.truncate(len(known))
        file.write(_line(result).encode())
        file.flush()
        os.fsync(file.fileno())


def _line(result: Record) -> str:
    return json.dumps(result.to_dict(), ensure_ascii=False) + "\n"


def _read_records(path: Path, read: Callable[[Mapping[str, Any]], R]) -> list[R]:
    """One record per line; of two with the same key the first counts."""
    records: dict[str, R] = {}
    for number, line in enumerate(_whole_lines(path).splitlines(), start=1):
        with _damage_told(f"line {number} of {path}", "delete that line; its run is then repeated"):
            record = read(parse_json(line))
        records.setdefault(record.key, record)
    return list(records.values())


def _whole_lines(path: Path) -> bytes:
    """Content of a file of records without a last line that a crash or a full disk cut short."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _is_old(folder: Path) -> bool:
    return (folder / OLD_PLAN).exists() and not (folder / STUDY).exists()


@contextmanager
def _damage_told(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{what} is damaged ({reason(error)}): {remedy}") from error


def _leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, free mappings too."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat

"""Format 1 of stored results, as version 0.1 wrote them, in the fields of format 2."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from didicm.experiments.spec import Condition, Method, Run
from didicm.experiments.study_file import METHODS, QUESTION
from didicm.settings import TrainConfig
from didicm.values import override, renamed

OLD_PLAN = "plan.json"

_WORDS = {"asked mid-step": "midpoint", "asked at the start": "start", "free labels": "importance-sampled labels"}
_KEY = re.compile(r"_(?P<pixels>own|\d+)px-(?P<fraction>[^_]+)_(?P<corruption>[^_]+)_seed(?P<seed>\d+)_[0-9a-f]+$")


def migrate_plan(old: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Plan`, plain, from a plan.json."""
    runs = [_run(key, label, old) for key, label in old.get("cells", {}).items()]
    study = _migrate_study(old) if old.get("study") else _make_comparison(old, runs)
    settings = {f"{run.method}, {run.condition}": run.settings for run in runs}
    own = {"study": study, "settings": settings, "runs": {run.key: str(run.method) for run in runs}}
    return {**own, "command": old.get("command", ""), "data": old.get("data") or study.get("data") or ""}


def migrate_result(old: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `RunResult`, plain, from a line of results.jsonl; `plan` is what plan.json has."""
    own = dict(old)
    del own["standard"]
    label = own["method"]
    own["key"] = _run(own["key"], label, plan).key if plan.get("cells") else own["key"]
    own["method"] = str(_method(label, plan))
    own["condition"] = {name: own.pop(name) for name in ("resolution", "fraction", "corruption")}
    own["measurements"] = [dict(entry) for entry in own.pop("readings")]
    for entry in own["measurements"]:
        entry["sampler"], entry["group"] = _words(entry.pop("name")), _words(entry["group"])
        entry["settings"], entry["scaled_metrics"] = renamed(entry["settings"]), entry.pop("tempered")
    return own


def _make_comparison(plan: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """A comparison had no study."""
    return {
        "name": "comparison",
        "title": plan.get("title") or "DiDiCM against a standard classifier",
        "question": QUESTION,
        "layout": "comparison",
        "methods": [vars(method) for method in {str(run.method): run.method for run in runs}.values()],
        "conditions": [vars(condition) for condition in dict.fromkeys(run.condition for run in runs)],
        "samplers": [{**x, "settings": renamed(x["settings"])} for x in plan.get("readings", [])],
        "held_out": plan["settings"]["held_out"],
        "seeds": len({run.seed for run in runs}),
        "note": plan.get("note", ""),
    }


def _migrate_study(plan: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(plan["study"])
    own["methods"] = [vars(_method(label, plan)) for label in own.pop("contestants")]
    for old, new in (("readings", "samplers"), ("curves", "curves")):
        own[new] = {_words(x): renamed(settings) for x, settings in own.pop(old, {}).items()}
    own["settings"] = renamed(own.get("settings", {}))
    own["by_fraction"] = {x: renamed(settings) for x, settings in own.get("by_fraction", {}).items()}
    return {**own, "note": own.get("note") or plan.get("note", "")}


def _method(label: str, plan: Mapping[str, Any]) -> Method:
    """Name and variant are apart where a baseline and a DiDiCM method share the variant."""
    contestants = (plan.get("study") or {}).get("contestants", {})
    if label not in contestants:
        return METHODS.get(label) or Method(_words(label))
    own = dict(contestants[label])
    line, size, recipe = own.pop("line", label), str(own.pop("column", "")), own.pop("recipe", None)
    name, _, variant = line.partition(", ")
    kinds = {x.get("method") == "standard" for y, x in contestants.items() if y.endswith(f", {variant}")}
    if len(kinds) < 2:
        name, variant = line, ""
    return Method(_words(name), _words(variant), size, recipe, renamed(own))


def _run(key: str, label: str, plan: Mapping[str, Any]) -> Run:
    """The run that an old key stands for, with its full settings: its new key follows from them."""
    found = _KEY.search(key)
    if found is None:
        raise ValueError(f"{key} is not the key of a run")
    corruption = re.sub(r"-(\d+)(?=\+|$)", r":\1", found["corruption"])
    pixels = None if found["pixels"] == "own" else int(found["pixels"])
    condition = Condition(pixels, float(found["fraction"]), None if corruption == "none" else corruption)
    settings = dict(plan["settings"])
    held_out, precision = settings.pop("held_out"), settings.pop("precision")
    own = {"seed": int(found["seed"]), "run.precision": precision, **condition.settings}
    overrides = plan["overrides"][f"{label}, {condition}"]
    config = override(TrainConfig(), renamed(settings), renamed(overrides), own)
    return Run(_method(label, plan), condition, int(found["seed"]), config, held_out=held_out)


def _words(name: str) -> str:
    for old, new in _WORDS.items():
        name = name.replace(old, new)
    return name

"""What was asked of a grid, kept beside its results: a report needs nothing else, and a folder keeps to it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from didicm.errors import UserError
from didicm.experiments.cells import Cell
from didicm.files import write_files
from didicm.settings import CHANGEABLE_ON_RESUME, TrainConfig, flatten

PLAN = "plan.json"


def make_plan(base: TrainConfig, cells: Mapping[str, Cell], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the cells, given by their keys, are made of; `about` has title, command, note and study."""
    settings = {
        k: v
        for k, v in flatten(base).items()
        if k not in (*CHANGEABLE_ON_RESUME, "out") and not k.startswith("run.")
    }
    first = next(iter(cells.values()))
    plan = {
        **about,
        "data": base.data,
        "model": base.model,
        "settings": {**settings, "precision": base.run.precision, "held_out": first.held_out},
        "overrides": {f"{cell.method}, {cell.setting}": dict(cell.overrides) for cell in cells.values()},
        "readings": [asdict(reading) for reading in first.readings],
        "cells": {key: cell.method for key, cell in cells.items()},
    }
    return json.loads(json.dumps(plan))


def conflicts(stored: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """What differs from what a folder was started with; other contestants and settings may join."""
    found = _differ(stored["settings"], plan["settings"])
    for name, own in stored["overrides"].items():
        if not found:
            found = [f"{name}: {says}" for says in _differ(own, plan["overrides"].get(name, own))]
    if not found and stored["readings"] != plan["readings"]:
        found = [f"readings are {', '.join(reading['name'] for reading in stored['readings'])}"]
    return found


def extend(stored: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan, with what was asked for earlier."""
    return {**plan, **{name: {**stored[name], **plan[name]} for name in ("overrides", "cells")}}


def read_plan(out: Path) -> dict[str, Any]:
    """What was asked for; empty where a grid was run from Python."""
    path = out / PLAN
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): delete it and give all options again") from error


def write_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Keep what was asked for."""
    write_files(out, {PLAN: lambda path: path.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")})


def _differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{k} is {v}, not {now[k]}" for k, v in before.items() if k in now and now[k] != v]

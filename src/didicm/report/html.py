"""`report.html`: one file that needs nothing else, made again at any time from what the grid stored."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from didicm.errors import UserError
from didicm.experiments.cells import LABELS
from didicm.experiments.definition import Study, make_study
from didicm.experiments.plan import PLAN, read_plan
from didicm.experiments.results import Results
from didicm.files import write_files
from didicm.report.drawing import draw_comparison, draw_study
from didicm.report.panel import Panel, our_panel, panel_table, published_panel
from didicm.report.records import Row, rows_of, settings_of, variants_of
from didicm.report.style import styled
from didicm.report.table import Table
from didicm.report.tables import cost_table, difference_table, main_table
from didicm.report.verdict import study_verdict, verdict

REPORT, TABLES, FIGURES = "report.html", "tables.md", "figures"
SPREAD = "mean over the seeds ± half of its 95 % interval, where there are several; T: with a temperature"


@dataclass(frozen=True)
class Report:
    """What a report says, for the screen as well."""

    path: Path
    verdict: list[str]
    tables: list[Table]


def write_report(out: str | Path) -> Report:
    """Make tables, figures and `report.html` from stored results."""
    out = Path(out)
    plan = read_plan(out)
    records = _planned(Results(out, out.parent if "study" in plan else None).read(), plan)
    if not records:
        raise UserError(f"{out} holds no results yet: run the comparison or the study first")
    rows = rows_of(records)
    study = make_study(plan["study"], str(out / PLAN)) if "study" in plan else None
    if study is not None:
        rows.sort(key=lambda row: list(study.contestants).index(row.method))
    with styled([row.method for row in rows]):
        if study is None:
            tables, says = [main_table(rows), difference_table(rows), cost_table(rows)], verdict(rows)
            pictures = draw_comparison(rows, out)
        else:
            ours = our_panel(study, rows)
            published = published_panel(study.published) if study.published else None
            tables, says = _tables(study, ours, published, rows), study_verdict(study, ours, published)
            pictures = draw_study(study, ours, published, rows, out)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("didicm.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    again = (
        f"didicm study {_quote(plan.get('name', study.name))} --out {_quote(out.parent)}"
        if study
        else f"didicm compare --out {_quote(out)}"
    )
    html = environment.from_string(source).render(
        title=plan.get("title", "DiDiCM against a standard classifier"),
        question=study.question if study else "",
        facts=_facts(plan, rows, records),
        fairness=_fairness(records),
        note=plan.get("note", ""),
        command=plan.get("command", ""),
        regenerate=f"{again} --report-only",
        settings={**plan.get("settings", {}), **plan.get("overrides", {})},
        verdict=says,
        tables=tables,
        lead=len(tables) - 2,
        figures=pictures,
        versions=records[0]["versions"],
        version=version("didicm"),
    )
    write_files(
        out / FIGURES, {f"{f.name}.{f.kind}": lambda path, f=f: path.write_bytes(f.data) for f in pictures}
    )
    lines = [f"# {plan.get('title', '')}", "", *(f"{sentence}\n" for sentence in says)]
    text = "\n".join([*lines, *(table.to_markdown() for table in tables)])
    write_files(
        out,
        {
            REPORT: lambda path: path.write_text(html, encoding="utf-8"),
            TABLES: lambda path: path.write_text(text, encoding="utf-8"),
        },
    )
    return Report(out / REPORT, says, tables)


def _tables(study: Study, ours: Panel, published: Panel | None, rows: Sequence[Row]) -> list[Table]:
    """Tables of a study: as the paper lays them out, the published one under ours, and what it does not show."""
    laid_out = [] if study.layout == "metrics" else [panel_table(ours, study.layout, SPREAD)]
    laid_out += [panel_table(published, study.layout)] if published else []
    return [*laid_out, main_table(rows), cost_table(rows)]


def _facts(plan: dict[str, Any], rows: Sequence[Row], records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What was run, in a few lines."""
    seeds = sorted({row.seed for row in rows})
    train = sorted({r["num_train"] for r in records}, reverse=True)
    held = sorted({r["num_held_out"] for r in records}, reverse=True)
    first = records[0]
    temperature = f", and {_list(held)} held out from them for the temperature" if any(held) else ""
    facts = {
        "data": f"{plan.get('data', '')} ({first['num_classes']} classes, {first['num_test']} test images)",
        "training images": _list(train) + temperature,
        "uncertainty": "; ".join(map(str, settings_of(rows))),
        "contestants": "; ".join(LABELS.get(m, m) for m in {v.method: None for v in variants_of(rows)}),
        "trainings": f"{len(records)}, with {len(seeds)} seed{'s' if len(seeds) > 1 else ''} each",
        "network": plan.get("model", ""),
    }
    return [(name, value) for name, value in facts.items() if value]


def _planned(records: Mapping[str, dict[str, Any]], plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results that were asked for, each under the name that its contestant has now."""
    names = plan.get("cells")
    if names is None:  # a grid that was run from Python
        return list(records.values())
    return [{**record, "method": names[key]} for key, record in records.items() if key in names]


def _fairness(records: Sequence[Mapping[str, Any]]) -> str:
    """How the comparison was kept fair."""
    share = max(r["num_held_out"] / (r["num_held_out"] + r["num_train"]) for r in records)
    held = (
        f"Of the training images {100 * share:.0f} % are held out, and every contestant gets a temperature fitted "
        "on them; nothing is chosen or fitted on test images"
        if share
        else "Nothing is chosen or fitted on test images"
    )
    return (
        f"{held}, and the model is that of the last epoch. Several readings of DiDiCM, with more or fewer steps, "
        "are of the same trained network. Where contestants differ in epochs, draws or recipe, the settings below "
        "say so."
    )


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

"""`report.html`: one file that needs nothing else, made again at any time from what a study stored."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure as Drawing

from didicm.errors import UserError
from didicm.experiments.results import Plan, Trial, read_plan, read_results, read_trials
from didicm.experiments.spec import Study
from didicm.experiments.study_file import list_studies
from didicm.files import write_files
from didicm.report import figures, images
from didicm.report.panels import panels_of
from didicm.report.records import NLL, SCALED_NLL, TOP1, TOP5, Rows, rows_of
from didicm.report.style import drawing
from didicm.report.tables import Table, cost_table, difference_table, main_table, panel_table, search_table
from didicm.report.verdict import compared, verdict
from didicm.text import count, quoted

REPORT, TABLES, FIGURES = "report.html", "tables.md", "figures"
CAPTIONS = yaml.safe_load(files("didicm.report").joinpath("captions.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Figure:
    """A figure of the report, as the bytes of its file."""

    name: str
    title: str
    caption: str
    data: bytes
    kind: str  # svg or png

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.name}.{self.kind}"

    @property
    def uri(self) -> str:
        """The picture itself, for an img tag."""
        mime = "image/svg+xml" if self.kind == "svg" else "image/png"
        return f"data:{mime};base64,{base64.b64encode(self.data).decode()}"


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
    # Those that were asked for last, each under the label that its method has now.
    asked = plan.runs if plan else {}
    results = [replace(run, method=asked[run.key]) for run in read_results(out) if run.key in asked]
    if plan is None or not results:
        raise UserError(f"{out} holds no results yet: run the comparison or the study first")
    study, rows, trials = plan.study, rows_of(results, plan.study), read_search(plan, out)
    tables, says = make_tables(study, rows), verdict(study, rows, trials)
    search = [search_table(trials, rows.conditions())] if trials else []
    pictures = [*draw_numbers(study, rows, trials), *_draw_posteriors(rows, out)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("didicm.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    html = environment.from_string(source).render(
        plan=plan,
        facts=_facts(plan, rows),
        held_out=max(row.run.num_held_out / (row.run.num_held_out + row.run.num_train) for row in rows),
        regenerate=_regenerate(study, out),
        settings=_settings(plan),
        verdict=says,
        tables=tables[:-2],
        more_tables=[*tables[-2:], *search],
        figures=pictures,
        versions={**rows[0].run.versions, "didicm": version("didicm")},
    )
    sentences = [f"# {study.title}", "", *(f"{sentence}\n" for sentence in says)]
    text = "\n".join([*sentences, *(table.to_markdown() for table in (*tables, *search))])
    write_files(out / FIGURES, {figure.file: figure.data for figure in pictures})
    write_files(out, {REPORT: html, TABLES: text})
    return Report(out / REPORT, says, [*tables, *search])


def read_search(plan: Plan, folder: Path) -> list[Trial]:
    """Its trials, method by method, each under the label that it has now; none if there was no search."""
    order = [str(method) for method in plan.study.methods]
    found = [replace(t, method=plan.runs[t.key]) for t in read_trials(folder) if t.key in plan.runs]
    known = [trial for trial in found if trial.method in order]
    return sorted(known, key=lambda trial: (order.index(trial.method), trial.number, trial.repeat))


def make_tables(study: Study, rows: Rows) -> list[Table]:
    """Tables in the study's layout, the published one under ours, then what they do not show; cost last."""
    if study.layout == "comparison":
        return [main_table(rows), difference_table(rows), cost_table(rows)]
    ours, published = panels_of(study, rows)
    shown = [None if study.layout == "metrics" else ours, published]
    return [*(panel_table(panel) for panel in shown if panel), main_table(rows), cost_table(rows)]


def draw_numbers(study: Study, rows: Rows, trials: Sequence[Trial] = ()) -> list[Figure]:
    """Figures of what the results and trials alone can show, the published numbers beside ours."""
    ours, published = panels_of(study, rows)
    panels = [published, ours] if published else [ours]
    conditions = rows.conditions()
    metrics = gains = [TOP1, NLL, SCALED_NLL]
    if study.layout in ("uncertainty", "sizes"):  # what the paper shows
        metrics, gains = [TOP5 if TOP5 in ours.metrics else TOP1], [TOP1, TOP5]
        conditions = [min(conditions, key=lambda c: (-c.fraction, c.resolution or 0))]
    drawn: dict[str, Drawing | None] = {}
    with drawing():
        if study.layout == "steps":
            drawn["steps"] = figures.over_columns([ours], (TOP1, NLL))
        elif study.layout != "sizes":
            drawn["uncertainty"] = figures.over_columns(panels, metrics)
        if study.layout in ("comparison", "uncertainty", "sizes"):
            drawn["gains"] = figures.over_columns(panels, gains, gains=True)
        if trials:
            drawn["lengths"] = figures.length_curves(study, trials, rows.conditions())
        if study.layout in ("comparison", "uncertainty"):
            drawn["calls"] = figures.calls_against_quality(rows, conditions, published)
        return _rendered(drawn)


def _draw_posteriors(rows: Rows, out: Path) -> list[Figure]:
    """Curves and single images, of the least informative condition."""
    hard = rows.conditions()[-1]
    raw, scaled = (figures.load_stored(rows, hard, out, scaled=scaled) for scaled in (False, True))
    if not raw:  # only metrics were kept
        return []
    with drawing():
        drawn: dict[str, Drawing | None] = {
            "reliability": figures.reliability_diagrams(raw, rows, hard),
            "risk": figures.risk_coverage_curves(scaled, hard),
            "entropy": figures.entropies(raw, hard),
        }
        ours, baselines = compared(rows.select(condition=hard))
        if ours is not None:
            row = min(rows.select(ours, hard), key=lambda row: row.run.seed)
            pictures = images.load_pictures(row, out)
            drawn["trajectories"] = images.trajectories(pictures)
            others = [r for e in baselines for r in rows.select(e, hard) if r.run.seed == row.run.seed]
            if others:
                other = images.load_pictures(others[0], out)
                drawn["errors"] = images.errors(pictures, other, (ours, others[0].entry))
        return _rendered(drawn)


def _rendered(drawn: dict[str, Drawing | None]) -> list[Figure]:
    rendered = []
    for name, figure in drawn.items():
        if figure is not None:
            kind = "png" if name in ("trajectories", "errors") else "svg"
            content = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(content, format=kind, dpi=130, metadata=metadata)
            rendered.append(Figure(name, **CAPTIONS[name], data=content.getvalue(), kind=kind))
    return rendered


def _facts(plan: Plan, rows: Rows) -> dict[str, str]:
    """What was run, in a few lines."""
    runs = {row.run.key: row.run for row in rows}.values()
    first = rows[0].run
    train, held = {run.num_train for run in runs}, {run.num_held_out for run in runs}
    temperature = f", and {_list(held)} held out from them for the temperature" if any(held) else ""
    facts = {
        "data": f"{plan.data} ({first.num_classes} classes, {first.num_test} test images)",
        "training images": _list(train) + temperature,
        "conditions": "; ".join(map(str, rows.conditions())),
        "methods": "; ".join(dict.fromkeys(str(row.method) for row in rows)),
        "trainings": f"{len(runs)}, with {count(len({run.seed for run in runs}), 'seed')} each",
        "network": ", ".join(dict.fromkeys(str(settings["model"]) for settings in plan.settings.values())),
    }
    return {name: value for name, value in facts.items() if value}


def _settings(plan: Plan) -> dict[str, Any]:
    """What all trainings share, and then what each has of its own."""
    every = list(plan.settings.values())
    shared = {k: v for k, v in every[0].items() if all(k in s and s[k] == v for s in every)} if every else {}
    own = {name: {k: v for k, v in s.items() if k not in shared} for name, s in plan.settings.items()}
    return {**shared, **{name: settings for name, settings in own.items() if settings}}


def _regenerate(study: Study, out: Path) -> str:
    if study.layout == "comparison":
        return f"didicm compare --out {quoted(out)} --report-only"
    name = study.name if study.name in list_studies() else f"{study.name}.yaml"
    return f"didicm study {quoted(name)} --out {quoted(out.parent)} --report-only"


def _list(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers, reverse=True)))

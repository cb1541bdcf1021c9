"""`report.html`: one file that needs nothing else, made again at any time from what the grid stored."""

import base64
import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from didicm.checkpoint import write_files
from didicm.errors import UserError
from didicm.study import figures, gallery
from didicm.study.cells import LABELS
from didicm.study.results import Results
from didicm.study.style import plt, styled
from didicm.study.table import Table
from didicm.study.tables import (
    Row,
    cost_table,
    difference_table,
    main_table,
    rows_of,
    settings_of,
    variants_of,
)
from didicm.study.verdict import contestants, verdict

REPORT, FIGURES, PLAN = "report.html", "figures", "plan.json"


@dataclass(frozen=True)
class Figure:
    """A figure of the report, as the bytes of its file."""

    name: str
    title: str
    caption: str
    data: bytes
    kind: str  # svg or png

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
    plan, records = read_plan(out), Results(out).read()
    if not records:
        raise UserError(f"{out} holds no results yet: run didicm compare --data ... --out {out} first")
    rows = rows_of(records.values())
    tables, says = [main_table(rows), difference_table(rows), cost_table(rows)], verdict(rows)
    with styled():
        pictures = draw_all(rows, out)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("didicm.study").joinpath("report.html.j2").read_text(encoding="utf-8")
    html = environment.from_string(source).render(
        title=plan.get("title", "DiDiCM against a standard classifier"),
        facts=_facts(plan, rows, list(records.values())),
        note=plan.get("note", ""),
        command=plan.get("command", ""),
        regenerate=f"didicm compare --out {shlex.quote(str(out))} --report-only",
        settings=plan.get("settings", {}),
        verdict=says,
        tables=tables,
        figures=pictures,
        versions=next(iter(records.values()))["versions"],
        version=version("didicm"),
    )
    write_files(
        out / FIGURES, {f"{f.name}.{f.kind}": lambda path, f=f: path.write_bytes(f.data) for f in pictures}
    )
    write_files(out, {REPORT: lambda path: path.write_text(html, encoding="utf-8")})
    return Report(out / REPORT, says, tables)


CAPTIONS = {
    "uncertainty": (
        "Over uncertainty",
        "Each method as its recipe reads it, from telling images to hardly telling ones. Bars: 95 % intervals "
        "over seeds.",
    ),
    "gains": (
        "Gains over the standard classifier",
        "Differences paired by seed; where a bar crosses zero, noise may explain it all.",
    ),
    "calls": (
        "Network calls against quality",
        "One trained network, sampled with more or fewer steps; the star is read from a single call. Lines "
        "across: the standard classifiers, one call.",
    ),
    "reliability": (
        "Does it mean what it says?",
        "Below the diagonal a classifier is surer than it should be. In the hardest setting, as trained.",
    ),
    "risk": (
        "Answering only when sure",
        "If the least sure images are left to a person: errors among those that are answered, with temperature. "
        "Lower is better.",
    ),
    "entropy": ("Entropy of right and wrong answers", "A useful posterior is unsure where it is wrong."),
    "trajectories": (
        "Posteriors on their way",
        "Test images as the network sees them in the hardest setting, from sure to unsure, with the five classes "
        "that end as the most probable; a tick marks the true one.",
    ),
    "mistakes": (
        "Where they err",
        "Images that at least one of the two gets wrong, with both posteriors, as trained: half of them where "
        "DiDiCM gives the true class least compared with the standard classifier, half where it gives it most.",
    ),
}


def draw_all(rows: Sequence[Row], out: Path) -> list[Figure]:
    """Every figure that the results allow; those of single images and curves are of the hardest setting."""
    hard = settings_of(rows)[-1]
    raw, tempered = figures.load_stored(rows, hard, out), figures.load_stored(rows, hard, out, tempered=True)
    drawn = {
        "uncertainty": figures.over_uncertainty(rows),
        "gains": figures.gains(rows),
        "calls": figures.calls_against_quality(rows),
        "reliability": figures.reliability_diagrams(raw, hard),
        "risk": figures.risk_coverage_curves(tempered, hard),
        "entropy": figures.entropies(raw, hard),
        **_draw_images([row for row in rows if row.setting == hard and row.main], rows, out),
    }
    images = ("trajectories", "mistakes")
    return [_render(name, figure, "png" if name in images else "svg") for name, figure in drawn.items() if figure]


def _draw_images(hard: Sequence[Row], rows: Sequence[Row], out: Path) -> dict[str, plt.Figure | None]:
    """Single images of DiDiCM and of the first standard classifier, with the same seed."""
    ours, standard = contestants(rows)
    own = [row for row in hard if ours is not None and row.method == ours.method]
    if not own:
        return {}
    row = min(own, key=lambda row: row.seed)
    pictures = gallery.load_pictures(row, out)
    drawn = {"trajectories": gallery.trajectories(pictures)}
    rivals = [r for r in hard if standard and r.method == standard[0].method and r.seed == row.seed]
    if rivals:
        other = gallery.load_pictures(rivals[0], out)
        drawn["mistakes"] = gallery.mistakes(pictures, other, (row.method, rivals[0].method))
    return drawn


def read_plan(out: Path) -> dict[str, Any]:
    """What was asked for: title, command and settings; empty where a grid was run from Python."""
    path = out / PLAN
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): delete it and give all options again") from error


def write_plan(out: Path, plan: dict[str, Any]) -> None:
    """Keep what was asked for."""
    write_files(out, {PLAN: lambda path: path.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")})


def _facts(plan: dict[str, Any], rows: Sequence[Row], records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What was run, in a few lines."""
    seeds = sorted({row.seed for row in rows})
    train = sorted({r["num_train"] for r in records}, reverse=True)
    held = sorted({r["num_held_out"] for r in records}, reverse=True)
    first = records[0]
    facts = {
        "data": f"{plan.get('data', '')} ({first['num_classes']} classes, {first['num_test']} test images)",
        "training images": f"{_list(train)}, and {_list(held)} held out from them for the temperature",
        "uncertainty": "; ".join(map(str, settings_of(rows))),
        "contestants": "; ".join(LABELS.get(m, m) for m in {v.method: None for v in variants_of(rows)}),
        "trainings": f"{len(records)}, with {len(seeds)} seed{'s' if len(seeds) > 1 else ''} each",
        "network": f"{plan['model']}, {first['parameters'] / 1e6:.2f} M parameters" if "model" in plan else "",
    }
    return [(name, value) for name, value in facts.items() if value]


def _render(name: str, figure: plt.Figure, kind: str) -> Figure:
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else {"Software": None})
    plt.close(figure)
    return Figure(name, *CAPTIONS[name], file.getvalue(), kind)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

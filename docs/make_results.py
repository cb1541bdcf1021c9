"""Write docs/results.md and its figures from the results in docs/results; `make results` runs it.

python docs/make_results.py            make the page again
python docs/make_results.py studies    first take over the results of studies that were run there
"""

import json
import sys
from pathlib import Path

from didicm.experiments import main_table, rows_of
from didicm.experiments.definition import Study, make_study, studies
from didicm.experiments.plan import PLAN
from didicm.experiments.results import RESULTS
from didicm.report.drawing import CAPTIONS, draw_panels
from didicm.report.html import SPREAD
from didicm.report.panel import our_panel, panel_table, published_panel
from didicm.report.records import Row
from didicm.report.style import styled
from didicm.report.verdict import study_verdict

FOLDER = Path(__file__).parent / "results"
HEAD = """# Results

What the studies in `didicm.studies` gave, on the images that ship with the package. This page is generated from
the results stored beside it, the published numbers from the tables of the paper. They are not comparable as they
stand: ImageNet has a hundred times the classes and six hundred times the images. What can be compared is who is
ahead, and whether the lead grows where images tell less.
"""


def take_over(source: Path) -> None:
    """Keep the results of every study that was run, without what only makes sense on the machine it was run on."""
    for name in studies():
        if not (source / name / RESULTS).is_file():
            continue
        plan = json.loads((source / name / PLAN).read_text(encoding="utf-8"))
        records = [json.loads(line) for line in (source / name / RESULTS).read_text(encoding="utf-8").splitlines()]
        records.sort(key=lambda record: record["key"])
        (FOLDER / f"{name}.json").write_text(
            json.dumps({"study": plan["study"]}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (FOLDER / f"{name}.jsonl").write_text(
            "".join(json.dumps(_rounded(record), ensure_ascii=False) + "\n" for record in records),
            encoding="utf-8",
        )


def write_page(folder: Path = FOLDER) -> str:
    """The page as text; the figures are written beside the results."""
    parts = [HEAD]
    for path in sorted(folder.glob("*.json"), key=lambda path: _order(path.stem)):
        study = make_study(json.loads(path.read_text(encoding="utf-8"))["study"], str(path))
        lines = path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        rows = rows_of(json.loads(line) for line in lines)
        rows.sort(key=lambda row: list(study.contestants).index(row.method))
        parts.append(write_study(study, rows, folder))
    return "\n".join(parts)


def write_study(study: Study, rows: list[Row], folder: Path) -> str:
    """One study: its question, what came out, figures, tables, and how to run it again."""
    ours = our_panel(study, rows)
    published = published_panel(study.published) if study.published else None
    parts = [f"## {study.title}", "", f"*{study.question}*", ""]
    parts += [f"{sentence}\n" for sentence in study_verdict(study, ours, published)]
    with styled([row.method for row in rows]):
        for figure in draw_panels(study, ours, published, rows):
            file = folder / f"{study.name}-{figure.name}.svg"
            file.write_bytes(figure.data)
            parts += [f"![{CAPTIONS[figure.name][0]}](results/{file.name})", ""]
    tables = [main_table(rows)] if study.layout == "metrics" else [panel_table(ours, study.layout, SPREAD)]
    tables += [panel_table(published, study.layout)] if published else []
    parts += [table.to_markdown().replace("## ", "### ", 1) for table in tables]
    parts += ["Run it again:", "", "```sh", f"didicm study {study.name}", "```", ""]
    return "\n".join(parts)


def _order(name: str) -> int:
    names = ("main", "selection", "efficiency", "sizes", "solvers", "schedules", "objectives")
    return names.index(name.rpartition("-")[0])


def _rounded(value: object) -> object:
    """Numbers to six digits: more would be noise from the machine."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    page = FOLDER.with_suffix(".md")
    page.write_text(write_page(), encoding="utf-8")
    print(page)

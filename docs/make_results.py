"""Write docs/results.md and its figures from the results in docs/results; `make results` runs it.

python docs/make_results.py            make the page again
python docs/make_results.py studies    first take over the results of studies that were run there
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from didicm.experiments.results import (
    RESULTS,
    TRIALS,
    Plan,
    append_result,
    read_plan,
    read_results,
    read_trials,
    write_plan,
)
from didicm.experiments.study_file import list_studies
from didicm.files import write_files
from didicm.report.html import draw_numbers, make_tables
from didicm.report.records import NLL, SCALED_NLL, TOP1, Entry, Metric, Rows, rows_of
from didicm.report.search import read_search
from didicm.report.verdict import verdict

FOLDER = Path(__file__).parent / "results"
ORDER = (
    "fair",
    "labels",
    "ensembles",
    "steps",
    "ensembles",
    "main",
    "released",
    "stems",
    "selection",
    "efficiency",
    "sizes",
    "solvers",
    "schedules",
    "objectives",
    "training",
    "finetune",
)
HEAD = """# Results

What the studies that ship with the package gave, on the images that ship with it, or those that a study's command
names. This page is generated from the results stored beside it, the published numbers from the tables of the
paper. They are not comparable as they stand: ImageNet has a hundred times the classes and six hundred times the
images. What can be compared is who is ahead, and whether the lead grows where images are less informative.
"""


OUTLIERS = "outliers"
OUTLIERS_HEAD = """## Foreign images

*Which score tells images apart that are unlike those of training?*

The chance that a foreign image has a higher score than a held-out image of the data (AUROC: 1 is perfect, 0.5 is
guessing). `didicm calibrate` stores the distance from the mean: a Mahalanobis distance in what the network finds
in the image alone. Entropy and confidence are no reliable sign: a network can be sure of an image unlike
anything it has seen. Other things in the same style are hardly told apart by any score of a network this small.
"""


ADVICE = """## Which method to use

Every number of this section comes from the tuned studies below: CIFAR-10 at 16 px, with learning rate, weight
decay and length chosen for each method by held-out images.
"Better" and "worse" mean that the 95 % interval of the difference over seeds, paired, lies on one side of zero.
The standard classifier is the better of its variants, chosen for each condition and metric in its favour.
"""
ADVISED = (TOP1, NLL, SCALED_NLL, Metric("cls/Brier"), Metric("cls/Brier", scaled=True))
_MARKS = {1: " +", 0: "", -1: " -"}
TUNED = ("fair-cpu", "labels-cpu")

DISTILL = "distill"
DISTILL_HEAD = """## One call

*How much of eight augmented steps can a network say in one call, when it is trained on their answers?*

`didicm distill` on a quarter of fashion-mini at 14 px, with Mixup; the standard classifier beside it learnt from
the labels.
"""

HUMAN = "human"
HUMAN_HEAD = """## Against what people see

*How far is the posterior from the labels of some 50 people per image (CIFAR-10H)?*

KL divergence of the model from the people, in nats; the share of images' probability that is elsewhere (total
variation); and the rank correlation of the model's entropy with theirs: is it unsure where they disagree? They saw
the images in full size, so a model of small images is rightly less sure than they are.
"""


def take_over(source: Path) -> None:
    """Keep the results of every study that was run, without what only makes sense on the machine it was run on."""
    for name in list_studies():
        plan = read_plan(source / name)
        if plan is not None and (results := read_results(source / name)):
            write_plan(FOLDER / name, replace(plan, command=_command(plan)))
            (FOLDER / name / RESULTS).unlink(missing_ok=True)
            (FOLDER / name / TRIALS).unlink(missing_ok=True)
            for record in sorted([*results, *read_trials(source / name)], key=lambda record: record.key):
                append_result(FOLDER / name, type(record).from_dict(_rounded(record.to_dict())))


def write_page(folder: Path = FOLDER) -> str:
    """The page as text; the figures are written beside the results."""
    parts = [HEAD, *_write_advice([folder / name for name in TUNED if (folder / name).is_dir()])]
    studies = [path for path in folder.iterdir() if path.name not in (OUTLIERS, HUMAN, DISTILL)]
    for path in sorted(studies, key=lambda path: ORDER.index(path.name.rpartition("-")[0])):
        if plan := read_plan(path):
            parts.append(_write_study(plan, rows_of(read_results(path), plan.study), path))
    return "\n".join(
        [
            *parts,
            *_write_distill(folder / DISTILL),
            *_write_human(folder / HUMAN),
            _write_outliers(folder / OUTLIERS),
        ]
    )


def _write_advice(folders: list[Path]) -> Iterator[str]:
    """What a practitioner can act on: DiDiCM and the better standard classifier, metric by metric."""
    plans = [(read_plan(folder), read_results(folder)) for folder in folders]
    studies = [rows_of(results, plan.study) for plan, results in plans if plan]
    if not studies:
        return
    yield ADVICE
    kinds = {"a single call against eight steps": False, "eight views against eight augmented steps": True}
    for title, views in kinds.items():
        counts = {metric: Counter[int]() for metric in ADVISED}
        lines, ratios = [], []
        for rows in studies:
            for condition in rows.conditions():
                here = rows.select(condition=condition)
                theirs, ours = _opponents(here, views)
                if not theirs or ours is None:
                    continue
                cells = []
                for metric in ADVISED:
                    best = max(theirs, key=lambda e: metric.sign * here.select(e).estimate(metric).mean)
                    gap = here.select(ours).minus(here.select(best), metric)
                    counts[metric][gap.sign * metric.sign] += 1
                    x, y = (metric.text(here.select(e).estimate(metric).mean) for e in (ours, best))
                    cells.append(f"{x} against {y}{_MARKS[gap.sign * metric.sign]}")
                ratios.append(here.cost_ratio(ours) / here.cost_ratio(theirs[0]))
                lines.append(f"| {condition} | {' | '.join(cells)} |")
        if not lines:
            continue
        yield f"### The standard classifier and DiDiCM: {title}\n"
        yield f"| condition | {' | '.join(metric.heading for metric in ADVISED)} |"
        yield "|---|" + "---:|" * len(ADVISED)
        yield from lines
        told = "; ".join(
            f"{metric}: better in {found[1]}, worse in {found[-1]}, no different in {found[0]}"
            for metric, found in counts.items()
        )
        least, most = (f"{end(ratios):.1f}" for end in (min, max))
        times = least if least == most else f"{least} to {most}"
        yield f"\nDiDiCM against the standard classifier: + better, - worse. Of {len(lines)} conditions, {told}."
        yield f"Its inference costs {times} times the multiply-adds.\n"
        if not views:
            yield from _conclude(counts, len(lines))


def _opponents(rows: Rows, views: bool) -> tuple[list[Entry], Entry | None]:
    """The standard classifiers and DiDiCM, each with one or with several views of an image."""
    found = [row for row in rows if (row.measured.settings.get("views", 1) > 1) == views]
    theirs = list(dict.fromkeys(row.entry for row in found if row.method.baseline and row.method.members == 1))
    ours = [row.entry for row in found if not row.method.baseline and (views or row.main)]
    return theirs, ours[0] if ours else None


def _conclude(counts: dict[Metric, Counter[int]], conditions: int) -> Iterator[str]:
    """The advice, which follows from the counts alone."""
    for metric, when in (
        (NLL, "no temperature is fitted"),
        (SCALED_NLL, "a temperature is fitted on held-out images"),
    ):
        better, worse = counts[metric][1], counts[metric][-1]
        if better > conditions / 2 and not worse:
            yield f"- **Use DiDiCM when {when}** and probabilities count: its NLL is better in most conditions."
        elif worse > conditions / 2 and not better:
            yield f"- **Use a standard classifier when {when}**: DiDiCM's NLL is worse in most conditions."
        else:
            yield f"- **When {when}, take either**, so the cheaper: neither has the better NLL in most conditions."
    better, worse = counts[TOP1][1], counts[TOP1][-1]
    if better == worse:
        yield "- For the most probable class alone, DiDiCM is no reason to change: top-1 is the same on the whole."
    else:
        word = "more" if better > worse else "less"
        yield f"- For the most probable class alone, DiDiCM is {word} accurate where they differ at all."
    yield ""


def write_summary(text: str, folder: Path = FOLDER) -> str:
    """README.md with the main study in one table: means over resolutions and seeds, by the share of the images."""
    plan = read_plan(folder / "main-cpu")
    assert plan is not None
    rows = [row for row in rows_of(read_results(folder / "main-cpu"), plan.study) if row.main]
    fractions = sorted({row.run.condition.fraction for row in rows})
    parts = [
        f"| | {' | '.join(f'top-1 %, {f:.0%} of the images | NLL' for f in fractions)} |",
        "|---|" + "---:|" * 2 * len(fractions),
    ]
    for name in dict.fromkeys(str(row.method) for row in rows):
        cells = []
        for metric, fraction in ((m, f) for f in fractions for m in (TOP1, NLL)):
            chosen = [r for r in rows if (str(r.method), r.run.condition.fraction) == (name, fraction)]
            cells.append(metric.text(fmean(value for row in chosen if (value := row.value(metric)) is not None)))
        parts.append(f"| {name} | {' | '.join(cells)} |")
    before, begin, rest = text.partition("<!-- results: make results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    return before + begin + "\n".join(parts) + "\n" + end + after


def _command(plan: Plan) -> str:
    """How to run it again: a study of images that do not ship is told where they are."""
    return f"didicm study {plan.study.name}" + (f" --data {plan.data}" if plan.study.data is None else "")


def _write_study(plan: Plan, rows: Rows, folder: Path) -> str:
    """One study: its question, what came out, figures, tables, and how to run it again."""
    study, trials = plan.study, read_search(plan, folder)
    figures = draw_numbers(study, rows, trials)
    write_files(folder, {figure.file: figure.data for figure in figures})
    parts = [f"## {study.title}", "", f"*{study.question}*", ""]
    parts += [f"Predicted before the runs: {study.prediction}\n"] if study.prediction else []
    parts += [f"{sentence}\n" for sentence in verdict(study, rows, trials)]
    parts += [f"![{figure.title}](results/{folder.name}/{figure.file})\n" for figure in figures]
    tables = make_tables(study, rows)
    tables = tables[: -2 if len(tables) > 2 else -1]  # what stands in the study's layout
    parts += [table.to_markdown().replace("## ", "### ", 1) for table in tables]
    return "\n".join([*parts, "Run it again:", "", "```sh", _command(plan), "```", ""])


def _write_outliers(folder: Path) -> str:
    """How well foreign images are told apart: AUROC by score, a table per data set, and how to measure it."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    parts = [OUTLIERS_HEAD]
    for data, title in (("fashion", "fashion-mini"), ("cifar", "CIFAR-10")):
        mine = [run for run in runs if run["data"] == data]
        kinds = list(next(iter(mine[0]["auroc"].values())))
        parts += [
            f"### {title} against",
            "",
            f"| method, score | {' | '.join(kinds)} |",
            "|---|" + "---:|" * len(kinds),
        ]
        for method, name in (("diffusion", "DiDiCM"), ("standard", "standard")):
            found = [run["auroc"] for run in mine if run["method"] == method]
            for score in found[0]:
                values = ([auroc[score][kind] for auroc in found] for kind in kinds)
                parts.append(f"| {name}, {score} | {' | '.join(map(_spread, values))} |")
        seeds = len({run["seed"] for run in mine})
        parts += ["", f"Mean and standard deviation over {seeds} seeds." if seeds > 1 else "One seed.", ""]
    command = "python docs/make_outliers.py runs --cifar10 FOLDER --tiny100 FOLDER"
    return "\n".join([*parts, "Run it again:", "", "```sh", command, "```", ""])


def _write_distill(folder: Path) -> Iterator[str]:
    """Teachers and students: means over seeds of metrics as trained, and what a posterior costs."""
    seeds = [json.loads(path.read_text(encoding="utf-8"))["found"] for path in sorted(folder.glob("*.json"))]
    if not seeds:
        return
    metrics = [Metric(name) for name in ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE")]
    yield DISTILL_HEAD
    yield f"|  | {' | '.join(metric.heading for metric in metrics)} | M multiply-adds |"
    yield "|---|" + "---:|" * (len(metrics) + 1)
    for name in seeds[0]:
        cells = [_spread([metric.scale * seed[name][metric.name] for seed in seeds]) for metric in metrics]
        yield f"| {name} | {' | '.join(cells)} | {seeds[0][name]['multiply_adds'] / 1e6:.1f} |"
    yield f"\nMean and standard deviation over {len(seeds)} seeds. Run it again:\n"
    yield "```sh\npython docs/make_distill.py runs\n```\n"


def _write_human(folder: Path) -> Iterator[str]:
    """How far posteriors are from those of people, a table per study."""
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        columns = ("divergence", "total variation", "rank correlation")
        yield HUMAN_HEAD
        yield f"| {path.stem} | {' | '.join(columns)} | divergence, T | total variation, T |"
        yield "|---|" + "---:|" * (len(columns) + 2)
        for row in dict.fromkeys((x["condition"], x["method"], x["sampler"]) for x in lines):
            mine = [x for x in lines if (x["condition"], x["method"], x["sampler"]) == row]
            cells = [_spread([x["as trained"][name] for x in mine]) for name in columns]
            cells += [_spread([x["temperature"][name] for x in mine]) for name in columns[:2]]
            yield f"| {', '.join(row)} | {' | '.join(cells)} |"
        yield "\nMean and standard deviation over the seeds; T: temperature-scaled. Measure it again:\n"
        yield f"```sh\npython docs/make_human.py {path.stem} --people FILE\n```\n"


def _spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _rounded(value: Any) -> Any:
    """Numbers to six digits: more would be noise from the machine."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    page = FOLDER.with_suffix(".md")
    page.write_text(write_page(), encoding="utf-8")
    readme = FOLDER.parents[1] / "README.md"
    readme.write_text(write_summary(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(page)

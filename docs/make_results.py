"""Write docs/results.md and its figures from the results in docs/results; `make results` runs it.

python docs/make_results.py            make the page again
python docs/make_results.py studies    first take over the results of studies that were run there
"""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from advice import ADVISED, BORDER, BORDERS, DATA, RECOMMENDED, TUNED, compare, read_study, write_advice

from didicm.evaluation.intervals import seed_interval
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
from didicm.experiments.spec import ONE_CALL, Condition
from didicm.experiments.study_file import list_studies, load_study
from didicm.files import write_files
from didicm.report.html import draw_numbers, make_tables, read_search
from didicm.report.records import NLL, SCALED_NLL, TOP1, Metric, Rows, rows_of
from didicm.report.style import COLOURS, GREYS, drawing, make_axes
from didicm.report.tables import show
from didicm.report.verdict import verdict

FOLDER = Path(__file__).parent / "results"
ORDER = (
    "fair",
    "strong",
    "breadth",
    "strong-breadth",
    "strong-many",
    "classes",
    "strong-classes",
    "labels",
    "strong-labels",
    "noise",
    "ensembles",
    "ensembles-labels",
    "ensembles-noise",
    "steps",
    "steps-classes",
    "main",
    "released",
    "stems",
    "selection",
    "efficiency",
    "sizes",
    "lamb",
    "solvers",
    "schedules",
    "objectives",
    "training",
    "training-short",
    "times",
    "mask",
    "mask-strong",
    "parameterization",
    "borders",
    "borders-strong",
    "holdouts",
    "recipe",
    "finetune",
)
HEAD = """# Results

What the studies that ship with the package gave, on the images that ship with it, or those that a study's command
names. This page is generated from the results stored beside it, the published numbers from the tables of the
paper. They are not comparable as they stand: ImageNet has a hundred times the classes and six hundred times the
images. What can be compared is who is ahead, and whether the lead grows where images are less informative.
"""


NO_LONGER = "squared times (more of them early), which are no longer an option"
UNIFORM = "Run again, it has uniform ones, which are [as good](#times-to-train-at)."

OUTLIERS = "outliers"
OUTLIERS_HEAD = """## Foreign images

*Which score tells images apart that are unlike those of training?*

The chance that a foreign image has a higher score than a held-out image of the data (AUROC: 1 is perfect, 0.5 is
guessing). `didicm calibrate` stores the distance from the mean: a Mahalanobis distance in what the network finds
in the image alone. Entropy and confidence are no reliable sign: a network can be sure of an image unlike
anything it has seen. Other things in the same style are hardly told apart by any score of a network this small.

Energy is minus the log-sum-exp of the network's logits, the mean over DiDiCM's steps; their disagreement is how
far the posteriors that the steps see are from their mean (Jensen-Shannon divergence). "One colour" are 200 images
of a random one; black is a single image, so its column only says how it ranks. Noise has the images' own size:
that of CIFAR-10 is shrunk from 32 to 16 px, as all images are there, which averages much of it away.
"""

SHIFT = "shift"
SHIFT_HEAD = """## Worse images

*What do images that get worse than those of training do to a calibrated model?*

`didicm evaluate --shift` on the half of fashion-mini's validation images that did not calibrate, after ten epochs
of recipe `small`: clean images, and means over the corruptions at severities 1 to 5. The temperature is fitted to
clean images. "Flagged" are images that the outlier score calls unlike those of training, at 5 % false alarms; its
threshold was set on these images, so that 5 % of the clean ones lie above it by construction.
"""


REPEATED, TRAINED_AGAIN = "repeated", "fair-cpu"
REPEATED_HEAD = """### Trained again

*How much would the same trainings differ if only their rounding did?*

All trainings of DiDiCM with ResNet blocks in the study above, repeated with the same seeds after images and
weights were laid out otherwise in memory, which changes the order of sums and with it their last digit.
"""

DISTILL = "distill"
DISTILL_AIM = 0.01
DISTILL_HEAD = """## One call

*How much of eight augmented steps can a network say in one call, when it is trained on their answers?*

`didicm distill` on a quarter of fashion-mini at 14 px, with Mixup; the standard classifier beside it learnt from
the labels. The teacher trained for 120 epochs, all others for 60; the student with the same network starts from
the teacher's weights. Both had squared times, which are [no longer an option](#times-to-train-at).
"""

HUMAN = "human"
HUMAN_HEAD = """## Against what people see

*How far is the posterior from the labels of some 50 people per image (CIFAR-10H)?*

KL divergence of the model from the people, in nats; the share of images' probability that is elsewhere (total
variation); and the rank correlation of the model's entropy with theirs: is it unsure where they disagree? They saw
the images in full size, so a model of small images is rightly less sure than they are. The networks with ResNet
blocks are those that were [trained again](#trained-again).
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
    parts = [HEAD, *write_advice([folder / name for name in TUNED if (folder / name).is_dir()])]
    for path in (folder / f"{name}-cpu" for name in ORDER):
        if stored := read_study(path):
            parts.append(_write_study(*stored, path))
            if path.name == TRAINED_AGAIN:
                parts += _write_repeated(stored[0], path, folder / REPEATED)
    return "\n".join(
        [
            *parts,
            *_write_distill(folder / DISTILL),
            *_write_human(folder / HUMAN),
            *_write_shift(folder / SHIFT),
            _write_outliers(folder / OUTLIERS),
        ]
    )


SUMMED_UP = ("standard", "DiDiCM, ResNet blocks, 1 call", "DiDiCM, ResNet blocks, 8 steps")  # of the BORDERS


def write_summary(text: str, folder: Path = FOLDER) -> str:
    """README.md with the tuned studies in one table: what stands for each method, by images per class."""
    shown, lines, conditions = (TOP1, SCALED_NLL), list[str](), list[Condition]()
    for name in BORDERS:
        if (stored := read_study(folder / name)) is None:
            continue
        rows = stored[1]
        conditions = conditions or rows.conditions()[::-1]  # others may have more
        heads = [f"{m.heading}, {c.fraction} per class" for c in conditions for m in shown]
        lines = lines or [f"| | {' | '.join(heads)} | inference |", "|---|" + "---:|" * (len(heads) + 1)]
        for entry in (e for e in rows.entries() if str(e) in SUMMED_UP):
            cells = []
            for condition, metric in product(conditions, shown):
                estimate = rows.select(entry, condition).estimate(metric)
                cells.append("" if estimate is None else show(estimate, metric))
            label = f"{entry}{BORDERS[name].removesuffix(BORDER)}"
            lines.append(f"| {label} | {' | '.join(cells)} | {rows.cost_ratio(entry):.1f} |")
    before, begin, rest = text.partition("<!-- results: make results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    return before + begin + "\n".join(lines) + "\n" + end + after


def _command(plan: Plan) -> str:
    """How to run it again: a study of images that do not ship is told where they are."""
    return f"didicm study {plan.study.name}" + (f" --data {plan.data}" if plan.study.data is None else "")


def _write_study(plan: Plan, rows: Rows, folder: Path) -> str:
    """One study: its question, what came out, figures, tables, and how to run it again."""
    study, trials = plan.study, read_search(plan, folder)
    figures = draw_numbers(study, rows, trials)
    write_files(folder, {figure.file: figure.data for figure in figures})
    parts = [f"## {study.title}", "", f"*{study.question}*", ""]
    parts += [f"Predicted: {study.prediction}\n"] if study.prediction else []
    parts += [f"Note: {study.note}\n"] if study.note else []
    ships = study.name in list_studies()
    missing = [str(c) for c in load_study(study.name).conditions if c not in study.conditions] if ships else []
    parts += [f"Not run yet: {'; '.join(missing)}.\n"] if missing else []
    squared = {x for x, settings in plan.settings.items() if settings.get("time_sampling") == "squared"}
    who = [
        str(method)
        for method in study.methods
        if not method.baseline and any(f"{method}, {condition}" in squared for condition in study.conditions)
    ]
    if who and ships:
        parts.append(f"{'; '.join(who)}: trained with {NO_LONGER}. {UNIFORM}\n")
    parts += [*(f"- {sentence}" for sentence in verdict(study, rows, trials)), ""]
    parts += [f"![{figure.title}](results/{folder.name}/{figure.file})\n" for figure in figures]
    tables = make_tables(study, rows)
    tables = tables[: -2 if len(tables) > 2 else -1]  # what stands in the study's layout
    parts += [table.to_markdown().replace("## ", "### ", 1) for table in tables]
    again = ["Run it again:", "", "```sh", _command(plan), "```"]
    return "\n".join([*parts, *(again if ships else [f"It was about {NO_LONGER}."]), ""])


def _write_repeated(plan: Plan, folder: Path, repeated: Path) -> Iterator[str]:
    """How far trainings move that differ in rounding alone, and which marks of the first section move, too."""
    before, again = ({result.key: result for result in read_results(place)} for place in (folder, repeated))
    if not again:
        return
    yield REPEATED_HEAD
    for metric in (TOP1, NLL):
        gaps = [
            metric.scale * (new.metrics[metric.name] - old.metrics[metric.name])
            for key, result in again.items()
            for old, new in zip(before[key].measurements, result.measurements, strict=True)
            if new.sampler == ONE_CALL
        ]
        digits = 1 if metric.scale == 100 else 3
        mean, low, high = seed_interval(gaps)
        interval = f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}"
        yield (
            f"- {metric.heading} of one call: {mean:+.{digits}f} in the mean of {len(gaps)} trainings "
            f"({interval}), {stdev(gaps):.{digits}f} from one training to another."
        )
    marks = [
        {
            f"{x.condition}, {x.entry}: {metric}": x.values[metric][2]
            for several in (False, True)
            for x in compare(DATA[plan.data], Rows(r for r in rows if (r.views > 1) == several))
            for metric in ADVISED
            if x.entry.method.variant == RECOMMENDED
        }
        for rows in (rows_of(list(x.values()), plan.study) for x in (before, {**before, **again}))
    ]
    moved = [name for name, mark in marks[0].items() if mark != marks[1][name]]
    yield (
        f"- Of its {len(marks[0])} comparisons with the best standard classifier, {len(moved)} are marked "
        f"otherwise{': ' if moved else ''}{'; '.join(moved)}.\n"
    )


def _write_outliers(folder: Path) -> str:
    """How well foreign images are told apart: AUROC by score, a table per data set, and how to measure it."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    parts = [OUTLIERS_HEAD]
    for data, title in (("fashion", "fashion-mini"), ("cifar", "CIFAR-10")):
        mine = [run for run in runs if run["data"] == data]
        kinds, told = list(next(iter(mine[0]["auroc"].values()))), []
        parts += [
            f"### {title} against",
            "",
            f"| method, score | {' | '.join(kinds)} |",
            "|---|" + "---:|" * len(kinds),
        ]
        for method, name in (("diffusion", "DiDiCM"), ("standard", "standard")):
            found = [run["auroc"] for run in mine if run["method"] == method]
            means = {}
            for score in found[0]:
                values = [[auroc[score][kind] for auroc in found] for kind in kinds]
                parts.append(f"| {name}, {score} | {' | '.join(map(_spread, values))} |")
                means[score] = fmean(map(fmean, values))
            ranked = sorted(((mean, score) for score, mean in means.items()), reverse=True)
            told.append(f"{name}: " + ", ".join(f"{score} {mean:.2f}" for mean, score in ranked))
        seeds = len({run["seed"] for run in mine})
        parts += ["", f"Mean and standard deviation over {seeds} seeds." if seeds > 1 else "One seed.", ""]
        parts += [f"Means over the columns, best first. {'; '.join(told)}.", ""]
    command = "python docs/make_outliers.py runs --cifar10 FOLDER --tiny100 FOLDER"
    return "\n".join([*parts, "Run it again:", "", "```sh", command, "```", ""])


def _write_shift(folder: Path) -> Iterator[str]:
    """A table per metric: a row per method, a column per severity; and in a sentence what is lost."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not runs:
        return
    yield SHIFT_HEAD
    methods = {"diffusion": "DiDiCM", "standard": "standard classifier"}
    metrics = {"cls/Acc": ("top-1 %", 100), "cls/NLL": ("NLL", 1), "cal/ECE": ("ECE %", 100)}
    metrics |= {"unlike": ("flagged %", 100)}
    severities = range(len(runs[0]["by_severity"]))
    found = {  # by method and metric, the values of the seeds at each severity
        (method, metric): [
            [scale * run["by_severity"][k][metric] for run in runs if run["method"] == method] for k in severities
        ]
        for method in methods
        for metric, (_, scale) in metrics.items()
    }
    yield f"|  | clean | {' | '.join(f'severity {k}' for k in severities[1:])} |"
    yield "|---|" + "---:|" * len(severities)
    for metric, (title, scale) in metrics.items():
        digits = 1 if scale == 100 else 3
        for method, name in methods.items():
            yield f"| {title}, {name} | {' | '.join(_spread(x, digits) for x in found[method, metric])} |"
    yield f"\nMean and standard deviation over {len({run['seed'] for run in runs})} seeds.\n"
    last = severities[-1]
    for method, name in methods.items():
        accuracy, error, flagged = ([fmean(x) for x in found[method, y]] for y in ("cls/Acc", "cal/ECE", "unlike"))
        yield (
            f"{name}: from clean images to severity {last}, top-1 goes from {accuracy[0]:.1f} to "
            f"{accuracy[-1]:.1f} % and ECE from {error[0]:.1f} to {error[-1]:.1f} %; {flagged[0]:.0f} % of clean "
            f"images are flagged, and {flagged[-1]:.0f} % at severity {last}.\n"
        )
    yield _compare_shift(found["diffusion", "cls/NLL"], found["standard", "cls/NLL"])
    yield "\nRun it again:\n\n```sh\npython docs/make_shift.py runs\n```\n"


def _compare_shift(ours: list[list[float]], theirs: list[list[float]]) -> str:
    """Where every seed of one method has a lower NLL than every seed of the other."""
    names = ["on clean images", *(f"at severity {k}" for k in range(1, len(ours)))]
    pairs = list(zip(names, ours, theirs, strict=True))
    lower = [name for name, x, y in pairs if max(x) < min(y)]
    higher = [name for name, x, y in pairs if min(x) > max(y)]
    told = [f"{word} {', '.join(where)}" for word, where in (("lower", lower), ("higher", higher)) if where]
    compared = f"is {', and '.join(told)}" if told else "is nowhere clearly lower or higher"
    return f"DiDiCM's NLL {compared} (every seed against every seed of the standard classifier)."


def _write_distill(folder: Path) -> Iterator[str]:
    """Teachers and students: means over seeds of metrics as trained, and what a posterior costs."""
    seeds = [json.loads(path.read_text(encoding="utf-8"))["found"] for path in sorted(folder.glob("*.json"))]
    if not seeds:
        return
    metrics = [Metric(name) for name in ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE")]
    yield DISTILL_HEAD
    teacher, *students = seeds[0]
    for student in students:
        gap, low, high = seed_interval([seed[student][NLL.name] - seed[teacher][NLL.name] for seed in seeds])
        yield f"- *{student}*: NLL {gap:+.3f} from *{teacher}* (95 % interval {low:+.3f} to {high:+.3f})."
    means = {name: fmean(seed[name][NLL.name] for seed in seeds) for name in seeds[0]}
    near = [name for name in students if name.startswith("student") and means[name] < means[teacher] + DISTILL_AIM]
    told = " and ".join(f"*{name}*" for name in near)
    yield f"\nWithin {DISTILL_AIM} NLL of the teacher, by means, which is the aim: {told or 'no student'}."
    student, plain = near[0] if near else students[0], "standard classifier"
    gap, low, high = seed_interval([seed[student][NLL.name] - seed[plain][NLL.name] for seed in seeds])
    yield (
        f"\nIs it worth it? *{student}* has an NLL of {means[student]:.3f}, a *{plain}* that learnt from the "
        f"labels {means[plain]:.3f}: a difference of {gap:+.3f} (95 % interval {low:+.3f} to {high:+.3f}).\n"
    )
    points = {name: [seed[name][NLL.name] for seed in seeds] for name in means}
    yield _draw_dots(folder, "NLL of one call and of several", {"NLL": points})
    yield f"\n|  | {' | '.join(metric.heading for metric in metrics)} | M multiply-adds |"
    yield "|---|" + "---:|" * (len(metrics) + 1)
    for name in seeds[0]:
        cells = [
            _spread([metric.scale * seed[name][metric.name] for seed in seeds], 1 if metric.scale == 100 else 3)
            for metric in metrics
        ]
        yield f"| {name} | {' | '.join(cells)} | {seeds[0][name]['multiply_adds'] / 1e6:.1f} |"
    yield f"\nMean and standard deviation over {len(seeds)} seeds. Run it again:\n"
    yield "```sh\npython docs/make_distill.py runs\n```\n"


def _write_human(folder: Path) -> Iterator[str]:
    """How far posteriors are from those of people: who is closest, and a table per study."""
    stored = sorted(folder.glob("*.jsonl"))
    yield from [HUMAN_HEAD] if stored else []
    for path in stored:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for condition in dict.fromkeys(line["condition"] for line in lines):
            yield _on_people([line for line in lines if line["condition"] == condition])
        columns = ("divergence", "total variation", "rank correlation")
        known = [fmean(x["as trained"]["rank correlation"] for x in same) for same in _same_entry(lines).values()]
        yield (
            "- No model is unsure where people disagree: the rank correlation of its entropy with theirs is at "
            f"most {max(known):.2f}.\n"
        )
        found = dict[str, dict[str, list[float]]]()
        for (condition, *entry), same in _same_entry(lines).items():
            values = [x["temperature"]["divergence"] for x in same]
            found.setdefault(condition, {})[", ".join(entry)] = values
        yield _draw_dots(folder, "Divergence from people, temperature-scaled", found)
        yield f"\n| {path.stem} | {' | '.join(columns)} | divergence, T | total variation, T |"
        yield "|---|" + "---:|" * (len(columns) + 2)
        for row, mine in _same_entry(lines).items():
            cells = [_spread([x["as trained"][name] for x in mine]) for name in columns]
            cells += [_spread([x["temperature"][name] for x in mine]) for name in columns[:2]]
            yield f"| {', '.join(row)} | {' | '.join(cells)} |"
        yield "\nMean and standard deviation over the seeds; T: temperature-scaled. Measure it again:\n"
        yield f"```sh\npython docs/make_human.py {path.stem} --people FILE\n```\n"


def _same_entry(lines: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Lines by condition, method and sampler: those of several seeds."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line["condition"], line["method"], line["sampler"]), []).append(line)
    return found


def _draw_dots(folder: Path, title: str, plots: dict[str, dict[str, list[float]]]) -> str:
    """A plot per heading with a line per name: the seeds, and their mean as a dot; standard ones in grey."""
    with drawing():
        rows = max(map(len, plots.values()))
        figure, axes = make_axes(len(plots), len(plots), size=(5.4 if len(plots) > 1 else 6, 0.8 + 0.22 * rows))
        for plot, (heading, points) in zip(axes, plots.items(), strict=True):
            order = sorted(points, key=lambda name: -fmean(points[name]))
            for i, name in enumerate(order):
                colour = GREYS[1] if name.startswith("standard") else COLOURS[0]
                plot.plot(points[name], [i] * len(points[name]), "|", color=colour)
                plot.plot(fmean(points[name]), i, "o", color=colour)
            plot.set_yticks(range(len(order)), order, fontsize=8)
            plot.set_title(heading)
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    write_files(folder, {"dots.svg": content.getvalue()})
    return f"![{title}](results/{folder.name}/dots.svg)"


def _on_people(lines: list[dict[str, Any]]) -> str:
    """Who is closest to people under one condition, and how far behind the best of the other kind is."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        found.setdefault((line["method"], line["sampler"]), {})[line["seed"]] = line["temperature"]["divergence"]
    order = sorted(found, key=lambda entry: fmean(found[entry].values()))
    best, others = order[0], [e for e in order if e[0].startswith("DiDiCM") != order[0][0].startswith("DiDiCM")]
    mean = fmean(found[best].values())
    told = f"- {lines[0]['condition']}: closest is *{', '.join(best)}* (divergence, T {mean:.3f})"
    if not others:
        return f"{told}."
    seeds = found[best].keys() & found[others[0]].keys()
    gap, low, high = seed_interval([found[others[0]][seed] - found[best][seed] for seed in seeds])
    return f"{told}; *{', '.join(others[0])}* is {gap:.3f} farther (95 % interval {low:+.3f} to {high:+.3f})."


def _spread(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


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

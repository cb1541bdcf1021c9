"""Pages of what the scripts in docs/ measured: people's labels, distillation, worse images and foreign ones."""

import json
from collections.abc import Iterator
from itertools import product
from statistics import fmean, stdev
from typing import Any

from compared import CROPS, FOLDER, STRONG, with_interval

from didicm.experiments.spec import ONE_CALL
from didicm.report.records import NLL, SCALED_NLL, TOP1, Metric, Rows

BACK = "\n[Results](../../results.md)\n"
PEOPLE_HEAD = """# Against what people see
{back}
*How far is the posterior from the labels of some 50 people per image (CIFAR-10H)?*

KL divergence of the model from the people, in nats; the share of images' probability that is elsewhere (total
variation); and the rank correlation of the model's entropy with theirs: is it unsure where they disagree? They saw
the images in full size, so a model of small images is rightly less sure than they are.
"""
DISTILL_HEAD = """# One call
{back}
*How much of eight augmented steps can a network say in one call, when it is trained on their answers?*

`didicm distill` on a quarter of fashion-mini at 14 px, with Mixup; the standard classifier beside it learnt from
the labels. The teacher trained for 120 epochs, all others for 60; the student with the same network starts from
the teacher's weights.
"""
SHIFT_HEAD = """# Worse images
{back}
*What do images that get worse than those of training do to a calibrated model?*

The models of two studies at 14 px, [with crops and flips](../fashion-cpu/README.md) and
[with strong augmentation](../strong-fashion-cpu/README.md), each with its own length of training, by
`didicm evaluate --shift`: clean images, and means over the corruptions at severities 1 to 5. Half of the
validation images calibrate, the others are measured on; the temperature is fitted to clean images. "Flagged" are
images that the outlier score calls unlike those of training, at 5 % false alarms; its threshold was set on these
images, so that 5 % of the clean ones lie above it by construction.
"""
OUTLIERS_HEAD = """# Foreign images
{back}
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

PEOPLE_STUDIES = {"fair-cpu": CROPS, "breadth-cpu": CROPS, "many-cpu": CROPS, "lengths-strong-cpu": STRONG}
STRATIFIED_HEAD = """# Times spread evenly over a batch
{back}
*Does it help to draw the times of a batch from as many equal parts of [0, 1], one from each?*

"log embedding" of studies [training-short-cpu](../training-short-cpu/README.md), a quarter of the training, and
[training-cpu](../training-cpu/README.md), all of it, with the same seeds.
"""

SHIFTED = {
    "cls/Acc": ("top-1 %", 100),
    "cls/NLL": ("NLL", 1),
    "cal/ECE": ("ECE %", 100),
    "unlike": ("flagged %", 100),
}
Line = dict[str, Any]


def read_json(name: str) -> list[Any]:
    """What was stored of one measurement, in files of a record each."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((FOLDER / name).glob("*.json"))]


def read_lines(name: str) -> list[Line]:
    """What was stored of one measurement, in files of a record per line."""
    paths = sorted((FOLDER / name).glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def rounded(value: Any) -> Any:
    """Numbers to six digits: more would be noise from the machine."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def read_people() -> list[Line]:
    """What posteriors and people's labels had in common, each with its augmentation, by study."""
    return [
        {"augmentation": augmentation, **json.loads(line)}
        for study, augmentation in PEOPLE_STUDIES.items()
        if (path := FOLDER / "human" / f"{study}.jsonl").exists()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def same_entry(lines: list[Line]) -> dict[tuple[str, str, str, str], list[Line]]:
    """Lines by augmentation, condition, method and sampler: those of several seeds."""
    found: dict[tuple[str, str, str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["seed"]):
        key = (line["augmentation"], line["condition"], line["method"], line["sampler"])
        found.setdefault(key, []).append(line)
    return found


def mean_and_spread(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def write_people(lines: list[Line]) -> Iterator[str]:
    """Every method and sampler, as trained and temperature-scaled."""
    yield PEOPLE_HEAD.format(back=BACK)
    columns = ("divergence", "total variation", "rank correlation")
    found = same_entry(lines)
    for place in dict.fromkeys(key[:2] for key in found):
        yield f"## {', '.join(place[::-1])}\n"
        yield f"| | {' | '.join(columns)} | divergence, T | total variation, T |"
        yield "|---|" + "---:|" * (len(columns) + 2)
        for row, mine in ((key, mine) for key, mine in found.items() if key[:2] == place):
            cells = [mean_and_spread([x["as trained"][name] for x in mine]) for name in columns]
            cells += [mean_and_spread([x["temperature"][name] for x in mine]) for name in columns[:2]]
            yield f"| {', '.join(row[2:])} | {' | '.join(cells)} |"
        yield ""
    studies = "; ".join(
        f"[{name}](../{name}/README.md), {a}" for name, a in PEOPLE_STUDIES.items() if (FOLDER / name).exists()
    )
    yield f"Mean and standard deviation over the seeds; T: temperature-scaled. Models of {studies}. Again:\n"
    yield "```sh\npython docs/make_human.py STUDY... --people FILE\n```\n"


def write_distill(seeds: list[dict[str, dict[str, float]]]) -> Iterator[str]:
    """Teachers and students: means over seeds of metrics as trained, and what a posterior costs."""
    metrics = [Metric(name) for name in ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE")]
    yield DISTILL_HEAD.format(back=BACK)
    teacher, *others = seeds[0]
    for name in others:
        gaps = [seed[name][NLL.name] - seed[teacher][NLL.name] for seed in seeds]
        yield f"- *{name}*: NLL {with_interval(gaps)} from *{teacher}*."
    yield f"\n| | {' | '.join(metric.heading for metric in metrics)} | M multiply-adds |"
    yield "|---|" + "---:|" * (len(metrics) + 1)
    for name in seeds[0]:
        cells = [
            mean_and_spread([m.scale * seed[name][m.name] for seed in seeds], 1 if m.percent else 3)
            for m in metrics
        ]
        yield f"| {name} | {' | '.join(cells)} | {seeds[0][name]['multiply_adds'] / 1e6:.1f} |"
    yield f"\nMean and standard deviation over {len(seeds)} seeds. Run it again:\n"
    yield "```sh\npython docs/make_distill.py runs\n```\n"


def write_stratified(found: dict[str, tuple[Rows, Rows]]) -> Iterator[str]:
    """Stratified times beside uniform ones, by length and sampler; their difference is paired by seed."""
    metrics = (TOP1, NLL, SCALED_NLL)
    yield STRATIFIED_HEAD.format(back=BACK)
    yield f"| | {' | '.join(metric.heading for metric in metrics)} |"
    yield "|---|" + "---:|" * len(metrics)
    for (length, sides), sampler in product(found.items(), ("8 steps", ONE_CALL)):
        uniform, even = (Rows(row for row in side if row.entry.sampler == sampler) for side in sides)
        for name, rows in (("uniform", uniform), ("spread evenly", even)):
            cells = (
                mean_and_spread([m.scale * x for x in rows.values(m)], 1 if m.percent else 3) for m in metrics
            )
            yield f"| {length}, {sampler}, {name} | {' | '.join(cells)} |"
        gaps = [even.minus(uniform, metric) for metric in metrics]
        cells = (f"{m.text(gap.mean, '+')} ± {m.text(gap.half)}" for m, gap in zip(metrics, gaps, strict=True))
        yield f"| {length}, {sampler}, difference | {' | '.join(cells)} |"
    yield "\nMean and standard deviation over the seeds; of a difference, ± is half of its 95 % interval. Again:\n"
    yield "```sh\npython docs/make_stratified.py runs --data hf://cifar10\n```\n"


def write_shift(runs: list[Line]) -> Iterator[str]:
    """A table per metric and number of images: a row per method, a column per severity."""
    yield SHIFT_HEAD.format(back=BACK)
    severities = range(len(runs[0]["by_severity"]))
    for fraction, (metric, (title, scale)) in (
        (fraction, x) for fraction in dict.fromkeys(run["fraction"] for run in runs) for x in SHIFTED.items()
    ):
        yield f"## {title}, {fraction} images per class\n"
        yield f"|  | clean | {' | '.join(f'severity {k}' for k in severities[1:])} |"
        yield "|---|" + "---:|" * len(severities)
        mine = [run for run in runs if run["fraction"] == fraction]
        for kind in dict.fromkeys((run["method"], run["augmentation"]) for run in mine):
            own = [run["by_severity"] for run in mine if (run["method"], run["augmentation"]) == kind]
            values = [[scale * levels[k][metric] for levels in own] for k in severities]
            cells = (mean_and_spread(x, 1 if scale == 100 else 3) for x in values)
            yield f"| {', '.join(kind)} | {' | '.join(cells)} |"
        yield ""
    yield f"Mean and standard deviation over {len({run['seed'] for run in runs})} seeds. Run it again:\n"
    yield "```sh\ndidicm study fashion-cpu --out studies\ndidicm study strong-fashion-cpu --out studies"
    yield "python docs/make_shift.py studies\n```\n"


def write_outliers(runs: list[Line]) -> Iterator[str]:
    """How well foreign images are told apart: AUROC by score, a table per data set, and how to measure it."""
    yield OUTLIERS_HEAD.format(back=BACK)
    for data, title in (("fashion", "fashion-mini"), ("cifar", "CIFAR-10")):
        mine = [run for run in runs if run["data"] == data]
        kinds, told = list(next(iter(mine[0]["auroc"].values()))), []
        yield f"## {title} against\n"
        yield f"| method, score | {' | '.join(kinds)} |"
        yield "|---|" + "---:|" * len(kinds)
        for method, name in (("diffusion", "DiDiCM"), ("standard", "standard")):
            found = [run["auroc"] for run in mine if run["method"] == method]
            means = {}
            for score in found[0]:
                values = [[auroc[score][kind] for auroc in found] for kind in kinds]
                yield f"| {name}, {score} | {' | '.join(map(mean_and_spread, values))} |"
                means[score] = fmean(map(fmean, values))
            ranked = sorted(((mean, score) for score, mean in means.items()), reverse=True)
            told.append(f"{name}: " + ", ".join(f"{score} {mean:.2f}" for mean, score in ranked))
        seeds = len({run["seed"] for run in mine})
        means = f"Means over the columns, best first. {'; '.join(told)}."
        yield f"\nMean and standard deviation over {seeds} seeds. {means}\n"
    yield "Run it again:\n\n```sh\npython docs/make_outliers.py runs --cifar10 FOLDER --tiny100 FOLDER\n```\n"

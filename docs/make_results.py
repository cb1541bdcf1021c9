"""Write docs/results.md, a page per study and the figures, from docs/results; `make results` runs it.

python docs/make_results.py            make the pages again
python docs/make_results.py studies    first take over the results of studies that were run there
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import stdev

from advice import (
    EQUAL,
    compare_lengths,
    write_aim,
    write_choice,
    write_conditions,
    write_defaults,
    write_findings,
)
from compared import (
    FOLDER,
    MANY,
    PEOPLE,
    TUNED,
    Compared,
    compare_all,
    of_study,
    one_call,
    read_study,
    signed,
    with_interval,
)
from measured import (
    read_json,
    read_lines,
    read_people,
    rounded,
    write_distill,
    write_outliers,
    write_people,
    write_shift,
    write_stratified,
)
from plots import Files
from questions import (
    compare_stratified,
    on_distillation,
    on_peaks,
    on_people,
    on_shift,
    on_steps,
    on_training,
    on_wrong_labels,
)

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
from didicm.experiments.spec import ONE_CALL
from didicm.experiments.study_file import list_studies, load_study
from didicm.experiments.tune import VERSION
from didicm.files import write_files
from didicm.report.html import draw_numbers, make_tables, read_search
from didicm.report.records import NLL, SCALED_NLL, TOP1, Rows
from didicm.report.tables import show
from didicm.report.verdict import verdict
from didicm.text import count

CHANGED = {"seeds": "seeds", "tune": "trials"}  # what a study may ask for more of since it was run
PAGE, README = Path("results.md"), "README.md"
ORDER = (
    "fair",
    "strong",
    "breadth",
    "many",
    "strong-breadth",
    "strong-many",
    "lengths-strong",
    "equal-strong",
    "classes-border",
    "classes",
    "strong-classes",
    "labels",
    "strong-labels",
    "noise",
    "ensembles",
    "fashion",
    "strong-fashion",
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
    "batches",
    "batches-strong",
    "recipe",
    "finetune",
)
HEAD = """# Results

Which method to use, what each question gave, and a page for every [study](#all-studies) with its tables, figures
and the command for it. All of it is generated from the results stored beside the pages. The networks are
small and so are the images, 7 to 32 pixels; nothing was trained on ImageNet. The paper's own numbers stand on the
pages of its studies, such as [the main one](results/main-cpu/README.md): what can be compared is who is ahead, and
whether the lead grows where images are less informative.

- *DiDiCM* here is one call of a network with the blocks of the standard classifier, half of its labels masked in
  training with crops and flips, 90 % with strong augmentation (RandAugment, Mixup, CutMix). The older studies
  predict scores, the newer ones the posterior.
- Each method has its own length of training, chosen on held-out images; in some studies also its learning rate
  and weight decay. Where it has variants that cost as much, held-out images choose one too, such as its batch.
- *Ahead* and *behind*: beyond the 95 % interval of the difference over seeds, by temperature-scaled NLL
  ("NLL, T"), and where that shows no difference by top-1. *Level*: neither shows one. The intervals are over the
  seeds of one search: that another would choose other lengths is not in them.

## Which method to use
"""
QUESTIONS = (
    "Who is ahead, each method with a length of its own?",
    "What if training labels are wrong?",
    "How far is the posterior from what people see?",
    "How many steps, which labels, how many chains?",
    "What trains fastest, and ends best?",
    "Can one call say what the sampler says?",
    "What if images get worse than those of training?",
)
ALL_STUDIES = """Where each method has a length of its own, what came out is counted as above. Elsewhere it is in
the words of the study's page, which takes the best standard classifier by test images; many of these studies
compare trainings of other cost."""
FOUR_LENGTHS = """Its search tried 1, 1/2, 2 and 1/4 times the length. Run again, it doubles or halves the length
for as long as that helps."""
NO_LONGER = "squared times (more of them early), which are no longer an option"
REPEATED, TRAINED_AGAIN = "repeated", "fair-cpu"
REPEATED_HEAD = """## Trained again

*How much would the same trainings differ if only their rounding did?*

All trainings of DiDiCM with ResNet blocks in the study above, repeated with the same seeds after images and
weights were laid out otherwise in memory, which changes the order of sums and with it their last digit.
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
                append_result(FOLDER / name, type(record).from_dict(rounded(record.to_dict())))


def write_pages() -> Files:
    """All pages and figures, by path in docs/."""
    files: Files = {}
    once, often = compare_all(), compare_all(views=True)
    asked = one_call(once)
    answers = (
        on_peaks(files, asked),
        on_wrong_labels(files, asked),
        on_people(files),
        on_steps(),
        on_training(files),
        on_distillation(files),
        on_shift(files),
    )
    lines = [HEAD, *write_choice(asked)]
    for number, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True), 1):
        lines += [f"## {number}. {question}\n", *answer]
    lines += [*write_findings(asked), *write_defaults(), *write_aim([*once, *often])]
    lines += [f"## All studies\n\n{ALL_STUDIES}\n", "| study | question | what came out |", "|---|---|---|"]
    for name in (f"{name}-cpu" for name in ORDER):
        if stored := read_study(name):
            says = _write_study(files, *stored)
            says = _say_chosen(found) if (found := of_study(name)) else says
            lines.append(f"| [{name}](results/{name}/{README}) | {stored[0].study.question} | {says} |")
    files[str(PAGE)] = "\n".join([*lines, ""])
    files["results/conditions.md"] = write_conditions(once, often)
    files[f"results/human/{README}"] = "\n".join(write_people(read_people()))
    files[f"results/distill/{README}"] = "\n".join(write_distill([run["found"] for run in read_json("distill")]))
    files[f"results/stratified/{README}"] = "\n".join(write_stratified(compare_stratified()))
    files[f"results/shift/{README}"] = "\n".join(write_shift(read_lines("shift")))
    files[f"results/outliers/{README}"] = "\n".join(write_outliers(read_json("outliers")))
    return files


def _say_chosen(found: list[Compared]) -> str:
    """What came out of a tuned study, each side with the variant that held-out images prefer."""
    ahead, gaps = [x.ahead for x in found], [x.gaps[SCALED_NLL].difference.mean for x in found]
    counts = ", ".join(f"{word} in {ahead.count(k)}" for word, k in (("ahead", 1), ("level", 0), ("behind", -1)))
    return f"One call of DiDiCM is {counts} of {count(len(found), 'condition')}: NLL, T {signed(gaps)}."


def write_summary(text: str) -> str:
    """README.md with CIFAR-10 at 16 px in one table: both methods and augmentations, by images per class."""
    shown = (TOP1, SCALED_NLL)
    found = [x for x in one_call(compare_all()) if x.data == "CIFAR-10" and x.condition.resolution == 16]
    found = [x for x in found if x.condition.fraction < MANY and not x.wrong_labels]
    fractions = sorted({x.condition.fraction for x in found})
    heads = [f"{metric.heading}, {fraction} per class" for fraction, metric in product(fractions, shown)]
    lines = [f"| | {' | '.join(heads)} | inference |", "|---|" + "---:|" * (len(heads) + 1)]
    for augmentation, who in product(TUNED, ("standard", "DiDiCM")):
        here = {x.condition.fraction: x for x in found if x.augmentation == augmentation}
        cells = []
        for x, metric in product((here[fraction] for fraction in fractions), shown):
            rows = read_study(x.study)[1].select(x.best if who == "standard" else x.entry, x.condition)
            cells.append(show(rows.estimate(metric), metric))
        cost = 1.0 if who == "standard" else max(x.inference for x in here.values())
        lines.append(f"| {who}, {augmentation} | {' | '.join(cells)} | {cost:.1f} |")
    *equal, (ours, theirs) = (lengths := compare_lengths())
    lines.append(
        f"\nWith 200 images per class and strong augmentation, held-out images chose {ours} epochs for DiDiCM and "
        f"{theirs} for the standard classifier; with {ours} for both, NLL, T and top-1 of DiDiCM minus the "
        f"standard classifier's are {lengths[equal[-1]]} ([study](docs/results/{EQUAL}/README.md))."
    )
    before, begin, rest = text.partition("<!-- results: make results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    return before + begin + "\n".join(lines) + "\n" + end + after


def _command(plan: Plan) -> str:
    """How to run it again: a study of images that do not ship is told where they are."""
    return f"didicm study {plan.study.name}" + (f" --data {plan.data}" if plan.study.data is None else "")


def _write_study(files: Files, plan: Plan, rows: Rows) -> str:
    """The page of a study: question, prediction, what came out, figures, tables; the first sentence of it."""
    study, place = plan.study, f"results/{plan.study.name}"
    trials = read_search(plan, FOLDER / study.name)
    figures, says = draw_numbers(study, rows, trials), verdict(study, rows, trials)
    files.update({f"{place}/{figure.file}": figure.data for figure in figures})
    parts = [f"# {study.title}\n", "[Results](../../results.md)\n", f"*{study.question}*\n"]
    parts += [f"Predicted: {study.prediction}\n"] if study.prediction else []
    parts += [f"Note: {study.note}\n"] if study.note else []
    ships = study.name in list_studies()
    missing = [str(c) for c in load_study(study.name).conditions if c not in study.conditions] if ships else []
    parts += [f"Not run yet: {'; '.join(missing)}.\n"] if missing else []
    now = load_study(study.name) if ships else study
    changed = [what for name, what in CHANGED.items() if getattr(study, name) != getattr(now, name)]
    parts += [f"Run before the study got more {' and '.join(changed)}.\n"] if changed else []
    if study.tune > 1 and plan.search < VERSION:
        parts.append(f"{FOUR_LENGTHS}\n")
    squared = {x for x, settings in plan.settings.items() if settings.get("time_sampling") == "squared"}
    who = [
        str(method)
        for method in study.methods
        if not method.baseline and any(f"{method}, {condition}" in squared for condition in study.conditions)
    ]
    if who and ships:
        again = "Run again, it has uniform ones, which are [as good](../times-cpu/README.md)."
        parts.append(f"{'; '.join(who)}: trained with {NO_LONGER}. {again}\n")
    parts += [*(f"- {sentence}" for sentence in says), ""]
    parts += [f"![{figure.title}]({figure.file})\n" for figure in figures]
    tables = make_tables(study, rows)
    tables = tables[: -2 if len(tables) > 2 else -1]  # what stands in the study's layout
    parts += [table.to_markdown() for table in tables]
    parts += ["Run it again:\n", "```sh", _command(plan), "```\n"] if ships else [f"It was about {NO_LONGER}.\n"]
    if study.name == TRAINED_AGAIN:
        parts += _write_repeated()
    page, told = "\n".join(parts), says[0]
    for table, labels in PEOPLE.items():
        page, told = page.replace(table, labels), told.replace(table, labels)
    files[f"{place}/{README}"] = page
    return told


def _write_repeated() -> Iterator[str]:
    """How far trainings move that differ in rounding alone."""
    before, again = ({x.key: x for x in read_results(FOLDER / name)} for name in (TRAINED_AGAIN, REPEATED))
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
        yield (
            f"- {metric.heading} of one call: {with_interval(gaps, digits)} in the mean of {len(gaps)} trainings, "
            f"{stdev(gaps):.{digits}f} from one training to another."
        )
    yield ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    docs = FOLDER.parent
    for path, content in write_pages().items():
        write_files((docs / path).parent, {Path(path).name: content})
    readme = docs.with_name(README)
    readme.write_text(write_summary(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(docs / PAGE)

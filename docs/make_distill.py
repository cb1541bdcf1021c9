"""Measure what is left of a sampler in one network call; docs/make_results.py makes the table.

python docs/make_distill.py RUNS

Trains a DiDiCM teacher and a standard classifier on a quarter of fashion-mini, distils the teacher's eight
augmented steps into its own network and into a standard one, with five seeds, into RUNS; what is there already is
used. Takes about 12 minutes of one core.
"""

import json
import sys
from pathlib import Path

from didicm.cli.__main__ import main as didicm
from didicm.evaluation.assess import evaluate
from didicm.evaluation.stored import open_model
from didicm.files import to_json, write_files

FOLDER = Path(__file__).parent / "results" / "distill"
DATA, SEEDS = "fashion-mini", range(5)
SETTINGS = ["--image.size=14", "--batch-size=50", "--run.validate-epochs=120", "--epochs=60"]
TEACHER = {"method": "cp", "steps": 8, "views": 8}
ASKED = {  # name: run, sampler
    "teacher, 8 augmented steps": ("teacher", TEACHER),
    "teacher, 8 steps": ("teacher", {"method": "cp", "steps": 8}),
    "teacher, 1 call": ("teacher", {"method": "readout"}),
    "student, the same network, 1 call": ("same", {}),
    "student, a standard network": ("standard", {}),
    "standard classifier, 8 views": ("labels", {"views": 8}),
    "standard classifier": ("labels", {}),
}


def main(runs: Path) -> None:
    """Train what is missing, measure, and store the numbers of each seed."""
    for seed in SEEDS:
        base = [f"--data={DATA}", "--recipe=small", "--fraction=0.25", f"--seed={seed}", *SETTINGS]
        score = ["--model-args.parameterization=score", "--model-args.noise-embedding=log"]
        places = {name: runs / f"{name}-{seed}" for name in ("teacher", "same", "standard", "labels")}
        asked = [f"--teacher-sampler.{name}={value}" for name, value in TEACHER.items()]
        mixed = ["--augment.mixup=0.5", *asked]
        make("train", *base, *score, "--epochs=120", out=places["teacher"])
        make("train", *base, "--method=standard", out=places["labels"])
        for student in ("same", "standard"):
            teacher = places["teacher"] / "last"
            given = [*base, *(score if student == "same" else []), f"--student={student}", *mixed]
            start = [f"--model-args.weights={teacher}"] if student == "same" else []
            make("distill", teacher, *given, *start, out=places[student])
        found = {name: measure(places[run] / "last", sampler) for name, (run, sampler) in ASKED.items()}
        write_files(FOLDER, {f"{seed}.json": to_json({"seed": seed, "found": found})})
        print(json.dumps(found))


def make(command: str, *arguments: object, out: Path) -> None:
    """A training by a command of didicm, unless it is done."""
    if not (out / "last").is_dir() and didicm([command, *map(str, arguments), f"--out={out}"]):
        raise SystemExit(f"{command} of {out} failed")


def measure(place: Path, sampler: dict[str, object]) -> dict[str, float]:
    """How good the model is on the test images as it was trained, and what a posterior costs."""
    found = evaluate(open_model(place, sampler=sampler), DATA, split="val", calibrated=False, workers=0)
    numbers = {name: found.metrics[name] for name in ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE")}
    return {**{name: float(f"{x:.6g}") for name, x in numbers.items()}, "multiply_adds": found.multiply_adds}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

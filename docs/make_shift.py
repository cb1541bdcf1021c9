"""Measure what worse images do to a model; docs/make_results.py makes the page.

python docs/make_shift.py STUDIES

STUDIES is the --out of studies fashion-cpu and strong-fashion-cpu, whose models at 14 px are measured. Half of the
validation images calibrate, the others are measured on, clean and under every corruption at every severity. Takes
about ten minutes of one core.
"""

import json
import sys
from pathlib import Path

import didicm
from didicm.evaluation.stored import open_model
from didicm.experiments.results import read_results
from didicm.experiments.spec import ONE_CALL
from didicm.files import write_files

FOLDER = Path(__file__).parent / "results" / "shift"
DATA, SIZE = "fashion-mini", 14
AUGMENTATIONS = {"fashion-cpu": "crops and flips", "strong-fashion-cpu": "strong augmentation"}


def main(studies: Path) -> None:
    """Measure every model by one call, and store a line of numbers for each."""
    lines = []
    for study, augmentation in AUGMENTATIONS.items():
        for result in sorted(read_results(studies / study), key=lambda result: result.key):
            if result.condition.resolution != SIZE:
                continue
            one_call = next(found.settings for found in result.measurements if found.sampler == ONE_CALL)
            place = studies / "runs" / result.key / "last"
            didicm.calibrate(open_model(place, sampler=one_call), DATA)
            found = didicm.evaluate_shift(open_model(place, sampler=one_call), DATA)
            levels = ({name: float(f"{x:.5g}") for name, x in y.items()} for y in (found.clean, *found.mean))
            told = {"method": result.method.partition(",")[0], "augmentation": augmentation}
            told |= {"fraction": int(result.condition.fraction), "seed": result.seed, "images": found.num_images}
            lines.append(json.dumps({**told, "by_severity": list(levels)}))
            print(lines[-1])
    write_files(FOLDER, {"models.jsonl": "\n".join([*lines, ""])})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

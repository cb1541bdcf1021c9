"""Measure what worse images do to a model; docs/make_results.py makes the table.

python docs/make_shift.py RUNS

Trains the small recipe on fashion-mini for ten epochs, with three seeds, into RUNS (docs/make_outliers.py takes
the same runs); what is there already is used. Half of the validation images calibrate, the others are measured on,
clean and under every corruption at every severity. Takes about 10 minutes of one core.
"""

import json
import sys
from pathlib import Path

import didicm
from didicm.files import to_json, write_files
from didicm.settings import load_recipe
from didicm.values import override

FOLDER = Path(__file__).parent / "results" / "shift"
DATA, SEEDS, METHODS = "fashion-mini", (0, 1, 2), ("diffusion", "standard")


def main(runs: Path) -> None:
    """Train what is missing, measure, and store the numbers of each run."""
    for method in METHODS:
        for seed in SEEDS:
            model = trained(runs / f"fashion-{method}-{seed}", method, seed, {"data": DATA})
            didicm.calibrate(model, DATA)
            found = didicm.evaluate_shift(model, DATA)
            levels = [
                {name: float(f"{x:.6g}") for name, x in level.items()} for level in (found.clean, *found.mean)
            ]
            told = {"method": method, "seed": seed, "images": found.num_images, "by_severity": levels}
            write_files(FOLDER, {f"{method}-{seed}.json": to_json(told)})
            print(json.dumps(told))


def trained(out: Path, method: str, seed: int, settings: dict[str, object]) -> Path:
    """The model of a quick training, unless that is done; best/ was chosen by the images that are measured on."""
    if not (out / "last").is_dir():
        asked = {"epochs": 10, "run.validate_epochs": 10, **settings, "seed": seed, "out": str(out)}
        didicm.train(override(load_recipe("small", method), asked))
    return out / "last"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Compare posteriors with what people see: CIFAR-10 models against the labels of some 50 people per test image.

python docs/make_human.py STUDY... --people cifar10h.npz

STUDY is the folder of a study on CIFAR-10 with its stored posteriors. The file of people has `test_index` (N,),
the places of N test images in the original order, and `cifar10h_counts` (N, 10), how often each class was named
(CIFAR-10H, Peterson et al. 2019). One line per run and sampler goes to docs/results/human; docs/make_results.py
makes the table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from didicm.evaluation.calibration import apply_temperature
from didicm.evaluation.store import load_posteriors
from didicm.experiments.results import read_results
from didicm.files import write_files

FOLDER = Path(__file__).parent / "results" / "human"


def main() -> None:
    """Measure every stored posterior of the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+")
    parser.add_argument("--people", type=Path, required=True)
    places = parser.parse_args()
    with np.load(places.people, allow_pickle=False) as stored:
        index, counts = (torch.from_numpy(stored[key]).long() for key in ("test_index", "cifar10h_counts"))
    people = counts.double() / counts.sum(1, keepdim=True)
    for study in places.studies:
        path = FOLDER / f"{study.name}.jsonl"
        before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        # Posteriors are not in the repository: what was measured where they were stays.
        lines = {name(line): line for line in (*before, *measure(study, index, people))}
        write_files(FOLDER, {path.name: "".join(json.dumps(line) + "\n" for line in lines.values())})
        print(path, len(lines))


def name(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a record is of."""
    return tuple(line[key] for key in ("method", "sampler", "condition", "seed"))


def measure(study: Path, index: Tensor, people: Tensor) -> list[dict[str, Any]]:
    """One record per run and stored sampler, as trained and with its temperature."""
    lines = []
    for result in sorted(
        read_results(study), key=lambda result: (result.method, str(result.condition), result.seed)
    ):
        for found in result.measurements:
            if found.posteriors is None or not (study / found.posteriors).exists():
                continue
            stored = load_posteriors(study / found.posteriors)
            if len(stored.probs) <= int(index.max()):
                raise SystemExit(f"{study / found.posteriors} has {len(stored.probs)} images: too few")
            told = {"method": result.method, "sampler": found.sampler, "condition": str(result.condition)}
            told |= {"seed": result.seed, "calls": found.calls, "as trained": compare(stored.probs[index], people)}
            if found.temperature is not None:
                scaled = apply_temperature(stored.probs, found.temperature)
                told["temperature"] = compare(scaled[index], people)
            lines.append(told)
    return lines


def compare(probs: Tensor, people: Tensor) -> dict[str, float]:
    """Divergence KL(people || model) and total variation, means over images; rank correlation of the entropies."""
    log_probs = probs.double().clamp_min(1e-12).log()
    divergence = torch.special.xlogy(people, people).sum(1) - (people * log_probs).sum(1)
    entropy, theirs = (torch.special.entr(p).sum(1) for p in (probs.double(), people))
    numbers = {
        "divergence": divergence.mean(),
        "total variation": 0.5 * (probs.double() - people).abs().sum(1).mean(),
        "entropy": entropy.mean(),
        "entropy of people": theirs.mean(),
        "rank correlation": spearmanr(entropy.numpy(), theirs.numpy()).statistic,
    }
    return {name: float(f"{float(value):.5g}") for name, value in numbers.items()}


if __name__ == "__main__":
    main()

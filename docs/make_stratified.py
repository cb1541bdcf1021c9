"""Measure times that are spread evenly over a batch; docs/make_results.py has them beside other ways to train.

python docs/make_stratified.py RUNS --data hf://cifar10

Trains "log embedding" of studies training-cpu and training-short-cpu once more, with the same seeds and with times
from as many equal parts of [0, 1] as a batch has draws, one from each, into RUNS; what is there already is used.
The library has no such option: it is one method of a classifier. Takes about two minutes of one core.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from measured import rounded
from torch import Tensor

from didicm import DiffusionClassifier
from didicm.experiments.execute import prepare
from didicm.experiments.measure import measure
from didicm.experiments.results import RESULTS, RunResult, append_result
from didicm.experiments.run import plan_runs
from didicm.experiments.spec import Run
from didicm.experiments.study_file import load_study
from didicm.training.loop import train
from didicm.training.state import LAST

FOLDER = Path(__file__).parent / "results" / "stratified"
STUDIES = ("training-cpu", "training-short-cpu")
METHOD, STRATIFIED = "log embedding", "log, stratified times"


class StratifiedTimes(DiffusionClassifier):
    """DiDiCM whose times are spread evenly over a batch, in random order."""

    def random_numbers(self, images: int, generator: torch.Generator | None = None) -> Tensor:
        """As for any classifier, the first number of each draw from a part of its own."""
        u = super().random_numbers(images, generator)
        parts = torch.randperm(u[..., 0].numel(), generator=generator).view_as(u[..., 0])
        u[..., 0] = (parts + u[..., 0]) / parts.numel()
        return u


def main() -> None:
    """Train what is missing, measure, and store a record per training in a file per study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", required=True)
    given = parser.parse_args()
    for name in STUDIES:
        runs, _ = plan_runs(load_study(name), given.data)
        mine = [run for run in runs.values() if str(run.method) == METHOD]
        results = [repeat(run, given.runs / name / str(run.seed)) for run in mine]
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / name / RESULTS).unlink(missing_ok=True)
        for result in results:
            append_result(FOLDER / name, RunResult.from_dict(rounded(result.to_dict())))


def repeat(run: Run, out: Path) -> RunResult:
    """The result of a run of a study with stratified times."""
    run = replace(run, config=replace(run.config, out=str(out / "run")))
    components, test = prepare(run, out / "index")
    usual = components.classifier
    stratified = StratifiedTimes(
        usual.model, usual.process, usual.sampler, usual.draws_per_image, usual.label_proposal, usual.mask
    )
    if not (out / "run" / LAST).is_dir():
        train(run.config, components=replace(components, classifier=stratified))
    result = measure(run, components, test, None, out)
    print(run, result.measurements[0].metrics["cls/NLL"])
    return replace(result, method=STRATIFIED)


if __name__ == "__main__":
    main()

"""Results that nobody had to train for."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.store import save_posteriors
from didicm.experiments.results import Measurement, Plan, RunResult, append_result, write_plan
from didicm.experiments.spec import PICTURES, Condition, Study
from didicm.experiments.study_file import METHODS, QUESTION
from didicm.report.records import rows_of
from didicm.report.verdict import verdict

HARD = Condition(7, 0.05)


@pytest.fixture(scope="session")
def comparison():
    """The study of a comparison, by default of all its methods."""

    def comparison(*methods, **changes):
        chosen = methods or tuple(METHODS.values())
        return Study("comparison", "DiDiCM against standard", QUESTION, "comparison", chosen, **changes)

    return comparison


@pytest.fixture(scope="session")
def result():
    """One run: the main sampler with so many calls, and a single call beside it if there are more."""

    def result(method, seed, accuracy, nll, condition=HARD, *, calls=1, **changes):
        scaled = {"cls/Acc": accuracy, "cls/Acc5": 0.9, "cls/NLL": nll, "cls/Brier": 0.4}
        scaled |= {"cal/ECE": 0.1, "sc/AURC": 0.2}
        metrics = {**scaled, "cls/NLL": nll + 0.1}

        def measured(name, calls, settings):
            file = f"measured/{method}-{seed}.safetensors"
            return Measurement(name, name, settings, calls, 1000 * calls, metrics, 1.5, scaled, file)

        main = [measured(f"{calls} steps", calls, {"method": "cp", "steps": calls})] if calls > 1 else []
        measurements = (*main, measured("1 call", 1, {"method": "readout"} if main else {}))
        key = f"{method}-{condition}-{seed}"
        run = RunResult(key, method, condition, seed, 90, 10, 1000, 10, 5000, 1.0, measurements, {"didicm": "0.0"})
        return replace(run, **changes)

    return result


@pytest.fixture(scope="session")
def rows(comparison):
    """Rows of a comparison's results."""

    return lambda results, study=None: rows_of(results, study or comparison())


@pytest.fixture(scope="session")
def says(comparison):
    """The verdict on rows."""

    return lambda rows, study=None: verdict(study or comparison(), rows)


@pytest.fixture(scope="session")
def store():
    """Write a study's folder with posteriors and pictures, all but the training."""

    def store(folder, study, names=("cat", "dog", "owl"), seeds=2, images=40):
        runs = {}
        grid = product(range(seeds), study.conditions, study.methods)
        for place, (seed, condition, method) in enumerate(grid):
            generator = torch.Generator().manual_seed(place)
            labels = torch.arange(images) % len(names)
            looks_like = (labels + (torch.arange(images) < 4)) % len(names)  # the first four mislead all methods
            seen = torch.nn.functional.one_hot(looks_like, len(names))
            calls = (1,) if method.baseline else (8, 1)
            measurements = []
            for i, n in enumerate(calls):
                logits = 1.5 * seen + torch.randn(images, len(names), generator=generator)
                probs = logits.softmax(-1)
                file = f"measured/{place}/posteriors-{i}.safetensors"
                save_posteriors(folder / file, probs, labels, names, [str(i) for i in range(images)])
                settings = {"method": "cp", "steps": n} if n > 1 else {"method": "readout"} if i else {}
                metrics = evaluate_probs(probs, labels)
                name = f"{n} steps" if n > 1 else "1 call"
                measurements.append(Measurement(name, name, settings, n, 1000 * n, metrics, 1.1, metrics, file))
            times = torch.linspace(1, 0, 9)
            path = torch.stack([(1 - t) * probs + t / len(names) for t in times], 1)
            pixels = torch.full((images, 1, 8, 8), 99, dtype=torch.uint8)
            pictures = {"shown": torch.arange(images), "images": pixels}
            if not method.baseline:
                pictures |= {"traced": torch.arange(3), "trajectory": path[:3].contiguous(), "times": times}
            save_file(pictures, folder / "measured" / str(place) / PICTURES)
            key = f"run-{place}"
            runs[key] = str(method)
            sizes = 36, 4, images, len(names), 5000
            result = RunResult(key, str(method), condition, seed, *sizes, 1.0, tuple(measurements), {})
            append_result(folder, result)
        pairs = product(study.methods, study.conditions)
        settings = {f"{m}, {c}": {"model": "didirn8", **m.settings} for m, c in pairs}
        write_plan(folder, Plan(study, "didicm compare", "somewhere", settings, runs))
        return folder

    return store

"""Cells that take a second, and results that nobody had to train for."""

from didicm.experiments import METHODS, Cell, Setting
from didicm.settings import load_recipe, override

SETTINGS = {
    "data": "fashion-mini",
    "model_args": {"width": 0.125, "stem": "small"},
    "batch_size": 20,
    "epochs": 2,
    "optimizer.ema": 0.9,
    "sampler.steps": 2,
    "image.channels": 1,
}
SETTING = Setting(7, 0.05)


def base(**changes):
    return override(load_recipe("small"), {**SETTINGS, **changes})


def cells(seeds=1, methods=("standard", "didicm-posterior"), settings=(SETTING,)):
    return [Cell(m, setting, seed, METHODS[m]) for seed in range(seeds) for setting in settings for m in methods]


def record(method, seed, accuracy, nll, setting=SETTING, calls=1):
    def reading(name, calls, main):
        metrics = {
            "cls/Acc": accuracy,
            "cls/Acc5": 0.9,
            "cls/NLL": nll + 0.1,
            "cls/Brier": 0.4,
            "cal/ECE": 0.1,
            "sc/AURC": 0.2,
        }
        return {
            "name": name,
            "settings": {},
            "group": name,
            "calls": calls,
            "multiply_adds": 1000 * calls,
            "metrics": metrics,
            "temperature": 1.5,
            "tempered": {**metrics, "cls/NLL": nll},
            "posteriors": f"measured/{method}-{seed}.safetensors",
        }

    readings = [reading(f"{calls} steps", calls, True)] if calls > 1 else []
    return {
        "key": f"{method}-{setting}-{seed}",
        "method": method,
        "standard": method.startswith("standard"),
        "resolution": setting.resolution,
        "fraction": setting.fraction,
        "corruption": setting.corruption,
        "seed": seed,
        "num_train": 90,
        "num_held_out": 10,
        "num_test": 1000,
        "num_classes": 10,
        "parameters": 5000,
        "train_seconds": 1.0,
        "readings": [*readings, reading("1 call", 1, not readings)],
    }

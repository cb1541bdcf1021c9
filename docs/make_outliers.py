"""Measure how well foreign images are told apart, by several scores; docs/make_results.py makes the table.

python docs/make_outliers.py RUNS --cifar10 FOLDER --tiny100 FOLDER

Trains the small recipe for ten epochs on fashion-mini and on a fifth of CIFAR-10 at 16 px (it and Tiny-ImageNet
as parquet files), with three seeds, into RUNS; what is there already is used. Takes about 15 minutes of one core.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from sklearn.metrics import roc_auc_score
from torch import Tensor

import didicm
from didicm.data import ImageSet, open_data
from didicm.evaluation.outliers import fit_outliers
from didicm.evaluation.stored import StoredModel, open_model
from didicm.files import to_json, write_files
from didicm.settings import load_recipe
from didicm.values import override

FOLDER = Path(__file__).parent / "results" / "outliers"
SEEDS, METHODS = (0, 1, 2), ("diffusion", "standard")
MOST = 1000  # images of each kind
NEIGHBOURS = 10


def main() -> None:
    """Train what is missing, measure, and store the numbers of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("runs", "--cifar10", "--tiny100"):
        parser.add_argument(name, type=Path, **({"required": True} if name.startswith("-") else {}))
    places = parser.parse_args()
    cifar = f"hf://{places.cifar10}"
    sets = {
        "fashion": ("fashion-mini", {}, "CIFAR-10 in grey", cifar),
        "cifar": (cifar, {"fraction": 0.2, "image.size": 16}, "Tiny-ImageNet", f"hf://{places.tiny100}"),
    }
    for name, (data, settings, foreign, uri) in sets.items():
        for method in METHODS:
            for seed in SEEDS:
                out = places.runs / f"{name}-{method}-{seed}"
                model = open_model(trained(out, method, seed, {**settings, "data": data}))
                own = some(open_data(data, channels=model.transform.channels).val)
                others = {foreign: some(open_data(uri, channels=model.transform.channels).val)}
                found = measure(model, own, others | made(own, seed), seed)
                told = {"data": name, "method": method, "seed": seed, "auroc": found}
                write_files(FOLDER, {f"{out.name}.json": to_json(told)})
                print(json.dumps(told))


def trained(out: Path, method: str, seed: int, settings: dict[str, object]) -> Path:
    """The model of a quick training, unless that is done; best/ was chosen by the images that are measured on."""
    if not (out / "last").is_dir():
        asked = {"epochs": 10, "run.validate_epochs": 10, **settings, "seed": seed, "out": str(out)}
        didicm.train(override(load_recipe("small", method), asked))
    return out / "last"


def some(images: ImageSet | None) -> list[Image.Image]:
    """At most so many images, evenly spaced."""
    assert images is not None
    return [images.load(int(i)) for i in np.linspace(0, len(images) - 1, min(MOST, len(images)))]


def made(own: list[Image.Image], seed: int) -> dict[str, list[Image.Image]]:
    """Images that no camera took, and those of the data themselves, corrupted."""
    random, shape = np.random.default_rng(seed), np.asarray(own[0]).shape
    colours = random.integers(0, 256, (200, *shape[2:]), dtype=np.uint8)
    blur = ImageFilter.GaussianBlur(0.1 * min(own[0].size))
    return {
        "noise": [Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)) for _ in range(200)],
        "one colour": [Image.fromarray(np.broadcast_to(colour, shape).copy()) for colour in colours],
        "black (one image)": [Image.fromarray(np.zeros(shape, dtype=np.uint8))],
        "inverted": [Image.fromarray(255 - np.asarray(image)) for image in own],
        "blurred": [image.filter(blur) for image in own],
    }


def measure(
    model: StoredModel, own: list[Image.Image], foreign: dict[str, list[Image.Image]], seed: int
) -> dict[str, dict[str, float]]:
    """AUROC by score and kind of foreign images; half of the own images are for the fit, the others compared."""
    order = np.random.default_rng(seed).permutation(len(own))
    fit, rest = np.split(order, 2)
    features = ask(model, [own[i] for i in fit])[0]
    rule = fit_outliers(features, features)
    assert rule is not None

    def whitened(features: Tensor) -> Tensor:
        """Features in which the covariance of the held-out images is the identity."""
        return (features.double() - rule.center.double()) @ rule.whiten.double()

    near = whitened(features)

    def scores(images: list[Image.Image]) -> dict[str, Tensor]:
        features, probs, outputs = ask(model, images)
        answers = outputs.softmax(-1)
        distances = torch.cdist(whitened(features), near)
        return {
            "distance from the mean (used)": rule.scores(features),
            f"distance from neighbour {NEIGHBOURS}": distances.topk(NEIGHBOURS, largest=False).values[:, -1],
            "energy": -outputs.logsumexp(-1).mean(1),
            "entropy": entropy(probs),
            "1 - largest probability": 1 - probs.amax(1),
            # What a step's answer says of which step it was: the answers' divergence from their mean
            **(
                {"disagreement of the steps": entropy(answers.mean(1)) - entropy(answers).mean(1)}
                if answers.shape[1] > 1
                else {}
            ),
        }

    like = scores([own[i] for i in rest])
    seen = {kind: scores([x[i] for i in rest] if len(x) == len(own) else x) for kind, x in foreign.items()}
    return {name: {kind: round(auroc(like[name], x[name]), 4) for kind, x in seen.items()} for name in like}


def ask(model: StoredModel, images: list[Image.Image]) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, D), probabilities (N, K), and the logits of each network call (N, calls, K)."""
    found, calls, outputs = [], [], []
    layer = model.classifier.model.get_submodule("fc")  # its outputs are logits of the posterior, by this recipe
    with torch.no_grad(), layer.register_forward_hook(lambda _, __, logits: calls.append(logits)):
        for start in range(0, len(images), 100):
            batch = torch.stack([model.transform(image) for image in images[start : start + 100]])
            found.append(model.classifier.posterior(batch))
            outputs.append(torch.stack(calls, 1))
            calls.clear()
    features = torch.cat([x.features for x in found if x.features is not None])
    return features, torch.cat([x.probs for x in found]).double(), torch.cat(outputs).double()


def entropy(probs: Tensor) -> Tensor:
    """In nats, of the last axis."""
    return torch.special.entr(probs).sum(-1)


def auroc(like: Tensor, foreign: Tensor) -> float:
    """Chance that a foreign image has the higher score; of equal ones, half."""
    is_foreign = np.repeat([0, 1], [len(like), len(foreign)])
    return float(roc_auc_score(is_foreign, torch.cat([like, foreign]).numpy()))


if __name__ == "__main__":
    main()

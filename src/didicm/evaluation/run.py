"""THE loop over a data set: a classifier's posteriors of labelled images, by one or several samplers at once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from didicm.classifier import Classifier
from didicm.data import Corruptions, EvalTransform, ImageSet, make_loader
from didicm.errors import UserError

Samplers = Mapping[str, Mapping[str, Any]]  # by name: the fields of `Sampler` that each changes
OWN: Samplers = {"": {}}  # the classifier's own sampler


@dataclass(frozen=True)
class Evaluation:
    """What a classifier said about N labelled images, and what it cost."""

    probs: dict[str, Tensor]  # by sampler, (N, K)
    labels: Tensor  # (N,)
    image_names: list[str]  # N
    skipped: list[str]  # images that could not be read, each with the reason
    nfe: dict[str, float]  # by sampler, network calls per image, on average where an early stop saves some
    images_per_second: dict[str, float]  # by sampler, without reading the images
    kept: Tensor  # (n,): rows of the images that were kept to look at
    kept_images: Tensor  # (n, C, H, W), as the network sees them


@dataclass(frozen=True)
class Batch:
    """What one batch of the loop gave, on the CPU."""

    label: Tensor  # (B,)
    index: Tensor  # (B,), in the data set
    probs: dict[str, Tensor]  # by sampler, (B, K)
    nfe: dict[str, float]
    seconds: dict[str, float]
    skipped: list[str]  # all that could not be read so far, each with the reason


@torch.no_grad()
def stream(
    classifier: Classifier,
    images: ImageSet,
    transform: EvalTransform,
    samplers: Samplers = OWN,
    *,
    corruption: Corruptions | str | None = None,
    batch_size: int = 64,
    workers: int = 0,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[Tensor, Batch]]:
    """Images (B, C, H, W) and their posteriors, batch by batch, on the device where the classifier is.

    Args:
        classifier: what is asked.
        images: labelled images; their classes are numbered as the classifier's.
        transform: what the classifier sees of them.
        samplers: by name, the settings of the classifier's sampler to change; each image is decoded once for all.
        corruption: applied to every image before the transform, such as noise:3.
        batch_size: changes the speed, not the result.
        workers: processes that decode images.
        seed: decides what is random in the corruption.
        rank: this process, of `world_size`; each takes its share of the images.
        world_size: number of processes.
        autocast: the precision to run the network in.
    """
    device = next(classifier.parameters()).device
    loader = make_loader(
        images,
        transform,
        batch_size,
        train=False,
        seed=seed,
        workers=workers,
        corruption=Corruptions.parse(corruption) if isinstance(corruption, str) else corruption,
        rank=rank,
        world_size=world_size,
        device=device,
    )
    classifier.eval()
    for image, label in loader:
        probs, nfe, seconds = {}, {}, {}
        for name, settings in samplers.items():
            begun = time.perf_counter()
            with autocast():
                posterior = classifier.posterior(image, **settings)
            probs[name] = posterior.probs.float().cpu()  # the copy waits for a GPU
            nfe[name] = posterior.nfe if posterior.calls is None else posterior.calls.double().mean().item()
            seconds[name] = time.perf_counter() - begun
        skipped = [skip.reason for skip in loader.skipped]
        yield image, Batch(label.cpu(), loader.index, probs, nfe, seconds, skipped)


def evaluate(
    classifier: Classifier,
    images: ImageSet,
    transform: EvalTransform,
    samplers: Samplers | None = None,
    *,
    keep: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **loading: Any,
) -> Evaluation:
    """Posteriors of a whole set; `keep` so many evenly spaced images to look at.

    `progress` is called with the number of images done and to do; `loading` are the options of `stream`.
    """
    samplers = samplers or OWN
    wanted = torch.linspace(0, len(images) - 1, min(keep, len(images))).long()
    batches: list[Batch] = []
    kept_images: list[Tensor] = []
    done = 0
    for image, batch in stream(classifier, images, transform, samplers, **loading):
        batches.append(batch)
        kept_images.append(image[torch.isin(batch.index, wanted)].cpu())
        done += len(batch.label)
        if progress is not None:
            progress(done + len(batch.skipped), len(images))
    if not batches:
        raise UserError(f"none of the {len(images)} images can be read: look at them with didicm doctor")
    index = torch.cat([batch.index for batch in batches])
    timed = batches[1:] or batches  # the first batch also warms up
    count = sum(len(batch.label) for batch in timed)
    return Evaluation(
        probs={name: torch.cat([batch.probs[name] for batch in batches]) for name in samplers},
        labels=torch.cat([batch.label for batch in batches]),
        image_names=[images.name(i) for i in index.tolist()],
        skipped=batches[-1].skipped,
        nfe={name: _mean([(batch.nfe[name], len(batch.label)) for batch in batches]) for name in samplers},
        images_per_second={name: count / sum(batch.seconds[name] for batch in timed) for name in samplers},
        kept=torch.isin(index, wanted).nonzero().squeeze(1),
        kept_images=torch.cat(kept_images),
    )


def _mean(values: Sequence[tuple[float, int]]) -> float:
    """Mean of values with their counts; what they all agree on stays as it is, a whole number too."""
    first = values[0][0]
    if all(value == first for value, _ in values):
        return first
    return sum(value * count for value, count in values) / sum(count for _, count in values)

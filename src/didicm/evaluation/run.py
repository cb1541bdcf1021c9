"""THE loop over a data set: a classifier's posteriors of labelled images, by one or several samplers at once."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
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
    groups: np.ndarray | None  # (N,), as in `ImageSet`
    image_names: list[str]  # N
    skipped: list[str]  # images that this process could not read, each with the reason
    nfe: dict[str, float]  # by sampler, network calls per image, on average where an early stop saves some
    images_per_second: dict[str, float]  # by sampler, in this process, without reading the images
    kept: Tensor  # (n,): rows of the images that were kept to look at
    kept_images: Tensor  # (n, C, H, W), as the network sees them
    features: Tensor | None = None  # (N, D), what the network found in each image, if that was asked for


@dataclass(frozen=True)
class Batch:
    """What one batch of the loop gave, on the CPU."""

    label: Tensor  # (B,)
    index: Tensor  # (B,), in the data set
    probs: dict[str, Tensor]  # by sampler, (B, K)
    nfe: dict[str, float]
    seconds: dict[str, float]
    skipped: list[str]  # all that could not be read so far, each with the reason
    features: Tensor  # (B, D), what the network found in the images, whatever the sampler


@torch.no_grad()
def stream(
    classifier: Classifier,
    images: ImageSet,
    transform: EvalTransform,
    samplers: Samplers = OWN,
    *,
    corruption: Corruptions | str | Sequence[Corruptions | None] | None = None,
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
        corruption: of every image, such as noise:3. Under several, each image is decoded once and its rows follow
            one another; `evaluate` takes one.
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
            nfe[name] = posterior.nfe if posterior.calls is None else fmean(posterior.calls.tolist())
            seconds[name] = time.perf_counter() - begun
        skipped = list(loader.skipped.values())
        found = posterior.probs if posterior.features is None else posterior.features
        yield image, Batch(label.cpu(), loader.index, probs, nfe, seconds, skipped, found.cpu())


@dataclass(frozen=True)
class Scratch:
    """A folder that takes posteriors as files mapped into memory, of which the system keeps as much as it can.

    The processes of a machine fill them together, each with its share of the images; then all see all.
    """

    folder: Path | None  # None for tables in memory
    barrier: Callable[[], object] = lambda: None  # waits for the other processes

    def table(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A table of zeros, or what another process has already put there."""
        if self.folder is None:
            return torch.zeros(*shape, dtype=dtype)
        path = str(self.folder / name)
        return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(*shape)


IN_MEMORY = Scratch(None)


def evaluate(
    classifier: Classifier,
    images: ImageSet,
    transform: EvalTransform,
    samplers: Samplers | None = None,
    *,
    keep: int = 0,
    features: bool = False,
    scratch: Scratch = IN_MEMORY,
    progress: Callable[[int, int], None] | None = None,
    **loading: Any,
) -> Evaluation:
    """Posteriors of a whole set, or of this process's share; `keep` so many evenly spaced images to look at.

    With a new `scratch` folder the posteriors lie there and not in memory, and those of all processes are joined.
    `features` keeps those of the images in memory, for a process that sees all of them.
    `progress` is called with the number of images done and to do; `loading` are the options of `stream`.
    """
    samplers, count = samplers or OWN, len(images)
    wanted = torch.linspace(0, count - 1, min(keep, count)).long()
    table = scratch.table
    probs = {name: table(f"probs-{i}", (count, classifier.num_classes)) for i, name in enumerate(samplers)}
    calls = {name: table(f"calls-{i}", (count,), torch.float64) for i, name in enumerate(samplers)}
    seen = table("seen", (count,), torch.uint8)
    shown = table("images", (len(wanted), transform.channels, transform.size, transform.size)) if keep else None
    found: list[Tensor] = []
    timed: list[tuple[int, dict[str, float]]] = []
    skipped: list[str] = []
    for image, batch in stream(classifier, images, transform, samplers, **loading):
        for name in samplers:
            probs[name][batch.index], calls[name][batch.index] = batch.probs[name], batch.nfe[name]
        seen[batch.index] = 1
        if features:
            found.append(batch.features)
        if shown is not None:
            mine = torch.isin(batch.index, wanted)
            shown[torch.searchsorted(wanted, batch.index[mine])] = image[mine].cpu()
        timed.append((len(batch.index), batch.seconds))
        skipped = batch.skipped
        if progress is not None:
            progress(sum(n for n, _ in timed) + len(skipped), count)
    scratch.barrier()
    index = seen.nonzero().squeeze(1)
    if not len(index):
        raise UserError("no image can be read: look at them with didicm doctor")
    if len(index) < count:
        # One by one, and into files again if there are any: all processes write the same numbers there.
        for i, (name, x) in enumerate(probs.items()):
            probs[name] = table(f"read-{i}", (len(index), classifier.num_classes)).copy_(x[index])
    timed = timed[1:] or timed  # the first batch also warms up
    return Evaluation(
        probs=probs,
        labels=torch.as_tensor(images.labels)[index].long(),
        groups=None if images.groups is None else images.groups[index.numpy()],
        image_names=[images.name(i) for i in index.tolist()],
        skipped=skipped,
        nfe={name: _mean(x[index]) for name, x in calls.items()},
        images_per_second={name: _speed(timed, name) for name in samplers},
        kept=torch.isin(index, wanted).nonzero().squeeze(1),
        kept_images=torch.zeros(0) if shown is None else shown[torch.isin(wanted, index)],
        features=torch.cat(found) if features else None,
    )


def _mean(x: Tensor) -> float:
    """Mean of network calls; a number that all images share stays whole."""
    mean = float(x.mean())
    return int(mean) if mean.is_integer() and bool((x == mean).all()) else mean


def _speed(timed: Sequence[tuple[int, dict[str, float]]], name: str) -> float:
    seconds = sum(spent[name] for _, spent in timed)
    return sum(count for count, _ in timed) / seconds if seconds else 0.0

"""From settings to the parts of a run: data, transforms, classifier, and what they cost."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from didicm.classifier import Classifier, DiffusionClassifier, StandardClassifier
from didicm.data import (
    Corruptions,
    Data,
    EvalTransform,
    ImageSet,
    TrainTransform,
    hold_out,
    open_data,
    subset,
    target_distribution,
)
from didicm.diffusion import UniformProcess, schedule_from_dict
from didicm.errors import UserError
from didicm.models import Cost, baseline_name, cost, create_model
from didicm.settings import ImageConfig, TrainConfig

LOOK_AT = 50  # images that are looked at to find their size and colour


@dataclass(frozen=True)
class RunComponents:
    """What a run is made of."""

    train: ImageSet
    val: ImageSet
    view: EvalTransform
    train_transform: TrainTransform
    corrupt_train: Corruptions | None
    corrupt_eval: Corruptions | None
    classifier: Classifier
    class_weight: Tensor | None  # (K,), of mean 1 over the images

    @property
    def class_names(self) -> list[str]:
        """Class names, by label."""
        return self.train.class_names


def build(config: TrainConfig) -> RunComponents:
    """Open the data and make the classifier; a mistake in the settings shows here, before anything is written."""
    if not config.data:
        raise UserError("no data: say where the images are with --data")
    data = open_data(config.data, channels=config.image.channels or 3)
    view = find_view(config.image, data)
    if view.channels != data.train.channels:
        data = open_data(config.data, channels=view.channels)
    data = hold_out(data, config.val_fraction, config.seed)
    train = data.train.select(subset(data.train.labels, config.fraction, config.seed))
    weight = None
    if config.balance == "weights":
        counts = np.bincount(train.labels, minlength=len(train.class_names)).clip(min=1)
        weight = torch.tensor(len(train) / (counts * (counts > 0).sum()), dtype=torch.float32)
    return RunComponents(
        train=train,
        val=data.val,
        view=view,
        train_transform=TrainTransform(config.augment, view),
        corrupt_train=Corruptions.parse(config.corrupt_train) if config.corrupt_train else None,
        corrupt_eval=Corruptions.parse(config.corrupt_eval) if config.corrupt_eval else None,
        classifier=build_classifier(config, len(train.class_names), view.channels),
        class_weight=weight,
    )


def find_view(config: ImageConfig, data: Data) -> EvalTransform:
    """What the network sees; size and colour are found from some images where they are not set."""
    size, channels = config.size, config.channels
    if size is None or channels is None:
        looked = np.linspace(0, len(data.train) - 1, min(LOOK_AT, len(data.train)), dtype=int)
        images = [image for i in looked if (image := _try_open(data.train, int(i))) is not None]
        if not images:
            raise UserError("none of the images looked at can be read: look at them with didicm doctor")
        size = size or min(config.limit, int(np.median([min(image[0]) for image in images])))
        channels = channels or (1 if all(image[1] in ("L", "1", "I;16", "I", "LA") for image in images) else 3)
    # Images that already have the size are shown whole.
    return EvalTransform(size, channels, crop_pct=config.crop_pct, interpolation=config.interpolation)


def build_classifier(config: TrainConfig, num_classes: int, channels: int) -> Classifier:
    """Make the classifier with weights that depend on the seed alone."""
    torch.manual_seed(config.seed)
    arguments = {"num_classes": num_classes, "in_chans": channels, **config.model_args}
    try:
        if config.method == "standard":
            # The same trunk without what only a score network has.
            own = {key: value for key, value in arguments.items() if key not in ("layout", "parameterization")}
            if arguments.get("layout") == "official":
                own.setdefault("stem", "small")
            model = create_model(baseline_name(config.model), **own)
            process = _process(config, num_classes) if config.objective == "marginal" else None
            return StandardClassifier(model, config.objective, process, config.draws_per_image)
        model = create_model(config.model, **arguments)
        process, draws = _process(config, num_classes), config.draws_per_image
        return DiffusionClassifier(model, process, config.sampler, draws, config.label_proposal)
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


def _process(config: TrainConfig, num_classes: int) -> UniformProcess:
    schedule = dict(config.schedule)
    if schedule.get("name") == "log-linear":
        # The default must be near uniform for any number of classes.
        schedule.setdefault("eps", min(1e-3, 1 / num_classes))
    if schedule.get("name") in ("exponential", "log-ratio"):
        schedule.setdefault("num_classes", num_classes)
    return UniformProcess(num_classes, schedule_from_dict(schedule))


@dataclass(frozen=True)
class Estimate:
    """What a run will take."""

    steps_per_epoch: int
    cost: Cost
    weights_mb: float  # weights, gradients, optimiser and averaged weights
    activations_mb: float  # kept for the backward pass of one process's batch


def estimate(config: TrainConfig, parts: RunComponents, world_size: int) -> Estimate:
    """Work out steps, multiply-adds and memory; the activations are measured on two images."""
    model = parts.classifier.model
    price = cost(model, parts.view.size)
    copies = 4 + (config.optimizer.ema is not None)  # weights, gradients, and two moments
    saved: dict[int, int] = {}

    def remember(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    image = torch.randn(2, parts.view.channels, parts.view.size, parts.view.size)
    target = target_distribution(torch.zeros(2, dtype=torch.long), len(parts.class_names))
    parameters = sum(p.numel() * 4 for p in model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x), torch.random.fork_rng():
        parts.classifier.eval().loss(image, target)
    own = {p.untyped_storage().data_ptr() for p in model.state_dict().values()}
    per_image = sum(size for place, size in saved.items() if place not in own) / 2
    batch = config.batch_size / (world_size * config.accumulate)
    steps = len(parts.train) // config.batch_size
    return Estimate(steps, price, copies * parameters / 2**20, batch * per_image / 2**20)


def check_batches(config: TrainConfig, parts: RunComponents, world_size: int) -> int:
    """Images per process and part of a step; the settings must divide evenly."""
    share, rest = divmod(config.batch_size, world_size * config.accumulate)
    if rest or not share:
        raise UserError(
            f"batch_size {config.batch_size} does not split evenly over {world_size} processes and "
            f"{config.accumulate} parts: choose a multiple of {world_size * config.accumulate}"
        )
    if len(parts.train) < config.batch_size:
        raise UserError(
            f"there are {len(parts.train)} training images, fewer than one batch of {config.batch_size}: "
            "lower batch_size or use more images"
        )
    return share


def _try_open(images: ImageSet, i: int) -> tuple[tuple[int, int], str] | None:
    try:
        image = images.original(i)
        return image.size, image.mode
    except Exception:  # a broken file can raise nearly anything; training names and counts it
        return None

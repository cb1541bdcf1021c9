"""From settings to the components of a run: data, transforms, classifier, and what they cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timm.optim import list_optimizers
from torch import Tensor, nn

from didicm.checkpoint import load, load_weights
from didicm.classifier import Classifier, DiffusionClassifier, StandardClassifier
from didicm.data import (
    Corruptions,
    EvalTransform,
    ImageSet,
    TrainTransform,
    find_transform,
    hold_out,
    open_data,
    subset,
    target_distribution,
)
from didicm.data.corruptions import noisy_labels
from didicm.diffusion import UniformProcess, schedule_from_dict
from didicm.errors import UserError, did_you_mean
from didicm.models import Cost, baseline_name, cost, create_model, head_cost
from didicm.models.backbone import Backbone
from didicm.settings import TrainConfig
from didicm.text import count
from didicm.training.devices import check_names, fixed_statistics, is_sharded
from didicm.values import coerce

SCORE_ONLY = ("layout", "parameterization", "noise_embedding")  # arguments that no baseline has
INDEX = "index"  # folder of listings, of a run or of a grid
BACKWARD = 2  # a backward pass takes twice the arithmetic of its forward pass


@dataclass(frozen=True)
class RunComponents:
    """What a run is made of."""

    train: ImageSet
    val: ImageSet
    eval_transform: EvalTransform
    train_transform: TrainTransform
    corrupt_train: Corruptions | None
    corrupt_eval: Corruptions | None
    classifier: Classifier
    class_weight: Tensor | None  # (K,), of mean 1 over the images
    training_prior: dict[str, Any]  # as a checkpoint stores it
    index: Path | None = None  # folder that keeps the listing of large data
    teacher: Classifier | None = None  # whose posteriors are the targets

    @property
    def class_names(self) -> list[str]:
        """Class names, by label."""
        return self.train.class_names


def build(config: TrainConfig, index: Path | None = None, *, fresh: bool = True) -> RunComponents:
    """Open the data and make the classifier; a mistake in the settings shows here, before anything is written.

    `index` is the folder that keeps the listing of large data, by default one in the run's own. A run that is not
    `fresh` has its weights in a stored state, and needs no others.
    """
    if not config.data:
        raise UserError("no data: say where the images are with --data")
    check_settings(config)
    corrupt_train, corrupt_eval = (
        Corruptions.parse(text) if text else None for text in (config.corrupt_train, config.corrupt_eval)
    )
    image = config.image
    if index is None and config.out:
        index = Path(config.out) / INDEX
    data = open_data(
        config.data, labels=config.labels, group_by=config.group_by, channels=image.channels or 3, index=index
    )
    transform = find_transform(data, image.size, image.limit, image.channels, image.crop_pct, image.interpolation)
    teacher = None
    if config.teacher is not None:
        teacher, transform = _open_teacher(config, data.train.class_names, transform)
    data = hold_out(data.with_channels(transform.channels), config.val_fraction, config.image_seed)
    assert data.val is not None
    chosen = subset(data.train.labels, config.fraction, config.image_seed)
    train = data.train.select(chosen)
    if config.label_noise:  # of all, so that a part of them has the same wrong labels
        train.labels = noisy_labels(data.train, config.label_noise, config.image_seed)[chosen]
    weight, images = None, train.class_counts
    if config.balance == "weights":
        counts = images.clip(min=1)
        weight = torch.tensor(len(train) / (counts * (images > 0).sum()), dtype=torch.float32)
    classifier = build_classifier(config, len(train.class_names), transform.channels, fresh=fresh)
    started = any(config.model_args.get(name) for name in ("pretrained", "weights"))
    if isinstance(classifier.model, Backbone) and started and teacher is None:
        transform = replace(transform, **classifier.model.normalization)
    train_transform = TrainTransform(config.augment, transform)
    train_transform.check()
    classifier.views = train_transform.views
    stored = keeps_features(config, classifier)  # or say what hinders it
    if isinstance(classifier, DiffusionClassifier) and config.sampler.views > 1:
        if stored:
            raise UserError("sampler.views needs images, not features: leave it out, or set feature_views 0")
        classifier.resolve()  # or say that there are no views
    if config.run.grad_checkpointing:
        try:
            classifier.model.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AttributeError, AssertionError) as error:  # how those of timm refuse that cannot
            raise UserError("this network does not support run.grad_checkpointing: leave it out") from error
    return RunComponents(
        train=train,
        val=data.val,
        eval_transform=transform,
        train_transform=train_transform,
        corrupt_train=corrupt_train,
        corrupt_eval=corrupt_eval,
        classifier=classifier,
        class_weight=weight,
        training_prior={"images": images.tolist(), "balance": config.balance},
        index=index,
        teacher=teacher,
    )


def _open_teacher(
    config: TrainConfig, class_names: list[str], transform: EvalTransform
) -> tuple[Classifier, EvalTransform]:
    """The classifier whose posteriors are the targets, and how it sees images: its student sees them alike."""
    assert config.teacher is not None
    stored = load(config.teacher)
    if stored.class_names not in (None, class_names) or stored.classifier.num_classes != len(class_names):
        raise UserError(f"teacher {config.teacher} has other classes than --data {config.data}: give one of these")
    if stored.transform is not None:
        transform = EvalTransform.from_dict(stored.transform)
    if config.image.size not in (None, transform.size):
        raise UserError(
            f"image.size is {config.image.size}, but teacher {config.teacher} sees {transform.size} pixels: "
            "leave it out"
        )
    stored.classifier.resolve(**config.teacher_sampler)  # or say what it has not
    return stored.classifier.requires_grad_(False), transform


def build_classifier(config: TrainConfig, num_classes: int, channels: int, *, fresh: bool = True) -> Classifier:
    """Make the classifier with weights that depend on the seed, and if it is `fresh` on what the settings name."""
    torch.manual_seed(config.seed)
    named = {key: x for key, x in config.model_args.items() if fresh or key not in ("pretrained", "weights")}
    arguments = {"num_classes": num_classes, "in_chans": channels, **named}
    try:
        if config.method == "standard":
            # The same trunk without what only a score network has.
            own = {key: value for key, value in arguments.items() if key not in SCORE_ONLY}
            if arguments.get("layout") == "official":
                own.setdefault("stem", "small")
            model = _network(baseline_name(config.model), own)
            process = _process(config, num_classes) if config.objective == "marginal" else None
            return StandardClassifier(model, config.objective, process, config.draws_per_image)
        return DiffusionClassifier(
            _network(config.model, arguments),
            _process(config, num_classes),
            config.sampler,
            config.draws_per_image,
            config.label_proposal,
            config.mask,
        )
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


def _network(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A network, started from `weights` if given: those are no argument of it, so that no model stores them."""
    own = dict(arguments)
    if (weights := own.pop("weights", None)) is None:
        return create_model(name, **own)
    own.pop("pretrained", None)
    model = create_model(name, **own)
    load_weights(model, coerce(weights, str, "model_args.weights"))
    return model


def check_settings(config: TrainConfig) -> None:
    """Refuse what can be refused without data or devices: unknown names, and what does not go together."""
    check_names(config.run)
    for package, wanted in (("tensorboard", config.run.tensorboard), ("wandb", config.run.wandb)):
        if wanted and find_spec(package) is None:
            raise UserError(f"run.{package} needs {package}: pip install 'didicm[{package}]'")
    name = config.optimizer.name.lower()
    # What it needs beside the gradient, no training computes.
    known = [str(optimizer) for optimizer in list_optimizers(exclude_filters=["adahessian"])]
    if name.removeprefix("lookahead_") not in known:
        raise UserError(
            f"optimizer.name {config.optimizer.name!r} is not an optimiser of timm's: {did_you_mean(name, known)}"
        )
    if config.optimizer.scale_lr and config.fraction > 1:
        raise UserError("optimizer.scale_lr needs fraction as a part of the images, not as a number of them")
    averages = [name for name in ("ema", "swa") if getattr(config.optimizer, name) is not None]
    if len(averages) > 1:
        raise UserError("optimizer.swa averages weights in place of optimizer.ema: set optimizer.ema none")
    if averages and is_sharded(config.run):
        raise UserError(
            f"optimizer.{averages[0]} does not work with fsdp, which splits the weights: leave one of them out"
        )
    if config.optimizer.swa is not None and config.optimizer.snapshots:
        raise UserError("optimizer.swa and optimizer.snapshots have schedules of their own: leave one of them out")
    if (cycles := config.optimizer.snapshots) and config.epochs % cycles:
        raise UserError(f"optimizer.snapshots {cycles} needs equal cycles: make epochs a multiple of {cycles}")


def keeps_features(config: TrainConfig, classifier: Classifier) -> bool:
    """Whether the head is trained on features that are computed once, which cannot be mixed as images are."""
    network = classifier.model
    if not (isinstance(network, Backbone) and network.frozen and config.feature_views):
        return False
    if config.teacher is not None:
        raise UserError("a teacher looks at images, not at features: set feature_views 0")
    if config.augment.mixup or config.augment.cutmix:
        raise UserError("mixup and cutmix mix images, not features: leave them out, or set feature_views 0")
    return True


def small_batch(images: int) -> int:
    """A batch for few training images: a power of two that makes four steps or more of an epoch."""
    return 1 << max(1, (images // 4).bit_length() - 1)


def check_batches(config: TrainConfig, components: RunComponents, world_size: int) -> int:
    """Images per process and part of a step; refuses what does not go together with so many processes."""
    share, rest = divmod(config.batch_size, world_size * config.accumulate)
    if rest or not share:
        raise UserError(
            f"batch_size {config.batch_size} does not split evenly over {count(world_size, 'process')} and "
            f"{count(config.accumulate, 'part')}: choose a multiple of {world_size * config.accumulate}"
        )
    if len(components.train) < config.batch_size:
        raise UserError(
            f"there are {len(components.train)} training images, fewer than one batch of {config.batch_size}: "
            f"lower batch_size, such as to {small_batch(len(components.train))}, or use more images"
        )
    network = components.classifier.model
    if share == 1 and isinstance(network, Backbone) and network.standardized:
        raise UserError(
            "features are standardised over a batch, and here each has a single image: raise batch_size, or set "
            "model_args.standardize to false"
        )
    if world_size > 1 and keeps_features(config, components.classifier):
        raise UserError("feature_views is for one process: set run.devices 1, or feature_views 0")
    return share


def count_feature_views(config: TrainConfig, components: RunComponents) -> int:
    """Views of every training image whose features are kept: one if all would be alike."""
    varied = components.train_transform.varies or components.corrupt_train is not None
    return config.feature_views if varied else 1


def training_multiply_adds(config: TrainConfig, components: RunComponents, price: Cost) -> int:
    """Multiply-adds of a whole training, forward and backward: an image is encoded, and called once per draw.

    A frozen backbone has no backward pass, and where its features are kept, only one forward pass per view.
    """
    network = components.classifier.model
    draws = config.draws_per_image if isinstance(components.classifier, DiffusionClassifier) else 1
    images = config.epochs * (len(components.train) // config.batch_size) * config.batch_size
    if not (isinstance(network, Backbone) and network.frozen):
        return (1 + BACKWARD) * price.total(draws) * images
    head, encoded = head_cost(network), images
    if keeps_features(config, components.classifier):
        encoded = count_feature_views(config, components) * len(components.train)
    return (price.per_image - head.per_image) * encoded + (1 + BACKWARD) * head.total(draws) * images


@dataclass(frozen=True)
class TrainingCost:
    """What a training will take."""

    steps_per_epoch: int
    cost: Cost
    weights_mb: float  # weights, gradients, optimiser and averaged weights, and the copy to go back to
    activations_mb: float  # kept for the backward pass of one process's batch


def estimate(config: TrainConfig, components: RunComponents, world_size: int, *, gpu: bool) -> TrainingCost:
    """Work out steps, multiply-adds and memory per process."""
    model, size = components.classifier.model, components.eval_transform.size
    averaged = config.optimizer.ema is not None or config.optimizer.swa is not None
    copies = 4 + averaged  # weights, gradients, and two moments
    if gpu and config.run.precision != "16-mixed":
        copies += copies - 1  # `Steps` keeps one of all but the gradients, unless float16 has every step read
    per_image = _saved_bytes(components, 3) - _saved_bytes(components, 2)  # the weights cancel
    if config.run.precision.endswith("-mixed"):
        per_image //= 2  # all but a few per cent of it is kept in half precision
    return TrainingCost(
        steps_per_epoch=len(components.train) // config.batch_size,
        cost=cost(model, size),
        weights_mb=copies * sum(p.numel() * 4 for p in model.parameters()) / 2**20,
        activations_mb=config.batch_size / (world_size * config.accumulate) * per_image / 2**20,
    )


def _saved_bytes(components: RunComponents, images: int) -> int:
    """Bytes kept in float32 for the backward pass of some images."""
    saved: dict[int, int] = {}

    def remember(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    size, channels = components.eval_transform.size, components.eval_transform.channels
    image = torch.randn(images, channels, size, size)
    target = target_distribution(torch.zeros(images, dtype=torch.long), len(components.class_names))
    hooks = torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x)
    with hooks, torch.random.fork_rng(), fixed_statistics(components.classifier.model):
        components.classifier.train().loss(image, target)
    return sum(saved.values())


def _process(config: TrainConfig, num_classes: int) -> UniformProcess:
    schedule = dict(config.schedule)
    if schedule.get("name") == "log-linear":
        # The default must be near uniform for any number of classes.
        schedule.setdefault("eps", min(1e-3, 1 / num_classes))
    if schedule.get("name") in ("exponential", "log-ratio"):
        schedule.setdefault("num_classes", num_classes)
    return UniformProcess(num_classes, schedule_from_dict(schedule))

"""Options and words that several commands share."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Column

from didicm.errors import UserError
from didicm.inference.onnx import SUFFIX, OnnxPredictor
from didicm.inference.prediction import BasePredictor
from didicm.processes import usable_cores
from didicm.progress import ProgressDisplay
from didicm.text import quoted
from didicm.values import Count, Pixels, Range, Workers

if TYPE_CHECKING:  # they need PyTorch, and exported models do without
    from didicm.data import Corruptions
    from didicm.evaluation.stored import StoredModel

WORKERS = min(4, usable_cores())


@dataclass(frozen=True)
class ModelOptions:
    """Which model is asked, and how.

    Args:
        run: a run (its best model), a model directory, or hf://owner/name
        sampler: how the posterior is sampled, as in --sampler.steps 2; by default as stored with the model
        size: input size in pixels; by default as stored with the model
        device: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one
        batch_size: changes the speed, not the result
        calibration: use the calibration stored with the model; --no-calibration leaves it out
        optimize: fold batch norms and, on a CPU, use Winograd's convolutions: the same answers faster
        compile: optimize, and compile the network, which takes a minute or two first
    """

    run: str
    sampler: Mapping[str, Any] = field(default_factory=dict)
    size: Pixels | None = None
    device: str = "auto"
    batch_size: Annotated[int, Range(1, 1_000_000)] = 64
    calibration: bool = True
    optimize: bool = False
    compile: bool = False

    def load(self, **asked: Any) -> BasePredictor:
        """The model ready for use, an exported one without PyTorch; `asked` is what both kinds can be asked."""
        if self.run.endswith(SUFFIX):
            if self.sampler or self.size or self.optimize or self.compile or not self.calibration:
                named = "--sampler, --size, --optimize, --compile and --no-calibration"
                raise UserError(f"{self.run} answers as it was exported: leave out {named}")
            return OnnxPredictor.load(self.run, self.device, **asked)
        from didicm.classifier import Sampler
        from didicm.inference.predictor import Predictor

        # They are given to `load` beside names of its own; `members` is for ensembles.
        Sampler.check_names(name for name in self.sampler if name != "members")
        asked |= {"calibrated": self.calibration, "optimize": self.optimize, "compile": self.compile}
        return Predictor.load(self.run, self.device, size=self.size, **asked, **self.sampler)


@dataclass(frozen=True)
class LabelledOptions(ModelOptions):
    """Options of all commands that ask a stored model about labelled images.

    Args:
        force: replace files that this command did not make
        data: where the images are, as for didicm train
        split: val or train; by default val, or all images if there is none
        labels: a table with the labels of the images in a folder, as for didicm train; by default as in training
        group_by: a column or a regular expression, as for didicm train; by default as in training
        corruption: applied to the images first: noise:3, blur:2+jpeg:4, ...
        workers: processes that decode images
        seed: seed of corruptions, splits and intervals
    """

    force: bool = False
    data: str = field(kw_only=True)
    split: Literal["val", "train"] | None = None
    labels: str | None = None
    group_by: str | None = None
    corruption: str | None = None
    workers: Workers = WORKERS
    seed: Count = 0

    def open(self) -> "StoredModel":
        """Load the model."""
        from didicm.evaluation.stored import open_model
        from didicm.inference.predictor import optimized

        model = open_model(self.run, device=self.device, size=self.size, sampler=self.sampler)
        return optimized(model, compile=self.compile) if self.optimize or self.compile else model

    def parsed_corruption(self) -> "Corruptions | None":
        """The corruption, checked."""
        from didicm.data import Corruptions

        return None if self.corruption is None else Corruptions.parse(self.corruption)

    @contextmanager
    def loading(self, console: Console) -> Iterator[dict[str, Any]]:
        """How images are loaded, with a display of progress."""
        with ProgressDisplay(console, 1) as display:
            yield {
                "corruption": self.parsed_corruption(),
                "seed": self.seed,
                "batch_size": self.batch_size,
                "workers": self.workers,
                "progress": lambda done, total: display.update(done, f"{done}/{total} images", total=total),
            }


def hint_corruption(model: "StoredModel", corruption: str | None, console: Console) -> None:
    """Remind of what training validated on."""
    trained = model.training
    if trained is not None and trained.corrupt_eval and corruption is None:
        same = f"--corruption {quoted(trained.corrupt_eval)}"
        console.print(f"note: training validated on corrupted images: {same} does the same")


def right(*headers: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(header, justify="right") for header in headers]


def percent(value: float) -> str:
    """A share, to a tenth of a per cent."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"

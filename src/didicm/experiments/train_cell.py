"""The training of one cell: in this process, or in several that torchrun starts."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np

from didicm.data import ArraySet, ImageSet, UnreadableImageError, stratified_split
from didicm.data.memory import is_small
from didicm.errors import UserError
from didicm.files import write_files
from didicm.settings import TrainConfig, flatten, override
from didicm.training.build import RunComponents, build, check_batches
from didicm.training.devices import make_fabric
from didicm.training.loop import BEST, STATE, Training
from didicm.training.state import has_state

DONE, CELL = "trained.json", "cell.json"

OnStep = Callable[[float], None]  # is told the share of the training that is done


class _Watched(Training):
    """A training that tells how far it is."""

    on_step: OnStep = staticmethod(lambda share: None)

    def _steps(self) -> Iterator[dict[str, float]]:
        for numbers in super()._steps():
            yield numbers
            self.on_step(self.position.step / self.total_steps)


def prepare(config: TrainConfig, held_out: float) -> tuple[RunComponents, ImageSet]:
    """RunComponents whose validation images are cut from the training images, and the test images.

    So nothing is ever chosen or fitted on test images, whether or not the data has a split of its own for them.
    """
    parts = build(config)
    test = parts.val
    if held_out:
        kept, held = stratified_split(parts.train.labels, held_out, config.seed)
        parts = replace(parts, train=parts.train.select(kept), val=parts.train.select(held))
    check_batches(config, parts, 1)
    return parts, test


def shrink(parts: RunComponents, test: ImageSet) -> tuple[RunComponents, ImageSet]:
    """Resize small sets once and not in every epoch, where that gives the very same pixels."""
    view, size = parts.view, (parts.view.size, parts.view.size)
    if parts.corrupt_train or parts.corrupt_eval or not parts.train_transform.keeps(size):
        return parts, test

    def resize(images: ImageSet) -> ImageSet:
        if not is_small(images):
            return images
        try:
            resized = [np.asarray(view.prepare(images.load(i))) for i in range(len(images))]
        except UnreadableImageError:
            return images  # the loader knows what to do about those
        return ArraySet(
            np.stack(resized), images.labels, images.class_names, channels=view.channels, origin=images
        )

    return replace(parts, train=resize(parts.train), val=resize(parts.val)), resize(test)


def train_cell(config: TrainConfig, held_out: float, parts: RunComponents, on_step: OnStep) -> float | None:
    """Train or resume a cell, unless it is trained; seconds, unless it was resumed."""
    folder = Path(config.out)
    if (folder / DONE).exists():
        return json.loads((folder / DONE).read_text(encoding="utf-8"))["seconds"]
    resumed = has_state(folder / STATE)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    if config.run.devices == 1:
        with open(folder / "train.log", "a", encoding="utf-8") as log, redirect_stdout(log):
            _train(config, parts, on_step)
    else:
        _train_in_processes(config, held_out, on_step)
    seconds = None if resumed else time.monotonic() - begun
    write_files(folder, {DONE: lambda path: path.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")})
    for name in (STATE, BEST):  # what only a resumed training needs; the trained model stays
        shutil.rmtree(folder / name, ignore_errors=True)
    return seconds


def _train(config: TrainConfig, parts: RunComponents, on_step: OnStep) -> None:
    fabric = make_fabric(config.run)
    fabric.launch()
    training = _Watched(config, parts, fabric)
    training.on_step = on_step
    training.run()


def _train_in_processes(config: TrainConfig, held_out: float, on_step: OnStep) -> None:
    """One process a device; the first prints how far it is."""
    folder = Path(config.out)
    (folder / CELL).write_text(json.dumps(flatten(config)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={config.run.devices}", "-m", __spec__.name, str(folder), str(held_out)]
    last: deque[str] = deque(maxlen=20)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            with open(folder / "train.log", "a", encoding="utf-8") as log:
                for line in process.stdout:
                    if line.startswith("share "):
                        on_step(float(line.split()[1]))
                    else:
                        log.write(line)
                        last.append(line)
        except BaseException:
            process.terminate()  # torchrun passes it on: the training is saved
            raise
    if process.returncode:
        told = next((line for line in last if line.startswith("didicm: ")), "").removeprefix("didicm: ").strip()
        raise UserError(told or f"the training failed: see {folder / 'train.log'}")


def main(folder: Path, held_out: float) -> int:
    """One of several processes that train a cell."""
    config = override(TrainConfig(), json.loads((folder / CELL).read_text(encoding="utf-8")))
    try:
        parts, test = prepare(config, held_out)
        _train(config, shrink(parts, test)[0], _print_share)
    except UserError as error:
        print(f"didicm: {error}", flush=True)
        return 2
    return 0


def _print_share(share: float) -> None:
    if os.environ["RANK"] == "0":
        print(f"share {share:.5f}", flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))

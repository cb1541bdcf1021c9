"""CIFAR-10 with labels that people gave, as a folder of images and tables of labels: the data of study labels-cpu.

python -m benchmarks.cifar10n --images cifar10 --labels cifar10n.npz --out cifar10n
didicm study labels-cpu --data cifar10n

`--images` is a folder with train.parquet and test.parquet: columns image (or img) and label, the label with
class names, as in the files of uoft-cs/cifar10 on the hub. `--labels` is a NumPy file with one array of class
numbers per set of labels, in the order of the training images: `clean`, which is compared with theirs, and any
others, such as `aggre`, `random1` and `worse` of CIFAR-10N (Wei et al. 2022, noisylabels.com; CC BY-NC 4.0, not
commercial). Each becomes a table NAME.csv with columns path, label and split; test images keep their labels in
all of them.
"""

import argparse
import csv
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from datasets import Features

from didicm.errors import UserError
from didicm.files import write_files

CLEAN = "clean"


def convert(images: Path, labels: Path, out: Path) -> dict[str, float]:
    """Write images and tables to `out`; the share of wrong training labels by table."""
    stored = np.load(labels, allow_pickle=False)
    given = {name: values for name, values in stored.items() if values.dtype == np.uint8}
    if CLEAN not in given:
        only = ", ".join(given) or "none of 8-bit class numbers"
        raise UserError(f"{labels} has no array {CLEAN!r}, only {only}")
    splits = {split: pq.read_table(images / f"{split}.parquet") for split in ("train", "test")}
    names = Features.from_arrow_schema(splits["train"].schema)["label"].names
    truth = {split: table["label"].to_numpy() for split, table in splits.items()}
    for name, values in given.items():
        if values.shape != truth["train"].shape or values.max() >= len(names):
            raise UserError(f"{name} in {labels} has not one class number per row of {images / 'train.parquet'}")
    if (given[CLEAN] != truth["train"]).any():
        raise UserError(f"{CLEAN} in {labels} are not the labels of {images / 'train.parquet'}: another order?")
    paths = {}
    for split, table in splits.items():
        paths[split] = [f"images/{split}-{i:05}.png" for i in range(len(table))]
        (out / "images").mkdir(parents=True, exist_ok=True)
        column = "image" if "image" in table.column_names else "img"  # the hub's name
        for path, image in zip(paths[split], table[column].to_pylist(), strict=True):
            (out / path).write_bytes(image["bytes"])
    for name, values in given.items():  # last: without tables nobody takes the images for whole
        rows = [(path, names[k], "train") for path, k in zip(paths["train"], values, strict=True)]
        rows += [(path, names[k], "test") for path, k in zip(paths["test"], truth["test"], strict=True)]
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows([("path", "label", "split"), *rows])
        write_files(out, {f"{name}.csv": text.getvalue()})
    return {name: float((values != given[CLEAN]).mean()) for name, values in given.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("images", "labels", "out"):
        parser.add_argument(f"--{option}", type=Path, required=True)
    for name, wrong in convert(**vars(parser.parse_args())).items():
        print(f"{name}.csv: {100 * wrong:.0f} % of the training labels are wrong")

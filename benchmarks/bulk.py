"""Bulk prediction of 2,000 JPEGs of 500 x 375 against the loop that one would write by hand.

All decode with the same number of workers. They take turns on parts of the images, and the best time that each had
for a part counts: on a shared machine noise only ever slows down.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.loading import write_images
from benchmarks.measure import Result
from didicm import DiffusionClassifier, Predictor, create_model, predict, save
from didicm.data import EvalTransform
from didicm.inference.bulk import BulkSettings

IMAGES, PARTS, ROUNDS, SIZE, BATCH, WORKERS = 2000, 4, 3, 112, 64, 2
Contender = Callable[[Sequence[str]], object]


def run() -> list[Result]:
    torch.manual_seed(0)
    classifier = DiffusionClassifier(create_model("backbone_score", backbone="resnet18")).eval()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images", IMAGES)
        files = sorted(map(str, (Path(folder) / "images").rglob("*.jpg")))
        model = save(classifier, Path(folder) / "model", transform=EvalTransform(SIZE).to_dict())
        seconds = _best_times(
            {
                "ours": _ours(Predictor.load(model), Path(folder)),
                "loop": _by_hand(classifier),
                "timm": _by_hand(nn.Sequential(timm.create_model("resnet18").eval(), nn.Softmax(-1))),
            },
            [files[k::PARTS] for k in range(PARTS)],
        )
    against_loop, against_timm = seconds["loop"] / seconds["ours"], seconds["ours"] / seconds["timm"]
    return [
        Result("predict --out, against the same network in a loop by hand", against_loop, "x faster", 1.0),
        Result("8 steps, against timm's ResNet-18 in that loop", against_timm, "x the time", 1.3, at_least=False),
    ]


def _best_times(contenders: dict[str, Contender], parts: Sequence[Sequence[str]]) -> dict[str, float]:
    best = {name: [float("inf")] * len(parts) for name in contenders}
    for _ in range(ROUNDS):
        for k, files in enumerate(parts):
            for name, contender in contenders.items():
                begun = time.perf_counter()
                contender(files)
                best[name][k] = min(best[name][k], time.perf_counter() - begun)
    return {name: sum(times) for name, times in best.items()}


def _ours(predictor: Predictor, folder: Path) -> Contender:
    settings = BulkSettings(batch_size=BATCH, workers=WORKERS)

    def contender(files: Sequence[str]) -> None:
        predict(predictor, files, folder / "rows.parquet", settings=settings)
        (folder / "rows.parquet").unlink()

    return contender


def _by_hand(network: nn.Module) -> Contender:
    """Images to the five most probable classes, as anybody would write it; nothing is stored."""

    @torch.inference_mode()
    def contender(files: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        loader = DataLoader(Files(files), batch_size=BATCH, num_workers=WORKERS)
        return [tuple(network(image).topk(5)) for image in loader]

    return contender


class Files(Dataset[Tensor]):
    def __init__(self, files: Sequence[str]) -> None:
        self.files = files
        self.transform = transforms.Compose([
            transforms.Resize(int(SIZE / 0.875), transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Tensor:
        return self.transform(Image.open(self.files[i]).convert("RGB"))

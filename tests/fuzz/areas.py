"""What is attacked: each area makes a corpus of good files, and turns a seed into a case.

A case answers "accepted" or "refused"; anything else it raises is a defect. What is accepted must also be right.
"""

import io
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, features

from didicm import DiffusionClassifier, Predictor, StandardClassifier, create_model, save
from didicm.checkpoint import CALIBRATION, CONFIG, WEIGHTS
from didicm.cli.__main__ import COMMANDS, main
from didicm.data import EvalTransform, open_image
from didicm.data.folder import FolderSet
from didicm.errors import UserError
from didicm.evaluation.calibration import Calibration, Conformal, save_calibration
from didicm.experiments.results import (
    RESULTS,
    STUDY,
    Measurement,
    Plan,
    RunResult,
    append_result,
    read_plan,
    read_results,
    write_plan,
)
from didicm.experiments.spec import Condition
from didicm.experiments.study_file import compare_study, load_study
from didicm.report.html import make_tables
from didicm.report.records import rows_of
from didicm.report.verdict import verdict
from didicm.settings import RECIPES, TrainConfig, read_yaml, to_yaml
from didicm.values import override, setting_types
from tests.fuzz.mutate import mutate_arguments, mutate_bytes, mutate_plain
from tests.oracle.tiff import tiff_bytes

ACCEPTED, REFUSED = "accepted", "refused"
NAMES = ["ant", "bee", "cat"]


class Area(ABC):
    """Something that reads what a stranger wrote."""

    name: ClassVar[str]
    share: ClassVar[int]  # cases, of a thousand

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def attack(self, rng: Random) -> None:
        """Read a damaged file; UserError refuses it, AssertionError is a wrong answer."""

    def case(self, rng: Random) -> str:
        """What comes of one attack."""
        try:
            self.attack(rng)
        except UserError as error:
            return REFUSED if str(error).strip() else "refused without a word"
        return ACCEPTED


class Images(Area):
    """Image files of all formats and modes."""

    name, share = "images", 500

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = [(content, 3) for content in _image_files()] + [(content, 5) for content in _many_channels()]
        even = {"mean": (0.5,) * 5, "std": (0.5,) * 5}
        self._transforms = {3: EvalTransform(16, 3), 5: EvalTransform(16, 5, **even)}
        self._path = folder_made(folder / "class") / "image.jpg"
        self._path.touch()
        self._images = FolderSet(folder)

    def attack(self, rng: Random) -> None:
        content, channels = rng.choice(self._files)
        content, transform = mutate_bytes(content, rng), self._transforms[channels]
        self._path.write_bytes(content)
        seen = transform(self._images.with_channels(channels).load(0))
        assert seen.shape == (channels, 16, 16)
        assert bool(seen.isfinite().all())
        assert torch.equal(seen, transform(open_image(content))), "another image from its bytes"


class Models(Area):
    """Model directories: their config, weights and calibration."""

    name, share = "model directories", 80

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._models = [make_model(folder / kind, kind) for kind in ("diffusion", "standard")]
        self._image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8))

    def attack(self, rng: Random) -> None:
        model = self.folder / "attacked"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(rng.choice(self._models), model)
        path = model / rng.choice((CONFIG, CONFIG, CALIBRATION, WEIGHTS))
        before = path.read_bytes()
        if path.name != WEIGHTS and rng.random() < 0.7:
            path.write_text(_json(mutate_plain(json.loads(before), rng)))
        else:
            path.write_bytes(mutate_bytes(before, rng))
        told = Predictor.load(model)(self._image)
        assert path.name != WEIGHTS or path.read_bytes() == before, "other weights than were saved"
        probs = torch.as_tensor(np.asarray(told.probs))
        assert bool(probs.isfinite().all())
        assert abs(probs.sum().item() - 1) < 1e-4
        assert len({name for name, _ in told.classes}) == len(probs)


class SettingsFiles(Area):
    """Settings, recipes and studies in YAML."""

    name, share = "settings files", 250

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        studies = RECIPES.parent / "experiments" / "studies"
        self._recipes = [path.read_bytes() for path in sorted(RECIPES.glob("*.yaml"))] + [
            to_yaml(TrainConfig()).encode()
        ]
        self._studies = [path.read_bytes() for path in sorted(studies.glob("*-cpu.yaml"))]

    def attack(self, rng: Random) -> None:
        path = self.folder / "file.yaml"
        if rng.random() < 0.3:
            path.write_bytes(mutate_bytes(rng.choice(self._studies), rng))
            load_study(str(path))
            return
        if rng.random() < 0.5:
            path.write_bytes(mutate_bytes(rng.choice(self._recipes), rng))
        else:  # JSON is YAML
            path.write_text(_json(mutate_plain(read_plain(rng.choice(self._recipes)), rng)))
        config = override(TrainConfig(), read_yaml(path))
        path.write_text(to_yaml(config))
        assert override(TrainConfig(), read_yaml(path)) == config, "another after it was stored"


class Results(Area):
    """Stored studies and their results."""

    name, share = "results files", 120

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._study = make_results(folder / "study")

    def attack(self, rng: Random) -> None:
        folder = self.folder / "attacked"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._study, folder)
        path = folder / rng.choice((STUDY, RESULTS))
        if rng.random() < 0.4:
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        elif path.name == STUDY:
            path.write_text(_json(mutate_plain(json.loads(path.read_text()), rng)))
        else:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            lines[0] = mutate_plain(lines[0], rng)
            path.write_text("".join(_json(line) + "\n" for line in lines))
        plan, results = read_plan(folder), read_results(folder)
        assert plan is not None
        assert [RunResult.from_dict(result.to_dict()) for result in results] == results
        known = [result for result in results if result.key in plan.runs]
        if known:
            rows = rows_of(known, plan.study)
            make_tables(plan.study, rows)
            verdict(plan.study, rows)


class CommandLines(Area):
    """Commands in this process, on good and bad files."""

    name, share = "command lines", 50

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_model(folder / "model", "diffusion")
        make_results(folder / "study")
        for k, name in product(range(6), NAMES):
            place = folder / "images" / name / f"{k}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(k).integers(0, 256, (12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(place)
        (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        (folder / "settings.yaml").write_text("epochs: 3\n")
        # None of them trains, serves or downloads; what comes last holds whatever was changed before it.
        self._commands = [
            (["models", "--size=8"], []),
            (["predict", "model", "images/ant/0.png", "--json"], ["--device=cpu"]),
            (["predict", "model", "broken.png", "--top=2"], ["--device=cpu"]),
            (["evaluate", "model", "--data=images", "--batch-size=4"], ["--workers=0", "--device=cpu"]),
            (["calibrate", "model", "--data=images", "--alpha=0.3"], ["--workers=0", "--device=cpu"]),
            (["doctor", "images", "--examples=drawn.png"], []),
            (["import-official", "broken.png", "--out=imported"], []),
            (["train", "--recipe=small", "--data=images", "--out=run"], ["--image.size=8", "--dry-run"]),
            (["train", "--config=settings.yaml", "--data=images", "--out=run"], ["--image.size=8", "--dry-run"]),
            (["compare", "--out=study"], ["--report-only"]),
            (["study", "solvers-cpu"], ["--dry-run"]),
        ]
        options = [f"--{name.replace('_', '-')}" for name in setting_types(TrainConfig) if name != "run.wandb"]
        places = ["model", "images", "study", "broken.png", "settings.yaml", "fashion-mini", "nowhere"]
        self._words = [
            *COMMANDS,
            *options,
            *places,
            "--data",
            "--out",
            "--set",
            "--size",
            "--top",
            "--sampler.steps",
        ]

    def attack(self, rng: Random) -> None:
        command, last = rng.choice(self._commands)
        changed = [command[0], *mutate_arguments(command[1:], self._words, rng), *last]
        if rng.random() < 0.05:
            changed = [*mutate_arguments(command[:1], list(COMMANDS), rng)[:1], "--help"]
        out, err = io.StringIO(), io.StringIO()
        with _inside(self.folder), redirect_stdout(out), redirect_stderr(err), _no_figures():
            try:
                code = main(changed)
            except SystemExit as end:
                code = int(end.code or 0)
        said = out.getvalue() + err.getvalue()
        assert "Traceback" not in said, said
        assert code in (0, 1, 2), f"exit code {code}"
        if code == 2:
            raise UserError(err.getvalue() or out.getvalue())

    def case(self, rng: Random) -> str:
        """What comes of one attack, on a folder as it was."""
        kept = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        try:
            return super().case(rng)
        finally:
            for path in list(self.folder.rglob("*")):
                if path.is_file() and path not in kept:
                    path.unlink()
            for path, content in kept.items():
                if not path.exists() or path.read_bytes() != content:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)


AREAS: list[type[Area]] = [Images, Models, SettingsFiles, Results, CommandLines]


def make_model(folder: Path, kind: str) -> Path:
    """A small model directory with a calibration."""
    torch.manual_seed(0)
    name = "didirn8" if kind == "diffusion" else "didirn8_baseline"
    network = create_model(name, num_classes=3, in_chans=1, width=0.125, stem="tiny")
    classifier = DiffusionClassifier(network) if kind == "diffusion" else StandardClassifier(network)
    save(classifier, folder, class_names=NAMES, transform=EvalTransform(8, 1, crop_pct=1.0).to_dict())
    rules = {"lac": Conformal("lac", 0.1, 0.8, 50), "aps": Conformal("aps", 0.1, 0.9, 50, True)}
    posterior = Predictor.load(folder).model.posterior
    save_calibration(folder, Calibration(1.5, rules, posterior, {"data": "some", "images": 50}, {}))
    return folder


def make_results(folder: Path) -> Path:
    """A finished comparison of two methods, which nobody had to train."""
    study = compare_study(methods=("standard", "didicm-score"), seeds=2)
    metrics = dict.fromkeys(("cls/Acc", "cls/Acc5", "cls/NLL", "cls/Brier", "cal/ECE", "sc/AURC"), 0.5)
    runs = {}
    for seed, method in product(range(2), study.methods):
        key = f"{method}-{seed}"
        settings: dict[str, Any] = {} if method.baseline else {"method": "cp", "steps": 8}
        measured = Measurement("1 call", "1 call", settings, 1, 1000, metrics, 1.5, metrics)
        append_result(
            folder_made(folder),
            RunResult(
                key, str(method), Condition(), seed, 90, 10, 100, 3, 5000, 1.0, (measured,), {"didicm": "0"}
            ),
        )
        runs[key] = str(method)
    write_plan(folder, Plan(study, "didicm compare", "images", {}, runs))
    return folder


def folder_made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_plain(content: bytes) -> Any:
    """Settings as JSON has them."""
    import yaml

    return yaml.safe_load(content)


def _json(value: object) -> str:
    """JSON of whatever nesting; the files say NaN where values are none."""
    try:
        return json.dumps(value, ensure_ascii=True)
    except RecursionError:
        return "[" * 5000


def _image_files() -> Iterator[bytes]:
    """Small good images of every format that is opened, and of many modes."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    colour = Image.fromarray(pixels).resize((37, 26), Image.Resampling.BICUBIC)
    deep = Image.fromarray(np.asarray(colour.convert("L"), dtype=np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: list[tuple[Image.Image, str, dict[str, Any]]] = [
        *((colour.convert(mode), "PNG", {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        (deep, "PNG", {}),
        (colour.convert("P"), "PNG", {"transparency": 3}),
        (colour, "JPEG", {"exif": exif}),
        (colour, "JPEG", {"progressive": True, "subsampling": 0}),
        (colour.convert("CMYK"), "JPEG", {}),
        (colour, "WEBP", {"lossless": True}),
        (colour.convert("RGBA"), "WEBP", {}),
        (colour, "BMP", {}),
        (colour.convert("P"), "GIF", {"save_all": True, "append_images": [colour.convert("P").rotate(90)]}),
        *(
            (colour, "TIFF", {"compression": name})
            for name in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits")
        ),
        (deep, "TIFF", {}),
        (colour.convert("F"), "TIFF", {}),
        (colour, "PPM", {}),
        (colour.convert("L"), "PPM", {}),
        (colour, "TGA", {"compression": "tga_rle"}),
    ]
    kinds += [(colour, "JPEG2000", {})] * features.check("jpg_2000")
    kinds += [(colour, "AVIF", {})] * features.check("avif")
    for image, file_format, options in kinds:
        file = io.BytesIO()
        image.save(file, file_format, **options)
        yield file.getvalue()
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n"


def _many_channels() -> Iterator[bytes]:
    """Small good arrays and TIFFs of five channels."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 25, 5), dtype=np.uint8)
    for array in (pixels, np.asfortranarray(pixels), pixels * np.uint16(257), pixels / np.float32(255)):
        file = io.BytesIO()
        np.save(file, array)
        yield file.getvalue()
    for planar, tile, deflate in product((False, True), (None, 16), (False, True)):
        yield tiff_bytes(pixels, planar=planar, tile=tile, deflate=deflate, predictor=deflate)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _no_figures() -> Iterator[None]:
    """Figures are made but not rendered, which takes seconds each."""
    from matplotlib.figure import Figure

    render = Figure.savefig
    Figure.savefig = lambda self, path, **options: Path(path).touch() if isinstance(path, Path) else None
    try:
        yield
    finally:
        Figure.savefig = render

"""`didicm train` as a user runs it: to the end, stopped, killed, resumed, in several processes, with mistakes."""

import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tarfile
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import didicm
from didicm.errors import UserError
from didicm.processes import held
from didicm.settings import load_recipe, read_config, recipes
from didicm.training.state import HELD, load_state
from didicm.values import override
from tests.fuzz.kills import survive

pytestmark = pytest.mark.usefixtures("few_tested")
DIDICM = (sys.executable, "-m", "didicm.cli")  # a command that starts others like itself
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *DIDICM[1:])


@pytest.fixture
def train(works, train_flags):
    """Train a tiny run to its end."""
    return lambda out, **changes: works("train", *train_flags(out, **changes)).out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "standard"},
        {"method": "standard", "objective": "marginal", "draws_per_image": 4},
        {"method": "standard", "objective": "binary-cross-entropy", "augment__mixup": 0.2},
        {"draws_per_image": 2, "accumulate": 2, "balance": "weights", "optimizer__ema": "null"},
        {"balance": "sampling", "corrupt_train": "noise:2", "corrupt_eval": "blur:1", "optimizer__name": "lamb"},
        {"schedule": '{"name": "geometric"}', "sampler__method": "cl", "augment__label_smoothing": 0.1},
        {"run__precision": "bf16-mixed", "run__tensorboard": "true"},
    ],
    ids=str,
)
def test_one_command_trains_either_kind(changes, tmp_path, train, metrics_of):
    run = tmp_path / "runs" / "x"
    printed = train(run, **changes)
    for place in ("best", "last"):
        checkpoint = didicm.load(run / place)
        assert checkpoint.class_names[0] == "T-shirt/top"
        assert checkpoint.transform["size"] == 14
        assert checkpoint.classifier(torch.zeros(2, 1, 14, 14)).shape == (2, 10)
    numbers = metrics_of(run)
    assert numbers[-1].keys() >= {"val/cls/Acc", "val/cls/Acc5", "val/cls/NLL", "val/cal/ECE"}
    assert [n["step"] for n in numbers if "loss" in n] == list(range(1, 11))
    assert [n["epoch"] for n in numbers if "loss" in n] == [1] * 5 + [2] * 5  # as on the screen
    assert "epoch 2: accuracy" in printed
    assert "images/s" in printed
    assert re.search(r"best model: \S+ \(NLL \d\.\d{3}, accuracy \d+\.\d %\)", printed)
    assert ("shifts calibration" in printed) == ("balance" in changes)
    if "run__tensorboard" in changes:
        assert list((run / "tensorboard").iterdir())


def test_training_learns(tmp_path, train, metrics_of):
    train(tmp_path / "run", epochs=8, fraction=0.3, run__validate_epochs=8)
    assert metrics_of(tmp_path / "run")[-1]["val/cls/Acc"] > 0.4


def test_killed_stopped_by_ctrl_c_and_resumed_it_ends_with_the_same_bits(tmp_path, start_didicm):
    """The short form of `python -m tests.fuzz.kills`."""
    told = {"SIGKILL": 1, "SIGTERM": 0, "SIGINT": 1, "while starting": 0}
    assert survive(tmp_path, times=2, seed=102, start=start_didicm) == told


def test_a_second_training_in_one_folder_is_told_who_has_it(tmp_path, fails, train_flags):
    with held(tmp_path / "run", HELD):
        error = fails("train", *train_flags(tmp_path / "run"))
    assert f"{tmp_path / 'run'} is in use by pid {os.getpid()} on {socket.gethostname()} since " in error
    assert os.listdir(tmp_path / "run") == [HELD]


def test_on_a_full_disk_it_ends_with_one_sentence_and_the_run_goes_on_later(
    tmp_path, train, fails, works, weights_of, assert_same
):
    whole = tmp_path / "whole"
    train(whole, epochs=1)
    rooms = {0: "nothing fits", 50_000: "weights do not fit"}
    runs = {room: shutil.copytree(whole, tmp_path / name) for room, name in rooms.items()}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, run in runs.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            error = fails("train", "--out", run, "--epochs=2", "--extend")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(run) in error
        assert "cannot be written (" in error
        assert "make room, then run the same command again" in error
        assert_same(weights_of(whole), weights_of(run))
        assert not list(run.rglob(".saving-*"))
    for folder in (whole, *runs.values()):
        works("train", "--out", folder, "--epochs=2", "--extend")
        assert_same(weights_of(whole), weights_of(folder))


def test_a_run_that_exists_names_the_one_setting_that_differs(tmp_path, train, fails, works, train_flags):
    run = tmp_path / "run"
    train(run)
    before = (run / "last" / "model.safetensors").read_bytes()
    assert "is finished" in works("train", f"--out={run}").out
    assert "is finished" in works("train", *train_flags(run, run__workers=0)).out
    error = fails("train", f"--out={run}", "--epochs=3")
    assert "started with other settings (epochs is 2, not 3): add --extend" in error
    error = fails("train", *train_flags(run, seed=4))
    assert "(seed is 0, not 4)" in error
    assert "is finished" in works("train", f"--out={run}", "--model-args.width=0.125").out
    assert "(model_args.width is 0.125, not 0.25)" in fails("train", f"--out={run}", "--model-args.width=0.25")
    file = tmp_path / "settings.yaml"
    file.write_text("batch_size: 128\nepochs: 2\n")  # the first is the default, but not of this run
    assert "(batch_size is 40, not 128)" in fails("train", f"--out={run}", f"--config={file}")
    with pytest.raises(UserError, match=re.escape("(optimizer.lr is 0.005, not 0.5)")):
        didicm.train(override(read_config(run / "config.yaml"), {"optimizer.lr": 0.5}))
    assert "lr: 0.005" in (run / "config.yaml").read_text()
    assert "(run.compile is False, not True)" in fails("train", f"--out={run}", "--run.compile")
    didicm.train(override(read_config(run / "config.yaml"), {"run.validate_epochs": 2}))  # it is done elsewhere
    assert (run / "last" / "model.safetensors").read_bytes() == before
    (run / "best" / "config.json").unlink()
    told = f"{run}/best/config.json is missing: restore it, or give the last model, {run}/last"
    assert told in fails("train", f"--out={run}")
    assert told in fails("evaluate", run, "--data=fashion-mini")
    shutil.rmtree(run / "last")
    assert "has no best/config.json: train it until its first validation, or" in fails("train", f"--out={run}")


def test_a_finished_run_can_be_extended_on_purpose(tmp_path, train, works, fails, metrics_of):
    run = tmp_path / "run"
    train(run)
    assert "more epochs than the 2" in fails("train", f"--out={run}", "--epochs=1", "--extend")
    assert "resuming from step 10 of 20" in works("train", f"--out={run}", "--epochs=4", "--extend").out
    assert [n["step"] for n in metrics_of(run) if "loss" in n] == list(range(1, 21))
    assert "is finished" in works("train", f"--out={run}").out
    assert "epochs: 4" in (run / "config.yaml").read_text()


def test_a_method_is_the_same_in_a_file_and_as_a_flag(tmp_path, works):
    file = tmp_path / "standard.yaml"
    file.write_text("method: standard\n")
    plans = [
        works("train", "--recipe=strong", *way, "--data=fashion-mini", f"--out={tmp_path / 'run'}", "--dry-run",
              "--model=didirn18", "--image.size=14", "--batch-size=40").out
        for way in ([f"--config={file}"], ["--method=standard"])
    ]  # fmt: skip
    assert "objective: multi-label" in plans[0]
    assert plans[0] == plans[1]


@pytest.fixture
def split(tmp_path, make_folder):
    """Settings of a network without batch statistics: whatever the split, a step is the same step."""
    return {
        "model": "backbone_score",
        "model_args": '{"backbone": "test_vit", "width": null, "stem": null}',
        "data": make_folder(tmp_path / "data", count=21),
        "val_fraction": 0.3,
        "image__size": 160,
        "fraction": 1,
        "batch_size": 8,
        "optimizer__name": "sgd",
        "optimizer__lr": 0.05,
        "optimizer__warmup_epochs": 0,  # so that few steps change the weights by more than the tolerance
        "draws_per_image": 2,
    }


def test_two_processes_with_workers_that_are_all_told_at_once_save_what_one_has_after_as_many_steps(
    tmp_path, split, fork_python, monkeypatch, train_flags, assert_same
):
    """Loading workers are told beside the process that they serve: torchrun passes it on to both."""
    monkeypatch.setattr(subprocess_handler, "Popen", fork_python)  # of torchrun, for the processes that it starts
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {**split, "corrupt_train": "noise:1", "run__workers": 1, "run__strategy": "ddp", "epochs": 1000}
    command = [*TORCHRUN, "train", *train_flags(two, **settings)]
    process = fork_python(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    while "step " not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGTERM)
    printed, trouble = process.communicate()
    assert "stopped and saved" in printed, trouble
    progress, weights, _ = load_state(two)
    assert progress.step > 0

    def stop(done, total):
        if done == progress.step:
            signal.raise_signal(signal.SIGINT)

    alone = {"out": str(one), "run.strategy": "auto", "run.workers": 0}
    with pytest.raises(KeyboardInterrupt):
        didicm.train(override(read_config(two / "config.yaml"), alone), on_step=stop)
    same, expected, _ = load_state(one)
    assert same.step == progress.step
    for part in ("model", "ema"):
        assert_same(expected[part], weights[part], atol=1e-5)


def test_two_processes_with_shares_of_the_weights_end_where_one_does(
    tmp_path, split, train, train_flags, fork_python, weights_of, assert_same, metrics_of
):
    """Here the command, which is forked, starts the second process itself: `python -m didicm.cli`, as users do."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {**split, "epochs": 1, "corrupt_eval": "resolution:7"}
    settings |= {"optimizer__ema": "null", "optimizer__clip": "null"}
    torn = [settings["data"] / name for name in ("cat/0.png", "dog/1.png")]
    for path in torn:
        path.write_bytes(b"torn")
    train(one, **settings)
    settings |= {"run__strategy": "fsdp", "run__save_seconds": 0, "run__devices": 2}
    process = fork_python([*DIDICM, "train", *train_flags(two, **settings)], stdout=PIPE, stderr=PIPE, text=True)
    shown, trouble = process.communicate()
    assert process.returncode == 0, shown + trouble
    assert all(shown.count(f"left out: {path}") == 1 for path in torn), shown  # whichever process met it
    assert shown.count("best model:") == 1
    assert_same(weights_of(one), weights_of(two), atol=1e-5)
    states = [load_state(run) for run in (one, two)]
    assert states[1][0].finished
    assert_same(states[0][1]["model"], states[1][1]["model"], atol=1e-5)
    logged, shared = ({n["step"]: n["loss"] for n in metrics_of(run) if "loss" in n} for run in (one, two))
    assert logged.keys() & shared.keys()
    assert all(shared[step] == pytest.approx(loss, abs=1e-4) for step, loss in logged.items() if step in shared)
    (*_, first, first_left), (*_, second, second_left) = metrics_of(one), metrics_of(two)
    assert second["val/cls/NLL"] == pytest.approx(first["val/cls/NLL"], abs=1e-4)
    assert first_left["unreadable_images"] == second_left["unreadable_images"] == 1  # the other is held out


def write_images(folder, classes=("cat", "köter", "鳥"), count=6, size=(40, 30)):
    rng = np.random.default_rng(0)
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (size[1], size[0], 3), dtype=np.uint8)
            pixels[..., k % 3] += 100
            Image.fromarray(pixels).save(folder / name / f"{i}.jpg")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diffusion", "standard"])
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_takes_a_step(name, method, tmp_path, works, metrics_of):
    size = 224 if (name, method) == ("strong", "diffusion") else 56
    data = write_images(tmp_path / "imagenet" / "train", size=(250, 250) if size == 224 else (80, 60))
    write_images(tmp_path / "imagenet" / "val", count=2, size=(80, 60))
    own = ["--model-args.width=0.125"]
    if name == "finetune":
        own = ["--model-args", '{"backbone": "resnet10t", "pretrained": false}']
    elif name != "small":
        own.append("--model=didirn10" if size == 224 else "--model=didirn50")
    run = tmp_path / "run"
    works(
        "train", "--recipe", name, "--method", method, "--data", data.parent, "--out", run, *own,
        "--batch-size=6", "--epochs=1", f"--image.size={size}", "--fraction=0.34",
        "--run.accelerator=cpu", "--run.precision=32-true", "--run.workers=0", "--run.devices=1",
    )  # fmt: skip
    assert didicm.load(run).class_names == ["cat", "köter", "鳥"]
    assert metrics_of(run)[0]["step"] == 1


@pytest.mark.parametrize(
    ("name", "method", "lr", "scaled", "decay", "batch", "smoothing"),
    [
        ("weak", "diffusion", 2e-3, True, 0.1, 1024, 0.0),
        ("weak", "standard", 2e-3, True, 0.1, 1024, 0.0),
        ("strong", "diffusion", 3.5e-3, False, 0.1, 2048, 0.1),
        ("strong", "standard", 5e-3, True, 0.1, 2048, 0.1),
        ("official-strong", "diffusion", 3.5e-3, False, 0.01, 2048, 0.1),
    ],
)
def test_the_papers_settings_are_in_the_recipes(name, method, lr, scaled, decay, batch, smoothing):
    config = load_recipe(name, method)
    optimizer, augment = config.optimizer, config.augment
    assert (optimizer.lr, optimizer.scale_lr, optimizer.weight_decay) == (lr, scaled, decay)
    assert (optimizer.name, optimizer.warmup_epochs) == ("lamb", 5)
    assert (config.epochs, config.batch_size, config.image.crop_pct) == (600, batch, 0.875)
    assert augment.label_smoothing == smoothing
    if name == "strong":
        assert (augment.repeats, augment.auto_augment) == (3, "rand-m7-mstd0.5-inc1")
        assert (augment.mixup, augment.cutmix) == (0.2, 1.0)


def test_folders_parquet_and_shards_train_alike(tmp_path, train):
    import datasets

    folder = write_images(tmp_path / "folder")
    files = sorted(folder.glob("*/*.jpg"))
    names = sorted({path.parent.name for path in files})
    rows = [{"image": str(path), "label": names.index(path.parent.name)} for path in files]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    with tarfile.open(tmp_path / "shard-0.tar", "w") as tar:
        for i, row in enumerate(rows):
            for end, content in (("jpg", Path(row["image"]).read_bytes()), ("cls", str(row["label"]).encode())):
                info = tarfile.TarInfo(f"{i:04}.{end}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    for i, uri in enumerate((folder, f"hf://{tmp_path / 'train.parquet'}", f"wds://{tmp_path / 'shard-0.tar'}")):
        changes = {"data": uri, "fraction": 1, "batch_size": 5, "val_fraction": 0.2, "image__size": 16}
        train(tmp_path / str(i), **changes)
        assert didicm.load(tmp_path / str(i)).classifier.num_classes == 3


def make_empty(folder):
    folder.mkdir()


def make_one_class(folder):
    write_images(folder, classes=("cat",))


def make_flat(folder):
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "x.jpg")


def make_empty_class(folder):
    write_images(folder)
    (folder / "empty").mkdir()


def make_unreadable(folder):
    write_images(folder)
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"")


BAD = {
    "missing": (lambda folder: None, "does not exist"),
    "empty": (make_empty, "folder"),
    "one class": (make_one_class, "single class"),
    "no classes": (make_flat, "folder"),
    "empty class": (make_empty_class, "empty"),
    "nothing readable": (make_unreadable, "read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_gets_one_sentence_and_writes_nothing(kind, tmp_path, fails, train_flags):
    make, says = BAD[kind]
    make(tmp_path / "data")
    changes = {"data": tmp_path / "data", "batch_size": 4, "image__size": 16}
    assert says in fails("train", *train_flags(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_few_unreadable_images_are_named_and_counted_in_both_splits(tmp_path, train):
    folder = write_images(tmp_path / "data" / "train", count=10)
    held_out = write_images(tmp_path / "data" / "val", count=4)
    (folder / "cat" / "0.jpg").write_bytes(b"")
    (folder / "cat" / "1.jpg").write_bytes((folder / "cat" / "2.jpg").read_bytes()[:200])
    (folder / "cat" / "folder.jpg").mkdir()
    (held_out / "cat" / "3.jpg").write_bytes(b"")
    changes = {"data": tmp_path / "data", "fraction": 1, "batch_size": 6, "image__size": 16}
    printed = train(tmp_path / "run", **changes)
    assert "training images could not be read" in printed
    for name in ("train/cat/0.jpg", "val/cat/3.jpg"):
        assert printed.count(f"left out: {tmp_path}/data/{name}") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 7, "accumulate": 2}, "choose a multiple of 2"),
        ({"batch_size": 4000}, "fewer than one batch"),
        ({"model": "didirn9"}, "unknown model"),
        ({"model_args__speed": "3"}, "no argument 'speed'"),
        ({"recipe": "smal"}, "unknown recipe 'smal': did you mean small?"),
        ({"fraction": 0}, "fraction must be in (0, 1] or a whole number from 2 (images per class), got 0"),
        ({"image__size": 0}, "image.size must be at least 1"),
        ({"optimizer__name": "adamx"}, "optimizer.name 'adamx' is not an optimiser of timm's: did you mean"),
        ({"corrupt_train": "fog:9"}, "fog"),
        ({"schedule": '{"name": "log-linear", "eps": 0.5}'}, "not near uniform"),
        ({"run__accelerator": "cuda"}, "run.accelerator cuda: there is no CUDA device here; available: cpu"),
        ({"run__accelerator": "warp"}, "run.accelerator"),
        ({"run__strategy": "fsdp"}, "optimizer.ema does not work with fsdp"),
        ({"epoch": 3}, "didicm train has no option --epoch: did you mean --epochs?"),
        ({"optimizer__speed": 3}, "no option --optimizer.speed"),
        ({"run__precision": 8}, "run.precision must be one of 32-true"),
        ({"epochs": "many"}, "epochs must be a whole number, got 'many'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
def test_bad_settings_get_one_sentence_and_write_nothing(dry, changes, says, tmp_path, fails, train_flags):
    if torch.cuda.is_available() and changes.get("run__accelerator") == "cuda":
        pytest.skip("this machine has the device")
    assert says in fails("train", *train_flags(tmp_path / "run", **changes), *dry)
    assert not (tmp_path / "run").exists()
    assert not torch.distributed.is_initialized()


def test_other_mistakes_of_the_command_line(tmp_path, fails, train_flags):
    (tmp_path / "my.yaml").write_text("epochs: 1\nepoch: 2\n")
    config = ["--data=fashion-mini", f"--out={tmp_path / 'run'}"]
    assert "no setting 'epoch'" in fails("train", f"--config={tmp_path / 'my.yaml'}", *config)
    assert "no --out" in fails("train", "--data=fashion-mini")
    assert "no data" in fails("train", f"--out={tmp_path / 'run'}")
    assert "does not take 'photos'" in fails("train", "photos", *config)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    assert "is not empty and holds no run" in fails("train", *train_flags(tmp_path / "full"))
    assert not (tmp_path / "run").exists()


def test_a_file_of_settings_overrides_the_recipe_and_flags_override_the_file(tmp_path, works):
    (tmp_path / "my.yaml").write_text("epochs: 7\noptimizer: {lr: 1e-4}\nmodel_args: {width: 0.5}\n")
    shown = works(
        "train", "--recipe=small", f"--config={tmp_path / 'my.yaml'}", "--data=fashion-mini", "--epochs=9",
        f"--out={tmp_path / 'run'}", "--dry-run",
    ).out  # fmt: skip
    for words in ("epochs: 9", "lr: 0.0001", "width: 0.5", "parameterization: posterior"):
        assert words in shown


def test_dry_run_says_what_would_happen_and_writes_nothing(tmp_path, works, train_flags):
    printed = works("train", *train_flags(tmp_path / "run"), "--dry-run").out
    for word in ("200 for training", "5 per epoch, 10 in all", "M parameters", "MB", "epochs: 2", "device", "cpu"):
        assert word in printed
    assert "nothing was written" in printed
    assert not (tmp_path / "run").exists()


def test_a_frozen_backbone_is_not_counted_as_if_it_were_trained(tmp_path, works):
    def per_step(frozen):
        network = f"--model-args={{backbone: resnet10t, pretrained: false, frozen: {frozen}}}"
        flags = ["--recipe=finetune", "--data=fashion-mini", "--image.size=32", "--batch-size=50", network]
        shown = works("train", *flags, f"--out={tmp_path / 'run'}", "--dry-run").out
        return float(re.search(r"([\d.]+) G per training step", shown)[1])

    assert per_step("true") < per_step("false") / 2


def test_a_diverging_run_stops_with_advice_and_keeps_its_state(tmp_path, fails, train_flags):
    changes = {"optimizer__lr": "1000", "optimizer__name": "sgd", "optimizer__clip": "null", "epochs": 20}
    error = fails("train", *train_flags(tmp_path / "run", **changes))
    assert "has a loss of" in error
    assert "try a lower optimizer.lr" in error
    progress, weights, _ = load_state(tmp_path / "run")
    assert not progress.finished
    assert weights["model"]


def test_files_are_written_with_the_users_umask(tmp_path, train):
    train(tmp_path / "run", epochs=1)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o644, path


def test_the_api_trains_from_settings_alone(tmp_path):
    changes = {
        "data": "fashion-mini", "out": str(tmp_path / "run"), "fraction": 0.05, "batch_size": 20, "epochs": 1,
        "model_args.width": 0.125, "image.size": 8,
    }  # fmt: skip
    seen = []
    folder = didicm.train(override(load_recipe("small"), changes), on_step=lambda *numbers: seen.append(numbers))
    assert folder == tmp_path / "run"
    assert seen == [(k, 5) for k in range(1, 6)]
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5

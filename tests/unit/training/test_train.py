import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import didicm
from didicm.cli.train import main
from didicm.settings import recipes
from didicm.training.state import Progress, load_state, save_state

TINY = {
    "recipe": "small",
    "data": "fashion-mini",
    "model_args": '{"width": 0.125, "stem": "small", "parameterization": "posterior"}',
    "fraction": "0.1",
    "batch_size": "40",
    "epochs": "2",
    "image.size": "14",
    "run.log_seconds": "0",
    "optimizer.ema": "0.9",
}


def flags(out, **changes):
    settings = {**TINY, **{key.replace("__", "."): str(value) for key, value in changes.items()}}
    return [f"--{key}={value}" for key, value in settings.items()] + [f"--out={out}"]


def command(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "didicm.cli", "train", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(run, which="last"):
    return load_file(run / which / "model.safetensors")


def assert_same(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        if tolerance:
            assert torch.allclose(one[name].double(), other[name].double(), **tolerance), name
        else:
            assert torch.equal(one[name], other[name]), name


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


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
def test_one_command_trains_either_kind(changes, tmp_path, capsys):
    run = tmp_path / "runs" / "x"
    assert main(flags(run, **changes)) == 0
    for place in ("best", "last"):
        checkpoint = didicm.load(run / place)
        assert checkpoint.class_names[0] == "T-shirt/top"
        assert checkpoint.transform["size"] == 14
        assert checkpoint.classifier(torch.zeros(2, 1, 14, 14)).shape == (2, 10)
    numbers = lines(run)
    assert numbers[-1].keys() >= {"val/cls/Acc", "val/cls/Acc5", "val/cls/NLL", "val/cal/ECE"}
    assert [n["step"] for n in numbers if "loss" in n] == list(range(1, 11))
    printed = capsys.readouterr().out
    assert "images/s" in printed
    assert "best model:" in printed
    assert ("shifts calibration" in printed) == ("balance" in changes)
    if "run__tensorboard" in changes:
        assert list((run / "tensorboard").iterdir())


def test_training_learns(tmp_path):
    run = tmp_path / "run"
    main(flags(run, epochs=20, fraction=0.5))
    accuracy = [n["val/cls/Acc"] for n in lines(run) if "val/cls/Acc" in n]
    assert accuracy[-1] > 0.5


def test_killed_and_resumed_ends_with_the_same_bits(tmp_path):
    settings = {"run__save_seconds": 0, "epochs": 6}
    main(flags(tmp_path / "whole", **settings))
    killed = 0
    moments = random.Random(time.time_ns())
    for _ in range(20):
        process = command(*flags(tmp_path / "killed", **settings))
        deadline = time.monotonic() + 60
        started = lambda: (tmp_path / "killed" / "state").exists()  # noqa: E731
        while not started() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            process.wait(timeout=moments.uniform(0.0, 1.5))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        if killed == 3:
            assert command(*flags(tmp_path / "killed", **settings)).wait(timeout=120) == 0
            break
    assert killed >= 1
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert_same(weights(tmp_path / "whole", "best"), weights(tmp_path / "killed", "best"))
    steps = [n["step"] for n in lines(tmp_path / "killed") if "loss" in n]
    assert steps == sorted(set(steps))


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    settings = {"epochs": 30, "run__log_seconds": 0}
    process = command(*flags(tmp_path / "run", **settings))
    while "step " not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert f"resume with: didicm train --out {tmp_path / 'run'}" in printed.replace("\n", " ")
    position = load_state(tmp_path / "run" / "state")[0]
    assert 0 < position.step < 150
    assert not position.finished


def test_a_finished_run_is_left_alone_and_other_settings_are_refused(tmp_path, capsys):
    run = tmp_path / "run"
    main(flags(run))
    before = (run / "last" / "model.safetensors").read_bytes()
    assert main([f"--out={run}"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert main(flags(run, run__workers=0)) == 0
    with pytest.raises(didicm.UserError, match="epochs is 2, not 3"):
        main(flags(run, epochs=3))
    assert (run / "last" / "model.safetensors").read_bytes() == before


def test_a_longer_run_goes_on_from_its_stored_settings(tmp_path):
    """Only --out is needed to resume, and the position inside the epoch is kept."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    main(flags(whole, epochs=3))
    process = command(*flags(stopped, epochs=3, run__save_seconds=0))
    while not (stopped / "state").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert main([f"--out={stopped}"]) == 0
    assert_same(weights(whole), weights(stopped))


@pytest.mark.parametrize("launcher", ["torchrun", "fabric", "fsdp"])
def test_two_processes_end_where_one_does(launcher, tmp_path):
    """On a network without batch statistics, whatever the split, a step is the same step."""
    settings = {
        "model": "backbone_score",
        "model_args": '{"backbone": "test_vit", "parameterization": "posterior"}',
        "image__size": 160,
        "fraction": 0.02,
        "batch_size": 8,
        "epochs": 1,
        "optimizer__name": "sgd",
        "optimizer__lr": 0.05,
        "draws_per_image": 2,
        "corrupt_eval": "resolution:7",
        "optimizer__ema": "null" if launcher == "fsdp" else 0.9,
    }
    main(flags(tmp_path / "one", **settings))
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
        two = [
            *start,
            "didicm.cli",
            "train",
            *flags(tmp_path / "two", **settings, run__strategy="ddp", run__save_seconds=0),
        ]
    else:
        strategy = "fsdp" if launcher == "fsdp" else "ddp"
        own = flags(tmp_path / "two", **settings, run__strategy=strategy, run__devices=2, run__save_seconds=0)
        two = [sys.executable, "-m", "didicm.cli", "train", *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(two, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"), atol=1e-5)
    one, two = (load_state(tmp_path / run / "state") for run in ("one", "two"))
    assert two[0].finished
    assert_same(one[1]["model"], two[1]["model"], atol=1e-5)
    first, second = lines(tmp_path / "one")[-1], lines(tmp_path / "two")[-1]
    assert second["val/cls/NLL"] == pytest.approx(first["val/cls/NLL"], abs=1e-4)


def write_images(folder, classes=("cat", "köter", "鳥"), count=6, size=(40, 30)):
    rng = np.random.default_rng(0)
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (size[1], size[0], 3), dtype=np.uint8)
            pixels[..., k % 3] += 100
            Image.fromarray(pixels).save(folder / name / f"{i}.jpg")
    return folder


@pytest.mark.parametrize("size", [224, 56])
@pytest.mark.parametrize("method", ["diffusion", "standard"])
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_takes_a_step(name, method, size, tmp_path):
    data = write_images(tmp_path / "imagenet" / "train", size=(250, 250) if size == 224 else (80, 60))
    write_images(tmp_path / "imagenet" / "val", count=2, size=(80, 60))
    arguments = {"width": 0.125}
    if name == "finetune":
        arguments = {"backbone": "resnet10t", "parameterization": "posterior"}
    elif name.startswith("official"):
        arguments["layout"] = "official"
    changes = ["model_args=" + json.dumps(arguments), "batch_size=6", "epochs=1", f"image.size={size}"]
    changes += ["fraction=0.34", "run.accelerator=cpu", "run.precision=32-true", "run.workers=0", "run.devices=1"]
    if name not in ("small", "finetune"):
        changes.append("model=didirn10" if size == 224 else "model=didirn50")
    run = tmp_path / "run"
    argv = ["--recipe", name, "--method", method, "--data", str(data.parent), "--out", str(run)]
    assert main(argv + [f"--{change}" for change in changes]) == 0
    assert didicm.load(run / "best").class_names == ["cat", "köter", "鳥"]
    assert lines(run)[0]["step"] == 1


def test_the_papers_settings_are_in_the_recipes(capsys):
    wanted = {
        ("weak", "diffusion"): (2e-3, True, 0.1, 1024, 0.0),
        ("weak", "standard"): (2e-3, True, 0.1, 1024, 0.0),
        ("strong", "diffusion"): (3.5e-3, False, 0.1, 2048, 0.1),
        ("strong", "standard"): (5e-3, True, 0.1, 2048, 0.1),
        ("official-strong", "diffusion"): (3.5e-3, False, 0.01, 2048, 0.1),
    }
    for (name, method), (lr, scaled, decay, batch, smoothing) in wanted.items():
        import yaml

        with pytest.raises(SystemExit):
            main(["--recipe", name, "--method", method, "--print_config"])
        config = yaml.safe_load(capsys.readouterr().out)
        optimizer = config["optimizer"]
        assert (optimizer["lr"], optimizer["scale_lr"], optimizer["weight_decay"]) == (lr, scaled, decay)
        assert optimizer["name"] == "lamb"
        assert (config["epochs"], optimizer["warmup_epochs"], config["batch_size"]) == (600, 5, batch)
        assert config["augment"]["label_smoothing"] == smoothing
        assert config["image"]["crop_pct"] == 0.875
        if name == "strong":
            assert config["augment"]["repeats"] == 3
            assert config["augment"]["auto_augment"] == "rand-m7-mstd0.5-inc1"
            assert (config["augment"]["mixup"], config["augment"]["cutmix"]) == (0.2, 1.0)


def test_folders_parquet_and_shards_train_alike(tmp_path):
    import io
    import tarfile

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
    for uri in (str(folder), f"hf://{tmp_path / 'train.parquet'}", f"wds://{tmp_path / 'shard-0.tar'}"):
        run = tmp_path / uri.partition(":")[0].strip("/").replace("/", "-")
        changes = {"data": uri, "fraction": 1, "batch_size": 5, "val_fraction": 0.2, "image__size": 16}
        assert main(flags(run, **changes)) == 0
        assert didicm.load(run / "best").classifier.num_classes == 3


def spoil_empty(folder):
    folder.mkdir()


def spoil_one_class(folder):
    write_images(folder, classes=("cat",))


def spoil_flat(folder):
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "x.jpg")


def spoil_class(folder):
    write_images(folder)
    (folder / "empty").mkdir()


def spoil_everything(folder):
    write_images(folder)
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"")


BAD = {
    "missing": (lambda folder: None, "does not exist"),
    "empty": (spoil_empty, "folder"),
    "one class": (spoil_one_class, "single class"),
    "no classes": (spoil_flat, "folder"),
    "empty class": (spoil_class, "empty"),
    "nothing readable": (spoil_everything, "read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_gets_one_sentence_and_writes_nothing(kind, tmp_path, capsys):
    from didicm.cli.__main__ import main as run_cli

    spoil, says = BAD[kind]
    spoil(tmp_path / "data")
    changes = {"data": tmp_path / "data", "batch_size": 4, "image__size": 16}
    assert run_cli(["train", *flags(tmp_path / "run", **changes)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("didicm: ")
    assert error.count("\n") == 0
    assert says in error
    assert not (tmp_path / "run").exists()


def test_a_few_unreadable_images_are_skipped_and_counted(tmp_path, capsys):
    folder = write_images(tmp_path / "data", count=10)
    (folder / "cat" / "0.jpg").write_bytes(b"")
    (folder / "cat" / "1.jpg").write_bytes((folder / "cat" / "2.jpg").read_bytes()[:200])
    (folder / "cat" / "folder.jpg").mkdir()
    changes = {"data": folder, "fraction": 1, "batch_size": 6, "image__size": 16, "val_fraction": 0.1}
    assert main(flags(tmp_path / "run", **changes)) == 0
    assert "images could not be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 7, "accumulate": 2}, "choose a multiple of 2"),
        ({"batch_size": 4000}, "fewer than one batch"),
        ({"model": "didirn9"}, "unknown model"),
        ({"model_args": '{"speed": 3}'}, "no argument 'speed'"),
        ({"recipe": "medium"}, "unknown recipe 'medium': choose one of finetune"),
        ({"fraction": 0}, "fraction must lie in"),
        ({"optimizer__name": "adamx"}, "optimizer.name 'adamx'"),
        ({"corrupt_train": "fog:9"}, "fog"),
        ({"schedule": '{"name": "log-linear", "eps": 0.5}'}, "not near uniform"),
    ],
    ids=str,
)
def test_bad_settings_get_one_sentence_and_write_nothing(changes, says, tmp_path):
    with pytest.raises(didicm.UserError, match=says):
        main(flags(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--optimizer.speed=3", "--epoch=3", "--run.precision=8", "--epochs=many"])
def test_unknown_flags_and_values_exit_with_2(flag, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main([*flags(tmp_path / "run"), flag])
    assert error.value.code == 2
    assert flag.strip("-").partition("=")[0].partition(".")[0] in capsys.readouterr().err


def test_a_config_file_with_an_unknown_key_is_refused(tmp_path, capsys):
    (tmp_path / "my.yaml").write_text("epochs: 1\nepoch: 2\n")
    with pytest.raises(SystemExit) as error:
        main([f"--config={tmp_path / 'my.yaml'}", "--data=fashion-mini", f"--out={tmp_path / 'run'}"])
    assert error.value.code == 2
    assert "epoch" in capsys.readouterr().err


def test_a_folder_in_use_is_not_overwritten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    with pytest.raises(didicm.UserError, match="is in use"):
        main(flags(tmp_path / "run"))


def test_dry_run_says_what_would_happen_and_writes_nothing(tmp_path, capsys):
    assert main([*flags(tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "200 for training",
        "5 an epoch, 10 in all",
        "M parameters",
        "MB",
        "epochs: 2",
        "nothing was written",
    ):
        assert word in printed
    assert not (tmp_path / "run").exists()


def test_a_diverging_run_stops_with_advice_and_keeps_its_state(tmp_path):
    run = tmp_path / "run"
    changes = {"optimizer__lr": "1e30", "optimizer__name": "sgd", "optimizer__clip": "null", "epochs": 20}
    with pytest.raises(didicm.UserError, match=r"step \d+ has a loss of .* try a lower optimizer.lr"):
        main(flags(run, **changes))
    position, weights, _ = load_state(run / "state")
    assert not position.finished
    assert weights["model"]


def test_a_full_disk_leaves_the_state_before_it(tmp_path, monkeypatch):
    model = {"model": {"w": torch.ones(3)}}
    save_state(tmp_path, Progress(step=1), model, {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []})

    def full(tensors, path, metadata):
        path.write_bytes(b"part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("didicm.training.state.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path, Progress(step=2), model, {})
    position, weights, optimizer = load_state(tmp_path)
    assert position.step == 1
    assert weights["model"]["w"].sum() == 3
    assert optimizer == {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []}
    (tmp_path / "state.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(didicm.UserError, match=r"state.safetensors is damaged"):
        load_state(tmp_path)

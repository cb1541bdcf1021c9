"""Whoever carries out the runs of a study, the numbers are the same, and what was begun is saved."""

import importlib.util
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments.execute import main as train_as_one_of_several
from didicm.experiments.execute import prepare, read_run, write_run
from didicm.experiments.executors import Job, gpu_shares, is_running, make_executor
from didicm.experiments.measure import measure
from didicm.experiments.results import RESULTS, read_results
from didicm.experiments.run import run_study
from didicm.processes import LOCK, held, interrupted
from didicm.settings import RunConfig
from didicm.training.state import HELD
from didicm.values import override

pytestmark = pytest.mark.slow


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(pid):
    """Processes that Python's spawn started for a process, but for its resource tracker."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{entry}/cmdline") as file:
                if parent == pid and "spawn_main" in file.read():
                    found.append(int(entry))
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("forked_workers")
def test_whatever_stops_the_workers_their_trainings_are_saved_and_go_on(tiny, tmp_path, meanwhile):
    def kill_one():
        active_children()[0].kill()

    def tell_all():  # as schedulers do; the owner passes it on, so that its workers are told twice
        for pid in (*(worker.pid for worker in active_children()), os.getpid()):
            os.kill(pid, signal.SIGTERM)

    died = "7 px, 5 % of the images, seed 0: its process was killed by SIGKILL"
    # The corruption leaves decoding to processes that the workers start.
    study = tiny({"epochs": 100_000, "corrupt_train": "noise:1", "run.workers": 1}, seeds=1)
    with (
        meanwhile(lambda: len(list(tmp_path.glob("measured/*/progress"))) == 2, kill_one),
        pytest.raises(UserError, match=died),
    ):
        run_study(study, tmp_path, jobs=2)
    assert not active_children()
    (saved,) = tmp_path.glob("runs/*/state/*.safetensors")
    before = saved.stat().st_mtime_ns

    training = saved.parents[1]
    folder = tmp_path / "measured" / training.name
    (folder / "progress").unlink()
    run_all = make_executor("local", 2, RunConfig(accelerator="cpu"), {}, tmp_path, Console())
    with meanwhile((folder / "progress").exists, tell_all), pytest.raises(KeyboardInterrupt), interrupted():
        next(run_all([folder]))
    assert not active_children()
    assert saved.stat().st_mtime_ns > before
    assert "resuming from step" in (training / "train.log").read_text()


def test_a_worker_stops_with_its_owner_and_the_study_gives_the_same_numbers_when_run_again(
    tiny, whole, tmp_path, numbers_of, monkeypatch
):
    """Spawned, as for users; one is enough here, as each imports PyTorch anew."""
    monkeypatch.setattr("didicm.experiments.executors.gpu_shares", lambda jobs, devices, gpus: [None])
    out, study = tmp_path / "out", tiny(seeds=1)
    owner = get_context("fork").Process(target=run_study, args=(study, out), kwargs={"jobs": 2})
    owner.start()
    while not (out / RESULTS).exists():  # then the worker is in its second run, somewhere
        assert owner.is_alive()
        time.sleep(0.02)
    workers = workers_of(owner.pid)
    owner.kill()
    owner.join()
    assert len(workers) == 1
    while any(map(is_alive, workers)):
        time.sleep(0.1)
    assert len(read_results(out)) == 1
    with open(out / RESULTS, "ab") as file:
        file.write(b'{"key": "half a li')
    run_study(study, out)
    assert len(numbers_of(out)) == 2
    assert all(numbers in numbers_of(whole) for numbers in numbers_of(out))


def test_a_run_can_be_trained_and_measured_by_several_processes(tiny, tmp_path):
    study = tiny({"run.devices": 2, "run.workers": 1}, methods=[{"name": "DiDiCM"}], seeds=1)
    (result,) = run_study(study, tmp_path)
    (run,) = study.runs("fashion-mini", 1)
    settings = {"out": str(tmp_path / "runs" / result.key), "run.devices": 1}
    run = replace(run, config=override(run.config, settings))
    alone = measure(run, *prepare(run), None, tmp_path / "alone")
    for shared, own in zip(result.measurements, alone.measurements, strict=True):
        assert shared.metrics == pytest.approx(own.metrics, abs=1e-5)
        assert shared.scaled_metrics == pytest.approx(own.scaled_metrics, abs=1e-5)
    assert (tmp_path / "alone" / "pictures.safetensors").exists()
    assert not list(tmp_path.glob("**/scratch"))
    log = (tmp_path / "runs" / result.key / "train.log").read_text()
    assert log.count("epoch 2: accuracy") == 1
    assert result.num_train == 90
    assert not list(tmp_path.glob("runs/*/state"))
    ours, theirs = (
        json.loads((tmp_path / "runs" / result.key / lock).read_text())["pid"] for lock in (LOCK, HELD)
    )
    assert ours == os.getpid() != theirs  # torchrun's are processes of their own


def test_a_mistake_that_one_of_several_processes_finds_is_kept_for_the_one_that_started_it(
    tiny, tmp_path, monkeypatch
):
    folder = write_run(tmp_path, tmp_path, tiny({"model_args": {"widht": 2}}).runs("fashion-mini", 1)[1])
    training = tmp_path / "runs" / folder.name
    for rank, told in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        assert train_as_one_of_several(folder) == 2
        assert (training / "error.txt").exists() == told
    assert "widht" in (training / "error.txt").read_text()


def test_submitit_tells_of_a_failed_job_while_others_go_on_and_nothing_is_trained_twice(
    tiny, whole, tmp_path, numbers_of, corrupt, fork_python, monkeypatch
):
    """The job that fails is started as submitit does, the other is forked."""
    starts = iter([subprocess.Popen])
    popen = SimpleNamespace(Popen=lambda *args, **options: next(starts, fork_python)(*args, **options))
    monkeypatch.setattr("submitit.local.local.subprocess", popen)
    study, out = tiny(seeds=1), tmp_path / "out"
    corrupted = corrupt(study.runs("fashion-mini", 1)[0])
    console = Console(record=True, width=500)
    failed = r"job \w+ failed \(standard, 7 px.*, seed 0: .*trained.json is damaged.*: see .*_log.err"
    with pytest.raises(UserError, match=failed):
        run_study(study, out, trainings=tmp_path, executor="submitit-local", jobs=2, console=console)
    assert "submitted 2 jobs, which go on if this command stops" in console.export_text()
    corrupted.unlink()
    run_study(study, out, trainings=tmp_path)  # the other job may be waiting, at it, or done
    assert len(numbers_of(out)) == 2
    assert all(numbers in numbers_of(whole) for numbers in numbers_of(out))
    for log in tmp_path.glob("runs/*/train.log"):
        assert log.read_text().count("epoch 2: accuracy") == 1


def test_what_a_job_of_an_earlier_command_is_at_is_not_submitted(tiny, tmp_path):
    folder = write_run(tmp_path, tmp_path, tiny().runs("fashion-mini", 1)[0])
    assert not is_running(folder)
    with held(Path(read_run(folder).config.out)):
        assert is_running(folder)


def test_a_job_that_is_out_of_time_is_queued_again(tmp_path):
    job = Job()
    again = job.checkpoint(tmp_path)
    assert (again.function, again.args) == (job, (tmp_path,))


def test_no_two_jobs_share_a_gpu():
    assert gpu_shares(2, 1, ["0", "1", "2"]) == ["0", "1"]
    assert gpu_shares(2, 2, ["4", "5", "6", "7"]) == ["4,5", "6,7"]
    assert gpu_shares(3, 1, []) == [None] * 3  # no GPU: the cores are split
    assert gpu_shares(1, 1, ["0", "1"]) == [None]
    with pytest.raises(UserError, match="3 jobs with 2 devices each need 6 GPUs and 4 are visible: give --jobs 2"):
        gpu_shares(3, 2, ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local", {"slurm_partition": "gpu"}, "--cluster is for --executor slurm or ray"),
        ("submitit-local", {"speed": 3}, "--executor submitit-local does not work with these options .*speed"),
        ("slurm", {}, "--executor slurm does not work with these options .*"),  # there is none here
    ],
)
def test_wrong_options_are_one_sentence_before_anything_runs(name, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        make_executor(name, 1, RunConfig(accelerator="cpu"), options, tmp_path, Console())


def test_local_jobs_of_submitit_never_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="gives all jobs the same GPUs: give --jobs 1"):
        make_executor("submitit-local", 2, RunConfig(), {}, tmp_path, Console())
    make_executor("submitit-local", 1, RunConfig(), {}, tmp_path, Console())


@pytest.mark.parametrize(("name", "package", "extra"), [("slurm", "submitit", "slurm"), ("ray", "ray", "ray")])
def test_a_missing_package_is_told_with_how_to_install_it(name, package, extra, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == package else find(asked))
    with pytest.raises(UserError, match=rf'--executor {name} needs {package}: pip install "didicm\[{extra}\]"'):
        make_executor(name, 1, RunConfig(), {}, tmp_path, Console())

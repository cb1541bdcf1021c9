"""Whoever carries out the runs of a study, the numbers are the same, and what was begun is saved."""

import importlib.util
import os
import signal

import pytest
from rich.console import Console

from didicm.errors import UserError
from didicm.experiments.clusters import Job
from didicm.experiments.execute import write_run
from didicm.experiments.executors import gpu_shares, make_executor
from didicm.experiments.results import read_results
from didicm.experiments.run import run_study
from didicm.settings import RunConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A study that this process carried out."""
    out = tmp_path_factory.mktemp("whole")
    run_study(tiny(), out)
    return out


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


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


def test_worker_processes_share_the_work_and_may_have_loading_workers(tiny, whole, tmp_path, numbers_of):
    results = run_study(tiny({"run.workers": 1}), tmp_path, jobs=2)
    assert [result.key for result in results] == [run.key for run in tiny().runs("fashion-mini", 2)]
    assert numbers_of(tmp_path) == numbers_of(whole)


def test_ctrl_c_saves_the_trainings_of_all_workers_and_the_same_command_goes_on(
    tiny, tmp_path, start_study, wait_until
):
    study, out = tiny({"epochs": 100_000}, seeds=1), tmp_path / "out"
    process = start_study(study, out, {"start_new_session": True}, jobs=2)
    wait_until(lambda: len(list(out.glob("measured/*/progress"))) == 2, process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal tells all of them
    shown, trouble = process.communicate()
    assert process.returncode == 130, trouble
    assert "the same command goes on" in shown
    assert len(list(out.glob("runs/*/state/*.safetensors"))) == 2

    process = start_study(study, out, {"start_new_session": True}, jobs=2)
    logs = list(out.glob("runs/*/train.log"))
    wait_until(lambda: all("resuming from step" in log.read_text() for log in logs), process)
    process.send_signal(signal.SIGTERM)  # a scheduler tells the first only
    assert process.wait() == 130
    assert not workers_of(process.pid)


def test_a_worker_that_dies_is_told_and_the_others_are_saved(tiny, tmp_path, start_study, wait_until):
    out = tmp_path / "out"
    process = start_study(tiny({"epochs": 100_000}, seeds=1), out, jobs=2)
    wait_until(lambda: len(list(out.glob("measured/*/progress"))) == 2, process)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, trouble = process.communicate()
    assert "7 px, 5 % of the images, seed 0: its process was killed by SIGKILL" in trouble
    assert len(list(out.glob("runs/*/state/*.safetensors"))) == 1


def test_workers_of_a_killed_owner_stop_by_themselves(tiny, tmp_path, start_study, wait_until):
    out = tmp_path / "out"
    process = start_study(tiny({"epochs": 100_000}, seeds=1), out, jobs=2)
    wait_until(lambda: len(list(out.glob("measured/*/progress"))) == 2, process)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(workers) == 2
    while any(map(is_alive, workers)):
        pass
    assert len(list(out.glob("runs/*/state/*.safetensors"))) == 2


def test_a_run_can_be_trained_by_several_processes(tiny, tmp_path):
    study = tiny({"run.devices": 2}, methods=[{"name": "DiDiCM"}], seeds=1)
    (result,) = run_study(study, tmp_path)
    log = (tmp_path / "runs" / result.key / "train.log").read_text()
    assert log.count("epoch 2: accuracy") == 1
    assert result.num_train == 90
    assert not list(tmp_path.glob("runs/*/state"))


def test_a_mistake_that_only_several_processes_find_is_one_sentence(tiny, tmp_path):
    study = tiny({"run.devices": 2, "batch_size": 25}, methods=[{"name": "DiDiCM"}], seeds=1)
    with pytest.raises(UserError, match=r"DiDiCM, 7 px, .* batch_size 25 does not split evenly over 2 processes"):
        run_study(study, tmp_path)


def test_ray_carries_out_a_study(tiny, whole, tmp_path, numbers_of):
    run_study(tiny(), tmp_path / "out", executor="ray", jobs=2)
    assert numbers_of(tmp_path / "out") == numbers_of(whole)
    wrong = tiny(seeds=1, methods=[{"name": "s", "method": "standard"}])
    folder = write_run(tmp_path / "wrong", tmp_path, wrong.runs("fashion-mini", 1)[0])
    state = tmp_path / "runs" / folder.name / "last"
    state.parent.mkdir(parents=True)
    state.write_text("not a folder")
    with pytest.raises(Exception, match="last"):
        run_study(wrong, tmp_path / "wrong", trainings=tmp_path, executor="ray")


def test_submitit_carries_out_a_study_and_submits_each_run_once(tiny, whole, tmp_path, numbers_of):
    console = Console(record=True, width=500)
    results = run_study(tiny(), tmp_path, executor="submitit-local", jobs=2, console=console)
    assert console.export_text().count("submitted ") >= 2  # no more than two at the same time
    assert numbers_of(tmp_path) == numbers_of(whole)
    assert len(read_results(tmp_path)) == len(results)
    logs = "".join(path.read_text() for path in (tmp_path / "jobs").glob("*_log.out"))
    assert logs.count("done: ") == 4


def test_a_job_that_fails_is_told_with_where_to_look(tiny, tmp_path):
    study = tiny({"run.devices": 2, "batch_size": 25}, methods=[{"name": "DiDiCM"}], seeds=1)
    with pytest.raises(
        UserError, match=r"job \w+ failed \(DiDiCM, 7 px.* does not split evenly .*: see .*_log.err"
    ):
        run_study(study, tmp_path, executor="submitit-local")


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
        ("submitit-local", {"speed": 3}, "--executor submitit-local cannot be used so .*speed"),
        ("slurm", {}, "--executor slurm cannot be used so .*"),  # there is none here
    ],
)
def test_wrong_options_are_one_sentence_before_anything_runs(name, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        make_executor(name, 1, RunConfig(accelerator="cpu"), options, tmp_path, Console())


@pytest.mark.parametrize(("name", "package", "extra"), [("slurm", "submitit", "slurm"), ("ray", "ray", "ray")])
def test_a_missing_package_is_told_with_how_to_install_it(name, package, extra, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == package else find(asked))
    with pytest.raises(UserError, match=rf'--executor {name} needs {package}: pip install "didicm\[{extra}\]"'):
        make_executor(name, 1, RunConfig(), {}, tmp_path, Console())

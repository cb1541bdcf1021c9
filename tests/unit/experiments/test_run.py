import json
import os
import shutil
import signal
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from didicm.classifier import DiffusionClassifier, Sampler, StandardClassifier
from didicm.data import folder
from didicm.errors import UserError
from didicm.evaluation.metrics import evaluate_probs
from didicm.evaluation.run import evaluate
from didicm.evaluation.store import load_posteriors
from didicm.experiments import execute as executing
from didicm.experiments import measure as measuring
from didicm.experiments import run as running
from didicm.experiments.execute import execute, prepare, read_result, write_run
from didicm.experiments.measure import final_epochs_gain, measure, samplers_of
from didicm.experiments.results import RESULTS, read_plan, read_results
from didicm.experiments.run import check_begun, plan_runs, run_study
from didicm.experiments.spec import PICTURES
from didicm.models import create_model
from didicm.processes import LOCK, HeldError, held
from didicm.report.html import write_report
from didicm.training.build import INDEX
from didicm.values import override


@pytest.fixture
def plan(tiny):
    """What is stored of a study."""
    return lambda *args, **changes: plan_runs(tiny(*args, **changes), None, None, None)[1]


def runs_of(study, seeds=1):
    return study.runs("fashion-mini", seeds)


def test_each_run_has_one_line_with_metrics_costs_and_stored_posteriors(tiny, whole):
    results = {result.key: result for result in read_results(whole)}
    assert list(results) == [run.key for run in runs_of(tiny(), 2)]
    for result in results.values():
        assert (result.num_train, result.num_held_out, result.num_test) == (90, 10, 1000)
        assert (whole / "measured" / result.key / PICTURES).is_file()
        assert result.train_seconds > 0
        for measured in result.measurements:
            if measured.posteriors:
                stored = load_posteriors(whole / measured.posteriors)
                assert evaluate_probs(stored.probs, stored.labels) == measured.metrics
                assert len(set(stored.image_names)) == 1000
                assert measured.scaled_metrics["cls/Acc"] == measured.metrics["cls/Acc"]
    diffusion = results[runs_of(tiny())[1].key]
    assert [measured.sampler for measured in diffusion.measurements] == ["2 steps", "1 call", "1 step"]
    assert [measured.calls for measured in diffusion.measurements] == [2, 1, 1]
    assert not list(whole.glob("runs/*/state"))
    assert not list(whole.glob("runs/*/best"))
    assert not list(whole.glob("measured/*/*.json"))


class Precisions(TorchDispatchMode):
    """In which precision the network convolves, and a solver normalises its scores."""

    def __init__(self):
        super().__init__()
        self.convolutions, self.solver = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default and len(result) > 1:  # costs are counted on one image
            self.convolutions.add(result.dtype)
        if function is torch.ops.aten._softmax.default:
            self.solver.add(result.dtype)
        return result


@pytest.mark.parametrize(("precision", "network"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_it_measures_with_the_precision_of_the_run_and_a_solver_in_float32(
    tiny, whole, tmp_path, precision, network
):
    run = runs_of(tiny())[1]
    settings = {"out": str(whole / "runs" / run.key), "run.precision": precision}
    run = replace(run, config=override(run.config, settings), held_out=0.0)  # no temperature: it has float64
    with Precisions() as seen:
        result = measure(run, *prepare(run), None, tmp_path)
    assert (seen.convolutions, seen.solver) == ({network}, {torch.float32})
    (stored,) = [x for x in read_results(whole) if x.key == runs_of(tiny())[1].key]
    for one, other in zip(result.measurements, stored.measurements, strict=True):
        assert one.metrics["cls/NLL"] == pytest.approx(other.metrics["cls/NLL"], abs=0.02)


def test_every_process_measures_its_share_and_the_first_alone_has_the_result(tiny, whole, tmp_path, monkeypatch):
    run, found = runs_of(tiny())[1], []
    run = replace(run, config=override(run.config, {"out": str(whole / "runs" / run.key)}))
    second = SimpleNamespace(global_rank=1, world_size=2, is_global_zero=False, device=torch.device("cpu"))
    vars(second).update(autocast=nullcontext, launch=lambda: None, barrier=lambda: None)
    for part in ("test", "held"):  # made by the first
        (tmp_path / measuring.SCRATCH / part).mkdir(parents=True)
    monkeypatch.setattr(measuring, "make_fabric", lambda settings: second)
    monkeypatch.setattr(
        measuring, "evaluate", lambda *args, **own: found.append(evaluate(*args, **own)) or found[-1]
    )
    assert measure(run, *prepare(run), None, tmp_path) is None
    assert [len(evaluation.labels) for evaluation in found] == [500, 5]


def test_what_is_done_is_not_run_again(tiny, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    console = Console(record=True, quiet=True)
    results = run_study(tiny(), out, console=console)
    assert (out / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()
    assert [result.key for result in results] == [run.key for run in runs_of(tiny(), 2)]
    assert console.export_text() == ""


def test_a_second_owner_is_told_who_the_first_is(tiny, tmp_path):
    first = rf"in use by pid {os.getpid()} on {socket.gethostname()} since .* \(didicm compare --seeds 2\): wait"
    with held(tmp_path, command="didicm compare --seeds 2"), pytest.raises(UserError, match=first):
        run_study(tiny(), tmp_path)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGUSR1], ids=lambda stop: stop.name)
def test_a_schedulers_signal_saves_the_training_and_frees_the_folder(stop, tiny, tmp_path, meanwhile):
    def training():
        return list(tmp_path.glob("measured/*/progress"))

    console = Console(record=True, width=500)
    with meanwhile(training, lambda: os.kill(os.getpid(), stop)), pytest.raises(KeyboardInterrupt):
        run_study(tiny({"epochs": 100_000}), tmp_path, console=console)
    assert "run the same command again to resume" in console.export_text()
    assert list(tmp_path.glob("runs/*/state/*"))
    with held(tmp_path):
        pass


@pytest.mark.usefixtures("few_tested")
def test_a_run_that_another_job_is_at_is_waited_for(tiny, tmp_path):
    run = runs_of(tiny())[0]
    folder = write_run(tmp_path, tmp_path, run)
    execute(folder)
    result = (folder / "result.json").read_bytes()
    execute(folder)  # finds it done
    assert (folder / "result.json").read_bytes() == result
    assert read_result(folder).key == run.key
    training = tmp_path / "runs" / run.key
    with held(training), pytest.raises(HeldError), held(training):
        pass


def test_a_second_study_samples_the_networks_of_the_first(tiny, whole, tmp_path):
    shutil.copytree(whole / "runs", tmp_path / "runs")
    models = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("model.safetensors")}
    samplers = {"labels": {"method": "cl", "steps": 1, "chains": 2}}
    renamed = [{"name": "other", "model_args.parameterization": "posterior"}]
    study = tiny(samplers=samplers, methods=renamed, seeds=1)
    (result,) = run_study(study, tmp_path / "second", trainings=tmp_path)
    assert [measured.sampler for measured in result.measurements] == ["labels"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("model.safetensors")} == models
    assert not (tmp_path / "second" / "runs").exists()


@pytest.mark.usefixtures("few_tested")
def test_without_held_out_images_all_are_for_training_and_there_is_no_temperature(tiny, tmp_path):
    (result,) = run_study(tiny(held_out=0, methods=[{"name": "s", "method": "standard"}], seeds=1), tmp_path)
    assert (result.num_train, result.num_held_out, result.num_test) == (100, 0, 100)
    assert result.measurements[0].temperature is None
    assert result.measurements[0].scaled_metrics is None


@pytest.mark.usefixtures("unrendered", "few_tested")
def test_a_network_whose_labels_are_all_masked_is_asked_once_and_has_no_steps_to_draw(tiny, tmp_path):
    masked = {"name": "DiDiCM", "mask": 1.0, "sampler.method": "readout"}
    study = tiny(methods=[masked, {"name": "standard", "method": "standard"}], seeds=1)
    result = next(x for x in run_study(study, tmp_path) if x.method == "DiDiCM")
    assert [x.calls for x in result.measurements] == [1]
    assert load_file(tmp_path / "measured" / result.key / PICTURES).keys() == {"shown", "images"}
    assert write_report(tmp_path).path.exists()


def test_methods_that_are_the_same_training_are_named(tiny, tmp_path):
    same = [{"name": name, "method": "standard"} for name in ("a", "b")]
    with pytest.raises(UserError, match="a and b have the same settings"):
        run_study(tiny(methods=same), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_temperature_images_are_cut_from_the_training_images_alike_for_all_methods(tiny):
    made = [prepare(run) for run in runs_of(tiny())]
    for components, test in made:
        sets = (components.train, components.val, test)
        names = [{images.name(i) for i in range(len(images))} for images in sets]
        assert not names[0] & names[1]
        assert not (names[0] | names[1]) & names[2]
        assert len(names[2]) == 1000
    (one, _), (other, _) = made
    assert [one.val.name(i) for i in range(10)] == [other.val.name(i) for i in range(10)]


def test_mistakes_are_told_before_anything_is_written(tiny, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"7 px, 1 % of the images: .* lower batch_size"):
        run_study(tiny(fractions=[0.01]), out)
    with pytest.raises(UserError, match=r"no setting 'optimizer.speed'"):
        run_study(tiny({"optimizer.speed": 1}), out)
    with pytest.raises(UserError, match="needs --data"):
        run_study(tiny(data=None), out)
    with pytest.raises(UserError, match=r"no executor 'rey': choose one of local, ray"):
        run_study(tiny(), out, executor="rey")
    assert not out.exists()


def test_whether_the_loss_was_still_falling_is_read_from_the_last_two_tenths(tmp_path, whole):
    path = tmp_path / "metrics.jsonl"

    def write(losses):
        lines = [{"step": i, "epoch": i, "loss": loss} for i, loss in enumerate(losses, start=1)]
        path.write_text("\n".join(map(json.dumps, [*lines, {"step": 20, "epoch": 20, "val/cls/Acc": 1.0}])))

    write([9.0] * 16 + [3.0, 1.0] + [1.0, 2.0])
    assert final_epochs_gain(path, 20) == 0.25  # from 2 to 1.5
    write([1.0])
    assert final_epochs_gain(path, 20) is None


def test_answers_that_are_not_finite_are_told_with_the_run_whoever_carries_it_out(tiny, tmp_path, monkeypatch):
    run = runs_of(tiny())[1]
    folder = write_run(tmp_path, tmp_path, run)

    def fail(*args):
        raise FloatingPointError("the network answered\nwith NaN")

    monkeypatch.setattr(executing, "_train_and_measure", fail)
    with pytest.raises(UserError, match=r"^DiDiCM, 7 px, .*, seed 0: the network answered with NaN$"):
        execute(folder)
    assert executing.main(folder) == 2  # as one of several processes
    told = tmp_path / "runs" / run.key / executing.ERROR
    assert told.read_text() == "the network answered with NaN"


def test_the_main_sampler_is_the_recipes():
    network = create_model("didirn8", num_classes=3, width=0.125)

    def methods(method):
        found = samplers_of(DiffusionClassifier(network, sampler=Sampler(method, steps=2)))
        return [(spec.name, spec.settings["method"], spec.stored) for spec in found]

    for method in ("cp", "cl"):
        assert methods(method) == [
            ("2 steps", method, True),
            ("1 call", "readout", True),
            ("1 step", method, False),
        ]
    assert methods("readout")[:2] == [("1 call", "readout", True), ("2 steps", "cp", True)]


def test_several_views_are_measured_beside_the_usual_answers():
    network = create_model("didirn8", num_classes=3, width=0.125)
    standard = StandardClassifier(create_model("didirn8_baseline", num_classes=3, width=0.125))
    diffusion = DiffusionClassifier(network, sampler=Sampler(steps=2))
    for classifier, names in (
        (standard, ["1 call", "4 views"]),
        (diffusion, ["2 steps", "1 call", "4 views", "4 augmented steps", "1 step"]),
    ):
        assert [spec.name for spec in samplers_of(classifier, views=4)] == names
        assert [spec.name for spec in samplers_of(classifier)] == [name for name in names if name[0] != "4"]


def test_an_ensemble_counts_as_the_work_of_all_its_members(tiny):
    methods = [{"name": "one", "method": "standard"}, {"name": "four", "method": "standard", "members": 4}]
    one, four = map(running._work, runs_of(tiny(methods=methods)))
    assert four == 4 * one


def test_a_folder_keeps_to_its_settings_and_may_grow(plan):
    stored = plan()
    assert not stored.conflict(plan())
    assert stored.conflict(plan({"optimizer.lr": 0.1})) == "optimizer.lr is 0.005, not 0.1"
    assert stored.conflict(plan({"model_args": {"width": 0.25}})) == "model_args.width is 0.125, not 0.25"
    assert stored.conflict(plan(held_out=0.2)) == "held_out is 0.1, not 0.2"
    assert stored.conflict(plan(views=2)) == "views is 1, not 2"
    for times, told in (("uniform", ""), ("squared", "time_sampling is squared, no longer an option")):
        older = {kind: {**settings, "time_sampling": times} for kind, settings in stored.settings.items()}
        assert replace(stored, settings=older).conflict(plan()) == told
    assert stored.conflict(plan(samplers={"2 steps": {"steps": 2}})) == "samplers are the usual ones"
    # What an earlier version did not store was as it is without the setting.
    older = {kind: {k: v for k, v in x.items() if k != "augment.pad_mode"} for kind, x in stored.settings.items()}
    assert replace(stored, settings=older).conflict(plan()) == "augment.pad_mode is black, not edge"
    assert not replace(stored, settings=older).conflict(plan({"augment.pad_mode": "black"}))
    # Also for methods and conditions that are new.
    assert stored.conflict(plan({"optimizer.lr": 0.1}, resolutions=[14])) == "optimizer.lr is 0.005, not 0.1"
    smooth = [{"name": "smooth", "method": "standard", "augment.label_smoothing": 0.1}]
    assert stored.conflict(plan({"epochs": 3}, methods=smooth)) == "epochs is 2, not 3"

    for grown in (plan(methods=smooth), plan(resolutions=[14]), plan(seeds=3)):
        assert not stored.conflict(grown)
        joined = stored.extended(grown)
        assert joined.runs == {**stored.runs, **grown.runs}
        assert joined.study.conditions[0] == stored.study.conditions[0]
        assert joined.study.methods[:2] == stored.study.methods
        assert not joined.conflict(stored)
        assert not joined.conflict(grown)
    of_two, of_four = (plan(methods=[{"name": "several", "members": n}]) for n in (2, 4))
    assert of_two.conflict(of_four) == "members of several is 2, not 4"
    study = plan(layout="metrics", methods=smooth)
    assert stored.extended(study) is study


def test_the_plan_is_on_disk_before_the_first_result(tiny, whole):
    stored = read_plan(whole)
    assert stored.study == tiny()
    assert stored.runs == {run.key: str(run.method) for run in runs_of(tiny(), 2)}
    assert {settings["epochs"] for settings in stored.settings.values()} == {2}


def test_a_folder_of_something_else_is_left_alone(tiny, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and holds no comparison"):
        run_study(tiny(), tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_command_that_was_stopped_before_it_wrote_its_plan_can_be_given_again(plan, tmp_path):
    (tmp_path / LOCK).touch()
    (tmp_path / INDEX).mkdir()
    assert check_begun(tmp_path, plan()) is None


def test_a_grid_lists_a_folder_once_and_sees_when_it_changes(tiny, tmp_path, make_folder, write, scans):
    data, out = make_folder(tmp_path / "data", count=12), tmp_path / "out"
    methods = [
        {"name": f"smoothed by {x}", "method": "standard", "augment.label_smoothing": x} for x in (0.1, 0.2)
    ]
    study = tiny({"batch_size": 4, "epochs": 1, "image.channels": 3}, fractions=[1.0], methods=methods)

    def run(seeds):
        scans.clear()
        run_study(study, out, data=str(data), seeds=seeds, console=Console(quiet=True))
        read = list(scans)
        folder._listings.clear()  # as another process would start
        return read

    time.sleep(0.2)
    assert run(1) == ["cat", "dog"]  # two methods, each built to check it and again to train it
    assert run(2) == []
    write(data / "cat" / "new.png")
    time.sleep(0.2)
    assert run(3) == ["cat", "dog"]
    counts = {result.num_train + result.num_held_out + result.num_test for result in read_results(out)}
    assert counts == {24, 25}


def test_a_run_keeps_the_listing_for_when_it_is_resumed(tmp_path, make_folder, scans, works, train_flags):
    data, run = make_folder(tmp_path / "data", count=12), tmp_path / "run"
    time.sleep(0.2)
    flags = {"data": data, "fraction": 1, "batch_size": 4, "epochs": 1, "image__channels": 3}
    works("train", *train_flags(run, **flags))
    assert scans == ["cat", "dog"]
    folder._listings.clear()
    works("train", f"--out={run}", "--epochs=2", "--extend")
    assert scans == ["cat", "dog"]

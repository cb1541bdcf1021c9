"""A student learns from its teacher's posteriors, in this process on images that ship with the package."""

import re

import pytest
import torch

import didicm
from didicm import Ensemble, StandardClassifier
from didicm.cli.__main__ import main
from didicm.cli.distill import DistillOptions, student_settings
from didicm.evaluation.stored import open_model
from didicm.training import loop
from didicm.values import override

TINY = [
    "--data=fashion-mini", "--model-args.width=0.125", "--fraction=0.2", "--image.size=8", "--batch-size=40",
    "--optimizer.ema=null", "--run.workers=0", "--run.validate-epochs=100", "--run.log-seconds=100",
]  # fmt: skip
FEW = "--fraction=0.05"  # where nothing has to be learnt


@pytest.fixture(scope="module")
def teacher(once):
    def make(folder):
        score = "--model-args.parameterization=score"  # whose one call differs from its eight
        assert main(["train", "--recipe=small", *TINY, score, "--epochs=5", f"--out={folder / 'run'}"]) == 0

    return once("teacher", make) / "run"


@pytest.fixture(scope="module")
def student(teacher, once):
    def make(folder):
        flags = [f"--out={folder / 'run'}", "--epochs=3", "--augment.mixup=0.5"]
        assert main(["distill", str(teacher), *flags]) == 0

    return once("student", make) / "run"


def test_one_call_of_the_student_is_near_the_teachers_eight(teacher, student):
    """It starts from the teacher's weights and answers without a label."""
    model, loaded = open_model(teacher), didicm.load(student).classifier
    assert (loaded.mask, loaded.sampler.method, loaded.sampler.calls) == (1.0, "readout", 1)
    val = didicm.open_data("fashion-mini", channels=1).val
    image = torch.stack([model.transform(val.load(i)) for i in range(300)])
    label = torch.as_tensor(val.labels[:300]).long().unsqueeze(-1)
    steps, learnt = model.classifier(image), loaded(image)
    untaught = model.classifier.posterior(image, method="readout").probs
    assert (learnt - steps).abs().mean() < (untaught - steps).abs().mean() / 2
    assert learnt.gather(-1, label).log().mean() > steps.gather(-1, label).log().mean() - 0.1


def test_it_resumes_to_the_same_bits(teacher, tmp_path, works, weights_of, assert_same):
    given = {
        "epochs": 1,
        "fraction": 0.1,
        "augment.mixup": 0.5,
        "run.save_seconds": 0,
        "teacher_sampler": {"steps": 2},
    }
    base, changes = student_settings(str(teacher), DistillOptions(), given)
    whole, stopped = (override(base, *changes, {"out": str(tmp_path / name)}) for name in ("whole", "stopped"))

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    loop.train(whole)
    with pytest.raises(KeyboardInterrupt):
        loop.train(stopped, on_step=stop)
    assert "resuming from step" in works("distill", teacher, f"--out={stopped.out}", "--epochs=1").out
    assert_same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped"))


@pytest.mark.parametrize("views", [1, 2])
def test_targets_are_the_teachers_posteriors_of_the_mixed_images(teacher, tmp_path, views, monkeypatch):
    seen = []
    losses = StandardClassifier.losses

    def remember(self, image, target, u):
        seen.append((image.detach().clone(), target.detach().clone()))
        return losses(self, image, target, u)

    monkeypatch.setattr(StandardClassifier, "losses", remember)
    asked = [f"--teacher-sampler.views={views}", "--teacher-sampler.steps=2", "--augment.mixup=0.5", FEW]
    command = ["distill", str(teacher), "--student=standard", *asked, "--epochs=1", f"--out={tmp_path / 'run'}"]
    assert main(command) == 0
    image, target = seen[-1]
    expected = didicm.load(teacher).classifier.posterior(image, steps=2, views=views).probs
    assert torch.allclose(target, expected, atol=1e-5)
    assert isinstance(didicm.load(tmp_path / "run").classifier, StandardClassifier)


def test_an_ensemble_teaches_too(teacher, student, tmp_path):
    stored = didicm.load(teacher)
    members = [stored.classifier, didicm.load(student).classifier]
    kept = {"class_names": stored.class_names, "transform": stored.transform}
    didicm.save(Ensemble(members), tmp_path / "ensemble", **kept)
    settings = ["--recipe=small", *[x for x in TINY if "image.size" not in x], FEW, "--epochs=1"]
    command = ["distill", str(tmp_path / "ensemble"), *settings, f"--out={tmp_path / 'run'}"]
    assert main(command) == 0
    assert didicm.load(tmp_path / "run").transform["size"] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "needs RUN, the teacher"),
        (["{run}"], "no --out"),
        (["{run}/best", "--out=x"], "is not a run whose settings a student could take: add --recipe or --config"),
        (["{run}", "--out=x", "--image.size=16"], "image.size is 16, but teacher .* sees 8 pixels"),
        (["{run}", "--out=x", "--teacher-sampler.step=2"], "did you mean steps"),
        (["{run}", "--out=x", "--sampler.method=cp"], "with mask 1 .* set sampler readout"),
        (["{run}", "--out=x", "--student=other"], "student must be one of same, standard"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says, teacher, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    assert re.search(says, fails("distill", *[x.format(run=teacher) for x in arguments]))
    assert not (tmp_path / "x").exists()

import re

import pytest
import torch

from didicm.experiments.results import read_results

ABSENT = "mps" if torch.cuda.is_available() else "cuda"  # no machine has both
TINY = [
    "--data=fashion-mini",
    "--resolutions=7",
    "--fractions=0.05",
    "--epochs=1",
    "--steps=2",
    "--set=batch_size=20",
    "--set=model_args={width: 0.125, stem: small}",
]


def test_compare_runs_resumes_extends_and_reports(tmp_path, request, works, fails, few_pictures):
    out = tmp_path / "out"
    methods = "--methods=standard,didicm-few"
    shown = works("compare", *TINY, methods, f"--out={out}", "--seeds=1").out
    for words in (
        "1/2  standard",
        "Test images",
        "Differences",
        "Cost",
        "report:",
        "single network call of DiDiCM costs",  # as recipe few asks
    ):
        assert words in shown
    assert (out / "report.html").stat().st_size > 10_000

    request.getfixturevalue("unrendered")  # seen once, and slow
    # One more method: what is done is not run again.
    more = "--methods=standard,standard-smooth,didicm-few"
    assert "3 trainings, 2 of them done before" in works("compare", *TINY, more, f"--out={out}", "--seeds=1").out
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
    assert "standard, smoothed labels" in works("compare", f"--out={out}", "--report-only").out

    error = fails("compare", *TINY, methods, f"--out={out}", "--set=optimizer.lr=0.1")
    assert "started with other settings (optimizer.lr is 0.005, not 0.1)" in error


def test_opponents_at_the_same_price_can_be_asked_for(tmp_path, works, unrendered, few_pictures):
    methods = "--methods=standard,ensemble,snapshots,swa,didicm-few"
    epochs = [x for x in TINY if not x.startswith("--epochs")] + ["--epochs=5"]
    works("compare", *epochs, methods, "--views=2", f"--out={tmp_path}", "--seeds=1")
    samplers = {
        result.method: [measured.sampler for measured in result.measurements if measured.posteriors]
        for result in read_results(tmp_path)
    }
    assert samplers == {
        "standard": ["1 call", "2 views"],
        "standard, ensemble": ["4 members"],
        "standard, snapshots": ["5 members"],
        "standard, SWA": ["1 call", "2 views"],
        "DiDiCM, ResNet blocks": ["1 call", "2 steps", "2 views", "2 augmented steps"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report-only"], "holds no results yet"),
        ([], "no --data"),
        (["--data=nowhere"], "nowhere"),
        (["--data=fashion-mini", "--recipe=huge"], "unknown recipe 'huge'"),
        (["--data=fashion-mini", "--resolutions=28,x"], "--resolutions must be a whole number, got 'x'"),
        (["--data=fashion-mini", "--fractions=2.5"], "--fractions must be in (0, 1] or a whole number"),
        (["--data=fashion-mini", "--corruptions=fog:9"], "no corruption 'fog'"),
        (["--data=fashion-mini", "--methods=magic"], "--methods has no 'magic'"),
        (["--data=fashion-mini", "--methods=standrad"], "did you mean standard?"),
        (["--data=fashion-mini", "--seeds=0"], "--seeds must be at least 1"),
        (["--data=fashion-mini", "--jobs=0"], "--jobs must be at least 1"),
        (["--data=fashion-mini", "--set=epochs"], "--set needs NAME=VALUE"),
        (["--data=fashion-mini", "--set=epoch=3"], "no setting 'epoch': did you mean epochs?"),
        (
            ["--data=fashion-mini", "--executor=here"],
            "--executor must be one of local, ray, slurm, submitit-local",
        ),
        (["--data=fashion-mini", "--set=run.accelerator=abacus"], "no run.accelerator 'abacus'"),
        (["--data=fashion-mini", "--set=seed=-1"], "seed must be at least 0"),
        (["--data=fashion-mini", "--set=optimizer.lr=-1"], "optimizer.lr must be above 0"),
        (["--data=fashion-mini", "--set=run.validate_epochs=0"], "run.validate_epochs must be at least 1"),
        (
            ["--data=fashion-mini", "--set=augment.auto_augment=rand-n99999x"],
            "augment does not work with these values",
        ),
        (["--data=fashion-mini", "--set=fraction=0.1"], "fraction=0.1 does not hold for standard"),
        (["--data=fashion-mini", "--set=seed=3"], "seeds count from 0 to --seeds"),
        (["--data=fashion-mini", "--set=run.devices=8"], "--set run.devices: give --devices"),
        (["--data=fashion-mini", "--set=run.nodes=2"], "run.nodes=2 does not hold for standard"),
        (["--data=fashion-mini", "--resolution=28"], "no option --resolution: did you mean --resolutions?"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(arguments, message, tmp_path, fails):
    assert message in fails("compare", f"--out={tmp_path / 'out'}", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unrendered")
def test_images_that_cannot_be_read_are_counted_in_the_verdict(tmp_path, make_folder, works):
    for split in ("train", "val"):
        (make_folder(tmp_path / "photos" / split, count=12) / "cat" / "torn.png").write_bytes(b"torn")
    asked = [f"--data={tmp_path / 'photos'}", "--resolutions=12", "--epochs=1", *TINY[-2:]]
    shown = works(
        "compare", *asked, "--set=batch_size=4", "--methods=standard", f"--out={tmp_path / 'out'}", "--seeds=1"
    ).out
    assert "Left out, because they cannot be read: 2 images; didicm doctor names them." in shown


@pytest.mark.usefixtures("unrendered")
def test_results_of_other_images_do_not_join(tmp_path, make_folder, works, fails):
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, count=12)
    asked = [f"--data={tmp_path / 'photos'}", "--resolutions=12", "--epochs=1", *TINY[-2:], "--set=batch_size=4"]
    asked += ["--methods=standard", f"--out={tmp_path / 'out'}"]
    works("compare", *asked, "--seeds=1")
    for path in sorted((tmp_path / "photos" / "val").rglob("*.png"))[:13]:
        path.unlink()
    says = "photos has 11 test images (12 px, "
    assert says in fails("compare", *asked, "--seeds=2")
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 1


def test_draws_of_held_out_images_are_of_a_search(tmp_path, works, fails):
    out = f"--out={tmp_path / 'out'}"
    assert "--holdouts repeats the trials of a search: give --tune" in fails("compare", *TINY, "--holdouts=2", out)
    shown = works("compare", *TINY, "--methods=standard", "--tune=4", "--holdouts=2", "--dry-run", out).out
    assert "(up to 4 trials of each kind, 2 draws of held-out images each), then 3 trainings" in shown
    assert re.search(r"GB on disk if the search keeps these epochs, [\w ]+ if longer is always better\n", shown)
    study = tmp_path / "mine.yaml"
    study.write_text("{title: Mine, question: Why, layout: comparison, holdouts: 2, methods: [{name: DiDiCM}]}")
    asked = ["study", str(study), "--data=fashion-mini", "--dry-run", out]
    assert "give --tune" in fails(*asked)
    assert "2 draws of held-out images each" in works(*asked, "--tune=2").out
    assert "of the search" not in works(*asked, "--tune=0").out
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(tmp_path, works):
    shown = works(
        "compare", *TINY, "--methods=standard", "--seeds=1", "--dry-run", f"--out={tmp_path / 'out'}"
    ).out
    assert "1 training: 1 kind, 1 of each" in shown
    assert "under 1 s on one device" in shown
    assert not (tmp_path / "out").exists()
    many = works("compare", *TINY, "--methods=standard", "--seeds=3", "--jobs=50", "--dry-run", "--out=x").out
    assert "on 3 devices" in many  # no more than there are trainings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"--set=run.accelerator={ABSENT}"], f"there is no {ABSENT.upper()} device here"),
        (["--cluster=num_cpus=1"], "--cluster is for --executor slurm or ray"),
    ],
)
def test_what_cannot_run_here_fails_in_a_dry_run_too(arguments, message, tmp_path, fails):
    for way in ([], ["--dry-run"]):
        assert message in fails("compare", *TINY, "--seeds=1", *way, f"--out={tmp_path / 'out'}", *arguments)
        assert not (tmp_path / "out").exists()


def test_without_a_folder_it_asks_for_one(fails):
    assert "needs --out" in fails("compare", *TINY)


def test_a_folder_of_something_else_is_left_alone(tmp_path, fails):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "not empty and holds no comparison" in fails("compare", f"--out={tmp_path}", *TINY)

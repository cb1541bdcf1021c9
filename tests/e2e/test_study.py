"""`didicm study` on studies that are shrunk until they take seconds."""

import re

import pytest
import yaml

from didicm.experiments.spec import STUDIES

SHRUNK = {
    "resolutions": [8],
    "fractions": [0.1],
    "by_fraction": {},
    "settings": {
        "epochs": 2,
        "batch_size": 20,
        "model": "didirn8",
        "model_args": {"width": 0.125, "stem": "small"},
        "optimizer.warmup_epochs": 0,
        "image.channels": 1,
        "run.accelerator": "cpu",
        "run.precision": "32-true",
        "run.workers": 0,
    },
}
STANDARD = {"method": "standard"}
pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture(scope="module")
def photos(tmp_path_factory, make_folder):
    """Few images: measuring takes most of a study's time, and some measure dozens of samplers."""
    root, names = tmp_path_factory.mktemp("photos"), [f"class {k}" for k in range(6)]
    make_folder(root / "train", names, count=70, size=(8, 8))
    make_folder(root / "val", names, count=5, size=(8, 8))
    return str(root)


@pytest.fixture
def shrink(tmp_path, photos):
    """A study that ships, on few small images and with a tiny network; all else is its own."""

    def shrink(name, **changes):
        content = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, "data": photos, **SHRUNK, **changes}, sort_keys=False))
        return str(path)

    return shrink


@pytest.mark.slow
def test_the_papers_main_study_runs_with_the_published_table_beside(tmp_path, shrink, works, fails):
    out = tmp_path / "out"
    path = shrink("main-imagenet")
    shown = works("study", path, f"--out={out}").out
    for words in (
        "4/4",
        "10 %, 8 px",
        "DiDiCM-CP, Strong Aug",
        "Published",
        "57.92",
        "tab:main_results",
        "report:",
    ):
        assert words in shown
    folder = out / "main-imagenet"
    assert {"uncertainty", "gains", "trajectories"} <= {path.stem for path in (folder / "figures").iterdir()}
    tables = (folder / "tables.md").read_text()
    assert "| standard, Weak Aug | top-1 | 44.86 |" in tables
    ours = [line for line in tables.split("## Published")[0].splitlines() if "|" in line]
    assert len(ours) > 6
    assert not any("±" in line for line in ours)  # one seed has no interval

    # The selection study finds its networks trained.
    shown = works("study", shrink("selection-imagenet"), f"--out={out}").out
    assert len(list((out / "runs").iterdir())) == 4
    assert "By mean top-1, best first:" in shown
    assert "Published: argmin 71.7" in shown

    # Everything again, from what was stored; other samplers of the same study are refused.
    (folder / "report.html").unlink()
    works("study", path, f"--out={out}", "--report-only")
    assert (folder / "report.html").exists()
    changed = shrink("main-imagenet", samplers={"2 steps": {"steps": 2}})
    assert "samplers are 8 steps" in fails("study", changed, f"--out={out}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["efficiency-cpu", "sizes-cpu", "solvers-cpu"])
def test_the_other_studies_run_too(name, tmp_path, shrink, works):
    changes = {}
    if name == "sizes-cpu":
        lines = (("standard", "standard"), ("DiDiCM-CP", "diffusion"))
        changes["methods"] = [
            {"name": line, "size": size, "method": method, "model": f"didirn{size}"}
            for line, method in lines
            for size in (8, 10)
        ]
    shown = works("study", shrink(name, **changes), f"--out={tmp_path / 'out'}", "--seeds=1").out
    made = {path.stem for path in (tmp_path / "out" / name / "figures").iterdir()}
    own = {"efficiency-cpu": "calls", "sizes-cpu": "gains", "solvers-cpu": "steps"}
    assert own[name] in made
    assert "report:" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["magic"], "there is no study and no YAML file 'magic'"),
        (["main-imagenet"], "study main-imagenet needs --data"),
        (["main-imagenet", "--data=nowhere"], "nowhere"),
        (["main-cpu", "--report-only"], "holds no results yet"),
        (["main-cpu", "--seeds=0"], "--seeds must be at least 1"),
        (["main-cpu", "--devices=0"], "--devices must be at least 1"),
        (["main-cpu", "--set=epoch=3"], "no setting 'epoch'"),
        (["training-cpu", "--data=fashion-mini", "--set=epochs=2"], "epochs=2 does not hold for cross-entropy"),
        (["steps-cpu", "--data=fashion-mini", "--set=sampler={steps: 2}"], "does not hold for"),
        (["steps-cpu", "--data=fashion-mini", "--set=sampler.steps=2"], "sampler.steps=2 does not hold for"),
        (["main-cpu", "--set=optimizer.lr=fast"], "optimizer.lr must be a number, got 'fast'"),
        (["main-cpu", "--set=model_args.parameterization=posterior", "--set=epochs=many"], "epochs must be"),
        (["solvers-cpu", "--cluster=slurm_partition=gpu"], "--cluster is for --executor slurm or ray"),
        (["solvers-cpu", "--devices=3"], "batch_size 50 does not split evenly over 3 processes"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(arguments, message, tmp_path, fails):
    assert message in fails("study", *arguments, f"--out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_without_a_name_the_studies_are_listed_and_a_dry_run_writes_nothing(tmp_path, works):
    assert "solvers-cpu" in works("study").out
    shown = works("study", "solvers-cpu", "--tune=4", "--dry-run", f"--out={tmp_path / 'out'}").out
    assert "8 trainings of the search (up to 4 trials of each kind), then 6 trainings" in shown
    assert re.search(r"in total \d+ min \d\d s on one device", shown)  # a CPU's speed, where there is no GPU
    assert "exact, midpoint, 8 steps" in shown
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_device_hours_at_the_given_speed_with_memory_and_its_precision(works):
    def shown(*flags):
        return works("study", "stems-cpu", "--seeds=1", "--dry-run", "--set=run.precision=bf16-mixed", *flags).out

    slow, fast = shown("--tflops=1e-5"), shown("--tflops=2e-5", "--devices=2", "--jobs=4")
    whole, half = (int(re.search(r"on one device \(([\d,]+) device-hours", text)[1]) for text in (slow, fast))
    assert whole > 10
    assert whole == pytest.approx(2 * half, abs=2)
    (spread,) = re.findall(r"device-hours; at best (\d+) h \d\d min on 8 devices\) and \d\.\d\d GB on disk", fast)
    assert int(spread) == half // 8
    assert "at best" not in slow
    kinds = re.findall(r"\b(?:400|160|40) +(0\.\d\d) +(\d\.\d) +\d+ (?:h|min) \d\d (?:min|s) +(\d+)", slow)
    assert len(kinds) == 24  # parameters, multiply-adds, time and memory of each
    assert "per device (bf16-mixed)" in slow


def test_a_corrected_mistake_and_a_renamed_method_are_no_conflict(tmp_path, shrink, works, fails):
    def command(*names, **changes):
        methods = [{"name": name, **STANDARD} for name in names]
        path = shrink("objectives-cpu", methods=methods, seeds=1, curves={}, **changes)
        return "study", path, f"--out={tmp_path / 'out'}"

    assert "a and b have the same settings" in fails(*command("a", "b"))
    works(*command("a"))
    shown = works(*command("renamed")).out
    assert "renamed" in shown
    assert "│ a " not in shown
    # Another share of held-out images is another experiment, not another seed.
    assert "held_out is 0.1, not 0.2" in fails(*command("renamed", held_out=0.2))

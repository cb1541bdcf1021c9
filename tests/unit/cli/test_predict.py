"""`didicm predict --out`: rows of many images."""

import io
import json

import pytest

from didicm import Predictor, evaluate
from didicm.cli.__main__ import main


@pytest.fixture(scope="module")
def model(tmp_path_factory, save_model):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write):
    folder = tmp_path_factory.mktemp("photos")
    for i in range(5):
        write(folder / f"{i}.png", seed=i)
    (folder / "torn.jpg").write_bytes(b"torn")
    return folder


def test_rows_from_a_folder_a_pattern_and_a_list(model, folder, tmp_path, works, monkeypatch):
    shown = works("predict", model, folder, "--out", tmp_path / "x.jsonl", "--top", 2, "--workers", 0)
    assert shown.out == ""
    assert "x.jsonl: 6 rows written now; 1 of them without a prediction: the column error says why" in shown.err
    assert "8 network calls per image" in shown.err
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [True] * 5 + [False]
    works("predict", model, folder / "?.png", "--out", tmp_path / "y.jsonl", "--top", 2, "--workers", 0)
    listed = "".join(f"{folder}/{i}.png\n" for i in range(5)).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(listed)))
    works("predict", model, "-", "--out", tmp_path / "z", "--top", 2, "--workers", 0, "--part-size", 2)
    parts = sorted((tmp_path / "z").glob("part-*"))
    assert [len(part.read_text().splitlines()) for part in parts] == [2, 2, 1]
    for files in ([tmp_path / "y.jsonl"], parts):
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert [row["image"] for row in found] == [row["image"] for row in rows[:5]]
        assert [row["entropy"] for row in found] == pytest.approx([row["entropy"] for row in rows[:5]], abs=1e-5)
    same = works("predict", model, *(folder / f"{i}.png" for i in range(5)), "--json", "--top", 2).out.splitlines()
    assert [json.loads(line)["image"] for line in same] == [row["image"] for row in rows[:5]]


@pytest.mark.parametrize("name", ["size", "device", "calibrated"])
def test_an_option_of_the_command_is_no_setting_of_the_sampler(name, model, folder, fails):
    assert f"a sampler has no setting '{name}'" in fails("predict", model, folder, f"--sampler.{name}", "1")


def test_an_ensemble_may_be_asked_for_some_of_its_members(model, folder, tmp_path, save_model, works, fails):
    other = save_model(tmp_path / "other", "standard")
    works("ensemble", model, other, "--out", tmp_path / "both")

    def ask(place, *flags):
        return json.loads(works("predict", place, folder / "0.png", "--json", *flags).out)["classes"]

    first, both = ask(tmp_path / "both", "--sampler.members", 1), ask(tmp_path / "both")
    assert first == ask(model)
    assert both != first
    assert "members" in fails("predict", model, folder / "0.png", "--sampler.members", 1)


def test_the_calls_that_an_early_stop_saves_are_told(model, folder, tmp_path, make_folder, works):
    shown = works("predict", model, folder, "--out", tmp_path / "x.csv", "--workers", 0, "--sampler.tolerance", 2)
    assert "3 network calls per image instead of 8: the early stop saved 62.5 %" in shown.err
    data = make_folder(tmp_path / "data", classes=("ant", "bee", "cat"), count=3)
    command = ["evaluate", model, "--data", data, "--out", tmp_path / "found", "--workers", 0]
    shown = works(*command, "--sampler.tolerance", 2).out
    assert "network calls per image; 8" in shown
    found = json.loads((tmp_path / "found" / "metrics.json").read_text())
    assert (found["nfe"], found["calls_saved"]) == (3, 5)
    assert "without the early stop" not in works(*command, "--force").out
    assert json.loads((tmp_path / "found" / "metrics.json").read_text())["calls_saved"] == 0


def test_shards_fill_a_folder_of_csv(model, folder, tmp_path, works):
    for shard in ("2/2", "1/2"):
        flags = ["--csv", "--shard", shard, "--part-size", 3, "--workers", 0, "--optimize", "--all-probs"]
        works("predict", model, folder, "--out", tmp_path / "rows", *flags)
    one, two = ((tmp_path / "rows" / f"part-00000{k}.csv").read_text().splitlines() for k in (0, 1))
    assert (len(one), len(two)) == (4, 4)
    assert one[0] == two[0]
    assert one[0].endswith("entropy,probability_of_ant,probability_of_bee,probability_of_cat,nfe,error")


def test_nothing_readable_is_a_failure(model, tmp_path, capsys):
    (tmp_path / "gone.png").symlink_to("nowhere")
    command = [
        "predict",
        str(model),
        str(tmp_path / "gone.png"),
        "--out",
        str(tmp_path / "x.csv"),
        "--workers",
        "0",
    ]
    assert main(command) == 2
    assert (tmp_path / "x.csv").read_text().splitlines()[1].endswith("no such file")


def test_an_image_that_cannot_be_read_has_its_line_of_json(model, folder, capsys):
    names = [str(folder / name) for name in ("0.png", "torn.jpg", "1.png")]
    assert main(["predict", str(model), *names, "--json"]) == 2
    shown = capsys.readouterr()
    found = [json.loads(line) for line in shown.out.splitlines()]
    assert [line["image"] for line in found] == names
    assert ["classes" in line for line in found] == [True, False, True]
    assert found[1].keys() == {"image", "error"}
    assert found[1]["error"] in shown.err


def test_an_empty_list_is_a_failure(model, tmp_path, capsys, monkeypatch):
    for flags in ([], ["--out", str(tmp_path / "x.csv"), "--workers", "0"], ["--dry-run"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        assert main(["predict", str(model), "-", *flags]) == 2
        assert "there are no images" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_elses_is_replaced_with_force_alone(model, folder, tmp_path, works, fails):
    out = tmp_path / "mine.csv"
    out.write_text("my thesis")
    command = ["predict", model, folder, "--out", out, "--workers", 0]
    assert "mine.csv exists already: give another --out, or replace it with --force" in fails(*command)
    assert out.read_text() == "my thesis"
    works(*command, "--force")
    assert len(out.read_text().splitlines()) == 7


@pytest.mark.parametrize("how", [["--out", "x.csv"], ["--out", "x"], [], ["--dry-run"]], ids=str)
def test_a_name_that_does_not_exist_is_told_before_the_work(how, model, folder, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    assert "nosuch.jpg does not exist; check its name" in fails("predict", model, folder, "nosuch.jpg", *how)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_many_images_would_take(model, folder, tmp_path, works):
    shown = works("predict", model, folder, "--dry-run", "--out", tmp_path / "x.parquet", "--part-size", 1000).out
    assert "measured on 6 images, 1 of them unreadable" in shown
    for text in ("a million", "1,000", "a billion", "1,000,000", "64 devices", "GB"):
        assert text in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--shard", "1/2"], "--shard is for rows in a file: say where with --out"),
        (["--all-probs"], "--all-probs is for rows in a file"),
        (["--out", "x", "--shard", "half"], "--shard must be i/n with i from 1 to n, as in 2/8, got 'half'"),
        (["--out", "x", "--shard", "3/2"], "--shard must be i/n"),
        (["--out", "x", "--csv", "--parquet"], "--parquet and --csv are two formats: choose one"),
        (["--out", "x.csv", "--parquet"], "--out x.csv ends in .csv, but parquet was asked for"),
        (["--out", "x", "--actors", "2"], "--actors is for Ray"),
        (["--out", "x", "--engine", "spark"], "--engine must be one of local, ray"),
        (["--out", "x", "--trajectory", "t.png"], "omit either --trajectory or --out"),
        (["--out", "/proc/x/y"], "/proc/x/y cannot be written"),
        (["--out", ""], "--out is empty: give a path"),
        (
            ["--out", "x.csv.gz"],
            "--out x.csv.gz ends in .gz, which is none of our formats: give a .jsonl, .csv or",
        ),
        (["--out", "x.onnx"], "--out x.onnx ends in .onnx, which is none of our formats"),
        (["--out", "x", "--shard", "9/9"], "6 images make 1 part of --part-size 4096; use smaller parts or fewer"),
        (["--out", "x", "--top", "0"], "--top must be at least 1"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_mistakes_are_told_before_the_work(flags, says, model, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(model), str(folder), *flags]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_evaluate_optimised_says_the_same(tmp_path, save_model, make_folder, works):
    data = make_folder(tmp_path / "data", classes=("ant", "bee", "cat"), count=3)
    model = save_model(tmp_path / "model", "standard")
    plain = evaluate(model, str(data)).metrics
    works("evaluate", model, "--data", data, "--out", tmp_path / "fast", "--optimize", "--workers", 0)
    assert json.loads((tmp_path / "fast" / "metrics.json").read_text())["metrics"] == pytest.approx(
        plain, abs=1e-4
    )
    assert evaluate(Predictor.load(model, optimize=True).model, str(data)).metrics == pytest.approx(
        plain, abs=1e-4
    )

import json
import os
import signal
import tracemalloc
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from didicm import Predictor, UserError
from didicm.data.listing import list_images
from didicm.evaluation.calibration import Calibration, Conformal, save_calibration
from didicm.evaluation.stored import open_model
from didicm.inference.bulk import BulkSettings, Estimate, estimate_bulk, predict
from didicm.inference.rows import RowWriter

SMALL = BulkSettings(top=2, part_size=6, batch_size=4)
COUNT = 20
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory, save_model):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def predictor(model):
    return Predictor.load(model, steps=STEPS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory, write):
    """Twenty images, one torn and one gone."""
    folder = tmp_path_factory.mktemp("photos")
    paths = [write(folder / f"{i:02}.png", seed=i) for i in range(COUNT)]
    paths[3].write_bytes(b"torn")
    paths[8].unlink()
    paths[8].symlink_to("nowhere")
    return [str(path) for path in paths]


def lines(path):
    paths = sorted(path.glob("part-*")) if path.is_dir() else [path]
    return [json.loads(line) for file in paths for line in file.read_text().splitlines()]


def test_a_row_says_what_the_predictor_says(predictor, photos, tmp_path):
    seen = []
    done = predict(
        predictor, photos, tmp_path / "x.jsonl", settings=SMALL, progress=lambda d, n: seen.append((d.images, n))
    )
    assert (done.images, done.unreadable, done.calls) == (COUNT, 2, 18 * STEPS)
    assert seen == [(n, COUNT) for n in (4, 6, 10, 12, 16, 18, 20)]
    found = lines(tmp_path / "x.jsonl")
    assert [line["image"] for line in found] == photos
    for i, line in enumerate(found):
        if i in (3, 8):
            assert line["classes"] is None
            assert ("no such file" if i == 8 else "none of JPEG") in line["error"]
            continue
        alone = predictor(photos[i])
        assert [entry["name"] for entry in line["classes"]] == [name for name, _ in alone.classes[:2]]
        assert [entry["probability"] for entry in line["classes"]] == pytest.approx(
            [p for _, p in alone.classes[:2]], abs=1e-5
        )
        assert line["entropy"] == pytest.approx(alone.entropy, abs=1e-5)
        assert (line["nfe"], line["error"]) == (STEPS, None)
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_one_path_and_paths_of_either_kind_are_taken(predictor, photos, tmp_path):
    for i, images in enumerate([photos[0], Path(photos[0]), [Path(photos[0])]]):
        assert predict(predictor, images, tmp_path / f"{i}.jsonl").images == 1
        assert lines(tmp_path / f"{i}.jsonl")[0]["image"] == photos[0]


def test_workers_shards_and_parts_change_nothing(predictor, photos, tmp_path):
    predict(predictor, photos, tmp_path / "whole.jsonl", settings=SMALL)
    expected = (tmp_path / "whole.jsonl").read_bytes()
    predict(predictor, photos, tmp_path / "workers.jsonl", settings=replace(SMALL, workers=2))
    assert (tmp_path / "workers.jsonl").read_bytes() == expected
    for index in (3, 1, 2):
        predict(predictor, photos, tmp_path / "shards", settings=SMALL, shard=(index, 3))
    parts = sorted((tmp_path / "shards").glob("part-*"))
    assert [len(lines(part)) for part in parts] == [6, 6, 6, 2]
    assert b"".join(part.read_bytes() for part in parts) == expected
    assert sorted(os.listdir(tmp_path / "shards")) == [".plan.json", *(part.name for part in parts)]
    # A batch of another size adds in another order: the last digits may differ.
    predict(predictor, photos, tmp_path / "batch.jsonl", settings=replace(SMALL, batch_size=5, part_size=100))
    for line, other in zip(lines(tmp_path / "whole.jsonl"), lines(tmp_path / "batch.jsonl"), strict=True):
        assert {**line, "classes": 0, "entropy": 0} == {**other, "classes": 0, "entropy": 0}
        for one, another in zip(line["classes"] or [], other["classes"] or [], strict=True):
            assert one["name"] == another["name"]
            assert one["probability"] == pytest.approx(another["probability"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "format", "workers"),
    [
        ("rows.jsonl", None, 0),
        ("rows.csv", None, 2),
        ("rows.parquet", None, 0),
        ("folder", "jsonl", 2),
        ("folder", "csv", 0),
        ("folder", "parquet", 0),
    ],
)
def test_killed_again_and_again_it_loses_and_repeats_no_row(name, format, workers, predictor, photos, tmp_path):
    """SIGKILL at the worst moments: when a file is written but not yet in its place, and right after."""
    settings, expected, out = replace(SMALL, workers=workers), tmp_path / "all" / name, tmp_path / name
    predict(predictor, photos, expected, format=format, settings=settings)
    replace_file = os.replace

    def killed(moment):
        moves = []

        def move(source, target):
            moves.append(target)
            if len(moves) == 2 and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            replace_file(source, target)
            if len(moves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = move
        predict(predictor, photos, out, format=format, settings=settings)

    codes = []
    for moment in ["before", "after"] * 10:
        process = get_context("fork").Process(target=killed, args=(moment,))
        process.start()
        process.join()
        codes.append(process.exitcode)
        if process.exitcode != -signal.SIGKILL:
            break
        assert name == "folder" or not out.exists() or moment == "after"
    assert codes[-1] == 0
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert len(codes) > 3
    if out.is_dir():
        assert sorted(os.listdir(out)) == sorted(os.listdir(expected))
        for file in expected.iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes()
    elif out.suffix == ".parquet":
        assert pq.read_table(out).equals(pq.read_table(expected))
    else:
        assert out.read_bytes() == expected.read_bytes()


def test_what_would_mix_two_things_is_refused_in_a_sentence(predictor, model, photos, tmp_path):
    out = tmp_path / "rows"
    predict(predictor, photos, out, settings=SMALL)
    assert predict(predictor, photos, out, settings=SMALL).images == 0  # it was complete
    for change, says in (
        ({"images": photos[1:]}, r"begun with other settings \(images\)"),
        ({"settings": replace(SMALL, top=1)}, r"begun with other settings \(top\)"),
        ({"settings": replace(SMALL, part_size=7)}, r"\(images, part size\)|\(part size\)"),
        ({"format": "csv"}, r"begun with other settings \(format of the rows\)"),
        ({"model": Predictor.load(model, steps=STEPS + 1)}, r"begun with other settings \(sampler\)"),
        ({"model": Predictor.load(model, steps=STEPS, size=16)}, r"begun with other settings \(transform\)"),
    ):
        asked = {"model": predictor, "images": photos, "out": out, "settings": SMALL, **change}
        with pytest.raises(UserError, match=says):
            predict(**asked)
    with pytest.raises(ZeroDivisionError):
        predict(predictor, photos, tmp_path / "x.csv", settings=SMALL, progress=lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"\.x\.csv\.parts was begun .* \(top\): .* remove it to start anew"):
        predict(predictor, photos, tmp_path / "x.csv", settings=replace(SMALL, top=1))
    predict(predictor, photos, tmp_path / "x.csv", settings=SMALL)
    with pytest.raises(UserError, match=r"x\.csv exists already: give another --out, or replace it with --force"):
        predict(predictor, photos, tmp_path / "x.csv", settings=SMALL)
    assert predict(predictor, photos, tmp_path / "x.csv", settings=SMALL, force=True).images == COUNT
    with pytest.raises(UserError, match=r"typo\.png does not exist"):
        predict(predictor, [*photos, "typo.png"], tmp_path / "t.csv", settings=SMALL)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "part-000000.jsonl").write_text("{}")
    with pytest.raises(UserError, match="holds parts of something else"):
        predict(predictor, photos, tmp_path / "other", settings=SMALL)
    with pytest.raises(UserError, match=r"ends in \.csv, but parquet was asked for"):
        predict(predictor, photos, tmp_path / "y.csv", format="parquet")
    with pytest.raises(UserError, match="there are no images"):
        predict(predictor, ["-"], tmp_path / "z.csv")
    with pytest.raises(UserError, match=r"nothing for shard 5/5: 20 images make 4 parts of --part-size 6"):
        predict(predictor, photos, tmp_path / "s", settings=SMALL, shard=(5, 5))
    with pytest.raises(UserError, match="--shard must be i/n"):
        predict(predictor, photos, tmp_path / "s", shard=(3, 2))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"rows", "x.csv", "other"}  # nothing of what was refused

    def second(done, todo):
        with pytest.raises(UserError, match=r"busy is in use by pid \d+ .*didicm predict"):
            predict(predictor, photos, tmp_path / "busy", settings=SMALL)

    predict(predictor, photos, tmp_path / "busy", settings=SMALL, progress=second)


def test_calibration_conformal_sets_and_all_probabilities(tmp_path, save_model, photos):
    model = save_model(tmp_path / "model")
    rules = {"lac": Conformal("lac", 0.1, 0.6, 20), "aps": Conformal("aps", 0.1, 1.0, 20)}
    save_calibration(model, Calibration(2.0, rules, open_model(model).posterior, {"data": "x"}, {}))
    predictor = Predictor.load(model)
    predict(predictor, photos, tmp_path / "rows", format="parquet", settings=replace(SMALL, all_probs=True))
    found = pq.read_table(tmp_path / "rows").to_pylist()
    for path, row in zip(photos, found, strict=True):
        if row["error"] is None:
            alone = predictor(path)
            assert row["conformal_set"] == alone.conformal_set
            assert row["all_probabilities"] == pytest.approx(alone.probs.tolist(), abs=1e-5)


def test_an_early_stop_shows_in_every_row(model, photos, tmp_path):
    predictor = Predictor.load(model, tolerance=0.08)
    done = predict(predictor, photos, tmp_path / "x.jsonl", settings=SMALL)
    found = [line["nfe"] for line in lines(tmp_path / "x.jsonl") if line["error"] is None]
    assert done.calls == sum(found)
    assert min(found) < 8
    for path, calls in zip([p for i, p in enumerate(photos) if i not in (3, 8)], found, strict=True):
        assert predictor.answers(predictor.read(path).unsqueeze(0))[2].tolist() == [calls]


def test_a_compiled_network_sees_batches_of_one_size(predictor, photos, tmp_path, monkeypatch):
    shapes, answers = [], predictor.answers
    monkeypatch.setattr(predictor, "answers", lambda image: shapes.append(len(image)) or answers(image))
    monkeypatch.setattr(predictor, "compiled", True)
    predict(predictor, photos, tmp_path / "x.jsonl", settings=SMALL)
    assert set(shapes) == {4}
    monkeypatch.setattr(predictor, "compiled", False)
    predict(predictor, photos, tmp_path / "y.jsonl", settings=SMALL)
    assert set(shapes) == {4, 2}
    for one, other in zip(lines(tmp_path / "x.jsonl"), lines(tmp_path / "y.jsonl"), strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], abs=1e-5)


def test_memory_does_not_grow_with_the_number_of_images(predictor, tmp_path):
    def peak(count):
        tracemalloc.start()
        predict(
            predictor, ["-"], tmp_path / f"{count}", lines=(b"gone-%d.png\n" % i for i in range(count)),
            settings=BulkSettings(part_size=100, batch_size=50),
        )  # fmt: skip
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peak(100)
    assert peak(4000) < peak(500) + 100_000


def test_what_many_images_would_take(predictor, photos):
    found = estimate_bulk(predictor, list_images(photos), RowWriter("csv", ["ant", "bee", "cat"]), SMALL)
    assert (found.images, found.unreadable) == (20, 2)
    assert min(found.decoding, found.network) > 0
    assert 20 < found.row < 200
    assert found.files(13) == 3
    one = Estimate(256, 0, decoding=0.008, network=0.002, row=100, cores=0, part_size=1000)
    assert one.seconds(1000, workers=0) == pytest.approx(10)
    assert one.seconds(1000, workers=1) == pytest.approx(8)
    assert one.seconds(1000, workers=4, devices=2) == pytest.approx(1)
    assert one.seconds(1000, workers=16) == pytest.approx(2)  # the device has all it can do
    assert replace(one, cores=4).seconds(1000, workers=16) == pytest.approx(4)  # shared with the workers
    assert one.bytes(10**9) == 1e11


def test_optimised_it_says_the_same(tmp_path, save_model, photos):
    model = save_model(tmp_path / "model", "standard")
    plain, fast = Predictor.load(model), Predictor.load(model, optimize=True)
    assert fast.model.classifier.inference_only
    assert not plain.model.classifier.inference_only
    assert torch.allclose(fast(photos[0]).probs, plain(photos[0]).probs, atol=1e-4)


def test_a_cluster_that_cannot_be_had_is_told(model, photos, tmp_path, monkeypatch):
    import ray

    def init(**options):
        raise Exception("The current node timed out during startup.")  # Ray's own words and kind

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        UserError, match=r"Ray cannot be started \(The current node timed out.*: check RAY_ADDRESS"
    ):
        predict(Predictor.load(model, "cpu"), photos, tmp_path / "rows", settings=SMALL, engine="ray")

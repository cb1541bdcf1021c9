"""Studies and bulk prediction on a real Ray, which is started once for both: that takes longer than either."""

import signal
from dataclasses import replace

import pytest

from didicm import Predictor, UserError
from didicm.experiments.run import run_study
from didicm.inference.bulk import BulkSettings, predict
from didicm.inference.on_ray import ray_session

pytestmark = pytest.mark.slow
SMALL = BulkSettings(top=2, part_size=6, batch_size=4)


@pytest.fixture(scope="module", autouse=True)
def started():
    """As the first command starts it; the next one finds it there."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ray_session("the tests"):
        signal.signal(signal.SIGTERM, on_sigterm)
        yield


def test_it_carries_out_a_study_until_a_run_fails(tiny, whole, tmp_path, numbers_of, corrupt):
    study = tiny(seeds=1)
    corrupt(study.runs("fashion-mini", 1)[1])
    with pytest.raises(UserError, match=r"DiDiCM, 7 px, 5 % of the images, seed 0: .*trained.json is damaged"):
        run_study(study, tmp_path / "out", trainings=tmp_path, executor="ray")
    (done,) = numbers_of(tmp_path / "out")
    assert done in numbers_of(whole)


def test_actors_write_the_same_rows(tmp_path, save_model, write, monkeypatch):
    model = save_model(tmp_path / "model")
    names = [write(tmp_path / f"{i:02}.png", seed=i).name for i in range(14)]
    (tmp_path / names[3]).write_bytes(b"torn")
    monkeypatch.chdir(tmp_path)  # relative names reach the actors too

    def rows(folder):
        return [path.read_text() for path in sorted((tmp_path / folder).glob("part-*"))]

    predict(Predictor.load(model, "cpu"), names, tmp_path / "here", settings=SMALL)
    seen = []
    done = predict(
        Predictor.load(model, "cpu"), names, tmp_path / "ray", settings=replace(SMALL, workers=1),
        engine="ray", actors=1, progress=lambda done, todo: seen.append((done.images, todo)),
    )  # fmt: skip
    assert (done.images, done.unreadable, done.calls) == (14, 1, 13 * 8)
    assert seen[-1] == (14, 14)
    assert rows("ray") == rows("here")
    assert len(rows("ray")) == 3
    (tmp_path / "ray" / "part-000002.jsonl").unlink()
    assert predict(Predictor.load(model, "cpu"), names, tmp_path / "ray", settings=SMALL).images == 2
    assert rows("ray") == rows("here")

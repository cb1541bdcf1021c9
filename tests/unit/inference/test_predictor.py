import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from didicm import Predictor, UserError, load
from didicm.evaluation.calibration import Calibration, Conformal, apply_temperature, save_calibration
from didicm.evaluation.stored import open_model

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_model):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def calibrated(tmp_path, save_model):
    save_model(tmp_path)
    rules = {"lac": Conformal("lac", 0.1, 0.6, 20), "aps": Conformal("aps", 0.1, 1.0, 20)}
    save_calibration(tmp_path, Calibration(2.0, rules, open_model(tmp_path).posterior, {"data": "x"}, {}))
    return tmp_path


def test_a_path_a_picture_and_lists_of_them(folder, tmp_path, picture, write):
    predictor = Predictor.load(folder)
    path = write(tmp_path / "0.png", seed=0)
    one = predictor(path)
    assert one.probs.shape == (3,)
    assert [name for name, _ in one.classes] == [NAMES[k] for k in one.probs.argsort(descending=True)]
    assert [p for _, p in one.classes] == sorted(one.probs.tolist(), reverse=True)
    assert math.isclose(one.entropy, -(one.probs * one.probs.log()).sum().item(), rel_tol=1e-5)
    assert one.conformal_set is None
    assert one.trajectory is None
    for same in (str(path), picture(0)):
        assert torch.equal(predictor(same).probs, one.probs)
    many = predictor([path, *(picture(i) for i in range(1, 5))], batch_size=2)
    assert len(many) == 5
    assert torch.allclose(many[0].probs, one.probs, atol=1e-5)
    assert predictor([]) == []


def test_it_says_what_the_classifier_says_to_the_stored_transform(folder, picture):
    predictor, checkpoint = Predictor.load(folder), load(folder)
    image = predictor.read(picture(3))
    assert image.shape == (1, 8, 8)
    assert torch.allclose(predictor(picture(3)).probs, checkpoint.classifier(image.unsqueeze(0))[0], atol=1e-6)
    assert Predictor.load(folder, size=16).read(picture(3)).shape == (1, 16, 16)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK", "1", "I;16"])
def test_every_mode_is_read(mode, folder, tmp_path, picture):
    image = Image.fromarray(np.arange(768, dtype=np.uint16).reshape(24, 32)) if mode == "I;16" else picture(1)
    image = image if mode == "I;16" else image.convert(mode)
    image.save(tmp_path / "x.tif")
    assert Predictor.load(folder)(tmp_path / "x.tif").probs.sum().item() == pytest.approx(1)


def test_a_photo_is_turned_upright(folder, tmp_path, picture):
    predictor, upright = Predictor.load(folder), picture(2, size=(32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    assert torch.equal(predictor(tmp_path / "turned.png").probs, predictor(tmp_path / "upright.png").probs)


def test_the_trajectory_goes_from_uniform_to_the_answer(calibrated, picture):
    prediction = Predictor.load(calibrated)(picture(0), trajectory=True)
    times, states = zip(*prediction.trajectory, strict=True)
    assert times == pytest.approx([1 - k / 8 for k in range(9)])
    assert torch.allclose(states[0], torch.full((3,), 1 / 3))
    assert torch.equal(states[-1], prediction.probs)


def test_the_calibration_is_applied(calibrated, picture):
    image = picture(0)
    raw, fitted = Predictor.load(calibrated, calibrated=False), Predictor.load(calibrated)
    assert raw.calibration is None
    assert raw(image).conformal_set is None
    prediction = fitted(image)
    expected = apply_temperature(raw(image).probs.unsqueeze(0), 2.0)[0]
    assert torch.allclose(prediction.probs, expected)
    assert prediction.conformal_set  # never empty
    inside = Conformal("lac", 0.1, 0.6, 20).sets(expected.unsqueeze(0))[0]
    assert set(prediction.conformal_set) == {NAMES[k] for k in range(3) if inside[k]}
    assert prediction.conformal_set[0] == prediction.classes[0][0]
    assert len(Predictor.load(calibrated, conformal="aps")(image).conformal_set) >= 2
    other = Predictor.load(calibrated, steps=2)
    assert other.calibration is None
    assert "fitted with steps 8" in other.note
    with pytest.raises(UserError, match="no conformal sets 'best': choose one of aps, lac"):
        Predictor.load(calibrated, conformal="best")


def test_a_batch_of_tensors_as_a_server_sends_it(folder, picture):
    predictor = Predictor.load(folder)
    batch = torch.stack([predictor.read(picture(i)) for i in range(3)])
    for got, i in zip(predictor.predict_batch(batch), range(3), strict=True):
        assert torch.allclose(got.probs, predictor(picture(i)).probs, atol=1e-5)


def test_mistakes_get_one_sentence(folder, tmp_path, picture):
    predictor = Predictor.load(folder)
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    for path, says in {
        tmp_path / "nowhere.png": r"nowhere.png cannot be read as an image \(no such file\)",
        tmp_path / "torn.jpg": r"torn.jpg cannot be read",
        tmp_path: r"cannot be read as an image \(it is a folder",
    }.items():
        with pytest.raises(UserError, match=says):
            predictor(path)
    with pytest.raises(UserError, match=r"torn.jpg cannot be read .*: leave it out, or use didicm.predict, which"):
        predictor([picture(0), tmp_path / "torn.jpg"])
    with pytest.raises(UserError, match="batch_size"):
        predictor([picture(0)], batch_size=0)
    with pytest.raises(UserError, match="sampler readout answers in one network call"):
        Predictor.load(folder, method="readout")(picture(0), trajectory=True)
    with pytest.raises(UserError, match="does not exist"):
        Predictor.load(Path("nowhere"))


def test_a_standard_classifier_and_one_without_class_names(tmp_path, save_model, picture):
    predictor = Predictor.load(save_model(tmp_path, "standard", names=None))
    assert {name for name, _ in predictor(picture(0)).classes} == {"0", "1", "2"}
    with pytest.raises(UserError, match="a standard classifier answers in one network call"):
        predictor(picture(0), trajectory=True)
    with pytest.raises(UserError, match="no sampler to set: leave out steps"):
        Predictor.load(tmp_path, steps=3)


def test_bytes_files_arrays_and_tensors_are_images_too(folder, picture):
    predictor, image = Predictor.load(folder), picture(4)
    expected = predictor(image).probs
    file = io.BytesIO()
    image.save(file, "PNG")
    pixels = np.asarray(image)
    file.seek(0)
    for same in (file.getvalue(), file, pixels, torch.from_numpy(pixels.copy()).permute(2, 0, 1)):
        assert torch.equal(predictor(same).probs, expected)
    grey = np.asarray(image.convert("L"))
    for same in (grey, grey[..., None], torch.from_numpy(grey.copy())[None]):
        assert torch.equal(predictor(same).probs, predictor(image.convert("L")).probs)
    for mode in ("LA", "RGBA"):
        clear = image.convert(mode)
        clear.putalpha(Image.fromarray(grey))
        assert torch.equal(predictor(np.asarray(clear)).probs, predictor(clear).probs)
    assert len(predictor([pixels, image, file.getvalue()])) == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros((4, 4), dtype=np.float32), r"an array must be 8-bit pixels .* got float32 of shape \(4, 4\)"),
        (np.zeros((2, 4, 4, 3), dtype=np.uint8), "give a list of such images"),
        (torch.zeros(3, 4, 4), r"a tensor must be 8-bit pixels of shape \(C, H, W\), got torch.float32"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "give a list of such images"),
        (np.zeros((0, 4), dtype=np.uint8), r"got uint8 of shape \(0, 4\)"),
        (b"no image", "the image given cannot be read as an image"),
        (io.BytesIO(b""), "the image given cannot be read as an image"),
        (io.StringIO("/" * 10_000), "it was opened as text: open it with mode 'rb'"),
        (None, "NoneType is not an image: give a path"),
        ({"a": 1}, "dict is not an image"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_image_is_refused_in_one_sentence(wrong, says, folder):
    with pytest.raises(UserError, match=says) as error:
        Predictor.load(folder)(wrong)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 3, 8, 8), (2, 1, 8, 9)])
def test_a_batch_of_another_shape_is_refused_in_one_sentence(shape, folder):
    with pytest.raises(
        UserError, match=r"a batch must be float32 .* = \(B, 1, 8, 8\), got torch.float32 of shape"
    ):
        Predictor.load(folder).predict_batch(torch.zeros(shape))

import shutil

from PIL import Image

from didicm.cli.__main__ import main as run_cli
from tests.unit.training.test_train import write_images


def test_doctor_names_what_is_wrong_and_draws_examples(tmp_path, capsys):
    folder = write_images(tmp_path / "data" / "train", count=12)
    write_images(tmp_path / "data" / "val", count=2, size=(20, 20))
    (folder / "cat" / "broken.jpg").write_bytes(b"not an image")
    shutil.copy(folder / "cat" / "3.jpg", tmp_path / "data" / "val" / "cat" / "copy.jpg")
    picture = tmp_path / "examples.png"
    code = run_cli(["doctor", str(tmp_path / "data"), "--examples", str(picture)])
    printed = capsys.readouterr().out
    assert code == 1
    assert "broken.jpg" in printed
    assert "copy.jpg" in printed
    assert Image.open(picture).width > 100


def test_doctor_is_content_with_good_data(tmp_path, capsys):
    assert run_cli(["doctor", "fashion-mini", "--examples", str(tmp_path / "x.png")]) == 0
    assert "Ready to train" in capsys.readouterr().out
    assert (tmp_path / "x.png").exists()


def test_doctor_says_where_it_looked_in_vain(tmp_path, capsys):
    assert run_cli(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_models_lists_every_network_with_its_cost(capsys):
    from didicm.models import list_models

    assert run_cli(["models", "--size", "64"]) == 0
    printed = capsys.readouterr().out
    for name in list_models():
        assert name in printed
    assert "12.1 M" in printed
    assert "0.149 G" in printed

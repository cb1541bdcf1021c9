import io
import os

import numpy as np
import pytest
from PIL import Image

from didicm.data import open_data
from didicm.errors import UserError
from didicm.serving.security import Limits
from didicm.serving.service import find_examples


def test_models_of_the_shipped_images_get_one_example_of_each_class():
    names = open_data("fashion-mini", channels=1).train.class_names
    found = find_examples(None, names[::-1], Limits())
    assert [example.name for example in found] == names
    assert all(Image.open(io.BytesIO(example.data)).size == (28, 28) for example in found)
    assert find_examples(None, ["ant", "bee"], Limits()) == []


def test_a_folder_of_examples_is_read_without_its_other_files(tmp_path, write):
    write(tmp_path / "b" / "bee.jpg")
    write(tmp_path / "ant.png")
    (tmp_path / "notes.txt").write_text("no image")
    np.save(tmp_path / "many.npy", np.zeros((9, 9, 5), dtype=np.uint8))
    found = find_examples(tmp_path, [], Limits())
    assert [(example.name, example.media_type) for example in found] == [
        ("ant", "image/png"),
        ("bee", "image/jpeg"),
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no image that a page can show"):
        find_examples(tmp_path / "empty", [], Limits())
    with pytest.raises(UserError, match="is no folder"):
        find_examples(tmp_path / "ant.png", [], Limits())


def test_a_folder_of_examples_shows_every_class_and_only_what_the_page_can_show_and_send(tmp_path, write):
    for name in ("ant", "bee", "cat"):
        for i in range(20):
            write(tmp_path / name / f"{name} {i:02}.png", i)
    write(tmp_path / "ant" / "a.tiff")  # no browser draws it
    (tmp_path / "bee" / "a.png").write_bytes((tmp_path / "bee" / "bee 00.png").read_bytes() + bytes(10**6))
    found = find_examples(tmp_path, [], Limits(upload_bytes=10**6))
    expected = [f"{name} {i:02}" for name in ("ant", "bee", "cat") for i in range(4)]
    assert sorted(example.name for example in found) == expected


def test_an_example_whose_name_is_no_text_is_offered_all_the_same(tmp_path, write, serve_here, predictor):
    write(tmp_path / "bee.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/b\xe9e.png"))
    client = serve_here({"bees": predictor}, examples=find_examples(tmp_path, [], Limits()))
    assert client.get("/examples") == (200, [{"name": "b\ufffde", "url": "examples/0"}])

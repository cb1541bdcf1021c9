import io

import pytest
from PIL import Image

from didicm.data import open_data
from didicm.errors import UserError
from didicm.serving.service import find_examples


def test_models_of_the_shipped_images_get_one_example_of_each_class():
    names = open_data("fashion-mini", channels=1).train.class_names
    found = find_examples(None, names[::-1], 10**6)
    assert [example.name for example in found] == names
    assert all(Image.open(io.BytesIO(example.data)).size == (28, 28) for example in found)
    assert find_examples(None, ["ant", "bee"], 10**6) == []


def test_a_folder_of_examples_is_read_without_its_other_files(tmp_path, write):
    write(tmp_path / "b" / "bee.jpg")
    write(tmp_path / "ant.png")
    (tmp_path / "notes.txt").write_text("no image")
    found = find_examples(tmp_path, [], 10**6)
    assert [(example.name, example.media_type) for example in found] == [
        ("ant", "image/png"),
        ("bee", "image/jpeg"),
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no image"):
        find_examples(tmp_path / "empty", [], 10**6)
    with pytest.raises(UserError, match="is no folder"):
        find_examples(tmp_path / "ant.png", [], 10**6)

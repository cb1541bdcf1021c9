"""Labels that a model doubts."""

import numpy as np
import pytest

from didicm import save
from didicm.cli.__main__ import main
from didicm.evaluation.assess import SURE, find_suspects
from didicm.evaluation.stored import open_model

NAMES = ["ant", "bee", "cat"]


def test_the_labels_that_a_model_doubts_come_first(tmp_path, make_checkpoint, some_images, capsys):
    """Label images as the model does but for three; those are what it finds."""
    made = make_checkpoint("standard")
    made.classifier.model.fc.weight.data.mul_(100)  # so that it is sure
    save(made.classifier, tmp_path / "model", class_names=NAMES, transform=made.transform)
    model, images = open_model(tmp_path / "model"), some_images(30)
    rows, probs = ["path,label"], []
    (tmp_path / "images").mkdir()
    for i in range(30):
        image = images.load(i)
        image.save(tmp_path / "images" / f"{i}.png")
        posterior = model.classifier.posterior(model.transform(image)[None]).probs[0]
        probs.append(posterior.detach().numpy())
        wrong = i in (4, 11, 23)
        rows.append(f"{i}.png,{NAMES[(int(posterior.argmax()) + wrong) % 3]}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    table = {"labels": str(tmp_path / "labels.csv")}
    told = find_suspects(model, str(tmp_path / "images"), **table)
    suspects = told.found
    sure = [i for i in (4, 11, 23) if probs[i].max() >= SURE]
    expected = sorted(sure, key=lambda i: -probs[i].max())
    assert expected  # else this says nothing
    assert [suspect.name.rsplit("/", 1)[1] for suspect in suspects] == [f"{i}.png" for i in expected]
    assert np.allclose(
        [suspect.probability for suspect in suspects], [probs[i].max() for i in expected], atol=1e-4
    )
    assert (told.ranked, told.described[:6]) == (30, "all of")
    code = main(["doctor", str(tmp_path / "images"), f"--labels={table['labels']}",
                 f"--check-labels={tmp_path / 'model'}", f"--examples={tmp_path / 'x.png'}"])  # fmt: skip
    printed = capsys.readouterr().out
    assert code in (0, 1)
    assert f"doubts {len(expected)} of " in printed
    assert str(suspects[0]) in printed
    assert told.accuracy == pytest.approx(27 / 30)  # three labels are wrong
    assert "it is right for 90.0 % of them" in printed
    assert "errs so often" not in printed
    assert "cannot check" not in printed


def test_an_image_that_cannot_be_read_does_not_count_as_looked_at(tmp_path, save_model, make_folder):
    save_model(tmp_path / "model")
    place = make_folder(tmp_path / "images", classes=NAMES, count=5, size=(8, 8))
    (place / "ant" / "broken.png").write_bytes(b"torn")
    assert find_suspects(open_model(tmp_path / "model"), str(place)).ranked == 15


def test_images_of_the_training_are_not_checked_and_that_is_said(tmp_path, save_model, make_folder, capsys):
    save_model(tmp_path / "model")
    for split, count in (("train", 5), ("val", 3)):
        make_folder(tmp_path / "images" / split, classes=NAMES, count=count, size=(8, 8))
    asked = [tmp_path / "images", "--check-labels", tmp_path / "model", "--examples", tmp_path / "x.png"]
    main(["doctor", *map(str, asked)])  # which has problems to tell: tiny classes, equal images
    printed = capsys.readouterr().out
    assert " of 9 labels (validation split of " in printed
    assert "It cannot check the other 15 labels: it has learned them" in printed
    assert "With a model that errs so often many of these labels are right" in printed


def test_a_run_given_as_a_table_of_labels_is_told_where_it_belongs(tmp_path, save_model, make_folder, fails):
    save_model(tmp_path / "model")
    folder = make_folder(tmp_path / "images", classes=NAMES, count=1)
    assert "is given with --check-labels" in fails("doctor", folder, "--labels", tmp_path / "model")

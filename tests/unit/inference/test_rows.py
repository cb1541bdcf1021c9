import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from didicm.inference.rows import RowWriter, join_rows, make_rows, most_probable, to_records

NAMES = ["ant", "bee", "=cat()", "dog"]
PROBS = np.array([[0.1, 0.4, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0], [0, 0.2, 0.7, 0.1]], np.float32)
IMAGES = ["a.png", "-b,\n.png", "ä.png", "d.png"]
ERRORS = [None, None, None, '@torn "x"']


def rows(where=slice(None), **options):
    probs, nfe = PROBS[where], np.array([8, 3, 4, 0])[where]
    return make_rows(IMAGES[where], ERRORS[where], probs, nfe, probs >= 0.25, top=2, **options)


@given(arrays(np.float32, (5, 7), elements=st.sampled_from([0, 1e-30, 0.25, 0.5, 1])), st.integers(1, 7))
def test_the_most_probable_classes_are_those_of_a_stable_sort(probs, count):
    assert (most_probable(probs, count) == np.argsort(-probs, axis=1, kind="stable")[:, :count]).all()


def test_a_record_says_it_all():
    first, second, third, torn = to_records(rows(all_probs=True), NAMES)
    assert first == {
        "image": "a.png",
        "classes": [{"name": "bee", "probability": 0.400000006}, {"name": "=cat()", "probability": 0.400000006}],
        "entropy": pytest.approx(-0.8 * np.log(0.4) - 0.2 * np.log(0.1), abs=1e-6),
        "conformal_set": ["bee", "=cat()"],
        "probabilities": pytest.approx(dict(zip(NAMES, [0.1, 0.4, 0.4, 0.1], strict=True))),
        "nfe": 8,
        "error": None,
    }
    assert second["conformal_set"] == NAMES
    assert third["entropy"] == 0
    assert torn == {**dict.fromkeys(first), "image": "d.png", "error": '@torn "x"'}
    plain = make_rows(["a"], [None], PROBS[:1], np.array([1]), top=9)
    assert next(to_records(plain, NAMES)).keys() == {"image", "classes", "entropy", "nfe", "error"}
    assert len(next(to_records(plain, NAMES))["classes"]) == 4


@pytest.mark.parametrize("all_probs", [False, True])
def test_all_formats_say_the_same_in_one_part_and_in_several(tmp_path, all_probs):
    whole = rows(all_probs=all_probs)
    one, two = (rows(where, all_probs=all_probs) for where in (slice(0, 1), slice(1, 4)))
    expected = list(to_records(whole, NAMES))
    assert list(to_records(join_rows([one, two]), NAMES)) == expected
    for name in ("jsonl", "csv", "parquet"):
        writer = RowWriter(name, NAMES)
        for file, part in (("whole", whole), ("one", one), ("two", two)):
            writer.write(tmp_path / f"{file}.{name}", part)
        writer.join(tmp_path / f"joined.{name}", [tmp_path / f"one.{name}", tmp_path / f"two.{name}"])
    for name in ("jsonl", "csv"):
        assert (tmp_path / f"joined.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
    assert [json.loads(line) for line in (tmp_path / "joined.jsonl").read_text().splitlines()] == expected
    found = pq.read_table(tmp_path / "joined.parquet")
    for row, record in zip(found.to_pylist(), expected, strict=True):
        assert row["image"] == record["image"]
        assert row["error"] == record["error"]
        for column, key in (("classes", "name"), ("probabilities", "probability")):
            best = None if record["classes"] is None else [entry[key] for entry in record["classes"]]
            assert row[column] == (best if column == "classes" or best is None else pytest.approx(best))
        assert row["conformal_set"] == record["conformal_set"]
        assert row["nfe"] == record["nfe"]
        if all_probs and record["error"] is None:
            assert row["all_probabilities"] == pytest.approx(list(record["probabilities"].values()))
    if all_probs:
        assert json.loads(found.schema.metadata[b"class_names"]) == NAMES


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path):
    RowWriter("csv", NAMES).write(tmp_path / "x.csv", rows(all_probs=True))
    with open(tmp_path / "x.csv", newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert len({len(line) for line in [header, *lines]}) == 1
    for line in [header, *lines]:
        for name, cell in zip(header, line, strict=True):
            assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")), (name, cell)
    first, second, _, torn = (dict(zip(header, line, strict=True)) for line in lines)
    assert first["class_2"] == "'=cat()"
    assert float(first["probability_2"]) == pytest.approx(0.4)
    assert json.loads(first["conformal_set"]) == ["bee", "=cat()"]
    assert float(first["probability_of_=cat()"]) == pytest.approx(0.4)
    assert second["image"] == "'-b,\n.png"
    assert torn["error"] == '\'@torn "x"'
    assert torn["class_1"] == torn["entropy"] == torn["nfe"] == ""

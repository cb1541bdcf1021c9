import base64
import io
import json
import math
from functools import partial
from urllib.parse import quote

import pytest
import torch
from PIL import Image
from rich.console import Console

from didicm.cli.serve import ServeOptions, open_model
from didicm.data.decode import image_formats
from didicm.inference.predictor import Predictor
from didicm.serving.service import Example


def classes_of(prediction):
    return [(entry["name"], entry["probability"]) for entry in prediction["classes"]]


def b64(data):
    return base64.b64encode(data).decode()


def test_the_three_forms_of_a_request_get_the_answer_of_the_library(client, predictor, file):
    data = file()
    expected = predictor(data)
    for status, content in (
        client.post("/predict", data),
        client.post("/predict", data, "image/png"),
        client.post("/predict", data, "text/plain"),  # what counts is the content
        client.post_json("/predict", {"image": b64(data)}),
        client.post_json("/predict", {"images": ["data:image/png;base64," + b64(data)]}),
        client.post_form("/predict", ("whatever", "bee.txt", data)),
    ):
        assert status == 200
        assert content["model"] == "bees"
        (prediction,) = content["predictions"]
        assert prediction["entropy"] == pytest.approx(expected.entropy, abs=1e-5)
        for (name, p), (other, q) in zip(classes_of(prediction), expected.classes, strict=True):
            assert name == other
            assert p == pytest.approx(q, abs=1e-5)


@pytest.mark.parametrize("kind", image_formats())
def test_formats_are_those_of_predict_and_told_by_content(client, file, kind):
    assert kind in client.get("/info")[1]["formats"]
    status, content = client.post("/predict", file(kind=kind), "image/png")
    assert status == 200, content


@pytest.mark.parametrize("size", [(1, 2000), (2000, 1)])
def test_thin_images_are_answered_as_predict_answers_them(client, predictor, file, size):
    data = file(size=size)
    status, content = client.post("/predict", data)
    assert status == 200
    assert classes_of(content["predictions"][0])[0][1] == pytest.approx(predictor(data).classes[0][1], abs=1e-5)


def test_a_format_that_is_not_offered_is_refused(client, file):
    status, content = client.post("/predict", file(kind="PCX"), "image/png")
    assert status == 422
    assert "JPEG" in content["predictions"][0]["error"]


def test_a_bad_image_fails_alone(client, predictor, file):
    images = [file(1), b"not an image", file(2)[:-40], file(3)]
    status, content = client.post_json("/predict", {"images": [*map(b64, images), 7, "%%%"], "top": 1})
    assert status == 200
    first, text, truncated, last, number, garbage = content["predictions"]
    assert classes_of(first)[0][0] == predictor(images[0]).classes[0][0]
    assert classes_of(last)[0][0] == predictor(images[3]).classes[0][0]
    assert "cannot be read as an image" in text["error"]
    assert "damaged" in truncated["error"]
    assert "base64 string" in number["error"]
    assert "not valid base64" in garbage["error"]


def test_options_reach_the_sampler_in_every_form(client, predictor, file):
    data = file()
    expected = predictor.changed(method="cl", steps=3)(data).classes
    for status, content in (
        client.post("/predict?steps=3&sampler=cl", data),
        client.post_json("/predict", {"image": b64(data), "steps": 3, "sampler": "cl"}),
        client.post_form("/predict", ("i", "i.png", data), ("steps", "3"), ("sampler", "cl")),
    ):
        assert status == 200, content
        assert classes_of(content["predictions"][0])[0][1] == pytest.approx(expected[0][1], abs=1e-5)


def test_a_question_that_the_calibration_was_not_fitted_for_is_told(serve_here, calibrated_model, file):
    model = Predictor.load(calibrated_model, "cpu")
    client = serve_here({"bees": model})
    for query in ("", "?steps=2"):  # as stored
        _, content = client.post(f"/predict{query}", file())
        assert content["predictions"][0]["conformal_set"]
        assert "notes" not in content
    _, content = client.post("/predict?steps=3", file())
    assert content["predictions"][0]["conformal_set"] is None
    assert content["notes"] == ["calibration left out: it was fitted with other settings"]


def test_classes_and_prior_are_exact_arithmetic_on_the_posterior(client, predictor, file):
    data = file()
    p = dict(predictor(data).classes)
    _, content = client.post("/predict?classes=ant&classes=cat", data)
    (prediction,) = content["predictions"]
    assert dict(classes_of(prediction)) == pytest.approx(
        {name: p[name] / (p["ant"] + p["cat"]) for name in ("ant", "cat")}, abs=1e-5
    )
    huge = {"ant": 1e307, "bee": 2e307, "cat": 4e307}  # as in training
    _, content = client.post_json("/predict", {"image": b64(data), "prior": huge})
    assert dict(classes_of(content["predictions"][0])) == pytest.approx(p, abs=1e-5)
    prior = {"ant": 0.2, "bee": 5, "cat": 1}
    _, content = client.post_json("/predict", {"image": b64(data), "prior": prior})
    shifted = {"ant": p["ant"] * 0.2 / 10, "bee": p["bee"] * 5 / 20, "cat": p["cat"] * 1 / 40}
    total = sum(shifted.values())
    expected = pytest.approx({name: x / total for name, x in shifted.items()}, abs=1e-5)
    assert dict(classes_of(content["predictions"][0])) == expected
    _, content = client.post("/predict?prior=training", data)
    assert dict(classes_of(content["predictions"][0])) == pytest.approx(p, abs=1e-5)
    coarse = {"insect": ["ant", "bee"], "animal": ["cat"]}
    for _, content in (
        client.post_json("/predict", {"image": b64(data), "taxonomy": coarse}),
        client.post(f"/predict?taxonomy={quote(json.dumps(coarse))}", data),
    ):
        summed = {"insect": p["ant"] + p["bee"], "animal": p["cat"]}
        assert dict(classes_of(content["predictions"][0])) == pytest.approx(summed, abs=1e-5)
    assert client.post("/predict?prior=uniform&baseline=true", data)[0] == 422  # the baseline does not say its own


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("steps=0", "steps must be at least 1"),
        ("steps=65", "at most 64"),
        ("steps=two", "steps must be a whole number"),
        ("sampler=naive", "sampler must be"),
        ("sampler=readout&steps=2", "sampler readout has no steps"),
        ("sampler=readout&trajectory=true", "no trajectory"),
        ("stepz=2", "did you mean steps?"),
        ("classes=dog", "choose one of ant, bee, cat"),
        ('taxonomy={"insect":["ant"]}', "the taxonomy lacks class"),
        ('taxonomy={"insect":"ant"}', "must be a list of classes"),
        ('prior={"ant":1}', "has no frequency for class 'bee'"),
        ('prior={"ant":-1,"bee":1,"cat":1}', "the prior of class 'ant' must be above 0"),
        ('prior={"ant":1,"bee":0,"cat":1}', "the prior of class 'bee' must be above 0"),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(client, file, query, named):
    status, content = client.post(f"/predict?{query.replace('{', '%7B').replace('}', '%7D')}", file())
    assert status == 422
    assert named in json.dumps(content, ensure_ascii=False)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "image/png", 422),
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"{}", "application/json", 422),
        (b'{"images": 3}', "application/json", 422),
        (b"x", "multipart/form-data", 400),
        (b"--b\r\nnonsense", "multipart/form-data; boundary=b", 422),
        (b'{"image":' + b"[" * 100_000, "application/json", 400),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(client, body, kind, status):
    found, content = client.post("/predict", body, kind)
    assert found == status, content
    assert isinstance(content["error"], str)


def test_a_file_name_instead_of_the_file_is_told(client):
    status, content = client.post_form("/predict", ("image", "photo.jpg"))
    assert status == 422
    assert content["error"] == "image came as text, not as a file: with curl, write image=@photo.jpg"


def test_the_trajectory_leads_from_knowing_nothing_to_the_answer(client, file):
    _, content = client.post("/predict?trajectory=true&steps=4&top=3", file())
    (prediction,) = content["predictions"]
    steps = prediction["trajectory"]
    assert [step["time"] for step in steps] == [1, 0.75, 0.5, 0.25, 0]
    assert steps[0]["probabilities"] == pytest.approx([1 / 3] * 3)
    assert steps[0]["entropy"] == pytest.approx(math.log(3))
    assert steps[-1]["probabilities"] == [p for _, p in classes_of(prediction)]
    assert steps[-1]["entropy"] == prediction["entropy"]


def test_the_baseline_answers_beside(client, baseline, file, serve_here, predictor):
    data = file()
    _, content = client.post("/predict?baseline=true&trajectory=true&steps=2", data)
    (prediction,) = content["predictions"]
    expected = baseline(data).classes
    assert classes_of(prediction["baseline"])[0][1] == pytest.approx(expected[0][1], abs=1e-5)
    assert "trajectory" not in prediction["baseline"]
    status, content = serve_here({"alone": predictor}).post("/predict?baseline=true", data)
    assert status == 422
    assert "no baseline" in content["error"]


def test_the_server_describes_itself_without_its_paths(client, predictor):
    status, info = client.get("/info")
    assert status == 200
    assert info["models"]["bees"]["classes"] == ["ant", "bee", "cat"]
    assert info["models"]["plain"]["kind"] == "standard classifier"
    assert info["baseline"] == "plain"
    assert client.get("/health") == (200, {"status": "UP", "model_class": "bees"})
    place = str(predictor.model.place)
    for path in ("/info", "/metrics", "/openapi.json", "/v2/models/bees", "/", "/nowhere"):
        _, content = client.get(path)
        assert place not in str(content)
        assert place.split("/")[1] + "/" not in str(content)


def test_openapi_describes_every_form(client):
    _, schema = client.get("/openapi.json")
    body = schema["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(body) == {"multipart/form-data", "image/*", "application/json"}
    assert {"/health", "/info", "/metrics", "/setup", "/v2/models/{name}/infer"} <= set(schema["paths"])


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/icon.svg"])
def test_no_query_changes_the_page(client, path):
    assert client.get(f"{path}?response=other&found=other&request=other") == client.get(path)


@pytest.mark.parametrize("path", ["/", "/page.js", "/health"])
def test_monitors_may_ask_for_the_head_alone(client, path):
    status, body, headers = client.request("HEAD", path)
    assert (status, body) == (200, b"")
    assert headers["content-length"] == client.request("GET", path)[2]["content-length"]


def test_metrics_count_what_was_done(serve_here, predictor, file):
    client = serve_here({"bees": predictor})
    client.post_json("/predict", {"images": [b64(file()), b64(b"no")]})
    client.get("/not/a/path")
    _, text = client.get("/metrics")
    lines = text.decode().splitlines()
    assert 'didicm_requests_total{path="/predict",status="200"} 1' in lines
    assert 'didicm_requests_total{path="other",status="404"} 1' in lines
    assert 'didicm_images_total{outcome="predicted"} 1' in lines
    assert 'didicm_images_total{outcome="refused"} 1' in lines
    assert 'didicm_batch_images_bucket{le="+Inf"} 1' in lines
    assert "didicm_requests_under_way 0" in lines
    for line in lines:  # the format's grammar: a comment, or a name with labels and a number
        assert line.startswith("# ") or math.isfinite(float(line.rpartition(" ")[2]))


def test_an_image_on_which_the_model_fails_is_not_counted_as_predicted(serve_here, predictor, file):
    class Failing:
        def __getattr__(self, name):
            return getattr(predictor, name)

        def predict_batch(self, images, **options):
            raise FloatingPointError

    client = serve_here({"bees": Failing()})
    assert client.post("/predict", file())[1]["predictions"] == [{"error": "the model failed on this image"}]
    assert 'didicm_images_total{outcome="predicted"} 0' in client.get("/metrics")[1].decode().splitlines()


def test_examples_are_images(serve_here, predictor, file):
    client = serve_here({"bees": predictor}, examples=[Example("a bee", file(), "image/png")])
    _, listed = client.get("/examples")
    assert listed == [{"name": "a bee", "url": "examples/0"}]
    _, data = client.get("/examples/0")
    assert Image.open(io.BytesIO(data)).size == (32, 24)
    assert client.get("/examples/1")[0] == 404
    assert client.get("/examples/x")[0] == 404


@pytest.mark.slow
def test_a_network_is_compiled_before_the_first_request_for_batches_of_any_size(predictor, monkeypatch, picture):
    graphs, compile = [], torch.compile

    def backend(graph, _):  # what is captured is ours; the C++ that would be made of it takes minutes
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(compile, backend=backend))
    monkeypatch.setattr("didicm.inference.predictor.COMPILERS", ("sh",))
    options = ServeOptions(run=str(predictor.model.place), device="cpu", batch_size=9, compile=True)
    compiled = open_model(options, Console(quiet=True))
    ready, image = len(graphs), compiled.read(picture(1))
    assert ready
    for count in range(1, 10):
        expected = predictor.predict_batch(torch.stack([image] * count))
        for answer, theirs in zip(compiled.predict_batch([image] * count), expected, strict=True):
            assert answer.probs == pytest.approx(theirs.probs.numpy(), abs=1e-4)
    assert len(graphs) == ready

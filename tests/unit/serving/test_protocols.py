import base64
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from didicm.errors import UserError
from didicm.serving import service
from didicm.serving.protocols import LabelStudio
from didicm.serving.security import Access
from didicm.serving.server import create_app
from didicm.serving.service import Service

INTERFACE = """<View><Image name="photo" value="$picture"/>
<Choices name="animal" toName="photo"><Choice value="bee"/><Choice value="cat"/></Choices></View>"""


def b64(data):
    return base64.b64encode(data).decode()


# The Open Inference Protocol


def test_the_open_inference_protocol_describes_server_and_models(client):
    assert client.get("/v2")[1]["name"] == "didicm"
    assert client.get("/v2/health/live") == (200, {"live": True})
    assert client.get("/v2/health/ready") == (200, {"ready": True})
    assert client.get("/v2/models/plain/ready") == (200, {"name": "plain", "ready": True})
    _, model = client.get("/v2/models/bees")
    assert model["outputs"][0]["shape"] == [-1, 3]
    status, content = client.get("/v2/models/wasps")
    assert status == 404
    assert "bees or plain" in content["error"]


def test_files_and_pixels_infer_alike(client, predictor, picture, file):
    images = [picture(i) for i in range(2)]
    expected = [predictor(image) for image in images]
    pixels = np.stack([np.asarray(image) for image in images])
    files = {"name": "image", "datatype": "BYTES", "shape": [2], "data": [b64(file(i)) for i in range(2)]}
    flat = {"name": "x", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.flatten().tolist()}
    nested = {**flat, "data": pixels.tolist()}
    for tensor in (files, flat, nested):
        status, content = client.post_json("/v2/models/bees/infer", {"id": "7", "inputs": [tensor]})
        assert status == 200, content
        assert content["id"] == "7"
        probabilities, label, error = content["outputs"]
        assert error["data"] == ["", ""]
        assert probabilities["shape"] == [2, 3]
        found = np.reshape(probabilities["data"], (2, 3))
        assert found == pytest.approx(np.stack([p.probs.numpy() for p in expected]), abs=1e-5)
        assert label["data"] == [p.classes[0][0] for p in expected]
    grey = {"datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [9] * 64}
    content = {"inputs": [grey], "parameters": {"steps": 2}}
    assert client.post_json("/v2/models/bees/infer", content)[0] == 200


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        [],
        [{"datatype": "BYTES", "shape": [2], "data": ["aa"]}],
        [{"datatype": "BYTES", "shape": [1], "data": ["bm8="]}],
        [{"datatype": "FP32", "shape": [1, 2, 2, 3], "data": [0] * 12}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [0] * 11}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [256] * 12}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [-1] * 12}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [0.5] * 12}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [2**70] * 12}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": [[0] * 11, 0]}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": ["x"] * 12}],
        [{"datatype": "UINT8", "shape": [1, 2, 2, 3], "data": ["1"] * 12}],
        [{"datatype": "UINT8", "shape": [1, 10**6, 10**6, 3], "data": []}],
        [{"datatype": "BYTES", "shape": [65], "data": ["aa"] * 65}],
        [{"datatype": "BYTES", "shape": [-1], "data": []}],
        [{"datatype": "BYTES", "shape": [True], "data": ["aa"]}],
    ],
)
def test_a_wrong_tensor_is_refused(client, inputs):
    status, content = client.post_json("/v2/models/bees/infer", {"inputs": inputs})
    assert status == 400
    assert content["error"]


def test_a_bad_image_fails_alone(client, predictor, file):
    data = [b64(file(0)), "bm8=", b64(file(2))]
    tensor = {"datatype": "BYTES", "shape": [3], "data": data}
    status, content = client.post_json("/v2/models/bees/infer", {"inputs": [tensor]})
    assert status == 200
    probabilities, label, error = content["outputs"]
    found = np.reshape(probabilities["data"], (3, 3))
    assert found.sum(1) == pytest.approx([1, 0, 1])
    assert found[2] == pytest.approx(predictor(file(2)).probs.numpy(), abs=1e-5)
    assert label["data"] == [predictor(file(0)).classes[0][0], "", predictor(file(2)).classes[0][0]]
    assert error["data"][0] == error["data"][2] == ""
    assert "cannot be read as an image" in error["data"][1]


def test_unknown_parameters_are_refused(client, file):
    tensor = {"datatype": "BYTES", "shape": [1], "data": [b64(file())]}
    content = {"inputs": [tensor], "parameters": {"top": 2}}
    assert client.post_json("/v2/models/bees/infer", content)[0] == 400


# Label Studio


def test_label_studio_connects_and_gets_its_choices(client, predictor, file):
    status, content = client.post_json("/setup", {"project": "1.2", "schema": INTERFACE, "hostname": "http://ls"})
    assert (status, content) == (200, {"model_version": "bees"})
    commented = f'{INTERFACE}<!-- {{"data": {{"picture": "/a.png"}}}} -->'  # as in Label Studio's own templates
    assert client.post_json("/setup", {"schema": commented})[0] == 200
    tasks = [
        {"id": 1, "data": {"picture": f"data:image/png;base64,{b64(file(1))}"}},
        {"id": 2, "data": {"picture": "http://169.254.169.254/latest"}},  # not ours to fetch
        {"id": 3, "data": {}},
    ]
    status, content = client.post_json("/predict", {"tasks": tasks, "label_config": INTERFACE, "params": {}})
    assert status == 200
    first, *others = content["results"]
    (choice,) = first["result"]
    name, p = next((name, p) for name, p in predictor(file(1)).classes if name in ("bee", "cat"))
    assert choice["value"] == {"choices": [name]}
    assert (choice["from_name"], choice["to_name"], choice["type"]) == ("animal", "photo", "choices")
    assert choice["score"] == pytest.approx(p, abs=1e-5)
    assert [other["result"] for other in others] == [[], []]


@pytest.mark.parametrize(
    "interface",
    [
        None,
        "<View>",
        "<View/>",
        '<View><Choices name="a" toName="nothing"/></View>',
        '<!DOCTYPE x [<!ENTITY a "aaaa">]><View>&a;</View>',
        INTERFACE.replace("<View>", '<!DOCTYPE View SYSTEM "file:///etc/passwd"><View>'),
        INTERFACE.replace("<View>", "<!DOCTYPE View><View>"),
    ],
)
def test_an_interface_without_choices_for_an_image_is_refused(client, interface):
    assert client.post_json("/setup", {"schema": interface})[0] == 400
    assert client.post_json("/predict", {"tasks": [], "label_config": interface})[0] == 400


def test_images_are_fetched_from_label_studio_alone(serve_here, predictor, file, monkeypatch):
    seen = []

    class Studio(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["Authorization"]))
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", "/data/a.png")
            self.end_headers()
            self.wfile.write(file(1))

        def log_message(self, *_):
            pass

    monkeypatch.setenv("LABEL_STUDIO_API_KEY", "key")
    studio = ThreadingHTTPServer(("127.0.0.1", 0), Studio)
    threading.Thread(target=studio.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{studio.server_port}"
    client = serve_here({"bees": predictor}, label_studio=address)
    addresses = [
        "/data/a.png",
        f"{address}/data/b.png",
        "/data/my bée%20.png?d=/1",
        "/moved",
        "/data/c.png?d=a b",
        "http://127.0.0.1:1/c.png",
        "http://[",
        "file:///etc/passwd",
    ]
    tasks = [{"data": {"picture": each}} for each in addresses]
    _, content = client.post_json("/predict", {"tasks": tasks, "label_config": INTERFACE})
    studio.shutdown()
    studio.server_close()
    assert [bool(entry["result"]) for entry in content["results"]] == [True] * 3 + [False] * 5
    fetched = ["/data/a.png", "/data/b.png", "/data/my%20b%C3%A9e%20.png?d=/1", "/moved"]
    assert sorted(seen) == [(path, "Token key") for path in fetched]


def test_few_fetched_images_are_in_memory_at_once(serve_here, predictor, file, monkeypatch):
    lock, held, most, read = threading.Lock(), [0], [0], service.read_image

    def count(change):
        with lock:
            held[0] += change
            most[0] = max(most[0], held[0])

    def fetch(self, address):
        count(1)
        return file(1)

    def counted(*arguments):
        try:
            return read(*arguments)
        finally:
            count(-1)

    monkeypatch.setattr(LabelStudio, "_fetch", fetch)
    monkeypatch.setattr(service, "read_image", counted)
    client = serve_here({"bees": predictor})
    tasks = [{"data": {"picture": "/a.png"}}] * 40
    _, content = client.post_json("/predict", {"tasks": tasks, "label_config": INTERFACE})
    assert all(entry["result"] for entry in content["results"])
    assert 1 <= most[0] <= service.FETCHED


def test_an_address_that_is_none_is_told(predictor):
    with pytest.raises(UserError, match="http://localhost:8080"):
        create_app(Service({"bees": predictor}), Access(), label_studio="localhost:8080")

"""Real servers in a thread of the test's own process, and a client that knows nothing of ours."""

import http.client
import io
import json
import threading
import time
import uuid

import pytest

from didicm.inference.predictor import Predictor
from didicm.serving.security import Access
from didicm.serving.server import create_app, make_server, open_socket
from didicm.serving.service import Service


class Client:
    """One connection per request, over a real socket."""

    def __init__(self, port):
        self.port = port

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        kind = response.headers.get("content-type", "")
        return response.status, json.loads(data) if data and "json" in kind else data, response.headers

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)[:2]

    def post(self, path, body, kind="application/octet-stream", **headers):
        return self.request("POST", path, body, {"Content-Type": kind, **headers})[:2]

    def post_json(self, path, content):
        return self.post(path, json.dumps(content).encode(), "application/json")

    def post_form(self, path, *parts):
        """Parts are (name, text) or (name, file name, bytes)."""
        boundary = uuid.uuid4().hex
        body = b""
        for name, *rest in parts:
            file = f'; filename="{rest[0]}"' if len(rest) == 2 else ""
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
            body += head.encode() + (rest[-1] if file else rest[0].encode()) + b"\r\n"
        return self.post(path, body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}")


@pytest.fixture(scope="session")
def connect():
    """A client of the server on a port."""
    return Client


@pytest.fixture(scope="session")
def serve_here():
    """Serve models by name; the server ends with the tests."""
    running = []

    def serve(models, access=None, *, limits=None, batch_size=8, examples=(), **options):
        service = Service(models, limits=limits, batch_size=batch_size, examples=examples)
        app = create_app(service, access or Access(), **options)
        listening = open_socket("127.0.0.1", 0)
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        running.append((server, thread))
        return Client(listening.getsockname()[1])

    yield serve
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(600)  # a request that a failed test left open must not keep the others from their end


@pytest.fixture(scope="session")
def predictor(tmp_path_factory, save_model):
    prior = {"images": [10, 20, 40], "balance": "none"}
    return Predictor.load(save_model(tmp_path_factory.mktemp("served") / "model", training_prior=prior), "cpu")


@pytest.fixture(scope="session")
def baseline(tmp_path_factory, save_model):
    return Predictor.load(save_model(tmp_path_factory.mktemp("served") / "baseline", "standard"), "cpu")


@pytest.fixture(scope="session")
def client(serve_here, predictor, baseline):
    """A server with a model and a baseline."""
    return serve_here({"bees": predictor, "plain": baseline})


@pytest.fixture(scope="session")
def file(picture):
    """An image file's bytes."""

    def make(seed=0, kind="PNG", **options):
        buffer = io.BytesIO()
        picture(seed, **options).save(buffer, kind)
        return buffer.getvalue()

    return make

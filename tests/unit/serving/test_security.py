import io
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image

from didicm.errors import UserError
from didicm.serving import server, service
from didicm.serving.security import HEADERS, Access, Limits, find_access
from didicm.serving.service import Example, read_image

TOKEN = "correct-horse-battery-staple"


class Gate:
    """A model that answers when it is told to."""

    def __init__(self, predictor):
        self.predictor, self.asked, self.open = predictor, threading.Semaphore(0), threading.Event()

    def __getattr__(self, name):
        return getattr(self.predictor, name)

    def predict_batch(self, images, **options):
        self.asked.release()
        assert self.open.wait(600)
        return self.predictor.predict_batch(images, **options)


def bomb(width, height):
    """A small PNG that says it is large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_every_answer_has_the_headers(client, file):
    for method, path, body in (
        ("GET", "/", None),
        ("GET", "/page.js", None),
        ("GET", "/nowhere", None),
        ("DELETE", "/predict", None),
        ("POST", "/predict", b"x"),
        ("POST", "/predict", file()),
    ):
        _, _, headers = client.request(method, path, body)
        for name, value in HEADERS.items():
            assert headers[name] == value
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers
    _, _, headers = client.request("OPTIONS", "/predict", headers={"Origin": "http://a.example"})
    assert "access-control-allow-origin" not in headers


def test_without_the_token_only_health_and_the_empty_page_are_open(serve_here, predictor, file):
    client = serve_here({"bees": predictor}, Access(TOKEN))
    for path in ("/", "/page.js", "/page.css", "/health", "/v2/health/ready"):
        assert client.get(path)[0] == 200
    for path in ("/info", "/metrics", "/examples", "/v2/models/bees", "/openapi.json", "/nowhere"):
        assert client.get(path)[0] == 401
        assert client.get(path, Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert client.get(path, Authorization=TOKEN)[0] == 401
    assert client.post("/predict", file())[0] == 401
    assert client.post("/predict", file(), Authorization=f"Bearer {TOKEN}")[0] == 200
    # curl -u any:TOKEN, and Label Studio's basic authentication
    basic = "YW55OmNvcnJlY3QtaG9yc2UtYmF0dGVyeS1zdGFwbGU="
    assert client.get("/info", Authorization=f"Basic {basic}", Host="gpu.example")[0] == 200
    assert client.get("/info", Authorization="Basic ???")[0] == 401


def test_a_web_page_cannot_reach_the_server_by_a_name_of_its_own(client, serve_here, predictor):
    assert client.get("/info", Host="rebound.example:8000")[0] == 421
    for host in ("localhost:8000", "LocalHost", "127.0.0.1", "[::1]:8000"):
        assert client.get("/info", Host=host)[0] == 200
    assert serve_here({"bees": predictor}, Access(any_host=True)).get("/info", Host="gpu.example")[0] == 200


def test_others_are_let_in_with_a_token_or_when_said_twice(tmp_path, monkeypatch):
    monkeypatch.delenv("DIDICM_TOKEN", raising=False)
    assert find_access("127.0.0.1", None, False) == Access()
    assert find_access("::1", None, False) == Access()
    for host in ("0.0.0.0", "::", "192.168.0.7", "gpu.example"):
        with pytest.raises(UserError, match="--allow-anonymous"):
            find_access(host, None, False)
    assert find_access("0.0.0.0", None, True) == Access(any_host=True)
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert find_access("0.0.0.0", tmp_path / "token", False) == Access(TOKEN)
    monkeypatch.setenv("DIDICM_TOKEN", TOKEN)
    assert find_access("0.0.0.0", None, False) == Access(TOKEN)
    monkeypatch.setenv("DIDICM_TOKEN", "short")
    with pytest.raises(UserError, match="at least 16 printable characters"):
        find_access("127.0.0.1", None, False)
    with pytest.raises(UserError, match=r"--token-file .*nothing cannot be read"):
        find_access("0.0.0.0", tmp_path / "nothing", False)


@pytest.mark.parametrize("page", ["guides/serve.md", "install.md"])
def test_the_token_of_the_documentation_is_one(page, monkeypatch):
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    (setting,) = re.findall(r"^export (DIDICM_TOKEN=.*)", text, re.MULTILINE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = f'{setting}; printf %s "$DIDICM_TOKEN"'
    token = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, env={"PATH": path}, check=True)
    monkeypatch.setenv("DIDICM_TOKEN", token.stdout)
    assert find_access("0.0.0.0", None, False) == Access(token.stdout)
    assert "-e DIDICM_TOKEN -v" in text


def test_sizes_are_limited(serve_here, predictor, file):
    limits = Limits(upload_bytes=5000, images=2, pixels=1000)
    client = serve_here({"bees": predictor}, limits=limits)
    for status, content in (
        client.post("/predict", bytes(5001)),
        client.request("POST", "/predict", iter([bytes(3000)] * 2))[:2],  # chunked: no length beforehand
        client.post_form("/predict", ("image", "a.png", bytes(6000))),
    ):
        assert (status, content) == (413, {"error": "the request is larger than 5,000 bytes"})
    assert client.post("/predict", file(size=(30, 30)))[0] == 200
    status, content = client.post("/predict", file(size=(32, 32), kind="JPEG"))
    assert status == 422
    assert "1,024 pixels: at most 1,000" in content["predictions"][0]["error"]
    small = file(size=(4, 4))
    status, content = client.post_form("/predict", *[("image", "a.png", small)] * 3)
    assert status == 422
    assert "at most 2" in content["error"]


@pytest.mark.parametrize("size", [(40_000, 40_000), (2**31 - 1, 2**31 - 1), (60_000_000, 1), (1, 60_000_000)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(client, size):
    status, content = client.post("/predict", bomb(*size))
    assert status == 422
    assert "pixels" in content["predictions"][0]["error"]


@pytest.mark.parametrize(
    ("kind", "side", "options", "refused"),
    [
        ("JPEG", 7_000, {}, False),
        ("JPEG", 7_000, {"progressive": True}, True),
        ("WEBP", 7_000, {"lossless": True, "method": 0}, True),
        ("PNG", 7_000, {"compress_level": 1}, False),
        ("JPEG2000", 3_500, {}, True),
    ],
)
def test_no_image_takes_more_than_300_mb(predictor, peak, kind, side, options, refused):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (0, 90, 0)).save(buffer, kind, **options)
    used, told = peak(lambda: read_image(predictor, buffer.getvalue(), Limits()))
    assert used < 300 * 2**20
    assert ("make it smaller" in told) == refused


INTERFACE = b'<View><Image name=\\"i\\" value=\\"$i\\"/><Choices name=\\"c\\" toName=\\"i\\">%s</Choices></View>'
MOST = 15_900_000  # bytes that a server takes by default


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/predict", b'{"a":[' + b"[]," * (MOST // 3) + b"[]]}", 413),
        ("/predict", b'{"a":[' + b'{"":0},' * (MOST // 7) + b"0]}", 413),
        ("/predict", b'{"images":[' + b"0," * 900_000 + b"0]}", 422),  # as many as are read
        ("/predict", b'{"image":"","prior":{"a":' + b"[" * 60 + b"]" * 60 + b"}}", 400),
        ("/v2/models/bees/infer", b'{"inputs":[' + b"[]," * (MOST // 3) + b"[]]}", 413),
        ("/setup", b'{"schema":"' + b"<a>" * (MOST // 3) + b'"}', 413),
        ("/setup", b'{"schema":"' + b"<a>" * 30_000 + b'"}', 400),
        ("/setup", b'{"schema":"' + INTERFACE % (b"<a/>" * 6_000) + b'"}', 400),
        ("/setup", b'{"schema":"' + INTERFACE % (b" " * 110_000) + b'"}', 413),
        ("/predict", b'{"tasks":[],"label_config":"' + b"<a>" * (MOST // 3) + b'"}', 413),
        ("/setup", b'{"schema":"' + INTERFACE % (b"<Choice value=''/>" * 4_000) + b'"}', 200),
    ],
    ids=range(11),
)
def test_no_body_keeps_others_waiting(client, path, body, status):
    answers = []
    sending = threading.Thread(target=lambda: answers.append(client.post(path, body, "application/json")))
    sending.start()
    longest = 0.0
    while sending.is_alive():
        start = time.process_time()  # of the server too, which is in this process: other processes do not count
        assert client.get("/health")[0] == 200
        longest = max(longest, time.process_time() - start)
    ((found, content),) = answers
    assert found == status, content
    assert longest < 3


def test_an_answer_is_bounded_too(client, file, monkeypatch):
    monkeypatch.setattr(service, "MOST_VALUES", 20)
    query = "/predict?trajectory=true&steps=4&top=1000"  # three classes at the start and after every step
    images = [("image", "a.png", file())] * 2
    assert client.post_form(query, images[0])[0] == 200
    status, content = client.post_form(query, *images)
    assert status == 422
    assert "more than 20 probabilities: ask about fewer images" in content["error"]
    assert client.post_form("/predict?top=1000", *images)[0] == 200


def test_others_are_answered_while_an_answer_is_worded(client, file, monkeypatch):
    begun, answered, describe = threading.Event(), threading.Event(), service.describe

    def slow(*arguments):
        begun.set()
        assert answered.wait(60)
        return describe(*arguments)

    monkeypatch.setattr(service, "describe", slow)
    found = []
    asking = threading.Thread(target=lambda: found.append(client.post("/predict", file())[0]))
    asking.start()
    assert begun.wait(600)
    assert client.get("/health")[0] == 200
    answered.set()
    asking.join()
    assert found == [200]


def test_text_in_a_form_is_bounded_as_json_is(client, file):
    image, deep, many = ("i", "i.png", file()), "[" * 60 + "]" * 60, "[" + "[]," * 300_000 + "[]]"
    assert client.post_form("/predict", image, ("prior", deep))[0] == 422
    assert client.post_form("/predict", image, ("prior", many), ("taxonomy", many))[0] == 413


def test_many_frames_are_read_as_one(client, picture):
    buffer = io.BytesIO()
    frames = [picture(i) for i in range(50)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(buffer.getvalue())).n_frames == 50
    assert client.post("/predict", buffer.getvalue())[0] == 200


def test_overload_is_answered_with_when_to_come_back(serve_here, predictor, file):
    gate = Gate(predictor)
    client = serve_here({"bees": gate}, limits=Limits(requests=1))
    found = []
    first = threading.Thread(target=lambda: found.append(client.post("/predict", file())))
    first.start()
    assert gate.asked.acquire(timeout=600)
    status, content, headers = client.request("POST", "/predict", file())
    assert status == 503
    assert "busy" in content["error"]
    assert int(headers["Retry-After"]) >= 1
    assert client.get("/health")[0] == 200
    gate.open.set()
    first.join()
    assert found[0][0] == 200
    assert client.post("/predict", file())[0] == 200


def test_a_full_queue_and_full_memory_are_overload(serve_here, predictor, file):
    client = serve_here({"bees": predictor}, limits=Limits(waiting=2))
    many = [("image", "a.png", file())] * 3
    assert client.post_form("/predict", *many)[0] == 503
    assert client.post_form("/predict", *many[:2])[0] == 200
    client = serve_here({"bees": predictor}, limits=Limits(all_bytes=1000))
    assert client.post("/predict", bytes(1001))[0] == 503


def test_a_model_that_takes_too_long_is_overload_and_a_slow_upload_is_late(serve_here, predictor, file, caplog):
    gate = Gate(predictor)
    client = serve_here({"bees": gate}, limits=Limits(seconds=0.5))
    assert client.post("/predict", file())[0] == 503
    gate.open.set()
    with socket.create_connection(("127.0.0.1", client.port), timeout=600) as slow:
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
    # Whoever leaves in the middle of a request gives back what it has taken.
    with socket.create_connection(("127.0.0.1", client.port)) as gone:
        gone.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
    while "didicm_requests_under_way 0" not in client.get("/metrics")[1].decode().splitlines():
        pass
    told = client.get("/metrics")[1].decode().splitlines()
    assert "didicm_upload_bytes_under_way 0" in told
    assert 'didicm_requests_total{path="/predict",status="499"} 1' in told
    assert "ClientDisconnect" not in caplog.text  # that is no failure of ours


def test_a_client_that_never_finishes_its_head_is_dropped(serve_here, predictor, monkeypatch):
    monkeypatch.setattr(server, "PATIENCE", 1)
    client = serve_here({"bees": predictor})
    for said in (b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
        with socket.create_connection(("127.0.0.1", client.port), timeout=600) as slow:
            slow.sendall(said)
            received = b""
            try:
                while part := slow.recv(1000):
                    received += part
            except ConnectionResetError:
                pass
            assert received.count(b"HTTP/1.1 200") == said.count(b"\r\n\r\n")


@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_never_reads_its_answers_is_dropped(requests, serve_here, predictor, monkeypatch):
    monkeypatch.setattr(server, "PATIENCE", 0.5)
    large = Example("large", bytes(2**24), "image/png")  # more than the system keeps for a connection
    client = serve_here({"bees": predictor}, limits=Limits(seconds=1), examples=[large])
    with socket.create_connection(("127.0.0.1", client.port), timeout=600) as deaf:
        deaf.sendall(b"GET /examples/0 HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests)
        time.sleep(3)
        received = 0
        try:
            while part := deaf.recv(2**20):
                received += len(part)
        except ConnectionResetError:
            pass
        assert received < 2**24


def test_an_address_in_use_shows_at_once(serve_here):
    with server.open_socket("127.0.0.1", 0) as first, pytest.raises(UserError, match="choose another"):
        server.open_socket("127.0.0.1", first.getsockname()[1])


def test_an_answer_without_a_reason_says_nothing_of_the_inside(serve_here, predictor, file, caplog):
    class Broken(Gate):
        def changed(self, **sampler):
            raise RuntimeError("/secret/path")

    client = serve_here({"bees": Broken(predictor)})
    status, content = client.post("/predict?steps=2", file())
    assert status == 500
    assert content == {"error": "the server failed: its log has the reason"}
    assert "/secret/path" in caplog.text

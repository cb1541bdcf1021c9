"""The server as a process: started by its command, stopped by a signal."""

import http.client
import io
import json
import re
import signal
import threading
from pathlib import Path

import pytest
from PIL import Image

from didicm.cli.__main__ import main

PATIENCE = 1200


@pytest.fixture(scope="module")
def model(tmp_path_factory, train_flags):
    run = tmp_path_factory.mktemp("serve") / "my run"
    assert main(["train", *train_flags(run, epochs=1)]) == 0
    return run


def ask(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_a_signal_lets_running_requests_finish_and_leaves_no_process(model, start_didicm):
    process = start_didicm(
        "serve", model, "--baseline", model, "--port", "0", "--sampler.method", "cl", "--optimize"
    )
    shown = ""
    while "serving" not in shown:
        assert process.poll() is None
        shown = process.stderr.readline()
    port = int(re.search(r"serving my-run on http://127.0.0.1:(\d+)/", shown)[1])
    assert ask(port, "GET", "/health")[0] == 200
    assert list(json.loads(ask(port, "GET", "/info")[1])["models"]) == ["my-run", "my-run-baseline"]
    buffer = io.BytesIO()
    Image.new("L", (28, 28)).save(buffer, "PNG")
    answers = []
    work = threading.Thread(
        target=lambda: answers.append(ask(port, "POST", "/predict?steps=64&trajectory=true", buffer.getvalue()))
    )
    work.start()
    while b"didicm_requests_under_way 1" not in ask(port, "GET", "/metrics")[1]:
        assert not answers
    children = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
    assert "".join(children) == ""  # one process: nobody can be left behind
    process.send_signal(signal.SIGTERM)
    work.join()
    assert answers[0][0] == 200
    assert len(json.loads(answers[0][1])["predictions"][0]["trajectory"]) == 65
    _, trouble = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, trouble
    assert "Traceback" not in trouble
    with pytest.raises(ConnectionRefusedError):
        ask(port, "GET", "/health")


def test_mistakes_are_told_before_anything_is_loaded(tmp_path, fails, monkeypatch):
    monkeypatch.delenv("DIDICM_TOKEN", raising=False)
    nowhere = tmp_path / "nowhere"
    assert "--allow-anonymous" in fails("serve", nowhere, "--host", "0.0.0.0", "--port", "0")
    assert "--port 99999 cannot be used" in fails("serve", nowhere, "--port", "99999")
    assert "cannot be used" in fails("serve", nowhere, "--host", "192.0.2.1", "--allow-anonymous")
    assert "did you mean --host?" in fails("serve", nowhere, "--hots", "0.0.0.0")
    assert "--examples" in fails("serve", nowhere, "--port", "0", "--examples", nowhere)
    assert "--label-studio" in fails("serve", nowhere, "--port", "0", "--label-studio", "localhost:8080")
    assert str(nowhere) in fails("serve", nowhere, "--port", "0")

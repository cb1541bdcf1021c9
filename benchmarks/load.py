"""Serve a model to many clients, then to hostile ones: no answer lost, none much later than others, no crash."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.clients import Work, play
from benchmarks.measure import Result
from didicm import DiffusionClassifier, create_model, save
from didicm.data import EvalTransform

CLIENTS, SECONDS, HOSTILE = 200, 30.0, 5000
SPREAD = 3.0  # 99th percentile over median
GROWTH = 800.0  # MB that hostile uploads may add to the peak: their bodies, one large image, and JSON
HEALTH = 5.0  # seconds within which /health answers whatever else is asked


class Server:
    """`didicm serve` in a process of its own, with an untrained model: its speed is that of a trained one."""

    def __init__(self, folder: Path) -> None:
        network = create_model("didirn18", num_classes=10, in_chans=1, width=0.125, stem="small")
        names, transform = [f"class {k}" for k in range(10)], EvalTransform(28, 1, crop_pct=1.0).to_dict()
        save(DiffusionClassifier(network), folder / "model", class_names=names, transform=transform)
        log = folder / "log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "didicm.cli", "serve", str(folder / "model"), "--port", "0"]
            self.process = subprocess.Popen(command, stderr=file)
        while "serving" not in log.read_text():
            if self.process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        self.port = int(log.read_text().partition("127.0.0.1:")[2].partition("/")[0])

    def peak(self) -> float:
        """Largest resident memory so far, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def run() -> list[Result]:
    """Measure one server from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            play(Work(server.port, CLIENTS, seconds=2))  # warms up
            honest, calm = play(Work(server.port, CLIENTS, seconds=SECONDS)), server.peak()
            hostile = play(Work(server.port, clients=20, hostile=HOSTILE))
            grown = server.peak() - calm
            again = play(Work(server.port, CLIENTS, seconds=2))
        finally:
            code = server.stop()
    median, late = (1000 * float(x) for x in np.percentile(honest.latencies, [50, 99]))
    failed = len(honest.latencies) - honest.statuses.get(200, 0)
    refused = sum(count for status, count in hostile.statuses.items() if 400 <= status < 500)
    broken = sum(count for status, count in hostile.statuses.items() if status >= 500)
    return [
        Result(f"answers to {CLIENTS} clients", len(honest.latencies) / SECONDS, "per second"),
        Result("median latency", median, "ms"),
        Result("99th percentile of latency", late, "ms"),
        Result("99th percentile over median", late / median, "x", SPREAD, at_least=False),
        Result("answers lost", honest.lost + again.lost, "answers", 0, at_least=False),
        Result("answers other than 200", failed, "answers", 0, at_least=False),
        Result("hostile uploads answered", len(hostile.latencies), "uploads"),
        Result("hostile uploads cut off by their client", hostile.left, "uploads"),
        Result("hostile uploads refused", refused, "uploads"),
        Result("hostile uploads that broke something", broken, "uploads", 0, at_least=False),
        Result("hostile uploads lost", hostile.lost, "uploads", 0, at_least=False),
        Result("longest wait for /health meanwhile", max(hostile.health), "s", HEALTH, at_least=False),
        Result("peak of memory raised by them", grown, "MB", GROWTH, at_least=False),
        Result("exit code after SIGTERM", code, "", 0, at_least=False),
    ]

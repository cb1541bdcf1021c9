"""Clients of a server under load, in a process of their own: `python -m benchmarks.clients WORK`.

They speak HTTP over plain sockets. Honest ones ask one question after the other on a connection that they keep;
hostile ones send what is damaged in one way or another.
"""

import asyncio
import io
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

MOST = 15_900_000  # bytes, about as many as a server takes
KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
TYPES = (
    "image/png",
    "image/jpeg",
    "application/json",
    "multipart/form-data",
    "multipart/form-data; boundary=b",
    "",
)


@dataclass(frozen=True)
class Work:
    """What the clients are to do."""

    port: int
    clients: int  # at once
    seconds: float = 0.0  # of honest questions
    hostile: int = 0  # or so many hostile uploads


@dataclass
class Tally:
    """What the clients saw."""

    latencies: list[float] = field(default_factory=list)  # seconds, of answered requests
    statuses: dict[int, int] = field(default_factory=dict)
    lost: int = 0  # no answer, or one that was cut off
    left: int = 0  # the client went before its request was whole
    health: list[float] = field(default_factory=list)  # seconds that /health took meanwhile

    def add(self, status: int, seconds: float) -> None:
        self.latencies.append(seconds)
        self.statuses[status] = self.statuses.get(status, 0) + 1


async def request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, body: bytes) -> int:
    """One request on an open connection; the status of its answer, read to its end."""
    writer.write(f"{head}Host: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    return int(answer.split()[1])


async def honest_clients(work: Work) -> Tally:
    """Clients that ask as fast as they are answered."""
    images = [photo(i) for i in range(50)]
    tally, start = Tally(), time.perf_counter()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", work.port)
        sent = number
        while time.perf_counter() - start < work.seconds:
            before = time.perf_counter()
            try:
                head = "POST /predict HTTP/1.1\r\nContent-Type: image/jpeg\r\n"
                status = await request(reader, writer, head, images[sent % len(images)])
            except (OSError, asyncio.IncompleteReadError):
                tally.lost += 1
                reader, writer = await asyncio.open_connection("127.0.0.1", work.port)
                continue
            tally.add(status, time.perf_counter() - before)
            sent += 1
        writer.close()

    await asyncio.gather(*map(client, range(work.clients)))
    return tally


async def hostile_clients(work: Work) -> Tally:
    """Uploads that are damaged in one way or another; each gets an answer, or is cut off by the client itself."""
    tally, rng = Tally(), random.Random(0)
    bodies = iter([hostile_upload(rng) for _ in range(work.hostile)])
    done = asyncio.Event()

    async def monitor() -> None:
        while not done.is_set():
            before = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", work.port)
            if await request(reader, writer, "GET /health HTTP/1.1\r\n", b"") != 200:
                raise RuntimeError("/health did not answer 200")
            tally.health.append(time.perf_counter() - before)
            writer.close()
            await asyncio.sleep(0.1)

    async def client() -> None:
        for path, kind, body, truncated in bodies:
            head = f"POST {path} HTTP/1.1\r\n" + (f"Content-Type: {kind}\r\n" if kind else "")
            reader, writer = await asyncio.open_connection("127.0.0.1", work.port)
            before = time.perf_counter()
            try:
                if truncated:  # promises more than it sends, and leaves
                    promised = f"{head}Host: localhost\r\nContent-Length: {len(body) + 99}\r\n\r\n"
                    writer.write(promised.encode() + body)
                    await writer.drain()
                    tally.left += 1
                else:
                    tally.add(await request(reader, writer, head, body), time.perf_counter() - before)
            except (OSError, asyncio.IncompleteReadError):
                tally.lost += 1
            writer.close()

    watching = asyncio.create_task(monitor())
    await asyncio.gather(*(client() for _ in range(work.clients)))
    done.set()
    await watching
    return tally


def hostile_upload(rng: random.Random) -> tuple[str, str, bytes, bool]:
    """A path, a content type, a body, and whether the body breaks off."""
    if rng.random() < 0.01:
        return (*rng.choice(bombs()), False)
    data = bytearray(photo(rng.randrange(50), rng.choice(KINDS)))
    for _ in range(rng.choice((0, 1, 3, 30, 300))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.2:
        data[rng.randrange(len(data) + 1) : 0] = rng.randbytes(rng.randrange(2000))
    if rng.random() < 0.05:
        data = bytearray(rng.randbytes(rng.randrange(100_000)))
    kind = rng.choice(TYPES)
    if kind.endswith("boundary=b"):
        data = b'--b\r\nContent-Disposition: form-data; name="i"; filename="i"\r\n\r\n' + data + b"\r\n--b--\r\n"
    return "/predict", kind, bytes(data), rng.random() < 0.1


@cache
def bombs() -> list[tuple[str, str, bytes]]:
    """Requests that would take gigabytes or many seconds of a server that believes them."""
    infer, kind = "/v2/models/model/infer", "application/json"
    tensor = b'{"datatype":"UINT8","shape":[1,600,500,3],"data":[' + b"0," * 899_999 + b"0]}"
    largest = blank("WEBP", 3900, lossless=True, method=0)  # about the largest that is decoded
    return [
        ("/predict", kind, b'{"a":[' + b"[]," * (MOST // 3) + b"[]]}"),
        ("/predict", kind, b'{"images":[' + b"0," * 900_000 + b"0]}"),  # as many values as are read
        ("/predict", kind, b'{"tasks":[],"label_config":"' + b"<a>" * (MOST // 3) + b'"}'),
        (infer, kind, b'{"inputs":[' + b'{"":0},' * (MOST // 7) + b"0]}"),
        (infer, kind, b'{"inputs":[' + tensor + b"]}"),
        ("/setup", kind, b'{"schema":"' + b"<a>" * (MOST // 3) + b'"}'),
        ("/setup", kind, b'{"schema":"' + b"<a>" * 30_000 + b'"}'),
        ("/predict", "image/png", blank("PNG", 7000)),
        ("/predict", "image/webp", blank("WEBP", 7000, lossless=True, method=0)),
        ("/predict", "image/webp", largest),
        ("/predict", "image/jpeg", blank("JPEG", 7000, progressive=True)),
    ]


def blank(kind: str, side: int, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (0, 90, 0)).save(buffer, kind, **options)
    return buffer.getvalue()


def photo(seed: int, kind: str = "JPEG") -> bytes:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((64, 48), Image.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


def play(work: Work) -> Tally:
    """Clients in another process, which does not share our interpreter."""
    command = [sys.executable, "-m", "benchmarks.clients", json.dumps(asdict(work))]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return Tally(**{**found, "statuses": {int(status): n for status, n in found["statuses"].items()}})


def main(text: str) -> None:
    work = Work(**json.loads(text))
    clients = hostile_clients(work) if work.hostile else honest_clients(work)
    print(json.dumps(asdict(asyncio.run(clients))))


if __name__ == "__main__":
    main(sys.argv[1])

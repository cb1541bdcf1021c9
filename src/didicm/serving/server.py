"""Running the server: its socket, its deadlines for slow clients, its signals."""

import asyncio
import signal
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from didicm.errors import UserError
from didicm.serving.security import Guard

PATIENCE = 20.0  # seconds for a client to send a request's head, and to read an answer
IDLE = 15  # seconds that a connection may rest between requests


class PatientProtocol(H11Protocol):
    """HTTP for clients that may be slow, but not for ever: uvicorn alone would wait for a head without end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request(after=None)

    def on_response_complete(self) -> None:
        last = self.cycle
        super().on_response_complete()
        self._timer.cancel()
        self._expect_request(after=last)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _expect_request(self, after: Any) -> None:
        self._timer = self.loop.call_later(PATIENCE, self._drop_if_waiting, after)

    def _drop_if_waiting(self, after: Any) -> None:
        if self.cycle is after:  # no further request has begun
            self.transport.abort()  # closing would wait for a client that does not read


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket, so that an address in use shows before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        detail = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port} cannot be used ({detail}): choose another") from error
    return found


def make_server(app: Guard) -> uvicorn.Server:
    """The server, not yet running."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=1024,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=int(app.limits.seconds) + 1,
    )
    return uvicorn.Server(config)


def run(app: Guard, listening: socket.socket) -> None:
    """Serve until a signal; then take no more requests, finish those under way, and return."""
    # uvicorn raises the signal again when it is done: by then there is nothing left to interrupt.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    make_server(app).run(sockets=[listening])

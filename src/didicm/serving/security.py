"""What stands before every route: limits, the token, the host, deadlines, and the headers of every answer.

A request that is not served gets a status, one sentence, and perhaps when to come back.
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from didicm.errors import UserError
from didicm.serving.metrics import Metrics

TOKEN_VARIABLE = "DIDICM_TOKEN"
SHORTEST_TOKEN = 16
OTHER = "other"
GONE = 499  # nginx's status for a client that left before its answer

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
RETRY_SECONDS = 1


class RefusalError(HTTPException):
    """An answer other than success, to be sent as it is."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})


def refuse(error: HTTPException) -> JSONResponse:
    """A refusal of ours or of the framework's as JSON."""
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def busy() -> RefusalError:
    """The server has more to do than it takes on."""
    return RefusalError(503, "the server is busy: try again soon", Retry_After=str(RETRY_SECONDS))


@dataclass(frozen=True)
class Limits:
    """How much one client, and all of them together, may ask for."""

    upload_bytes: int = 16 * 2**20  # of one request
    all_bytes: int = 256 * 2**20  # of all requests under way
    pixels: int = 50_000_000  # of one image
    images: int = 64  # of one request
    steps: int = 64  # of one question
    requests: int = 256  # under way; further ones are answered 503
    waiting: int = 2048  # images in a model's queue
    seconds: float = 60.0  # until a request must have arrived, been answered and sent


@dataclass(frozen=True)
class Access:
    """Who is let in."""

    token: str | None = None
    any_host: bool = False  # without a token, a server on loopback answers to the names of loopback alone

    def check(self, headers: Headers) -> None:
        """Refuse a client without the token, and a web page that reached us under a name of its own."""
        if self.token is not None:
            if not hmac.compare_digest(_given_token(headers), self.token.encode()):
                raise RefusalError(401, "this server needs its token", WWW_Authenticate="Bearer")
        elif not self.any_host and not is_loopback(_hostname(headers.get("host", ""))):
            raise RefusalError(421, "this server answers to localhost alone")


class Guard:
    """ASGI middleware that lets no request pass unlimited and no answer without its headers."""

    def __init__(
        self, app: ASGIApp, *, limits: Limits, access: Access, metrics: Metrics, free: Collection[str]
    ) -> None:
        self.app, self.limits, self.access, self.metrics = app, limits, access, metrics
        self.free = free  # paths that need no token: health, and the page, which holds nothing secret
        self.requests = self.bytes = 0  # under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        visit = _Visit(self, receive, send)
        try:
            await asyncio.wait_for(self._admit(scope, visit), self.limits.seconds)
        except RefusalError as refusal:
            await visit.answer(scope, refusal)
        except asyncio.TimeoutError:
            late = RefusalError(408, f"the request did not arrive within {self.limits.seconds:g} s")
            await visit.answer(scope, busy() if visit.arrived else late)
        except Exception:
            if visit.status != 500:  # else it has been logged and answered already
                raise
        finally:
            visit.close(scope)

    async def _admit(self, scope: Scope, visit: "_Visit") -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in self.free:
            self.access.check(headers)
        if scope["method"] == "POST":
            if self.requests >= self.limits.requests:
                raise busy()
            visit.counted = 1
            self.requests += 1
            if int(headers.get("content-length") or 0) > self.limits.upload_bytes:
                raise self.too_large()
        await self.app(scope, visit.receive, visit.send)

    def too_large(self) -> RefusalError:
        """The answer to a body beyond the limit."""
        return RefusalError(413, f"the request is larger than {self.limits.upload_bytes:,} bytes")


class _Visit:
    """One request: what it has taken of the limits, and how far its answer is."""

    def __init__(self, guard: Guard, receive: Receive, send: Send) -> None:
        self.guard, self._receive, self._send = guard, receive, send
        self.start = time.perf_counter()
        self.counted = self.bytes = 0  # of the requests and bytes under way
        self.arrived = False
        self.status: int | None = None

    async def receive(self) -> Message:
        """A part of the body, within the limits."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self.bytes += size
        self.guard.bytes += size
        self.arrived = not message.get("more_body", False)
        if self.bytes > self.guard.limits.upload_bytes:
            raise self.guard.too_large()
        if self.guard.bytes > self.guard.limits.all_bytes:
            raise busy()
        return message

    async def send(self, message: Message) -> None:
        """A part of the answer, its head with our headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def answer(self, scope: Scope, refusal: RefusalError) -> None:
        """Refuse, unless the answer has begun: then the server closes the connection."""
        if self.status is None:
            await refuse(refusal)(scope, self._receive, self.send)
        else:
            raise TimeoutError("a client did not read its answer in time")

    def close(self, scope: Scope) -> None:
        """Give back what was taken, and count the request."""
        self.guard.requests -= self.counted
        self.guard.bytes -= self.bytes
        path = getattr(scope.get("route"), "path", OTHER)  # of a stranger's paths there is no end
        self.guard.metrics.request(path, self.status or GONE, time.perf_counter() - self.start)


def find_access(host: str, token_file: Path | None, allow_anonymous: bool) -> Access:
    """Who is let in at this address; an open door to the network must be asked for in so many words."""
    token = _read_token(token_file)
    if token is None and not is_loopback(host) and not allow_anonymous:
        raise UserError(
            f"--host {host} lets others in: give a token by --token-file FILE or {TOKEN_VARIABLE}, or say "
            "--allow-anonymous if anyone who reaches this machine may use the model"
        )
    return Access(token, any_host=allow_anonymous)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(file: Path | None) -> str | None:
    source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
    if file is not None:
        source = f"--token-file {file}"
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{source} cannot be read ({error}): give a file that holds the token alone"
            ) from error
    if token is None:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"the token of {source} must be at least {SHORTEST_TOKEN} printable characters without spaces: "
            "make one with python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def _given_token(headers: Headers) -> bytes:
    """The token of a request: as a bearer's, or as the password of clients that know only passwords."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return value.strip().encode() if scheme.lower() == "bearer" else b""


def _hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]

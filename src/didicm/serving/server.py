"""The server: its routes (ours, other programs' and the page), its socket, its deadlines and signals."""

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any

import uvicorn
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from didicm.data.decode import image_formats
from didicm.errors import UserError
from didicm.inference.prediction import BasePredictor
from didicm.serving import protocols
from didicm.serving.security import GONE, Access, Guard, RefusalError, refuse
from didicm.serving.service import Service, log
from didicm.serving.uploads import read_upload

PATIENCE = 20.0  # seconds for a client to send a request's head, and to read an answer
IDLE = 15  # seconds that a connection may rest between requests
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PREDICT = yaml.safe_load((resources.files("didicm.serving") / "predict.yaml").read_text(encoding="utf-8"))
TOLD_LIMITS = ("upload_bytes", "pixels", "images", "steps", "seconds")
HEALTH = ("/health", "/v2/health/live", "/v2/health/ready")


def create_app(service: Service, access: Access, *, label_studio: str | None = None) -> Guard:
    """The server as an ASGI application; images are fetched from the address `label_studio` alone."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    app = FastAPI(
        title="didicm",
        version=protocols.VERSION,
        description="Image classification with a posterior you can trust.",
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _leave, Exception: _fail},
    )
    guard = Guard(app, limits=service.limits, access=access, metrics=service.metrics, free={*PAGE, *HEALTH})
    studio = protocols.LabelStudio(service, label_studio)
    _add_own(app, service, guard, studio)
    _add_page(app, service)
    protocols.add_open_inference(app, service)
    protocols.add_label_studio(app, studio)
    return guard


def _add_own(app: FastAPI, service: Service, guard: Guard, studio: protocols.LabelStudio) -> None:
    @app.post("/predict", summary="Classify images", openapi_extra=PREDICT)
    async def predict(request: Request) -> Response:
        upload = await read_upload(request, service.limits)
        if upload.tasks is not None:
            return JSONResponse(await studio.predict(upload.tasks))
        found = await service.predict(upload.images, upload.options)
        failed = all("error" in entry for entry in found)
        note = service.models[service.name].note(upload.options.question)
        notes = {} if note is None else {"notes": [note]}
        return JSONResponse({"model": service.name, "predictions": found, **notes}, 422 if failed else 200)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="Whether the server is up")
    async def health() -> dict[str, str]:
        return {"status": "UP", "model_class": service.name}

    @app.get("/info", summary="The model, how it is asked, and the limits")
    async def info() -> dict[str, Any]:
        def told(model: BasePredictor) -> dict[str, Any]:
            coverage = None if model.rule is None else 1 - model.rule.alpha
            rest = {"coverage": coverage, "trajectory": model.has_trajectory, "classes": model.class_names}
            return {**model.describe(), **rest}

        return {
            "version": protocols.VERSION,
            "model": service.name,
            "baseline": service.baseline,
            "models": {name: told(served.model) for name, served in service.models.items()},
            "formats": image_formats(),
            "limits": {name: getattr(service.limits, name) for name in TOLD_LIMITS},
        }

    @app.get("/metrics", summary="Counts for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        gauges = {
            "requests_under_way": ("requests that are being served", guard.requests),
            "upload_bytes_under_way": ("bytes of requests that are being served", guard.bytes),
            "images_waiting": ("images in queues", sum(model.waiting for model in service.models.values())),
            "peak_memory_bytes": ("largest resident memory so far", peak),
        }
        return PlainTextResponse(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")


def _add_page(app: FastAPI, service: Service) -> None:
    files = resources.files("didicm.serving") / "page"
    for path, (name, kind) in PAGE.items():
        response = Response((files / name).read_bytes(), media_type=kind)
        send = partial(lambda found: found, response)  # not by a default: FastAPI would read it from the query
        app.add_api_route(path, send, methods=["GET", "HEAD"], include_in_schema=False)

    @app.get("/examples", summary="Images to try")
    async def examples() -> list[dict[str, str]]:
        return [{"name": item.name, "url": f"examples/{i}"} for i, item in enumerate(service.examples)]

    @app.get("/examples/{number:int}", summary="One of them")
    async def example(number: int) -> Response:
        if not 0 <= number < len(service.examples):
            raise RefusalError(404, "there is no such example")
        return Response(service.examples[number].data, media_type=service.examples[number].media_type)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refuse(error)


async def _leave(_: Request, error: Exception) -> Response:
    return Response(status_code=GONE)  # for the metrics: nobody is left to read it


async def _fail(_: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return JSONResponse({"error": "the server failed: its log has the reason"}, 500)


class PatientProtocol(H11Protocol):
    """HTTP for clients that may be slow, but not for ever.

    uvicorn alone would wait without end: for a head, and to send an answer that the client does not read.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request(after=None)

    def on_response_complete(self) -> None:
        last = self.cycle
        super().on_response_complete()
        self._timer.cancel()
        self._expect_request(after=last)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(PATIENCE, self.transport.abort)

    def resume_writing(self) -> None:
        self._unread.cancel()
        super().resume_writing()

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
        found.listen()  # two may bind an address as long as none listens
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

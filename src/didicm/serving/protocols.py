"""Thin routes for other programs: the Open Inference Protocol v2, and Label Studio's machine learning backends."""

import asyncio
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPMessage
from importlib.metadata import version
from typing import IO, Any
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree

import numpy as np
from fastapi import FastAPI, Request

from didicm.data.bands import Picture, from_pixels
from didicm.data.many_channels import MOST_CHANNELS
from didicm.errors import UserError
from didicm.serving.engine import Answer, check_shape
from didicm.serving.refusal import RefusalError
from didicm.serving.security import Limits
from didicm.serving.service import Service, Source
from didicm.serving.uploads import from_base64, make_options, read_json

VERSION = version("didicm")
LABEL_STUDIO_KEY = "LABEL_STUDIO_API_KEY"

# The Open Inference Protocol, v2


def add_open_inference(app: FastAPI, service: Service) -> None:
    """Routes of https://github.com/kserve/open-inference-protocol, for the model and the baseline."""

    @app.get("/v2", summary="The server, in the Open Inference Protocol")
    async def server() -> dict[str, Any]:
        return {"name": "didicm", "version": VERSION, "extensions": []}

    @app.get("/v2/health/live", summary="Whether the server is up")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready", summary="Whether the models are loaded")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.get("/v2/models/{name}/ready", summary="Whether a model is loaded")
    async def model_ready(name: str) -> dict[str, Any]:
        _known(service, name)
        return {"name": name, "ready": True}

    @app.get("/v2/models/{name}", summary="A model's inputs and outputs")
    async def model(name: str) -> dict[str, Any]:
        classes = len(_known(service, name))
        return {
            "name": name,
            "platform": "didicm",
            "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}],
            "outputs": [
                {"name": "probabilities", "datatype": "FP64", "shape": [-1, classes]},
                {"name": "label", "datatype": "BYTES", "shape": [-1]},
            ],
        }

    @app.post("/v2/models/{name}/infer", summary="Classify image files in base64, or 8-bit pixels")
    async def infer(name: str, request: Request) -> dict[str, Any]:
        names = _known(service, name)
        content = await read_json(request)
        images = await service.run(_tensor_images, content.get("inputs"), service.limits)
        parameters = content.get("parameters") or {}
        if not isinstance(parameters, dict) or not set(parameters) <= {"steps", "sampler"}:
            raise RefusalError(400, "parameters may be steps and sampler")
        answers = await service.answers(images, make_options(parameters, service.limits).question, name)
        rows = []
        for i, answer in enumerate(answers):
            if not isinstance(answer, Answer):  # a tensor has no room for the error of one row
                raise RefusalError(400, f"image {i}: {answer}")
            rows.append(answer.probs)
        found = {
            "model_name": name,
            "outputs": [
                {
                    "name": "probabilities",
                    "datatype": "FP64",
                    "shape": [len(rows), len(names)],
                    "data": [float(p) for row in rows for p in row],
                },
                {
                    "name": "label",
                    "datatype": "BYTES",
                    "shape": [len(rows)],
                    "data": [names[int(row.argmax())] for row in rows],
                },
            ],
        }
        return {**found, "id": content["id"]} if isinstance(content.get("id"), str) else found


def _known(service: Service, name: str) -> Sequence[str]:
    if name not in service.models:
        raise RefusalError(404, f"there is no such model: ask for {' or '.join(service.models)}")
    return service.models[name].engine.class_names


def _tensor_images(inputs: Any, limits: Limits) -> list[Source]:
    """The images of an inference request: files in base64 (BYTES), or pixels (UINT8) of shape (N, H, W, C)."""
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise RefusalError(400, "inputs must be a list of one tensor: the images")
    kind, shape, data = (inputs[0].get(key) for key in ("datatype", "shape", "data"))
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape) or not shape:
        raise RefusalError(400, "the shape of a tensor must be a list of positive whole numbers")
    if not isinstance(data, list):
        raise RefusalError(400, "the data of a tensor must be a list")
    if shape[0] > limits.images:
        raise RefusalError(400, f"the request has {shape[0]} images: at most {limits.images} are allowed")
    if kind == "BYTES" and len(shape) == 1 and len(data) == shape[0]:
        return [from_base64(text) for text in data]
    if (
        kind == "UINT8"
        and len(shape) == 4
        and shape[3] <= MOST_CHANNELS
        and math.prod(shape) <= limits.upload_bytes
    ):
        try:
            pixels = np.asarray(data, dtype=np.uint8).reshape(shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise RefusalError(
                400, "the data of a UINT8 tensor must be as many numbers as its shape says"
            ) from error
        return [_checked(from_pixels(array), limits) for array in pixels]
    raise RefusalError(400, "the tensor must be BYTES of shape (N), or UINT8 of shape (N, H, W, channels)")


def _checked(image: Picture, limits: Limits) -> Source:
    try:
        check_shape(image, limits.pixels)
    except UserError as error:
        return error
    return image


# Label Studio


class LabelStudio:
    """Its contract: tasks and a labelling interface in, one choice per task out.

    Tasks name images by address. Only those of the Label Studio that the server was started for are fetched: the
    server must not be a way into other people's networks.
    """

    def __init__(self, service: Service, host: str | None) -> None:
        self.service, self.host = service, host
        if host is not None and urlsplit(host).scheme not in ("http", "https"):
            raise UserError(f"--label-studio {host} must be an address such as http://localhost:8080")

    async def predict(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Answers in the order of the tasks; one whose image cannot be read has an empty result."""
        tasks = content.get("tasks")
        if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
            raise RefusalError(400, "tasks must be a list of objects")
        if len(tasks) > self.service.limits.images:
            raise RefusalError(400, f"at most {self.service.limits.images} tasks are allowed, got {len(tasks)}")
        choices, image, key, allowed = read_interface(content.get("label_config"))
        addresses = [data.get(key) if isinstance(data := task.get("data"), dict) else None for task in tasks]
        fetched = await asyncio.gather(*(asyncio.to_thread(self._fetch, address) for address in addresses))
        names = self.service.engine.class_names
        results = []
        question = make_options({}, self.service.limits).question
        for answer in await self.service.answers(fetched, question):
            best = -1
            if isinstance(answer, Answer):
                known = [k for k, name in enumerate(names) if not allowed or name in allowed]
                best = max(known, key=lambda k: float(answer.probs[k]), default=-1)
            if not isinstance(answer, Answer) or best < 0:
                results.append({"result": [], "score": 0.0, "model_version": self.service.name})
                continue
            choice = {
                "from_name": choices,
                "to_name": image,
                "type": "choices",
                "value": {"choices": [names[best]]},
                "score": float(answer.probs[best]),
            }
            results.append({"result": [choice], "score": choice["score"], "model_version": self.service.name})
        return {"results": results, "model_version": self.service.name}

    def _fetch(self, address: Any) -> Source:
        if not isinstance(address, str):
            return UserError("the task has no image")
        if address.startswith("data:"):
            return from_base64(address)
        url = urljoin(self.host or "", address)
        if self.host is None or urlsplit(url)[:2] != urlsplit(self.host)[:2]:
            return UserError("images of this address are not fetched: see --label-studio")
        key = os.environ.get(LABEL_STUDIO_KEY)
        request = urllib.request.Request(url, headers={"Authorization": f"Token {key}"} if key else {})
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=10) as response:
                data = response.read(self.service.limits.upload_bytes + 1)
        except (OSError, ValueError, urllib.error.URLError):
            return UserError("Label Studio did not hand over the image")
        return data if len(data) <= self.service.limits.upload_bytes else UserError("the image is too large")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def add_label_studio(app: FastAPI, studio: LabelStudio) -> None:
    """`/setup`; its `/predict` shares our route and is told by the tasks in its body."""

    @app.post("/setup", summary="Label Studio connects a project")
    async def setup(request: Request) -> dict[str, str]:
        content = await read_json(request)
        read_interface(content.get("schema") or content.get("label_config"))
        return {"model_version": studio.service.name}


def read_interface(config: Any) -> tuple[str, str, str, set[str]]:
    """Names of the choices and the image in a labelling interface, the task's key, and the choices it offers."""
    if not isinstance(config, str) or "<!" in config:  # no document types: they could define entities
        raise RefusalError(400, "the labelling interface is missing or has a document type")
    try:
        root = ElementTree.fromstring(config)
    except ElementTree.ParseError as error:
        raise RefusalError(400, "the labelling interface is not valid XML") from error
    images = {item.get("name", ""): item.get("value", "") for item in root.iter("Image")}
    for choices in root.iter("Choices"):
        image = choices.get("toName", "")
        if choices.get("name") and images.get(image, "").startswith("$"):
            offered = {choice.get("value", "") for choice in choices.iter("Choice")}
            return choices.get("name", ""), image, images[image].removeprefix("$"), offered
    raise RefusalError(400, "the labelling interface needs Choices for an Image: <Choices name=... toName=...>")

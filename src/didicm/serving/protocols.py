"""Thin routes for other programs: the Open Inference Protocol v2, and Label Studio's machine learning backends."""

import math
import os
import string
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from http.client import HTTPException, HTTPMessage
from importlib.metadata import version
from typing import IO, Any
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
from fastapi import FastAPI, Request

from didicm.data.picture import MOST_CHANNELS, from_array
from didicm.errors import UserError
from didicm.inference.prediction import Prediction
from didicm.serving.batching import Question
from didicm.serving.security import Limits, RefusalError
from didicm.serving.service import Service, Source
from didicm.serving.tasks import INTERFACE_BYTES, Tasks, read_interface
from didicm.serving.uploads import from_base64, make_options, read_json

VERSION = version("didicm")
LABEL_STUDIO_KEY = "LABEL_STUDIO_API_KEY"
SETUP_BYTES = 2 * INTERFACE_BYTES  # in JSON an interface is longer

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
            "outputs": _outputs(-1, classes),
        }

    @app.post("/v2/models/{name}/infer", summary="Classify image files in base64, or 8-bit pixels")
    async def infer(name: str, request: Request) -> dict[str, Any]:
        names = _known(service, name)
        images, question, own = await read_json(request, lambda content: _read_inference(content, service.limits))
        answers = await service.answers(images, question, name)
        if not any(isinstance(answer, Prediction) for answer in answers):
            raise RefusalError(400, f"image 0: {answers[0]}")
        probs, labels, errors = np.zeros((len(answers), len(names))), [""] * len(answers), [""] * len(answers)
        for i, answer in enumerate(answers):
            if isinstance(answer, Prediction):
                probs[i], labels[i] = answer.probs, names[int(answer.probs.argmax())]
            else:
                errors[i] = str(answer)
        outputs = {"probabilities": probs.flatten().tolist(), "label": labels, "error": errors}
        described = _outputs(len(answers), len(names))
        found = {"model_name": name, "outputs": [{**item, "data": outputs[item["name"]]} for item in described]}
        return found if own is None else {**found, "id": own}


def _outputs(images: int, classes: int) -> list[dict[str, Any]]:
    """The tensors of an answer; an image that cannot be read has an error, and neither label nor probabilities."""
    return [
        {"name": "probabilities", "datatype": "FP64", "shape": [images, classes]},
        {"name": "label", "datatype": "BYTES", "shape": [images]},
        {"name": "error", "datatype": "BYTES", "shape": [images]},
    ]


def _known(service: Service, name: str) -> Sequence[str]:
    if name not in service.models:
        raise RefusalError(404, f"there is no such model: ask for {' or '.join(service.models)}")
    return service.models[name].model.class_names


def _read_inference(content: Mapping[str, Any], limits: Limits) -> tuple[list[Source], Question, str | None]:
    """The images of an inference request, how they are to be asked about, and its id."""
    parameters, name = content.get("parameters") or {}, content.get("id")
    if not isinstance(parameters, dict) or not set(parameters) <= {"steps", "sampler"}:
        raise RefusalError(400, "parameters may be steps and sampler")
    images = _tensor_images(content.get("inputs"), limits)
    return images, make_options(parameters, limits).question, name if isinstance(name, str) else None


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
            pixels = np.asarray(data).reshape(shape)  # of its own type: as uint8 it would lose fractions
            if pixels.dtype.kind != "i" or pixels.min() < 0 or pixels.max() > 255:
                raise ValueError
        except ValueError as error:
            raise RefusalError(
                400, "the data of a UINT8 tensor must be as many whole numbers up to 255 as its shape says"
            ) from error
        return [from_array(array) for array in pixels.astype(np.uint8)]
    raise RefusalError(400, "the tensor must be BYTES of shape (N), or UINT8 of shape (N, H, W, channels)")


# Label Studio


def check_label_studio(host: str | None) -> None:
    """Complain about what is no address."""
    if host is not None and urlsplit(host).scheme not in ("http", "https"):
        raise UserError(f"--label-studio {host} must be an address such as http://localhost:8080")


class LabelStudio:
    """Its contract: tasks and a labelling interface in, one choice per task out.

    Tasks name images by address. Only those of the Label Studio that the server was started for are fetched: the
    server must not be a way into other people's networks.
    """

    def __init__(self, service: Service, host: str | None) -> None:
        check_label_studio(host)
        self.service, self.host = service, host

    async def predict(self, tasks: Tasks) -> dict[str, Any]:
        """Answers in the order of the tasks; one whose image cannot be read has an empty result."""
        interface = tasks.interface
        images = [partial(self._fetch, address) for address in tasks.addresses]
        names, results = self.service.models[self.service.name].model.class_names, []
        offered = [k for k, name in enumerate(names) if not interface.allowed or name in interface.allowed]
        for answer in await self.service.answers(images, Question()):
            if not isinstance(answer, Prediction) or not offered:
                results.append({"result": [], "score": 0.0, "model_version": self.service.name})
                continue
            best = max(offered, key=lambda k: float(answer.probs[k]))
            choice = {
                "from_name": interface.choices,
                "to_name": interface.image,
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
        key = os.environ.get(LABEL_STUDIO_KEY)
        try:
            url = urlsplit(urljoin(self.host or "", address))
            if self.host is None or url[:2] != urlsplit(self.host)[:2]:
                return UserError("images of this address are not fetched: see --label-studio")
            url = url._replace(path=quote(url.path, safe=string.punctuation))  # names of files may have spaces
            headers = {"Authorization": f"Token {key}"} if key else {}
            request = urllib.request.Request(url.geturl(), headers=headers)
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=10) as response:
                data: bytes = response.read(self.service.limits.upload_bytes + 1)
        except (OSError, ValueError, HTTPException):
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
        await read_json(
            request,
            lambda content: read_interface(content.get("schema") or content.get("label_config")),
            SETUP_BYTES,
        )
        return {"model_version": studio.service.name}

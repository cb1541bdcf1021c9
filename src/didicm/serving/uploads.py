"""From the body of a request to images and options: multipart, raw bytes, or JSON with base64."""

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from PIL import Image
from starlette.datastructures import UploadFile
from starlette.requests import Request

from didicm.data.decode import MODES, image_formats, open_image, own_channels
from didicm.data.picture import Picture, open_bands
from didicm.errors import UserError, did_you_mean, reason
from didicm.files import parse_json
from didicm.serving.batching import Question
from didicm.serving.security import Limits, RefusalError
from didicm.serving.tasks import Tasks, read_tasks
from didicm.values import Natural, Settings, field_types

MOST_NAMES = 100_000  # in an option: more would keep others waiting
MOST_VALUES = 1_000_000  # in JSON: Python takes about half a second for them, and a hundred megabytes
IMAGE_KEYS = ("image", "images")
T = TypeVar("T")
_PARSING = ThreadPoolExecutor(1, "parse")  # one request at a time, for its memory


@dataclass(frozen=True)
class Options(Settings):
    """How a request wants to be answered.

    Args:
        steps: of the sampler; by default as stored with the model
        sampler: cp, cl or readout; by default as stored with the model
        top: classes in the answer
        classes: those that are possible here; the probabilities are renormalised to them
        prior: how frequent each class is here, if that differs from training; uniform; or training
        taxonomy: coarser names and their classes, whose probabilities are summed
        trajectory: answer with every step of the sampler too
        baseline: ask the baseline too
    """

    steps: Natural | None = None
    sampler: Literal["cp", "cl", "readout"] | None = None
    top: Natural = 5
    classes: tuple[str, ...] = ()
    prior: Mapping[str, float] | Literal["uniform", "training"] = field(default_factory=dict)
    taxonomy: Mapping[str, Any] = field(default_factory=dict)
    trajectory: bool = False
    baseline: bool = False

    @property
    def question(self) -> Question:
        """What the model itself must know."""
        return Question(self.steps, self.sampler, self.trajectory)


@dataclass(frozen=True)
class Upload:
    """Images as they came, and the options."""

    images: list[bytes | UserError]
    options: Options
    tasks: Tasks | None = None  # of Label Studio, instead


async def read_upload(request: Request, limits: Limits) -> Upload:
    """Read a request of any of the three kinds."""
    query = request.query_params.multi_items()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await read_json(request, lambda content: _from_content(content, query, limits))
    if kind == "multipart/form-data":
        images, texts = await _read_form(request, limits)
        return await _parse(lambda: _make_upload(images, _from_texts(query) | _from_texts(texts), limits))
    return _make_upload([await request.body()], _from_texts(query), limits)


async def read_json(request: Request, read: Callable[[dict[str, Any]], T], most: int | None = None) -> T:
    """What `read` makes of the JSON object in a body of at most so many bytes.

    Others are answered meanwhile. The object itself, which takes far more memory than its body, is not kept.
    """
    body = await request.body()
    if most is not None and len(body) > most:
        raise RefusalError(413, f"the request is larger than {most:,} bytes")
    return await _parse(lambda: read(_json_object(body)))


async def _parse(function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_PARSING, function)


def _json_object(body: bytes) -> dict[str, Any]:
    _check_values(body)
    try:
        content = parse_json(body)
    except ValueError as error:
        raise RefusalError(400, f"the body is not valid JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise RefusalError(400, "the body must be a JSON object")
    return content


def _check_values(text: bytes) -> None:
    """Refuse text that holds too many values, before any is made of it: that would let nobody else run."""
    if sum(map(text.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise RefusalError(413, f"the request holds more than {MOST_VALUES:,} values: send images as files")


def _from_content(content: Mapping[str, Any], query: list[tuple[str, str]], limits: Limits) -> Upload:
    if "tasks" in content:  # Label Studio's contract, whose options are its own
        return Upload([], Options(), read_tasks(content, limits))
    images = content.get("images", [])
    if not isinstance(images, list):
        raise RefusalError(422, "images must be a list of base64 strings")
    images = [*([content["image"]] if "image" in content else []), *images]
    _check_count(images, limits)
    given = {name: value for name, value in content.items() if name not in IMAGE_KEYS}
    return _make_upload([from_base64(image) for image in images], _from_texts(query) | given, limits)


def _make_upload(images: list[bytes | UserError], given: Mapping[str, Any], limits: Limits) -> Upload:
    _check_count(images, limits)
    return Upload(images, make_options(given, limits))


def _check_count(images: Sequence[Any], limits: Limits) -> None:
    if not images or images == [b""]:
        raise RefusalError(422, "the request has no image: send files, image bytes, or JSON with base64 images")
    if len(images) > limits.images:
        raise RefusalError(422, f"the request has {len(images)} images: at most {limits.images} are allowed")


def make_options(given: Mapping[str, Any], limits: Limits) -> Options:
    """Options from names and values; a wrong one is told in one sentence."""
    known = field_types(Options)
    for name, value in given.items():
        if name not in known:
            raise RefusalError(422, f"there is no option {name[:40]!r}: {did_you_mean(name[:40], known)}")
        if hasattr(value, "__len__") and len(value) > MOST_NAMES:
            raise RefusalError(422, f"{name} is too long: give each class once")
    try:
        options = Options(**given)
    except UserError as error:
        raise RefusalError(422, str(error)) from error
    if options.steps is not None and options.steps > limits.steps:
        raise RefusalError(422, f"steps must be at most {limits.steps}, got {options.steps}")
    return options


def open_upload(data: bytes, pixels: int) -> Picture:
    """The image that bytes hold, judged by their content; errors are the client's to fix.

    It is not decoded yet, but for arrays and TIFFs of many channels, which take the memory of one image at most.
    """
    try:
        image = open_image(data)
        many = isinstance(image, Image.Image) and own_channels(image) not in MODES
        image = open_bands(data) if many else image
    except Image.DecompressionBombError as error:
        raise UserError(f"the image has too many pixels: at most {pixels:,} are allowed") from error
    except UserError as error:
        raise UserError(f"this cannot be read as an image: {error}") from error
    except Exception as error:  # a broken file can raise nearly anything from inside a decoder
        names = image_formats()
        raise UserError(f"this cannot be read as an image: send {', '.join(names[:-1])} or {names[-1]}") from error
    check_pixels(image, pixels)
    return image


def check_pixels(image: Picture, pixels: int) -> None:
    """Refuse an image of more pixels than the server takes, before any is decoded."""
    if (found := image.width * image.height) > pixels:
        raise UserError(f"the image has {found:,} pixels: at most {pixels:,} are allowed")


def load_pixels(image: Picture) -> Picture:
    """Decode what was opened."""
    try:
        image.load()
    except Exception as error:
        raise UserError("this image is damaged: it cannot be decoded to its end") from error
    return image


def from_base64(text: Any) -> bytes | UserError:
    """Bytes from base64, also as a data URL."""
    if not isinstance(text, str):
        return UserError("an image in JSON must be a base64 string")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return UserError("this is not valid base64")


async def _read_form(request: Request, limits: Limits) -> tuple[list[bytes | UserError], list[tuple[str, str]]]:
    images: list[bytes | UserError] = []
    texts: list[tuple[str, str]] = []
    async with request.form(max_files=limits.images + 1, max_fields=1000) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                images.append(await value.read())
            elif name in IMAGE_KEYS:  # as of curl -F image=photo.jpg
                raise RefusalError(422, f"{name} came as text, not as a file: with curl, write {name}=@photo.jpg")
            else:
                texts.append((name, value))
    return images, texts


def _from_texts(items: list[tuple[str, str]]) -> dict[str, Any]:
    """Options that were given as text: numbers, truth values and the prior are read as JSON."""
    given: dict[str, Any] = {}
    _check_values("".join(text for _, text in items).encode())
    for name, text in items:
        if name == "classes":
            given.setdefault("classes", []).append(text)
        elif name == "sampler":
            given[name] = text
        else:
            try:
                given[name] = parse_json(text)
            except ValueError:
                given[name] = text
    return given

"""`didicm serve`: a model over HTTP, with a page to try it."""

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from didicm.cli.flags import parse
from didicm.cli.options import ModelOptions
from didicm.errors import UserError
from didicm.inference.onnx import SUFFIX
from didicm.inference.prediction import BasePredictor
from didicm.text import SafeConsole
from didicm.values import Natural, Positive


@dataclass(frozen=True)
class ServeOptions(ModelOptions):
    """Serve a model over HTTP: POST /predict, a page to try it, and routes for other programs.

    Args:
        run: a run (its best model), a model directory, hf://owner/name, or a file of didicm export (.onnx)
        baseline: another run, which the page shows side by side
        host: address to listen on; any but this machine's own needs a token
        port: port to listen on; 0 takes a free one
        token_file: a file with the token that clients must send; or set DIDICM_TOKEN
        allow_anonymous: let anyone in who can reach the address, without a token
        examples: a folder of images that the page offers
        label_studio: address of the Label Studio whose images may be fetched, as http://localhost:8080
        conformal: kind of set: lac (small) or aps (adapts to the image)
        max_upload: largest request, in megabytes
        max_pixels: largest image, in megapixels
        max_requests: requests under way at once; further ones are told to come back
        timeout: seconds for one request
    """

    baseline: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None
    allow_anonymous: bool = False
    examples: Path | None = None
    label_studio: str | None = None
    conformal: Literal["lac", "aps"] = "lac"
    max_upload: Positive = 16.0
    max_pixels: Positive = 50.0
    max_requests: Natural = 256
    timeout: Positive = 60.0


def main(argv: list[str]) -> int:
    """Serve until stopped."""
    options = parse(argv, ServeOptions, command="serve", positional=["run"])
    try:
        from didicm.serving.protocols import check_label_studio
        from didicm.serving.security import Limits, find_access
        from didicm.serving.server import create_app, open_socket, run
        from didicm.serving.service import Service, find_examples
    except ModuleNotFoundError as error:
        raise UserError(f'didicm serve needs {error.name}: pip install "didicm[serve]"') from error
    megabyte = 2**20
    limits = Limits(
        upload_bytes=int(options.max_upload * megabyte),
        all_bytes=max(256 * megabyte, int(options.max_upload * megabyte)),
        pixels=int(options.max_pixels * 1e6),
        requests=options.max_requests,
        seconds=options.timeout,
    )
    access = find_access(options.host, options.token_file, options.allow_anonymous)
    check_label_studio(options.label_studio)
    offered = options.examples and find_examples(options.examples, (), limits)
    listening = open_socket(options.host, options.port)
    console = SafeConsole(stderr=True, soft_wrap=True)
    name = model_name(options.run)
    models = {name: open_model(options, console)}
    if options.baseline is not None:
        other = model_name(options.baseline)
        plain = replace(options, run=options.baseline, sampler={}, size=None)  # those are settings of the model
        models[other if other != name else f"{other}-baseline"] = open_model(plain, console)
    examples = offered or find_examples(None, models[name].class_names, limits)
    service = Service(models, limits=limits, batch_size=options.batch_size, examples=examples)
    app = create_app(service, access, label_studio=options.label_studio)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    address, port = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    console.print(f"serving {name} on http://{shown}:{port}/ (stop with Ctrl-C)")
    run(app, listening)
    return 0


def open_model(options: ServeOptions, console: Console) -> BasePredictor:
    """Load a model, and say what is known of its calibration."""
    predictor = options.load(conformal=options.conformal)
    named = "" if options.run.endswith(SUFFIX) else f"{model_name(options.run)}: "
    console.print(f"{named}{predictor.note}")
    if options.compile:
        from didicm.inference.predictor import Predictor  # it needs PyTorch, and exported models do without

        assert isinstance(predictor, Predictor)
        predictor.warm_up(options.batch_size)
    return predictor


def model_name(source: str) -> str:
    """What clients call a model: its run's or its file's name, never its path."""
    parts = [part for part in re.split(r"[/\\]", source) if part not in ("", ".", "best", "last")]
    return (
        re.sub(r"[^\w.-]+", "-", (parts or [""])[-1].removesuffix(SUFFIX), flags=re.ASCII).strip("-.") or "model"
    )

"""The page on speed, from what the benchmarks stored: `python -m benchmarks --write` measures and writes both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Result

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
STORED = PAGE.with_name("speed.json")
Suites = Mapping[str, Sequence[Result]]

HEAD = """# Speed

What answers, training and exported models cost, as far as it was measured. `make bench` and `make load` measure
it and write this page. Times are ratios within one run: both sides take turns on the same machine, here
two shared CPU cores, and each keeps its best time. A bound is a promise: `make bench` fails when one is broken.
GPUs are not measured here; what decides their speed (host syncs, graphs, data types, devices) is counted by the
tests.
"""
SECTIONS = {
    "networks": """## A posterior

Eight steps of DiDiRN share the encoding of the image; a network around a timm backbone encodes it once, and its
steps cost next to nothing.
""",
    "diffusion": """## Against K x K matrices

The paper writes noising and steps as matrices of K x K; the library uses closed forms that are linear in the
number of classes.
""",
    "training": """## Training

Against a literal transcription of the released training step, and against timm's own training loop.
""",
    "loading": """## Reading images

The loader against timm's, with the same files, transforms and workers.
""",
    "bulk": """## Bulk prediction

`didicm predict --out` with 2,000 JPEGs of 500 x 375, eight steps of a ResNet-18 with a DiDiCM head at 112 px,
two workers, against the loop that one would write by hand. That loop stores nothing, but its workers send
float32 images instead of 8-bit ones, and its network is not channels-last. [Guide](guides/bulk.md)
""",
    "exported": """## Exported models

One thread, 8-bit pixels in, probabilities of 100 classes out, eight steps at 64 px. [Guide](guides/export.md)
""",
    "load": """## The server under load

200 clients that ask for 30 s, each again as soon as it is answered; then 5,000 damaged or hostile uploads, 20 at a
time. Clients and server share the machine's cores. [Guide](guides/serve.md)
""",
}


def read() -> dict[str, list[Result]]:
    """What was measured last, by suite."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    return {name: [Result(**result) for result in results] for name, results in stored.items()}


def write(suites: Suites) -> None:
    """Keep these measurements, those of other suites too, and show them on the page."""
    merged = {**read(), **suites}
    stored = {name: [asdict(result) for result in results] for name, results in merged.items()}
    STORED.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(merged), encoding="utf-8")


def page(suites: Suites) -> str:
    """A section for everything that was measured."""
    return "\n".join(
        [HEAD, *(f"{text}\n{table(suites[name])}" for name, text in SECTIONS.items() if name in suites)]
    )


def table(results: Sequence[Result]) -> str:
    lines = ["| | measured | bound |", "|---|---:|---|"]
    for result in results:
        bound = result.bound_text if result.holds else f"**{result.bound_text}: not kept**"
        lines.append(f"| {result.name} | {result.value_text} | {bound} |")
    return "\n".join([*lines, ""])

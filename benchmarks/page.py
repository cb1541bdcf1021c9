"""The page on speed, from what the benchmarks stored: `python -m benchmarks --write` measures and writes both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Result

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
STORED = PAGE.with_name("speed.json")
START, END = "<!-- {}: make bench -->", "<!-- end of {} -->"
Suites = Mapping[str, Sequence[Result]]


def read() -> dict[str, list[Result]]:
    """What was measured last, by suite."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    return {name: [Result(**result) for result in results] for name, results in stored.items()}


def write(suites: Suites) -> None:
    """Keep these measurements, those of other suites too, and show them on the page."""
    merged = {**read(), **suites}
    stored = {name: [asdict(result) for result in results] for name, results in merged.items()}
    STORED.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), merged), encoding="utf-8")


def with_tables(page: str, suites: Suites) -> str:
    """The page with each suite's table between its marks."""
    for name, results in suites.items():
        start, end = START.format(name), END.format(name)
        head, _, rest = page.partition(start)
        page = f"{head}{start}\n{table(results)}\n{end}{rest.partition(end)[2]}"
    return page


def table(results: Sequence[Result]) -> str:
    lines = ["| | measured | bound |", "|---|---:|---|"]
    for result in results:
        bound = result.bound_text if result.holds else f"**{result.bound_text}: not kept**"
        lines.append(f"| {result.name} | {result.value_text} | {bound} |")
    return "\n".join(lines)

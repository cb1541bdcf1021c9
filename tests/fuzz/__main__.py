"""Attack all that reads files: `python -m tests.fuzz --write` is `make fuzz`.

Every area runs in a process of its own, so that its memory is its own and a crash is seen. The cases of a seed are
always the same; `--area "images" --only 1234` repeats one of them.
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from tests.fuzz.areas import ACCEPTED, AREAS, REFUSED, Area
from tests.fuzz.kills import survive

PATIENCE = 600  # seconds that a case may take, on however busy a machine
MEMORY = 300 * 2**20  # bytes that an area may take beyond what it needs for good files
WARM = 20  # cases before memory counts: what they import and cache belongs to nobody
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
STORED = PAGE.with_name("reliability.json")
START, END = "<!-- fuzz: make fuzz -->", "<!-- end of fuzz -->"


@dataclass
class Outcome:
    """What came of the attacks on one area."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    peak: int = 0  # bytes beyond the start

    @property
    def row(self) -> dict[str, int | str]:
        tried = sum(self.counts.values())
        kinds = {kind: self.counts[kind] for kind in (ACCEPTED, REFUSED, "tracebacks", "hangs", "wrong answers")}
        return {"area": self.name, "cases": tried, **kinds, "peak memory, MB": round(self.peak / 2**20)}


def attack(area: type[Area], count: int, seed: int, first: int = 0) -> Outcome:
    """Try so many cases in a process of their own."""
    outcome = Outcome(area.name)
    context = get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(area, range(first, first + count), seed, sending))
    process.start()
    sending.close()
    case = "the corpus"
    while True:
        if not receiving.poll(PATIENCE + 60):
            process.kill()
            outcome.counts["hangs"] += 1
            outcome.defects.append(f"{area.name}, {case}: hangs")
            break
        try:
            kind, said, peak = receiving.recv()
        except EOFError:
            process.join()
            outcome.counts["tracebacks"] += 1
            outcome.defects.append(f"{area.name}, {case}: the process ended with {process.exitcode}")
            break
        if kind == "start":
            case = said
        elif kind == "end":
            break
        else:
            outcome.counts[kind] += 1
            outcome.peak = max(outcome.peak, peak)
            if kind not in (ACCEPTED, REFUSED):
                outcome.defects.append(f"{area.name}, {case}: {said}")
    process.join()
    if outcome.peak > MEMORY:
        outcome.defects.append(f"{area.name}: {outcome.peak >> 20} MB, more than {MEMORY >> 20}")
    return outcome


def _work(area: type[Area], numbers: range, seed: int, sending: Connection) -> None:
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 2)  # libraries that complain of damaged files
        made = area(Path(scratch))
        start = 0
        signal.signal(signal.SIGALRM, _give_up)
        for i in numbers:
            sending.send(("start", f"case {i}", 0))
            kind, said = _try(made, Random(f"{seed} {area.name} {i}"))
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            start = used if i - numbers.start < WARM else start
            sending.send((kind, said, used - start))
    sending.send(("end", "", 0))
    sending.close()
    os._exit(0)


def _try(area: Area, rng: Random) -> tuple[str, str]:
    signal.alarm(PATIENCE)
    try:
        return area.case(rng), ""
    except AssertionError:
        return "wrong answers", traceback.format_exc(limit=-6)
    except TimeoutError:
        return "hangs", traceback.format_exc(limit=-6)
    except BaseException:
        return "tracebacks", traceback.format_exc(limit=-6)
    finally:
        signal.alarm(0)


def _give_up(*_: object) -> None:
    raise TimeoutError


def write(outcomes: list[Outcome], seed: int, kills: dict[str, int]) -> None:
    """Keep the counts, and their table in the page on reliability."""
    stored = {"seed": seed, "areas": [outcome.row for outcome in outcomes], "kills": kills}
    STORED.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")


def page(text: str, stored: dict) -> str:
    """The page on reliability with these counts."""
    header = list(stored["areas"][0])
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    lines += [
        f"| {' | '.join(f'{x:,}' if isinstance(x, int) else x for x in row.values())} |" for row in stored["areas"]
    ]
    kills = ", ".join(f"{count} {name}" for name, count in stored["kills"].items())
    lines += [
        "",
        f"Seed {stored['seed']}. A training disturbed again and again ended with the same bits: {kills}.",
    ]
    head, _, rest = text.partition(START)
    return f"{head}{START}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=12_000, help="of all areas together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", help="only this one")
    parser.add_argument("--only", type=int, help="only this case of the area")
    parser.add_argument("--kills", type=int, default=20, help="how often a training is killed or stopped")
    parser.add_argument("--write", action="store_true", help="put the counts into docs/reliability.md")
    options = parser.parse_args()
    outcomes = []
    for area in AREAS:
        if options.area not in (None, area.name):
            continue
        began = time.monotonic()
        count = max(1, options.cases * area.share // 1000)
        once = options.only is not None
        outcome = attack(area, 1 if once else count, options.seed, options.only if once else 0)
        outcomes.append(outcome)
        print(f"{json.dumps(outcome.row)}  {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(outcome.defects), end="\n" * bool(outcome.defects), flush=True)
    kills = {}
    if options.area is None and options.kills:
        with tempfile.TemporaryDirectory() as scratch:
            kills = survive(Path(scratch), options.kills, options.seed)
        print(json.dumps(kills), flush=True)
    failed = any(outcome.defects for outcome in outcomes)
    if options.write and not failed:
        write(outcomes, options.seed, kills)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

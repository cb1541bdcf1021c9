"""The short form of `make fuzz`, with a seed of its own."""

import json
from random import Random

import pytest

from tests.fuzz.__main__ import PAGE, STORED, attack, page
from tests.fuzz.areas import ACCEPTED, AREAS, REFUSED, Area

CASES = 400  # of all areas together


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_whatever_is_read_is_answered_or_refused(area):
    outcome = attack(area, CASES * area.share // 1000, seed=1)
    assert not outcome.defects, "\n".join(outcome.defects)
    assert outcome.counts[REFUSED] > 0
    assert outcome.counts[ACCEPTED] + outcome.counts[REFUSED] == sum(outcome.counts.values())


class Broken(Area):
    """Does all that an area may not."""

    name, share = "broken", 1000

    def attack(self, rng: Random) -> None:
        kind = rng.choice(("wrong", "raises", "crashes"))
        assert kind != "wrong"
        if kind == "crashes":
            import os

            os.abort()
        raise KeyError(kind)


def test_the_fuzzer_sees_wrong_answers_exceptions_and_crashes():
    outcome = attack(Broken, 30, seed=0)
    assert outcome.counts["wrong answers"] + outcome.counts["tracebacks"] == len(outcome.defects)
    assert any("KeyError" in defect for defect in outcome.defects)
    assert "ended with -6" in outcome.defects[-1]


def test_the_page_on_reliability_shows_the_stored_counts():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, stored) == text
    assert not any(row[kind] for row in stored["areas"] for kind in ("tracebacks", "hangs", "wrong answers"))

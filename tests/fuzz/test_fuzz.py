"""The short form of `make fuzz`, with a seed of its own."""

import json
import os
from random import Random

import pytest

from didicm.errors import UserError
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
    """Does one after the other what an area may not."""

    name, share = "broken", 1000
    tried = 0

    def attack(self, rng: Random) -> None:
        self.tried += 1
        assert self.tried != 1
        if self.tried == 2:
            raise KeyError("lost")
        if self.tried == 3:
            raise UserError(" ")
        os._exit(7)


def test_the_fuzzer_sees_wrong_answers_exceptions_silence_and_crashes():
    outcome = attack(Broken, 10, seed=0)
    expected = ("AssertionError", "KeyError: 'lost'", "", "the process ended with 7")
    assert len(outcome.defects) == len(expected)
    assert all(says in defect for says, defect in zip(expected, outcome.defects, strict=True))
    assert outcome.counts == {"wrong answers": 1, "tracebacks": 2, "refused without a word": 1}


def test_the_page_on_reliability_shows_the_stored_counts():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, stored) == text
    assert not any(row[kind] for row in stored["areas"] for kind in ("tracebacks", "hangs", "wrong answers"))

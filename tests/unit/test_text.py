"""Names that would steer a terminal, a shell, a table, a plot or a page if they were passed on as they are."""

import io
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table as RichTable

from didicm.progress import ProgressDisplay, duration
from didicm.report.tables import Table
from didicm.text import SafeConsole, count, quoted, readable

HOSTILE = [
    "\x1b]0;owned\x07", "\x1b[2J", "a\nb", "a\r\nb", "\u202egnp.exe", "a\u2028b", "\x9b31m", "caf\udce9", "\x7f",
]  # fmt: skip
HARMLESS = ["cat", "[red]", ":cat:", "$x^2$", "köter", "鳥", "क्\u200dष", "it's", "a|b", "=1+1", "👩\u200d🔬"]
ACTS = set("\x1b\x07\n\r\u202e\u2028\x9b\udce9\x7f\x00")


@pytest.mark.parametrize("name", HOSTILE)
def test_what_acts_instead_of_being_shown_is_spelt_out(name):
    shown = readable(name)
    assert not ACTS & set(shown)
    assert shown.encode("utf-8")
    assert readable(shown) == shown


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_only_unusual_is_shown_as_it_is(name):
    assert readable(name) == name


@pytest.mark.parametrize("make", [SafeConsole, Console])
@pytest.mark.parametrize("name", HOSTILE + HARMLESS)
def test_terminals_show_names_in_lines_tables_and_progress(name, make):
    file = io.StringIO()
    console = make(file=file, width=200)
    own = make is SafeConsole
    with ProgressDisplay(console, 10) as progress:
        progress.print(name)
    console.print(Table(name, [name, "x"], [[name, "1"]], note=name).to_rich())
    if own:
        table = RichTable(name, title=name)
        table.add_row(name)
        console.print(table)
        console.print(name)
    shown = file.getvalue()
    assert not (ACTS - {"\n"}) & set(shown)
    assert shown.count(readable(name)) >= (7 if own and not {"\n", "\udce9"} & set(name) else 4)


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))
def test_bash_reads_a_quoted_argument_as_what_it_was(text):
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted(text)}"], capture_output=True).stdout
    assert printed == text.encode()
    assert not {"\x1b", "\n"} & set(quoted(text))


def test_a_file_name_that_is_no_utf8_is_quoted_by_its_bytes():
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted('caf' + chr(0xDCE9))}"], capture_output=True)
    assert printed.stdout == b"caf\xe9"


def test_a_name_cannot_end_a_cell_of_a_document():
    text = Table("t", ["a|b", "x\ny"], [["c|d", "1"]]).to_markdown()
    assert text.splitlines()[2:5] == [r"| a\|b | x\ny |", "|---|---:|", r"| c\|d | 1 |"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.3, "under 1 s"), (59.9, "59 s"), (200, "3 min 20 s"), (3900, "1 h 05 min"),
     (47.5 * 3600, "47 h 30 min"), (49 * 3600, "2 days 01 h"), (3e8, "3,472 days")],
)  # fmt: skip
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_one_thing_and_several():
    told = [
        count(1, "image"),
        count(0, "image"),
        count(2000, "process"),
        count(1.0, "process"),
        count(1.25, "call"),
    ]
    assert told == ["1 image", "0 images", "2,000 processes", "1 process", "1.25 calls"]

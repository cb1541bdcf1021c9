import json
import os
import socket
import subprocess
import time

import pytest

from didicm.errors import UserError
from didicm.experiments import Results
from didicm.experiments.claims import BEAT, SILENT
from didicm.experiments.results import CLAIMS, RESULTS


def test_a_torn_last_line_is_cut_off_and_the_rest_stays(tmp_path):
    results = Results(tmp_path)
    results.append({"key": "a", "x": 1})
    with open(results.path, "ab") as file:
        file.write(b'{"key": "b", "x"')
    assert list(Results(tmp_path).read()) == ["a"]
    with open(results.path, "ab") as file:
        file.write(b'{"key": "b", "x"')
    results.append({"key": "c"})  # also while the file is in use
    assert list(results.read()) == ["a", "c"]
    assert results.path.read_bytes().count(b"\n") == 2


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / RESULTS).write_text('{"key": "a"}\nnonsense\n{"key": "b"}\n')
    with pytest.raises(UserError, match="line 2"):
        Results(tmp_path).read()


def test_a_claimed_cell_is_nobody_elses_until_it_is_released(tmp_path):
    mine, other = Results(tmp_path), Results(tmp_path)
    assert mine.claim(["a", "b"]) == "a"
    assert other.claim(["a", "b"]) == "b"
    assert other.claim(["a", "b"]) is None
    mine.release("a")
    assert other.claim(["a", "b"]) == "a"
    other.append({"key": "a"})
    assert mine.claim(["a"]) is None
    assert not (tmp_path / CLAIMS / "a").exists()


def test_claims_of_the_dead_are_taken_over_and_those_of_other_hosts_are_not(tmp_path):
    results = Results(tmp_path)
    process = subprocess.Popen(["true"])
    process.wait()
    here = socket.gethostname()
    owners = {
        "dead": {"host": here, "pid": process.pid, "started": "1"},
        "reused": {"host": here, "pid": os.getpid(), "started": "1"},  # another process once had this number
        "elsewhere": {"host": "another", "pid": process.pid, "started": "1"},
    }
    for key, owner in owners.items():
        (tmp_path / CLAIMS / key).write_text(json.dumps(owner))
    (tmp_path / CLAIMS / "torn").write_text('{"host"')
    taken = [results.claim([key]) for key in ("dead", "reused", "elsewhere", "torn")]
    assert taken == ["dead", "reused", None, "torn"]
    silent = time.time() - SILENT - 60
    os.utime(tmp_path / CLAIMS / "elsewhere", (silent, silent))
    assert results.claim(["elsewhere"]) == "elsewhere"


def test_a_claim_is_alive_while_its_owner_is_and_tells_how_far_it_is(tmp_path):
    mine, other = Results(tmp_path), Results(tmp_path)
    assert mine.claim(["a"]) == "a"
    path = tmp_path / CLAIMS / "a"
    os.utime(path, (0, 0))
    mine.report("a", 0.25)
    deadline = time.monotonic() + 20
    while other.shares() != {"a": 0.25}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert path.stat().st_mtime > time.time() - 60
    mine.release("a")
    time.sleep(2 * BEAT)  # no later sign of life brings it back
    assert other.shares() == {}


def test_an_owner_that_was_thought_dead_leaves_the_new_ones_claim_alone(tmp_path):
    mine = Results(tmp_path)
    assert mine.claim(["a"]) == "a"
    theirs = json.dumps({"host": "another", "pid": 1, "started": "1", "share": 0.5})
    (tmp_path / CLAIMS / "a").write_text(theirs)  # taken over while we were suspended
    time.sleep(2.5 * BEAT)
    mine.release("a")
    assert (tmp_path / CLAIMS / "a").read_text() == theirs


def test_grids_that_share_trainings_share_claims_but_not_results(tmp_path):
    one, two = (Results(tmp_path / name, tmp_path) for name in ("one", "two"))
    assert one.claim(["a"]) == "a"
    assert two.claim(["a"]) is None
    one.append({"key": "a"})
    assert two.read() == {}
    assert two.claim(["a"]) == "a"


def test_results_are_appended_once(tmp_path):
    results = Results(tmp_path)
    results.append({"key": "a", "x": 1})
    results.append({"key": "a", "x": 2})
    assert results.read() == {"a": {"key": "a", "x": 1}}

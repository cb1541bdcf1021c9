"""Locks between real processes: killed ones, forked ones, containers, and a system that refuses locks."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from didicm.errors import UserError
from didicm.processes import HeldError, held

HOLD = """
import os, sys, time
from pathlib import Path
from didicm.processes import held
with held(Path(sys.argv[1]), command="didicm compare --out x"):
    if "fork" in sys.argv and not os.fork():
        time.sleep(1200)
    print("held", flush=True)
    time.sleep(1200)
"""
# The system's own filter of calls answers flock with an error, as file systems without locks do.
REFUSE = """
import ctypes, platform, struct, sys
from pathlib import Path
from didicm.errors import UserError
from didicm.processes import held
flock = {"x86_64": 73, "aarch64": 32}[platform.machine()]
steps = (0x20, 0, 0, 0), (0x15, 0, 1, flock), (0x06, 0, 0, 0x50000 | int(sys.argv[2])), (0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
system = ctypes.CDLL(None, use_errno=True)
assert system.prctl(38, 1, 0, 0, 0) == 0 and system.prctl(22, 2, filter) == 0
try:
    with held(Path(sys.argv[1])):
        print("held")
except UserError as error:
    print(error)
"""


def start(script, *arguments, under=()):
    command = [*under, sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def pid_namespace():
    """How to start a process in a pid namespace of its own, as containers do; nothing where that is forbidden."""
    for under in (["unshare", "-pf"], ["unshare", "-Urpf"]):
        try:
            if subprocess.run([*under, "true"], capture_output=True).returncode == 0:
                return [*under, "--kill-child"]
        except OSError:
            break
    return []


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds the folder."""
    started = []

    def hold(*arguments, **options):
        started.append(start(HOLD, tmp_path, *arguments, **options))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_is_told_who_the_first_is_and_a_killed_one_leaves_the_folder_free(tmp_path, holder):
    process = holder()
    who = rf"in use by pid {process.pid} on {socket.gethostname()} since \d{{4}}-\d\d-\d\d \d\d:\d\d"
    told = who + r" \(didicm compare --out x\): wait for it, or give another --out"
    with pytest.raises(HeldError, match=told), held(tmp_path):
        pass
    process.kill()
    process.wait()
    with held(tmp_path):
        pass


def test_containers_with_one_host_name_do_not_take_each_other_for_dead(tmp_path, holder):
    under = pid_namespace()
    holder(under=under)
    told = rf"in use by pid {1 if under else ''}.* on {socket.gethostname()}"
    with pytest.raises(HeldError, match=told), held(tmp_path):
        pass


def test_a_forked_process_does_not_keep_its_dead_parents_lock(tmp_path, holder):
    process = holder("fork")
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.kill()
    process.wait()
    with held(tmp_path):
        (child,) = map(int, children)
        os.kill(child, 0)  # it lives
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [38, 37, 95], ids=["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's filter of system calls")
def test_where_the_file_system_refuses_locks_it_says_so_and_leaves_nothing(number, tmp_path):
    folder = tmp_path / "new"
    told, _ = start(REFUSE, folder, number).communicate()
    assert told.startswith(f"files in {folder} cannot be locked (")
    assert told.endswith("): give an --out on a file system with locks\n")
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    told = r"cannot be written to \(Not a directory\): give another --out"
    with pytest.raises(UserError, match=told), held(tmp_path / "file" / "x"):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(thesis)
    with pytest.raises(UserError, match="cannot be written to"), held(folder):
        pass
    assert thesis.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that pins processes")
def test_cores_are_those_that_a_process_may_use():
    pinned = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    code = f"{pinned}; from didicm.processes import usable_cores; print(usable_cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"

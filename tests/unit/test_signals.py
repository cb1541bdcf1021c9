"""Real signals, sent to this process and to processes that serve it."""

import contextlib
import multiprocessing
import os
import signal
import time

import pytest

from didicm.processes import STOPPING, interrupted, obey_parent_alone, shielded, stoppable


@pytest.fixture(autouse=True)
def handlers_return():
    before = [signal.getsignal(number) for number in STOPPING]
    yield
    assert [signal.getsignal(number) for number in STOPPING] == before


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted_and_one_that_a_launcher_passes_on_is_the_same_wish(number, monkeypatch):
    with stoppable() as stop:
        send(number)
        assert stop == [number]
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # as torchrun sets it
        send(number)
        assert set(stop) == {number}


def test_ctrl_c_twice_stops_at_once():
    with stoppable():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_somebody_elses_handler_has_its_turn_once_everything_is_saved():
    told = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: told.append(list(saved)))
    saved = []
    try:
        with contextlib.suppress(KeyboardInterrupt), stoppable() as stop:
            send(signal.SIGUSR2)
            assert stop
            saved.append("state")
            raise KeyboardInterrupt
        assert told == [["state"]]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_is_ignored_on_purpose_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what runs in the background
    try:
        with stoppable() as stop, interrupted():
            send(signal.SIGINT)
        assert not stop
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_is_not_interrupted():
    left = []
    with contextlib.suppress(KeyboardInterrupt), interrupted():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            send(signal.SIGUSR1)
            left.append("in order")
        pytest.fail("it went on")
    assert left


def _serve(pipe):
    obey_parent_alone()
    pipe.send(os.getpid())
    time.sleep(1200)


def test_a_worker_stops_for_its_parent_alone():
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    with shielded():
        worker = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs,), daemon=True)
        worker.start()
    pid = ours.recv()
    stranger = "import os, sys; [os.kill(int(sys.argv[1]), int(number)) for number in sys.argv[2:]]"
    os.spawnlp(os.P_WAIT, "python3", "python3", "-c", stranger, str(pid), *(str(int(n)) for n in STOPPING))
    time.sleep(0.2)
    assert worker.is_alive()
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0

"""Calls side by side in processes: results as they come, nothing left behind."""

import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing

import pytest

from forge.harness.pool import side_by_side


def square(x, wait=0.0):
    time.sleep(wait)
    return x * x, os.getpid()


def fail(x):
    raise ValueError(f"{x} is refused")


def die(x):
    os.kill(os.getpid(), signal.SIGKILL)


def left_behind():
    """Processes that still exist. multiprocessing alone does not tell: it may miss an end."""
    found = []
    for process in multiprocessing.active_children():
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            continue
        found.append(process)
    return found


def test_all_results_come_from_other_processes():
    found = list(side_by_side(square, [(i,) for i in range(3)], 2))
    assert sorted(value for value, _ in found) == [0, 1, 4]
    assert os.getpid() not in {pid for _, pid in found}
    assert not left_behind()


def test_closing_ends_what_runs():
    begin = time.monotonic()
    with closing(side_by_side(square, [(1,), (2, 600.0), (3, 600.0)], 2)) as found:
        assert next(found)[0] == 1
    assert time.monotonic() - begin < 60 and not left_behind()


@pytest.mark.parametrize(
    "call, error, text",
    [(fail, ValueError, "3 is refused"), (die, BrokenProcessPool, "terminated")],
)
def test_what_a_call_raises_is_raised(call, error, text):
    with pytest.raises(error, match=text):
        list(side_by_side(call, [(3,)], 2))
    assert not left_behind()


def test_only_the_first_interrupt_counts():
    before = signal.getsignal(signal.SIGINT)
    with closing(side_by_side(square, [(1,), (2, 600.0)], 2)) as found:
        next(found)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before and not left_behind()

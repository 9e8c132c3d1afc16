"""Calls spread over processes, results as they come."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def side_by_side(
    call: Callable[..., T], arguments: Sequence[Sequence[Any]], jobs: int
) -> Generator[T]:
    """``call(*a)`` for each of ``arguments``, ``jobs`` at a time, each in a process of its own.

    A generator: closing it, or an exception, ends the calls that still run. What a call raises is
    raised here.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a process was killed.
    """
    # CUDA cannot be used in a fork.
    context = multiprocessing.get_context("spawn")
    before = multiprocessing.active_children()
    with _one_interrupt(), ProcessPoolExecutor(jobs, context, _let_interrupts_end_it) as pool:
        try:
            for done in as_completed([pool.submit(call, *a) for a in arguments]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - set(before):
                process.kill()
                process.join()
            raise


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Only the first Ctrl-C counts: a second one would leave locks of the pool behind."""

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _let_interrupts_end_it() -> None:
    # Ctrl-C reaches all processes of a terminal; only the first one has something to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""Wall-clock time of whole training steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from forge.harness.turns import BURST, Turns

FAST_STEP_MS = 20.0
FAST_STEPS, SLOW_STEPS = 200, 20
SLOW_FACTOR = 5.0


def synchronizer(device: str) -> Callable[[], None]:
    """What waits until ``device`` has finished its work."""
    return torch.cuda.synchronize if device.startswith("cuda") else _nothing


def _nothing() -> None:
    """A CPU step has ended when it returns."""


def time_steps(
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    count: int,
    device: str,
    start: int = 0,
    turns: Turns | None = None,
) -> tuple[list[float], Any]:
    """Run ``count`` steps over ``batches`` in turn, from batch ``start`` on.

    Args:
        turns: with other workers, which take some steps each.

    Returns:
        Milliseconds of each step (device synchronised before and after), and the last loss.
    """
    wait = synchronizer(device)
    samples: list[float] = []
    loss = None
    if turns is not None:
        turns.begin()
    for i in range(start, start + count):
        if turns is not None and (i - start) % BURST == 0:
            if samples:
                turns.pass_on()
            turns.take()
        batch = batches[i % len(batches)]
        wait()
        begin = perf_counter()
        loss = step(batch)
        wait()
        samples.append((perf_counter() - begin) * 1e3)
    if turns is not None:
        turns.pass_on()
    return samples, loss


def steps_needed(warmup_ms: Sequence[float]) -> int:
    """Timed steps for a steady median: 200 under 20 ms a step, down to 20 for slow ones."""
    recent = statistics.median(warmup_ms[-5:])
    return FAST_STEPS if recent < FAST_STEP_MS else SLOW_STEPS


def quantiles(samples_ms: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile."""
    p20, p50, p80 = np.quantile(samples_ms, (0.2, 0.5, 0.8))
    return float(p20), float(p50), float(p80)


def slow_steps(samples_ms: Sequence[float]) -> list[int]:
    """Indices of steps above five times the median (a new projection, a recompilation)."""
    limit = SLOW_FACTOR * statistics.median(samples_ms)
    return [i for i, sample in enumerate(samples_ms) if sample > limit]

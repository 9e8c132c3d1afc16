"""How far a measured time can be trusted: spread of a row, drift of a run.

Two sources, told apart. Where a row was measured in several passes, each in its own process and
minutes apart, its spread is the range of their medians. Where there is one pass only, it is a
bootstrap interval of the median of its steps: it knows nothing of what differs between processes
(on eager rows 10 to 40 %), so what rests on it is said with a caution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge.harness.records import Record, by_row

# One row measured again at the start, middle and end of a run should not move by more.
DRIFT_LIMIT_PCT = 2.0
RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(frozen=True)
class Spread:
    """Where the median time of a row lies, in ms, and what that was told from."""

    median: float
    low: float
    high: float
    passes: int

    @property
    def source(self) -> str:
        """``3 passes``, or ``bootstrap of 1 pass``."""
        return f"{self.passes} passes" if self.passes > 1 else "bootstrap of 1 pass"


def pass_medians(records: Sequence[Record]) -> list[float]:
    """Median step of each pass that was measured, in ms, in the order of the passes."""
    return [record.latency_ms for record in records if record.latency_ms is not None]


def spread(records: Sequence[Record]) -> Spread | None:
    """The spread of one row from the records of its passes; ``None`` when none was measured."""
    medians = pass_medians(records)
    if not medians:
        return None
    if len(medians) > 1:
        return Spread(float(np.median(medians)), min(medians), max(medians), len(medians))
    (record,) = [record for record in records if record.latency_ms is not None]
    low, high = bootstrap_median(record.samples_ms or medians)
    return Spread(medians[0], low, high, 1)


def bootstrap_median(samples: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of the median of ``samples`` (Efron 1979), the same at each call."""
    values = np.asarray(samples)
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(draws, axis=1), (tail, 1 - tail))
    return float(low), float(high)


def witness(run: Sequence[Record]) -> list[Record]:
    """All passes of the row that was measured first among those measured more than once."""
    timed = (record for record in run if record.latency_ms is not None)
    rows = by_row(sorted(timed, key=lambda record: record.order))
    return next((passes for passes in rows.values() if len(passes) > 1), [])


def drift_pct(run: Sequence[Record]) -> float | None:
    """How far the passes of the run's first repeated row lie apart, in % of the fastest."""
    medians = pass_medians(witness(run))
    return 100 * (max(medians) / min(medians) - 1) if medians else None


def drift_note(percent: float) -> str:
    """What is said of a run that drifted; nothing under the limit."""
    if percent <= DRIFT_LIMIT_PCT:
        return ""
    return f"drift of {percent:.1f} % between passes, above {DRIFT_LIMIT_PCT:g} %"

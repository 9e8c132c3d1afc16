"""The rows of ``forge-bench validate``: which there are, and training one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge.harness import data, environment, fidelity, records, verdict
from forge.harness.execution import Batch
from forge.harness.fidelity import Method, Record
from forge.harness.pool import side_by_side
from forge.harness.settings import MOST, MOST_PASSES
from forge.harness.validate_models import check_model, judge, load, missing
from forge.harness.workloads import MODELS

# Batches of held-out text. Methods are compared on the same ones, so its size only matters for how
# well it stands for other text.
HELD_OUT = {"cuda": 16, "cpu": 4}

# Model, method, learning rate, seed.
Row = tuple[str, str, float, int]


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run; kept in ``validate.json`` so that ``--resume`` can go on.

    Attributes:
        rates: learning rates of each model, in the order of ``models``.
        seeds: how many; they are 0, 1, ...
    """

    run_id: str
    models: list[str]
    methods: list[str]
    rates: list[list[float]]
    steps: int
    seeds: int
    batch: int
    seq: int
    device: str
    hardware: str

    def __post_init__(self) -> None:
        records.check_kinds(self)
        for name in ("steps", "seeds", "batch", "seq"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be 1 to {MOST}, got {getattr(self, name)}")
        if self.seeds > MOST_PASSES:
            raise ValueError(f"seeds must be at most {MOST_PASSES}, got {self.seeds}")
        data.check_tokens(self.batch, self.seq)
        if len(self.rates) != len(self.models) or self.device not in HELD_OUT:
            raise ValueError("models and rates do not fit, or the device is unknown")
        for rate in chain.from_iterable(self.rates):
            if not (isinstance(rate, int | float) and 0 <= rate < math.inf):
                raise ValueError(f"--lr must be a number from 0 on, got {rate!r}")
        for name in self.models:
            check_model(name)
        for key in self.methods:
            fidelity.method(key)

    def plan(self) -> Iterator[Row]:
        """All rows.

        What a promise is about comes first, then the other methods; in each, model by model and
        seed by seed: what was interrupted has whole comparisons.
        """
        promised = [key for key in self.methods if key in verdict.PROMISED]
        others = [key for key in self.methods if key not in promised]
        for keys in (promised, others):
            for model, rates in zip(self.models, self.rates, strict=True):
                for seed in range(self.seeds):
                    for lr in rates:
                        for key in keys:
                            yield model, key, lr, seed


def train_rows(
    rows: Sequence[Row],
    settings: Settings,
    known: dict[str, Any],
    jobs: int,
    show: Callable[[Row, int], None],
) -> Generator[Record]:
    """The rows' records, as they come; ``show(row, steps)`` says what has been done."""
    if jobs > 1 and len(rows) > 1:
        yield from side_by_side(_row_beside, [(row, settings, known) for row in rows], jobs)
        return
    for row in rows:
        show(row, 0)
        yield _timed_row(row, settings, known, partial(show, row))
        fidelity.release(settings.device)


def _row_beside(row: Row, settings: Settings, known: dict[str, Any]) -> Record:
    fidelity.release(settings.device)  # what the process' row before left
    return _timed_row(row, settings, known)


def _timed_row(
    row: Row, settings: Settings, known: dict[str, Any], tick: Any = lambda _: None
) -> Record:
    if settings.device == "cpu":
        torch.set_num_threads(1)  # on a busy machine more of them take much longer
    begin = time.monotonic()
    record = _row(row, settings, known, tick)
    return replace(record, seconds=round(time.monotonic() - begin, 2))


def _row(row: Row, settings: Settings, known: dict[str, Any], tick: Any) -> Record:
    name, key, lr, seed = row
    chosen = fidelity.method(key)
    rival = chosen.spec.distribution
    base: dict[str, Any] = dict(
        run_id=settings.run_id,
        model=name,
        model_name=MODELS[name].name if name in MODELS else Path(name).stem,
        key=key,
        method=chosen.name,
        states=chosen.states,
        lr=lr,
        seed=seed,
        steps=settings.steps,
        batch=settings.batch,
        seq=settings.seq,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        hardware=settings.hardware,
        device=settings.device,
        environment={**known, "rival_version": environment.package_version(rival)},
    )
    absent = missing(name)
    if absent:
        return Record(**base, status="skipped", notes=absent)
    return Record(**base, **_train(name, chosen, lr, seed, settings, tick))


def _train(
    name: str, chosen: Method, lr: float, seed: int, settings: Settings, tick: Any
) -> dict[str, Any]:
    s = settings
    shape = (s.batch, s.seq)
    try:
        subject = load(name)
        train = _tokens(name, "train", *shape, s.steps, seed, s.device)
        held = _tokens(name, "heldout", *shape, HELD_OUT[s.device], 0, s.device)
        torch.manual_seed(seed)
        model, lent = subject.make(seed), judge(name, s.device)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        return dict(status="failed", notes=environment.one_line(error))
    fields = fidelity.measure(chosen, model, lent, lr, s.steps, train[0], held[0], s.device, tick)
    epochs = round(s.steps / len(train[0]), 2)
    return fields | dict(epochs=epochs, data=f"train {train[1]}, held out {held[1]}")


@cache
def _text(name: str, part: str) -> np.ndarray:
    return data.split_tokens(load(name).encode, part)


# Of two models: all rows of a seed read the same.
@lru_cache(maxsize=4)
def _tokens(
    name: str, part: str, batch: int, seq: int, count: int, seed: int, device: str
) -> tuple[list[Batch], str]:
    """Batches on ``device``, and the fingerprint of their tokens."""
    made = data.shuffled_batches(_text(name, part), batch, seq, count, seed)
    ids = torch.from_numpy(made.astype(np.int64)).to(device)
    return [{"input_ids": one, "labels": one} for one in ids], data.fingerprint(made)

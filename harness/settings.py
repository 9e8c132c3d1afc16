"""What defines a run: kept in its folder, so that ``--resume`` can go on with it."""

from __future__ import annotations

import json
import logging
import random
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from forge.harness import data, records
from forge.harness.files import write_atomically
from forge.harness.rows import Row
from forge.harness.workloads import MODELS
from forge.optim.registry import find

SETTINGS_FILE = "run.json"
# Of any count, and of seconds: longer than select() waits.
MOST = 10**9
# Of passes over the rows, and of seeds: each row of each is planned before the first runs.
MOST_PASSES = 1000


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run; kept in ``run.json`` so that ``--resume`` can go on.

    Attributes:
        rows: ``{"key", "kernels", "execution"}`` of each row, in the registry's order.
        steps: timed steps; ``None`` picks them by the speed of the step.
        repeat: passes over the rows.
        repeat_only: the methods or row ids that passes after the first measure; empty: all.
        in_turns: passes after the first measure their rows side by side, some steps each in turn.
        timeout_s: a row that takes longer is stopped and ``failed``.
        drift_pct: filled in at the end of a run with several passes:
            :func:`forge.harness.noise.drift_pct` of its records.
    """

    run_id: str
    model: str
    model_name: str
    weights: str | None
    batch: int
    seq: int
    steps: int | None
    warmup: int
    attention: str
    data: str
    device: str
    dtype: str
    seed: int
    repeat: int
    repeat_only: list[str]
    hardware: str
    timeout_s: float
    rows: list[dict[str, str]]
    in_turns: bool = False
    drift_pct: float | None = None

    def __post_init__(self) -> None:
        records.check_kinds(self)
        for name in ("batch", "seq", "warmup", "repeat", "timeout_s"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be 1 to {MOST}, got {getattr(self, name)}")
        if self.repeat > MOST_PASSES:
            raise ValueError(f"repeat must be at most {MOST_PASSES}, got {self.repeat}")
        if self.model not in MODELS or self.device not in ("cpu", "cuda"):
            raise ValueError(f"unknown model {self.model!r} or device {self.device!r}")

    def schedule(self) -> list[tuple[int, Row]]:
        """``(repeat, row)`` in the order of the run: every pass is shuffled anew by the seed."""
        shuffle = random.Random(self.seed).shuffle
        plan = []
        for repeat in range(self.repeat):
            rows = [Row(**row) for row in self.rows]
            if repeat and self.repeat_only:
                rows = [row for row in rows if {row.key, row.id} & set(self.repeat_only)]
            shuffle(rows)
            plan += [(repeat, row) for row in rows]
        return plan


def new_folder(out: Path, workload: str, hardware: str, commit: str) -> Path:
    """Create ``<out>/<date>_<workload>_<hardware>_<commit>``, with a suffix if it is taken."""
    parts = [datetime.now(UTC).strftime("%Y-%m-%d"), workload, hardware, commit or "nocommit"]
    name = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
    for suffix in ("", *(f"_{n}" for n in range(2, 1000))):
        folder = out / (name + suffix)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"--out: a thousand runs named {name} in {out}")


def save_settings(folder: Path, settings: Settings) -> None:
    """Write ``run.json``."""
    write_atomically(folder / SETTINGS_FILE, json.dumps(asdict(settings), indent=1) + "\n")


def load_settings(folder: Path) -> Settings:
    """Read ``run.json`` of an interrupted run.

    Raises:
        ValueError: there is none, or it is not of this version.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        raise ValueError(f"--resume {folder}: holds no {SETTINGS_FILE}, it is not a run's folder")
    try:
        settings = Settings(**json.loads(path.read_text(encoding="utf-8")))
        rows = [Row(**row) for row in settings.rows]
        for row in rows:
            records.check_kinds(row)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--resume {folder}: unreadable {SETTINGS_FILE} ({error})") from error
    for key in sorted({row.key for row in rows}):
        try:
            find(key)
        except ValueError as error:
            raise ValueError(f"--resume {folder}: {error}") from error
    return settings


def batches_of(settings: Settings) -> np.ndarray:
    """The run's input, int32 ``[n, batch, seq]``: the same whenever it is made again.

    Raises:
        ValueError: no such text or checkpoint.
    """
    s = settings
    vocabulary = _vocabulary(s.weights) if s.weights else MODELS[s.model].vocab
    return data.make_batches(s.data, s.batch, s.seq, vocabulary, s.seed)


def _vocabulary(weights: str) -> int:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    # Its warnings are of attempts to reach the hub; the error says that there was none.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        config = AutoConfig.from_pretrained(weights)
        kind, vocabulary = config.model_type, config.vocab_size
        # Encoders have a causal head too, over attention that sees the tokens it predicts.
        encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_decoder
        if encoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"a checkpoint of type {kind!r}")
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--weights {weights}: no causal language model there: {reason.rstrip('.')}; give a "
            "checkpoint's folder, or a hub id that can be reached from here"
        ) from error
    return vocabulary

"""``leaderboard.csv``: one line a row, from the records of the runs and the published figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from forge.harness import logs, noise, profiles, records, timing
from forge.harness.environment import one_line
from forge.harness.files import write_atomically
from forge.harness.profiles import Profile
from forge.harness.records import Record

COLUMNS = (
    "method, source, status, hardware, gpu_count, model, batch, seq, precision, states, attention, "
    "kernels, execution, latency_ms, latency_p20_ms, latency_p80_ms, peak_memory_gib, "
    "state_bytes_per_param, tokens_per_s, mfu_pct, ofu_pct, loss, gate, steps, torch, triton, "
    "date, commit, run_id, source_ref, notes"
).split(", ")
# The note of a row of one pass in a run with rows of several.
ONE_PASS = "1 pass"
INTEGERS = ("gpu_count", "batch", "seq", "steps")
# Significant digits in the file: more would be noise. What is shown is rounded from the record
# itself: a number that is rounded twice differs between two tables.
DIGITS = {
    "latency_ms": 5,
    "latency_p20_ms": 5,
    "latency_p80_ms": 5,
    "peak_memory_gib": 4,
    "state_bytes_per_param": 4,
    "tokens_per_s": 5,
    "mfu_pct": 4,
    "ofu_pct": 4,
    "loss": 5,
}


def merge_repeats(found: Sequence[Record]) -> list[Record]:
    """One record a row of each run: the latency is the median of the passes' medians, percentiles
    are of all their steps. The note of the row that tells the run's drift says so; so does that of
    a row of one pass among rows of several.

    A row is ``ok`` only if every pass was; otherwise its first pass that was not stands for it.
    """
    pooled = []
    for run in records.by_run(found).values():
        told, drift = noise.witness(run), noise.drift_pct(run)
        for row, group in records.by_row(run).items():
            note = noise.drift_note(drift) if drift and told[0].row == row else ""
            if told and len(group) == 1:
                note = ONE_PASS
            pooled.append(_pool(group, note))
    return pooled


def _pool(group: list[Record], note: str) -> Record:
    bad = [record for record in group if record.status != "ok"]
    if bad:
        return bad[0]
    first = group[0]
    if len(group) == 1:
        return replace(first, notes="; ".join(filter(None, [note, first.notes])))
    samples = [sample for record in group for sample in record.samples_ms]
    p20, _, p80 = timing.quantiles(samples)
    medians = noise.pass_medians(group)
    p50 = statistics.median(medians)
    passes = f"{len(group)} passes: {', '.join(f'{median:.4g}' for median in medians)} ms"
    notes = [first.notes, passes, note]
    ratio = medians[0] / p50
    return replace(
        first,
        samples_ms=samples,
        latency_ms=p50,
        latency_p20_ms=p20,
        latency_p80_ms=p80,
        steps=len(samples),
        peak_memory_gib=max(record.peak_memory_gib or 0.0 for record in group),
        tokens_per_s=first.tokens_per_s and first.tokens_per_s * ratio,
        mfu_pct=first.mfu_pct and first.mfu_pct * ratio,
        notes="; ".join(filter(None, notes)),
    )


def measured_row(record: Record) -> dict[str, Any]:
    """The columns of a measured record."""
    raw = asdict(record)
    env = record.environment
    raw |= dict(
        source="measured",
        source_ref="",
        date=record.date[:10],
        torch=str(env.get("torch") or ""),
        triton=str(env.get("triton") or ""),
        commit=str(env.get("commit") or "") + ("-dirty" if env.get("dirty") else ""),
        attention=record.attention or record.attention_request,
    )
    return {column: raw[column] for column in COLUMNS}


def published_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of ``published.csv`` in the leaderboard's columns; none when the file is missing.

    Raises:
        ValueError: it is no such table.
    """
    if not path.exists():
        return []
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except ValueError as error:  # pandas' errors, and text that is not UTF-8
        raise ValueError(f"{path}: no table of published results ({one_line(error)})") from error
    missing = {"method", "model", "hardware", "batch", "seq"} - set(frame.columns)
    if missing:
        raise ValueError(f"{path}: a table without the columns {', '.join(sorted(missing))}")
    rows = []
    for raw in frame.to_dict("records"):
        row = {column: raw.get(column) for column in COLUMNS}
        row |= dict(source="published", status="ok", gpu_count=1)
        if raw.get("approximate"):
            row["notes"] = "approximate"
        rows.append(row)
    return rows


def load_runs(runs: Path) -> tuple[list[Record], list[str]]:
    """Records of every run under ``runs``, oldest run first, and messages about damaged lines.

    A folder with a run that an earlier one has (a copy) is named and left out: its records would
    count as more passes.
    """
    found, messages, _ = _load(runs)
    return found, messages


def _load(runs: Path) -> tuple[list[Record], list[str], dict[str, Path]]:
    """As :func:`load_runs`, and the folder of each run, whose name need not be the run's."""
    found: list[Record] = []
    messages: list[str] = []
    homes: dict[str, Path] = {}
    for file in sorted(runs.glob(f"*/{records.RECORDS_FILE}")):
        these, damaged = records.load(file.parent)
        messages += damaged
        ids = set(records.by_run(these))
        copied = next((homes[run_id] for run_id in ids if run_id in homes), None)
        if copied is not None:
            messages.append(f"{file.parent}: ignored, {copied} has the same run")
            continue
        homes |= dict.fromkeys(ids, file.parent)
        found += these
    return found, messages, homes


def table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The leaderboard of ``rows``: measured before published, the rows of a run together, by
    latency; rows without one last."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    for column in INTEGERS:
        frame[column] = pd.to_numeric(frame[column]).astype("Int64")
    for column in DIGITS:
        frame[column] = pd.to_numeric(frame[column])
    keys = ["source", "hardware", "model", "batch", "seq", "run_id", "latency_ms", "method"]
    return frame.sort_values(keys, na_position="last", kind="stable", ignore_index=True)


@dataclass(frozen=True)
class Board:
    """What a folder of runs says.

    Attributes:
        passes: every record, one a row and pass.
        rows: one record a row (:func:`merge_repeats`).
        frame: the leaderboard (:func:`table`), published rows included.
        damaged: a message for every line that could not be read.
        profiles: every profile.
        logs: what the worker of each pass printed, by ``(run_id, row, repeat)``.
    """

    passes: list[Record]
    rows: list[Record]
    frame: pd.DataFrame
    damaged: list[str]
    profiles: list[Profile] = field(default_factory=list)
    logs: dict[tuple[str, str, int], str] = field(default_factory=dict)


def read(runs: Path, published: Path, include_cpu: bool = False) -> Board:
    """The leaderboard of every run under ``runs`` and of the file ``published``.

    Args:
        include_cpu: keep rows that were measured on a CPU; they say nothing about a GPU.

    Raises:
        ValueError: ``published`` is no table of published results.
    """
    found, damaged, homes = _load(runs)
    profiled, unreadable = profiles.load_all(runs)
    profiled = [profile for profile in profiled if profile.gpu_count or include_cpu]
    passes = [record for record in found if record.gpu_count or include_cpu]
    rows = merge_repeats(passes)
    frame = table([*map(measured_row, rows), *published_rows(published)])
    printed = {
        (run_id, row, repeat): text
        for run_id, folder in homes.items()
        for (row, repeat), text in logs.by_row_and_pass(folder).items()
    }
    return Board(passes, rows, frame, damaged + unreadable, profiled, printed)


def csv_text(frame: pd.DataFrame) -> str:
    """``leaderboard.csv`` of a :func:`table`, its numbers rounded to :data:`DIGITS`."""
    short = frame.copy()
    for column, digits in DIGITS.items():
        short[column] = frame[column].map(
            lambda v, d=digits: float(f"{v:.{d}g}"), na_action="ignore"
        )
    return short.to_csv(index=False, lineterminator="\n")


def write(board: Board, target: Path) -> None:
    """Write ``leaderboard.csv`` in one step (readers see the old file or the new one)."""
    write_atomically(target, csv_text(board.frame))


def headline(rows: Sequence[Record]) -> str | None:
    """The run to show first: of most rows, of the shortest sequences, the newest."""

    def order(rows: Sequence[Record]) -> tuple[int, int, str]:
        return len(rows), -rows[0].seq, max(record.date for record in rows)

    groups = records.by_run(rows)
    return max(groups, key=lambda run: order(groups[run]), default=None)

"""The static page of the leaderboard: one HTML file with everything in it, no network.

Text of records gets there as data (JSON with ``<`` escaped) or autoescaped, never as markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from forge.harness import leaderboard, noise, records
from forge.harness.leaderboard import Board
from forge.harness.profiles import Profile
from forge.harness.records import Record


@dataclass(frozen=True)
class Column:
    """A sortable column: ``field`` of a leaderboard row, how it is written, its CSS classes."""

    title: str
    field: str
    places: int | None = None
    css: str = ""


COLUMNS = (
    Column("rank", "rank", 0, "number rank"),
    Column("method", "method"),
    Column("states", "states", css="wide"),
    Column("kernels", "kernels", css="wide"),
    Column("execution", "execution", css="wide"),
    Column("ms / step", "latency_ms", 2, "number"),
    Column("p20 to p80", "latency_p80_ms", 1, "number wide"),
    Column("peak GiB", "peak_memory_gib", 2, "number"),
    Column("B/param", "state_bytes_per_param", 2, "number wide"),
    Column("tokens/s", "tokens_per_s", 0, "number wide"),
    Column("MFU %", "mfu_pct", 1, "number wide extra"),
    Column("OFU %", "ofu_pct", 1, "number wide extra"),
    Column("DRAM %", "dram_active_pct", 1, "number wide extra"),
    Column("J / step", "energy_j", 1, "number wide extra"),
)
FACTS = (
    "run_id, row, status, model, batch, seq, precision, states, kernels, execution, attention, "
    "hardware, gpu_count, latency_ms, latency_p20_ms, latency_p80_ms, peak_memory_gib, "
    "peak_reserved_gib, peak_warmup_gib, memory_kind, params, state_bytes, grad_bytes, "
    "tokens_per_s, mfu_pct, ofu_pct, ofu_adjusted_pct, tensor_active_pct, dram_active_pct, "
    "sm_clock_mhz, energy_j, steps, warmup, data"
).split(", ")
# What a GPU row should have, and how the notes of one without it begin (efficiency.py, ofu.py).
EFFICIENCY = {
    "mfu_pct": ("no MFU:",),
    "ofu_pct": ("NVML:", "GPM:", "clock:", "no OFU:"),
    "dram_active_pct": ("NVML:", "GPM:", "no OFU:"),
    "energy_j": ("NVML:", "energy:", "no OFU:"),
}
INTERNAL = ("status", "gpu_count", "run_id")  # of no meaning in a published row
PASS_FACTS = ("repeat", "date", "status", "samples_ms", "warmup_ms")


@dataclass(frozen=True)
class Plot:
    """A figure of the page: SVG text and the runs it shows."""

    name: str
    title: str
    caption: str
    svg: str
    run_ids: tuple[str, ...]


def render(board: Board, plots: Sequence[Plot]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forge.harness", "templates"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["breakable"] = _breakable
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False}
    groups, data = _groups(board)
    rows = [row for group in groups for row in group["rows"]]
    return environment.get_template("page.html.j2").render(
        columns=COLUMNS,
        groups=groups,
        choices={name: _values(rows, name) for name in ("execution", "states", "status")},
        plots=plots,
        data=data,
    )


def runs_in_order(rows: Sequence[Record]) -> list[list[Record]]:
    """The rows of each run, by latency: that of ``leaderboard.headline``, then the newest first."""
    first = leaderboard.headline(rows)
    runs = [
        sorted(run, key=lambda r: (r.latency_ms is None, r.latency_ms or 0.0, r.method))
        for run in records.by_run(rows).values()
    ]
    runs.sort(key=lambda run: max(record.date for record in run), reverse=True)
    return sorted(runs, key=lambda run: run[0].run_id != first)


def work(record: Record | Profile) -> str:
    """What was trained, and on what."""
    return (
        f"{record.model}, batch {record.batch}, sequence {record.seq}, {record.precision}, "
        f"{record.hardware}"
    )


def _groups(board: Board) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    groups: list[dict[str, Any]] = []
    data: list[dict[str, Any]] = []
    passes = records.by_run(board.passes)
    published = board.frame[board.frame["source"] == "published"]
    shown = pd.Series(False, index=published.index)
    for run in runs_in_order(board.rows):
        first, rows = run[0], []
        by_row = records.by_row(passes[first.run_id])
        for rank, record in enumerate(run, start=1):
            cells = leaderboard.measured_row(record)
            cells["rank"] = rank if record.latency_ms is not None else None
            cells |= {name: getattr(record, name) for name in EFFICIENCY}
            rows.append(_row(cells, len(data)))
            data.append(_record(record, by_row[record.row], board.logs))
        commit = cells["commit"]
        single = "" if len(by_row) < len(passes[first.run_id]) else ", one pass a row"
        groups.append(
            dict(
                kind="measured",
                run_id=first.run_id,
                title=work(first),
                detail=f"torch {cells['torch']}, commit {commit}, run {first.run_id}{single}",
                commit=commit,
                date=first.date[:10],
                mark=noise.drift_note(noise.drift_pct(passes[first.run_id]) or 0.0),
                rows=rows,
            )
        )
        same = (
            (published["model"] == first.model)
            & (published["batch"] == first.batch)
            & (published["seq"] == first.seq)
        )
        if (same & ~shown).any():
            these = published[same & ~shown]
            groups.append(_published(these, "the same work", first.run_id, data))
        shown |= same
    if not shown.all():
        groups.append(_published(published[~shown], "other work", "", data))
    return groups, data


def _published(
    frame: pd.DataFrame, what: str, run_id: str, data: list[dict[str, Any]]
) -> dict[str, Any]:
    rows = []
    for raw in frame.to_dict("records"):
        cells = {name: None if pd.isna(value) else value for name, value in raw.items()}
        facts = {name: value for name, value in cells.items() if name not in INTERNAL}
        place = f"{cells['model']}, {cells['batch']} x {cells['seq']}, {cells['hardware']}"
        said = [place, cells["source_ref"], cells["notes"]]
        cells |= dict(rank=None, notes="; ".join(filter(None, said)), status="published")
        rows.append(_row(cells, len(data), str(cells["hardware"])))
        data.append(dict(title=f"{cells['method']}, published", facts=facts, passes=[]))
    return dict(
        kind="published",
        run_id=run_id,
        title=f"Published by others, {what}",
        detail="not measured here, not ranked",
        mark="",
        rows=rows,
    )


def _breakable(text: str) -> Markup:
    """``text``, escaped, that a narrow column breaks after ``_`` and ``+`` and not within words."""
    return Markup(re.sub(r"([_+])", r"\1<wbr>", str(escape(text))))  # noqa: S704 escaped


def _row(cells: dict[str, Any], index: int, place: str = "") -> dict[str, Any]:
    # What a phone shows of the columns that it has no room for.
    kind = (cells["states"], cells["kernels"], cells["execution"], place)
    shown = {}
    for column in COLUMNS:
        value = cells.get(column.field)  # a published row has fewer
        number = column.places is not None and value is not None
        text = f"{value:,.{column.places}f}" if number else str(value or "")
        if number and column.field == "latency_p80_ms":
            text = f"{cells['latency_p20_ms']:,.{column.places}f} to {text}"
        if value is None and column.field == "latency_ms":
            text = cells["status"]
        shown[column.title] = dict(text=text, value=value if number else None)
    same = {name: cells[name] or "" for name in ("execution", "states", "status", "notes")}
    return dict(cells=shown, index=index, kind=", ".join(filter(None, kind)), **same)


def _record(
    record: Record, passes: Sequence[Record], logs: Mapping[tuple[str, str, int], str]
) -> dict[str, Any]:
    environment = dict(record.environment)
    facts = {name: _short(getattr(record, name)) for name in FACTS}
    if record.gpu_count and record.latency_ms is not None:
        facts |= {
            name: _why_missing(record, said)
            for name, said in EFFICIENCY.items()
            if facts[name] is None
        }
    return dict(
        title=f"{record.method}, {record.kernels}, {record.execution}",
        facts=facts,
        notes=record.notes,
        passes=[
            {name: getattr(one, name) for name in PASS_FACTS}
            | {"log": logs.get((one.run_id, one.row, one.repeat), "")}
            for one in passes
        ],
        gate=record.gate_detail,
        gate_result=record.gate,
        command=environment.pop("command", ""),
        environment=environment,
    )


def _why_missing(record: Record, said: tuple[str, ...]) -> str:
    reasons = [note for note in record.notes.split("; ") if note.startswith(said)]
    if reasons:
        return f"not known: {'; '.join(reasons)}"
    return "not measured by the version that made this record"


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _values(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    return sorted({row[name] for row in rows if row[name]})

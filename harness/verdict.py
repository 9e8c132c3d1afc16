"""What the rows of ``forge-bench validate`` say: gaps to the fp32 reference, noise, verdicts.

Rows of one seed share their initial weights and their batches, so methods are compared seed by
seed: the gap of a method is its held-out loss over the reference's, less one. What differs between
seeds in the gaps is what differs between runs by chance; it is far less than the spread of the
losses themselves.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forge.harness import options, plots
from forge.harness.fidelity import RECORDS_FILE, REFERENCE, Record, in_order, read
from forge.harness.files import write_atomically

CSV_FILE, TABLE_FILE = "fidelity.csv", "verdict.txt"

# How far, in %, the mean held-out loss of a method may be from the reference's, up or down.
LIMITS_PCT = {"forge-bf16": 0.5, "forge-int8": 1.0}
# And below or at the mean of which other method it must be.
NOT_ABOVE = {"forge-bf16": "adamw-fused"}
# The methods that these are about.
PROMISED = {REFERENCE, *LIMITS_PCT, *NOT_ABOVE.values()}

COLUMNS = (
    "model, method, states, lr, seed, steps, train_loss, heldout_loss, hardware, date, commit, "
    "run_id"
).split(", ")


@dataclass(frozen=True)
class Gap:
    """Relative differences of held-out losses over the seeds that both methods have, in %."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        spread = f" ({self.low:+.3f} to {self.high:+.3f})" if self.seeds > 1 else ""
        return f"{self.mean:+.3f}{spread}"


@dataclass(frozen=True)
class Verdict:
    """One method on one model at one rate.

    Attributes:
        seeds: with a held-out loss, of those asked for.
        before, after: mean held-out loss before and after training.
        noise_pct: standard deviation of the held-out loss over the seeds, in % of its mean; None
            with fewer than two.
        gap: to the reference; None when either has no loss.
        fall_pct: how far the loss fell, in % of the reference's fall. At a low rate a method that
            learns nothing is close to the reference, too; here it has 0.
        ok: False where a promise is not kept, a row of it failed, or it could not be tested though
            the method ran; None where there is no promise, or the method cannot run here.
        text: the verdict in words.
    """

    model: str
    lr: float
    key: str
    method: str
    states: str
    seeds: int
    before: float | None
    after: float | None
    noise_pct: float | None
    gap: Gap | None
    fall_pct: float | None
    ok: bool | None
    text: str


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """One verdict for each model, rate and method, in the order of the records."""
    groups: dict[tuple[str, float], dict[str, list[Record]]] = {}
    for record in records:
        methods = groups.setdefault((record.model, record.lr), {})
        methods.setdefault(record.key, []).append(record)
    found = []
    for methods in groups.values():
        order = sorted(methods, key=lambda key: key != REFERENCE)
        found += [_verdict(methods[key], methods) for key in order]
    return found


def _verdict(rows: list[Record], others: dict[str, list[Record]]) -> Verdict:
    first, losses = rows[0], list(_losses(rows).values())
    notes = "; ".join(dict.fromkeys(f"{r.status}: {r.notes}" for r in rows if r.status != "ok"))
    gap = gap_pct(rows, others.get(REFERENCE, []))
    ok, text = _judged(first.key, rows, others, gap) if losses else (None, "")
    if any(row.status in ("failed", "oom") for row in rows) and first.key in LIMITS_PCT:
        ok = False
    return Verdict(
        model=first.model_name,
        lr=first.lr,
        key=first.key,
        method=first.method,
        states=first.states,
        seeds=len(losses),
        before=_mean([r.heldout[0][1] for r in rows if r.status == "ok"]),
        after=_mean(losses),
        noise_pct=100 * statistics.stdev(losses) / statistics.mean(losses)
        if len(losses) > 1
        else None,
        gap=gap,
        fall_pct=fall_pct(rows, others.get(REFERENCE, [])),
        ok=ok,
        text="; ".join(filter(None, (text, notes))),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _losses(rows: Sequence[Record]) -> dict[int, float]:
    return {r.seed: r.heldout_loss for r in rows if r.heldout_loss is not None and r.status == "ok"}


def gap_pct(rows: Sequence[Record], others: Sequence[Record]) -> Gap | None:
    """By how much the losses of ``rows`` are above those of ``others``, over the common seeds."""
    mine, theirs = _losses(rows), _losses(others)
    gaps = [100 * (mine[seed] / theirs[seed] - 1) for seed in mine if seed in theirs]
    return Gap(statistics.mean(gaps), min(gaps), max(gaps), len(gaps)) if gaps else None


def fall_pct(rows: Sequence[Record], others: Sequence[Record]) -> float | None:
    """How far the losses of ``rows`` fell over the common seeds, in % of those of ``others``;
    None where those did not fall."""
    mine, theirs = _falls(rows), _falls(others)
    seeds = mine.keys() & theirs.keys()
    whole = sum(theirs[seed] for seed in seeds)
    return 100 * sum(mine[seed] for seed in seeds) / whole if whole > 0 else None


def _falls(rows: Sequence[Record]) -> dict[int, float]:
    return {r.seed: r.heldout[0][1] - r.heldout[-1][1] for r in rows if r.status == "ok"}


def _judged(
    key: str, rows: list[Record], others: dict[str, list[Record]], gap: Gap | None
) -> tuple[bool | None, str]:
    if key == REFERENCE:
        return None, "the reference"
    if key not in LIMITS_PCT:
        return None, ""
    if gap is None:
        return False, "NOT TESTED: the reference has no loss"
    limit = LIMITS_PCT[key]
    ok = abs(gap.mean) <= limit
    side = "above" if gap.mean > 0 else "below"
    words = [
        f"within {limit:g} %"
        if ok
        else f"FALLS SHORT: {abs(gap.mean):.2f} % {side}, {limit:g} % is allowed"
    ]
    rival = NOT_ABOVE.get(key)
    if rival in others:
        against = gap_pct(rows, others[rival])
        kept, text = _not_above(against, others[rival][0].method)
        ok = ok and kept
        words.append(text)
    elif rival:
        words.append(f"{rival} was not run beside it")
    return ok, "; ".join(words)


def _not_above(gap: Gap | None, rival: str) -> tuple[bool, str]:
    if gap is None:
        return False, f"NOT TESTED against {rival}, which has no loss"
    if gap.mean <= 0:
        return True, f"not worse than {rival} ({gap.mean:+.3f} %)"
    # The seeds disagree: with two or more, this may be chance.
    if gap.seeds > 1 and gap.low <= 0:
        return True, f"as {rival} within the noise over seeds: {gap} %"
    return False, f"FALLS SHORT: worse than {rival} by {gap} %"


def table(found: Sequence[Verdict], title: str) -> Table:
    """The verdicts as a table."""
    view = Table(title=title, title_justify="left")
    for name in ("model", "lr", "method", "states"):
        view.add_column(name)
    for name in ("seeds", "before", "after", "noise, %"):
        view.add_column(name, justify="right")
    view.add_column("gap, %", justify="right", no_wrap=True)
    view.add_column("fall, %", justify="right")
    view.add_column("verdict")
    for one in found:
        noise = "" if one.noise_pct is None else f"{one.noise_pct:.3f}"
        losses = ("" if x is None else f"{x:.4f}" for x in (one.before, one.after))
        gap = "" if one.gap is None or one.key == REFERENCE else str(one.gap)
        fall = "" if one.fall_pct is None else f"{one.fall_pct:.0f}"
        names = (one.model, f"{one.lr:g}", one.method, one.states, str(one.seeds))
        view.add_row(*names, *losses, noise, gap, fall, one.text)
    return view


def markdown(records: Sequence[Record]) -> str:
    """The run that ended last, of one machine, as the README shows it."""
    last = max(records, key=lambda record: record.date)
    rows = [record for record in records if record.run_id == last.run_id]
    lines = [
        f"Held-out loss, nats a token, after {last.steps:,} steps of {last.batch} x {last.seq} "
        f"tokens, one {last.hardware}, {last.date[:10]} (`{last.run_id}`). gap: to fp32 master "
        "weights, seed by seed, mean (lowest to highest); learned: how far the loss fell, that of "
        "fp32 master weights is 100 %.",
        "",
        "| model | lr | method | states | seeds | held-out loss | gap, % | learned, % |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for one in verdicts(rows):
        loss = "" if one.after is None else f"{one.before:.4f} to {one.after:.4f}"
        gap = "" if one.gap is None or one.key == REFERENCE else str(one.gap)
        fall = "" if one.fall_pct is None else f"{one.fall_pct:.0f}"
        lines.append(
            f"| {one.model} | {one.lr:g} | {one.method} | {one.states} | {one.seeds} | {loss} "
            f"| {gap} | {fall} |"
        )
    return "\n".join(lines)


def as_json(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The verdicts as plain data."""
    return [asdict(one) for one in found]


def text_of(records: Sequence[Record]) -> str:
    """The rows as CSV. A row without losses has none; its record says why."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for record in records:
        dirty = "-dirty" if record.environment.get("dirty") else ""
        ok = record.status == "ok"
        writer.writerow(
            asdict(record)
            | dict(
                model=record.model_name,
                train_loss=f"{record.train_loss:.6f}" if ok else "",
                heldout_loss=f"{record.heldout_loss:.6f}" if ok else "",
                lr=f"{record.lr:g}",
                date=record.date[:10],
                commit=f"{record.environment.get('commit', '')}{dirty}",
            )
        )
    return text.getvalue()


def write(folder: Path, found: Sequence[Record], judged: Sequence[Verdict], title: str) -> None:
    """Write the rows, the table and the plots of a run into its ``folder``; of a run on a GPU also
    ``fidelity.csv`` beside ``runs/``: all runs there that were on one."""
    write_atomically(folder / CSV_FILE, text_of(found))
    page = io.StringIO()
    Console(file=page, width=200).print(table(judged, title))
    write_atomically(folder / TABLE_FILE, page.getvalue())
    for model, lr in dict.fromkeys((record.model_name, record.lr) for record in found):
        rows = [r for r in found if (r.model_name, r.lr) == (model, lr)]
        svg = plots.loss_curves(rows, f"{model}, lr {lr:g}: training and held-out loss")
        if svg:
            write_atomically(folder / f"{model}-lr{lr:g}.svg", plots.standalone(svg))
    write_measured(folder.parent, folder.parent.parent)


def write_measured(runs: Path, target: Path) -> list[Path]:
    """``fidelity.csv`` of all runs that were on a GPU; no file without one."""
    found = measured(runs)
    if not found:
        return []
    write_atomically(target / CSV_FILE, text_of(found))
    return [target / CSV_FILE]


def measured(runs: Path) -> list[Record]:
    """The records of every run in ``runs`` on a GPU, in the order of the folders' names."""
    found = []
    for folder in sorted(path.parent for path in runs.glob(f"*/{RECORDS_FILE}")):
        rows, damaged = read(folder)
        options.warn(damaged)
        found += in_order([row for row in rows if row.device == "cuda"])
    return found

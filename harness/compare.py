"""``forge-bench compare``: two runs or two commits, row by row, and what is only noise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from forge.harness import leaderboard, noise, options, records
from forge.harness.noise import Spread, spread
from forge.harness.options import RESULTS
from forge.harness.records import Record

# What must be equal for a ratio of two times to be about the code.
SAME = ("gpu", "cpu", "driver", "python", "torch", "triton", "transformers", "liger_kernel")
# What the table does without on a narrow terminal, the least important first.
SPARE = ("memory B / A", "spread from A / B", "B ms", "A ms", "range of B / A")
CAUTION = (
    "one pass only: that interval is of one process, and processes differ "
    "(eager rows by 10 to 40 %); measure both with --repeat 3 before believing a small difference"
)


@dataclass(frozen=True)
class Comparison:
    """One row measured on both sides. ``ratio`` is time of B over time of A: under 1, B is faster.

    ``ratio_low`` to ``ratio_high`` is what both spreads allow, the extreme ends together (an upper
    bound of the uncertainty). ``verdict``: ``within noise`` when that range holds 1, else
    ``faster`` or ``slower``, of B.
    """

    row: str
    work: str
    a: Spread
    b: Spread
    memory_ratio: float | None
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: str

    @property
    def one_pass(self) -> bool:
        """A side was measured once."""
        return min(self.a.passes, self.b.passes) == 1


def compare(a: list[Record], b: list[Record]) -> list[Comparison]:
    """Compare every row of the same work that was timed on both sides, in the order of ``a``."""
    ours, theirs = _by_work(a), _by_work(b)
    found = []
    for key, passes in ours.items():
        first, second = spread(passes), spread(theirs.get(key, []))
        if first is None or second is None:
            continue
        low, high = second.low / first.high, second.high / first.low
        verdict = "within noise"
        if high < 1 or low > 1:
            verdict = "faster" if high < 1 else "slower"
        ratio = second.median / first.median
        row, work = key
        memory = _memory_ratio(passes, theirs[key])
        found.append(Comparison(row, work, first, second, memory, ratio, low, high, verdict))
    return found


def _by_work(found: list[Record]) -> dict[tuple[str, str], list[Record]]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in found:
        work = f"{r.model}, batch {r.batch}, sequence {r.seq}, {r.precision}"
        groups.setdefault((r.row, work), []).append(r)
    # A row that failed in one pass has no time, as in the leaderboard.
    return {key: group for key, group in groups.items() if all(r.status == "ok" for r in group)}


def _memory_ratio(a: list[Record], b: list[Record]) -> float | None:
    peaks = [max((r.peak_memory_gib or 0.0 for r in side), default=0.0) for side in (a, b)]
    return peaks[1] / peaks[0] if all(peaks) else None


def cautions(a: list[Record], b: list[Record], found: list[Comparison]) -> list[str]:
    """What speaks against reading the ratios ``found`` as an effect of the code."""
    # A commit's runs may be of several lengths: what was not compared does not matter.
    keys = {(comparison.row, comparison.work) for comparison in found}
    a, b = (
        [record for key, group in _by_work(side).items() if key in keys for record in group]
        for side in (a, b)
    )
    said = []
    for name in ("hardware", "attention_request", "data"):
        sides = [{str(getattr(record, name)) for record in side} for side in (a, b)]
        said += _difference(name, *sides)
    for name in SAME:
        sides = [{str(record.environment.get(name, "")) for record in side} for side in (a, b)]
        said += _difference(name, *sides)
    for label, side in (("A", a), ("B", b)):
        for run in records.by_run(side).values():
            if mark := noise.drift_note(noise.drift_pct(run) or 0.0):
                said.append(f"{label}: {mark}, of {noise.witness(run)[0].row}")
        if any(record.environment.get("dirty") for record in side):
            said.append(f"{label} was measured on a checkout with changes")
    if any(comparison.one_pass for comparison in found):
        said.append(CAUTION)
    return said


def _difference(name: str, a: set[str], b: set[str]) -> list[str]:
    if a == b:
        return []
    return [f"{name} differs: {', '.join(sorted(a))} against {', '.join(sorted(b))}"]


def side(name: str, runs: Path) -> tuple[list[Record], list[str]]:
    """The records called ``name``: a run's folder, a run's id, or a commit (all its runs).

    Raises:
        ValueError: no such run or commit; the message lists what there is.
    """
    for folder in (Path(name), runs / name):
        if (folder / records.RECORDS_FILE).is_file():
            return records.load(folder)
    every, damaged = leaderboard.load_runs(runs)
    # A short name may be a prefix of a commit, or the other way round; four digits at least.
    chosen = [
        record
        for record in every
        if (commit := str(record.environment.get("commit") or ""))
        and min(len(commit), len(name)) >= 4
        and (commit.startswith(name) or name.startswith(commit))
    ]
    if not chosen:
        known = ", ".join(records.by_run(every)) or "none"
        raise ValueError(f"{name}: no such run folder, run or commit in {runs}; runs: {known}")
    return chosen, damaged


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="a run's folder or id, or a commit")],
    b: Annotated[str, typer.Argument(metavar="B", help="the same, compared with A")],
    runs: Annotated[Path, typer.Option(help="folder of runs")] = RESULTS / "runs",
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """Ratios of time and memory of two runs or commits, and which are only noise.

    Several passes of a row: its spread is the range of their medians. One pass: a bootstrap of the
    median of its steps, which says nothing about what differs between processes.

    \b
    Example:
      forge-bench compare 1b0fb4072 mine/2026-12-01_Qwen3-0.6B-b1-s512_H200_4d21c9f
    """
    (first, lost_a), (second, lost_b) = (options.checked(side, name, runs) for name in (a, b))
    options.warn(dict.fromkeys(lost_a + lost_b))
    found = compare(first, second)
    if not found:
        options.refuse(f"{a} and {b}: no row of the same work was timed in both")
    said = cautions(first, second, found)
    if as_json:
        rows = [asdict(c) for c in found]
        options.show_json({"a": a, "b": b, "rows": rows, "cautions": said})
        return
    view = _table(found, f"B over A, A = {a}, B = {b}")
    options.show_table(options.console(), view, SPARE)
    for line in said:
        typer.echo(f"caution: {line}")


def _table(found: list[Comparison], title: str) -> Table:
    view = Table(title=escape(title), title_justify="left")
    for name in ("row", "work"):
        view.add_column(name)
    for name in ("A ms", "B ms", "B / A", "range of B / A", "memory B / A"):
        view.add_column(name, justify="right")
    for name in ("B is", "spread from A / B"):
        view.add_column(name)
    for c in found:
        cells: list[Any] = [
            escape(c.row),
            escape(c.work),
            f"{c.a.median:.2f}",
            f"{c.b.median:.2f}",
            f"{c.ratio:.3f}",
            f"{c.ratio_low:.3f} to {c.ratio_high:.3f}",
            "" if c.memory_ratio is None else f"{c.memory_ratio:.3f}",
            c.verdict + (", by one pass" if c.one_pass and c.verdict != "within noise" else ""),
            " / ".join(dict.fromkeys((c.a.source, c.b.source))),
        ]
        view.add_row(*cells, style="dim" if c.verdict == "within noise" else None)
    return view

"""Tables for people: the end of a run, ``forge-bench list``, and the README."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from forge.harness.leaderboard import ONE_PASS
from forge.harness.profiles import Profile
from forge.harness.trace import PARTS
from forge.optim.spec import OptimizerSpec

# What a measured row must share with a published one to stand beside it.
PUBLISHED_KEY = ["method", "states", "kernels", "execution"]
BEGIN, END = "<!-- leaderboard:begin -->", "<!-- leaderboard:end -->"
FIDELITY_BEGIN, FIDELITY_END = "<!-- fidelity:begin -->", "<!-- fidelity:end -->"
BUDGET_BEGIN, BUDGET_END = "<!-- time-budget:begin -->", "<!-- time-budget:end -->"


# What a result's table does without on a narrow terminal, the least important first.
SPARE = ("p20", "p80", "MFU %", "state B/param", "tokens/s", "states", "kernels", "execution")


def fitted(view: Table, width: int, spare: Sequence[str] = ()) -> Table:
    """``view``, changed to fit ``width`` characters: texts wrap, numbers are never cut.

    Numbers are what is justified right. Where there is no room for all columns, ``spare`` go one
    after the other, then the numbers, the last first.
    """
    if _width(view, wrapped=False) <= width:
        return view
    numbers = [column for column in view.columns if column.justify == "right"]
    for column in view.columns:
        column.overflow = "fold"
    for column in numbers:
        column.no_wrap, column.header = True, str(column.header).replace(" ", "\n")
    named = {str(column.header).replace("\n", " "): column for column in view.columns}
    for column in [*(named[name] for name in spare), *reversed(numbers[1:])]:
        if _width(view, wrapped=True) <= width:
            break
        if column in view.columns:
            view.columns.remove(column)
    return view


def _width(view: Table, wrapped: bool) -> int:
    """Characters that a table takes, or needs when its texts are wrapped at words and at 8."""
    total = 1
    for column in view.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
        if wrapped and column.justify != "right":
            lines = [word[:8] for line in lines for word in line.split()]
        total += 3 + max(map(len, lines), default=0)
    return total


def result_table(frame: pd.DataFrame, title: str) -> Table:
    """Rows of a leaderboard frame as a rich table: measured first, then published."""
    view = Table(title=title, title_justify="left")
    for name in ("method", "states", "kernels", "execution"):
        view.add_column(name)
    for name in ("ms/step", "p20", "p80", "peak GiB", "state B/param", "tokens/s", "MFU %"):
        view.add_column(name, justify="right")
    view.add_column("status")
    source = ""
    for row in frame.to_dict("records"):
        if source and row["source"] != source:
            view.add_section()
        source = row["source"]
        status = row["status"] if source == "measured" else f"published, {row['hardware']}"
        view.add_row(
            escape(row["method"]),
            _text(row["states"]),
            _text(row["kernels"]),
            _text(row["execution"]),
            _number(row["latency_ms"], 2),
            _number(row["latency_p20_ms"], 2),
            _number(row["latency_p80_ms"], 2),
            _number(row["peak_memory_gib"], 2),
            _number(row["state_bytes_per_param"], 2),
            _number(row["tokens_per_s"], 0),
            _number(row["mfu_pct"], 1),
            status,
            style=None if row["status"] == "ok" else "dim",
        )
    return view


def remarks(frame: pd.DataFrame) -> list[str]:
    """One line for every measured row that has something to say."""
    return [
        f"{row['method']}, {row['kernels']}, {row['execution']}: {row['notes']}"
        for row in frame.to_dict("records")
        if row["source"] == "measured" and _text(row["notes"])
    ]


def methods_table(specs: Sequence[OptimizerSpec], installed: Callable[[str], str]) -> Table:
    """What ``forge-bench list`` shows. ``installed(package)``: its version, or nothing."""
    view = Table(title="Methods", title_justify="left", show_lines=True)
    view.add_column("key", no_wrap=True)
    view.add_column("method, package, licence")
    view.add_column("what it is, states, limits")
    for spec in specs:
        facts = method(spec, installed)
        origin = f"{facts['package']} {facts['version']}"
        if not facts["version"]:
            origin = f"{facts['package']}, not installed"
        following = "follows AdamW" if spec.exact else "lossy: looser gate"
        lines = [
            spec.summary,
            f"states: {spec.states}; runs on: {', '.join(spec.devices)}; {following}",
        ]
        if spec.limits:
            lines.append(f"limits: {', '.join(spec.limits)}")
        view.add_row(
            spec.key,
            escape(f"{spec.method}\n{origin}\n{spec.licence}"),
            escape("\n".join(lines)),
        )
    return view


def method(spec: OptimizerSpec, installed: Callable[[str], str]) -> dict[str, Any]:
    """What is known of a method, as plain data; an empty ``version``: not installed."""
    package = spec.distribution or ("forge-optim" if spec.target[:6] == "forge:" else "torch")
    same = ("key", "method", "licence", "summary", "states", "devices", "limits", "exact")
    facts = {name: getattr(spec, name) for name in same}
    return {**facts, "package": package, "version": installed(package)}


def markdown(frame: pd.DataFrame, run_id: str, brief: bool = False) -> str:
    """The measured rows of ``run_id`` and the published rows of the same work, as Markdown.

    Args:
        brief: only the columns that a phone has room for; what the notes say of passes is above.

    Raises:
        ValueError: the leaderboard has no such run.
    """
    rows = frame[(frame["source"] == "measured") & (frame["run_id"] == run_id)]
    if rows.empty:
        known = ", ".join(sorted(frame["run_id"].dropna().unique())) or "none"
        raise ValueError(f"--run: no run {run_id!r} in the leaderboard; there are: {known}")
    first = rows.iloc[0]
    published = frame[
        (frame["source"] == "published")
        & (frame["model"] == first["model"])
        & (frame["batch"] == first["batch"])
        & (frame["seq"] == first["seq"])
        & (frame["hardware"] == first["hardware"])
        & frame["latency_ms"].notna()
    ]
    published = published.assign(kernels=published["kernels"].str.lower())
    published = published.drop_duplicates(PUBLISHED_KEY).set_index(PUBLISHED_KEY)
    what = (
        f"{first['model']}, batch {first['batch']}, sequence {first['seq']}, {first['precision']}, "
        f"one {first['hardware']}, torch {first['torch']}, {first['date']}, commit "
        f"{first['commit']}"
    )
    notes = "; ".join(rows["notes"].fillna("")).split("; ")
    unsure = "how far another is from it is not known, close ranks are not certain."
    caution = _passes(rows) if brief else ""
    if ONE_PASS in notes:
        caution += f" {'The other rows are one pass' if brief else f'`{ONE_PASS}`'}: {unsure}"
    elif not any(" passes: " in note for note in notes):
        caution += f" One pass a row: {unsure}"
    names = [name for name in _MARKDOWN if not brief or name not in _NOT_BRIEF]
    lines = [
        f"{cell(what)} (run `{cell(run_id.replace('`', ' '))}`).{caution}",
        "",
        f"| {' | '.join(names)} |",
        f"|{'|'.join(_MARKDOWN[name] for name in names)}|",
    ]
    for rank, row in enumerate(rows.to_dict("records"), start=1):
        cells = _markdown_row(str(rank), row, published)
        lines.append(f"| {' | '.join(cell(cells[name]) for name in names)} |")
    return "\n".join(lines)


# Columns, and how Markdown sets them.
_MARKDOWN = dict.fromkeys(("rank",), "--:")
_MARKDOWN |= dict.fromkeys(("method", "states", "model kernels", "execution"), "---")
_MARKDOWN |= dict.fromkeys(("ms / step", "p20 to p80", "peak GiB", "state B/param"), "--:")
_MARKDOWN |= dict.fromkeys(("tokens/s", "published ms / GiB"), "--:") | {"notes": "---"}
_NOT_BRIEF = ("p20 to p80", "state B/param", "tokens/s", "notes")


def _passes(rows: pd.DataFrame) -> str:
    """What the notes of ``rows`` say of passes and drift, in sentences that name the ranks."""
    said, drift = "", ""
    for rank, notes in enumerate(rows["notes"].fillna("").str.split("; "), start=1):
        said += "".join(f" Row {rank}: median of {note}." for note in notes if " passes: " in note)
        drift += "".join(f" Marked: {note}." for note in notes if note.startswith("drift of "))
    return f" {cell(said + drift)}" if said else ""


def _markdown_row(rank: str, row: dict[str, Any], published: pd.DataFrame) -> dict[str, str]:
    theirs = ""
    key = tuple(row[column] for column in PUBLISHED_KEY)
    if key in published.index:
        other = published.loc[key]
        theirs = f"{_number(other['latency_ms'], 1)} / {_number(other['peak_memory_gib'], 1)}"
    if row["status"] != "ok":
        rank, numbers = "", [row["status"], "", "", "", ""]
    else:
        spread = f"{_number(row['latency_p20_ms'], 1)} to {_number(row['latency_p80_ms'], 1)}"
        numbers = [
            _number(row["latency_ms"], 1),
            spread,
            _number(row["peak_memory_gib"], 2),
            _number(row["state_bytes_per_param"], 2),
            _number(row["tokens_per_s"], 0),
        ]
    what = [row[column] for column in ("method", "states", "kernels", "execution")]
    notes = textwrap.shorten(_text(row["notes"]), 120)
    return dict(zip(_MARKDOWN, [rank, *what, *numbers, theirs, notes], strict=True))


def cell(text: str) -> str:
    """``text`` on one line, where nothing in it is a table's border, a tag or a link."""
    text = html.escape(" ".join(text.split()), quote=False)
    return text.replace("|", "/").replace("[", "\\[")


def published_markdown(frame: pd.DataFrame) -> str:
    """What others published, with its source, as Markdown; empty when there is nothing."""
    rows = frame[frame["source"] == "published"]
    if rows.empty:
        return ""
    lines = [
        "## Published by others",
        "",
        "Not measured here and not ranked.",
        "",
        "| method | model | batch x sequence | hardware | ms / step | peak GiB | source |",
        "|---|---|---|---|--:|--:|---|",
    ]
    for row in rows.to_dict("records"):
        shape = f"{_number(row['batch'], 0)} x {_number(row['seq'], 0)}"
        times = [_number(row["latency_ms"], 1), _number(row["peak_memory_gib"], 1)]
        source = "; ".join(filter(None, [_text(row["source_ref"]), _text(row["notes"])]))
        texts = [row["method"], row["model"], shape, row["hardware"], *times, source]
        lines.append(f"| {' | '.join(cell(_text(text)) for text in texts)} |")
    return "\n".join(lines)


def with_table(readme: Path, table: str) -> str:
    """The text of ``readme`` with ``table`` between its two marker comments.

    Raises:
        ValueError: the file or its markers are missing.
    """
    content = readme.read_text(encoding="utf-8") if readme.exists() else ""
    text = _between(content, BEGIN, END, table)
    if text is None:
        raise ValueError(f"--readme {readme}: needs the lines {BEGIN} and {END}")
    return text


def with_budget(text: str, profiles: Sequence[Profile]) -> str:
    """``text``, a README, with the newest profile of our captured step between its markers.

    As it is without such a profile or without the markers.
    """
    ours = [p for p in profiles if p.method == "FORGE" and p.row.endswith("/forge/cuda_graph")]
    if not ours:
        return text
    newest = max(ours, key=lambda profile: profile.date)
    return _between(text, BUDGET_BEGIN, BUDGET_END, budget(newest)) or text


def with_fidelity(text: str, table: str) -> str:
    """``text``, a README, with ``table`` between its markers for it, if it has any."""
    return _between(text, FIDELITY_BEGIN, FIDELITY_END, table) or text


def budget(profile: Profile) -> str:
    """Where the time of a step goes, in Markdown: each part beside its floor."""
    lines = [
        f"{profile.row}, {profile.model}, batch {profile.batch}, sequence {profile.seq}, one "
        f"{profile.hardware}, {profile.date[:10]}: {profile.wall_ms:.2f} ms a step "
        f"(`{profile.run_id}`). Launches of the update overlap: the sum of their ms is more "
        "than they take.",
        "",
        "| part | ms | floor, ms | kernels |",
        "|---|--:|--:|--:|",
    ]
    for part in sorted(profile.parts, key=lambda part: -part["ms"]):
        floor = part.get("floor_ms")
        lines.append(
            f"| {PARTS.get(part['part'], part['part'])} | {part['ms']:.2f} "
            f"| {_number(float('nan') if floor is None else floor, 2)} | {part['pieces']:,.0f} |"
        )
    return "\n".join(lines)


def _between(text: str, begin: str, end: str, new: str) -> str | None:
    """``text`` with ``new`` between two markers; ``None``: they are not in it."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n{new}\n{end}{after}" if found and closed else None


def _text(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _number(value: Any, places: int) -> str:
    return "" if pd.isna(value) else f"{value:,.{places}f}"

"""Plots of measured rows as SVG text that follows the reader's light or dark colours.

Text and lines are ``currentColor``, the background is transparent, and marks keep a contrast of at
least 3:1 on both white and near-black.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from forge.harness import fidelity, records
from forge.harness.memory import GIB
from forge.harness.profiles import Profile
from forge.harness.records import Record
from forge.harness.trace import PARTS

# Stands for the reader's text colour until the SVG is written: matplotlib knows no currentColor.
INK = "#010203"
COLOURS = ("#2f81c7", "#c2571a", "#2e9070", "#a65fb0", "#8a7a1f", "#7a7f87")
MARKS = {"eager": "o", "compile": "D", "cuda_graph": "s", "compile+cuda_graph": "^"}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "forge-bench",  # the same records give the same file
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
# For a file of its own; inline in a page the page's colour is inherited.
OWN_COLOURS = (
    "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)
# Where a number may stand, in points from its mark, the best place first.
OFFSETS = ((8, 8), (8, -8), (-8, 8), (-8, -8), (0, 11), (0, -11), (11, 0), (-11, 0))
# Times closer together than this are drawn on an axis that is this much wider on both sides.
NARROWEST = 1.1
PRECISION_BYTES = {"bf16": 2, "fp32": 4}


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in one coordinate without losing in the other,
    by the first coordinate; of equal points the first."""
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def latency_memory(rows: Sequence[Record]) -> str | None:
    """Median step (ms) against peak memory (GiB) of a run's rows, the Pareto front drawn through.

    Points carry their rank by latency; a list beside them names the ranks. ``None``: nothing was
    timed.
    """
    timed = [r for r in rows if r.latency_ms is not None and r.peak_memory_gib is not None]
    timed.sort(key=lambda record: record.latency_ms or 0.0)
    if not timed:
        return None
    points = [(record.latency_ms or 0.0, record.peak_memory_gib or 0.0) for record in timed]
    with rc_context(STYLE):
        figure, axes = _figure(4.4)
        ways = dict.fromkeys((*MARKS, *(record.execution for record in timed)))
        for i, way in enumerate(ways):
            these = [p for p, record in zip(points, timed, strict=True) if record.execution == way]
            if these:
                xs, ys = zip(*these, strict=True)
                look: Any = dict(color=COLOURS[i % len(COLOURS)], marker=MARKS.get(way, "X"))
                axes.scatter(xs, ys, s=46, label=way, **look)
        _log_ms(axes)
        axes.margins(x=0.08, y=0.1)
        _show_at_least(axes, [ms for ms, _ in points])
        _draw_front(axes, [points[i] for i in pareto_front(points)])
        axes.set(xlabel="median step, ms (log scale)", ylabel="peak memory, GiB")
        marks = axes.legend(frameon=False, fontsize=8, title="dotted: Pareto front")
        axes.add_artist(marks)
        named = labels(rows)
        names = [f"{i + 1}  {named[record.row]}" for i, record in enumerate(timed)]
        nothing = [axes.scatter([], [], alpha=0) for _ in names]
        axes.legend(nothing, names, frameon=False, fontsize=7, labelspacing=0.25, handlelength=0,
                    handletextpad=0, loc="upper left", bbox_to_anchor=(1.0, 1.02))  # fmt: skip
        figure.draw_without_rendering()
        _number_points(axes, points)
        return _svg(figure, "Step time against peak memory, with the Pareto front")


def latency_sequence(rows: Sequence[Record]) -> str | None:
    """Median step (ms) over the sequence length, a line a row measured at two lengths or more.

    ``rows`` are those of one machine, commit, model and batch. ``None``: there is no such row.
    """
    timed = [record for record in rows if record.latency_ms is not None]
    lines = {
        row: sorted((r.seq, r.latency_ms or 0.0) for r in group)
        for row, group in records.by_row(timed).items()
        if len({r.seq for r in group}) > 1
    }
    if not lines:
        return None
    named = labels(rows)
    ways = {record.row: record.execution for record in timed}
    slowest_last = sorted(lines.items(), key=lambda line: line[1][-1][1])
    with rc_context(STYLE):
        figure, axes = _figure(max(4.4, 1.0 + 0.16 * len(lines)))
        for i, (row, points) in enumerate(slowest_last):
            axes.plot(*zip(*points, strict=True), color=COLOURS[i % len(COLOURS)], lw=1.2, ms=5,
                      marker=MARKS.get(ways[row], "X"))  # fmt: skip
        _log_ms(axes, "y")
        lengths = sorted({seq for points in lines.values() for seq, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set(xlabel="sequence length, tokens", ylabel="median step, ms (log scale)")
        _name_lines(axes, [(*points[-1], named[row]) for row, points in slowest_last])
        return _svg(figure, "Step time over sequence length")


def memory_parts(record: Record) -> dict[str, float] | None:
    """The parts of a row's peak, GiB, adding up to it; ``None`` when the peak is not known.

    Weights are ``params`` in ``precision``, states and gradients as recorded. Gradients are those
    that exist when the optimizer's step begins; where they were not recorded they are in the rest.
    """
    size = PRECISION_BYTES.get(record.precision)
    if record.peak_memory_gib is None or record.state_bytes is None:
        return None
    if record.params is None or size is None:
        return None
    parts = {
        "weights": record.params * size / GIB,
        "states": record.state_bytes / GIB,
        "gradients": (record.grad_bytes or 0) / GIB,
    }
    rest = record.peak_memory_gib - sum(parts.values())
    name = (
        "activations, other" if record.grad_bytes is not None else "gradients, activations, other"
    )
    return {**parts, name: max(rest, 0.0)}


def memory_by_part(rows: Sequence[Record]) -> str | None:
    """Stacked bars of :func:`memory_parts`, smallest peak on top. ``None``: no peak is known."""
    parts = [(record, memory_parts(record)) for record in rows]
    bars = [(record, found) for record, found in parts if found]
    bars.sort(key=lambda bar: bar[0].peak_memory_gib or 0.0)
    if not bars:
        return None
    names = list(dict.fromkeys(name for _, found in bars for name in found))
    names = [name for name in names if any(found.get(name) for _, found in bars)]
    with rc_context(STYLE):
        figure, axes = _figure(0.9 + 0.27 * len(bars))
        left = [0.0] * len(bars)
        places = range(len(bars))
        for colour, name in zip(COLOURS, names, strict=False):
            widths = [found.get(name, 0.0) for _, found in bars]
            axes.barh(places, widths, left=left, color=colour, label=name, height=0.72)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, total in zip(places, left, strict=True):
            _beside(axes, total, place, f"{total:.2f}")
        named = labels(rows)
        axes.set_yticks(places, [named[record.row] for record, _ in bars], fontsize=8)
        axes.set(xlim=(0, 1.08 * max(left)), ylim=(len(bars) - 0.4, -0.6))
        axes.set_xlabel("peak memory, GiB")
        axes.legend(
            frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(-0.3, 1.0)
        )
        return _svg(figure, "Peak memory by part")


def time_by_part(profile: Profile) -> str | None:
    """Bars of a step's milliseconds by part, the longest on top, each with its floor beneath.

    ``None``: nothing took time. A part without a known floor has no second bar.
    """
    parts = sorted(profile.parts, key=lambda part: -part["ms"])
    parts = [part for part in parts if part["ms"] > 0 or part.get("floor_ms")]
    if not parts:
        return None
    with rc_context(STYLE):
        figure, axes = _figure(1.1 + 0.42 * len(parts))
        places = range(len(parts))
        floors = [(place, part["floor_ms"]) for place, part in enumerate(parts)
                  if part.get("floor_ms") is not None]  # fmt: skip
        apart = 0.19 if floors else 0.0
        bars = [("measured", [(place - apart, p["ms"]) for place, p in enumerate(parts)])]
        if floors:
            bars.append(("floor", [(place + apart, ms) for place, ms in floors]))
        for colour, (name, found) in zip(COLOURS, bars, strict=False):
            heights, widths = zip(*found, strict=True)
            axes.barh(heights, widths, color=colour, height=0.36, label=name)
            for y, ms in found:
                _beside(axes, ms, y, f"{ms:.3g}")
        axes.set_yticks(places, [PARTS.get(part["part"], part["part"]) for part in parts])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel(f"ms of a step, which takes {profile.wall_ms:.4g} ms")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        return _svg(figure, "Time of a step by part, beside its floor")


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8)


def loss_curves(rows: Sequence[fidelity.Record], title: str) -> str | None:
    """Losses (nats a token) over steps of one model at one rate, a line a method, mean of its seeds
    with a band from the lowest to the highest: of training, in windows of a hundredth of the steps,
    and beside it of held-out text against the reference, in %. ``None``: nothing was trained."""
    trained = [row for row in rows if row.status == "ok"]
    groups: dict[str, list[fidelity.Record]] = {}
    for row in trained:
        groups.setdefault(row.key, []).append(row)
    if not groups:
        return None
    reference = {row.seed: row for row in groups.get(fidelity.REFERENCE, [])}
    with rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, group in enumerate(groups.values()):
            look: Any = dict(color=COLOURS[i % len(COLOURS)], lw=1.2)
            look["ls"] = ("-", "--", ":")[i // len(COLOURS) % 3]
            window = max(1, group[0].steps // 100)
            steps = [(n + 0.5) * window for n in range(group[0].steps // window)]
            smooth = [_windows(row.train_losses, window) for row in group]
            _band(left, steps, smooth, f"{group[0].method} {group[0].states}", look)
            gaps = [
                [100 * (mine[1] / theirs[1] - 1) for mine, theirs in pairs]
                for row in group
                if row.seed in reference
                for pairs in [list(zip(row.heldout, reference[row.seed].heldout, strict=True))]
            ]
            if gaps:
                _band(right, [point[0] for point in group[0].heldout], gaps, "", look)
        for axes in (left, right):
            axes.grid(color=INK, alpha=0.15, lw=0.6)
            axes.set_xlabel("step")
        left.set_ylabel("training loss, nats a token")
        right.set_ylabel("held-out loss against fp32 master, %")
        figure.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=3)
        return _svg(figure, title)


def _windows(losses: Sequence[float], window: int) -> list[float]:
    count = len(losses) // window
    return [sum(losses[n * window : (n + 1) * window]) / window for n in range(count)]


def _band(axes: Axes, xs: Sequence[float], lines: Any, name: str, look: Any) -> None:
    columns = list(zip(*lines, strict=True))
    axes.plot(xs, [sum(column) / len(column) for column in columns], label=name or None, **look)
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    axes.fill_between(xs, low, high, color=look["color"], alpha=0.2, lw=0)


def usual_kernels(rows: Sequence[Record]) -> str:
    """The model kernels of more than half of ``rows``, which labels leave out; empty: none are."""
    counts = Counter(record.kernels for record in rows)
    kernels, count = counts.most_common(1)[0] if rows else ("", 0)
    return kernels if 2 * count > len(rows) else ""


def labels(rows: Sequence[Record]) -> dict[str, str]:
    """A name for every row of ``rows``, no two the same, by the row's id: the method with its
    states, kernels and execution where they are not bf16, the usual ones and eager."""
    usual = usual_kernels(rows)
    found: dict[str, str] = {}
    for record in rows:
        states = f" {record.states}" if record.states != "bf16" else ""
        kernels = f", {record.kernels}" if record.kernels != usual else ""
        way = f", {record.execution}" if record.execution != "eager" else ""
        found[record.row] = f"{record.method}{states}{kernels}{way}"
    often = Counter(found.values())
    return {row: f"{name} ({row})" if often[name] > 1 else name for row, name in found.items()}


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=INK, alpha=0.15, lw=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _draw_front(axes: Axes, front: Sequence[tuple[float, float]]) -> None:
    """The stairs through ``front`` and on to the edges: right of them and above is beaten."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    corners = [(front[0][0], top), *front, (right, front[-1][1])]
    axes.step(*zip(*corners, strict=True), where="post", color=INK, lw=1, ls=":", zorder=0)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _name_lines(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """Write names right of the axes, whose y is logarithmic, each joined to its line's end.

    Args:
        ends: x and y of the end, from the lowest, and the name.
    """
    low, high = (math.log(limit) for limit in axes.get_ylim())
    wanted = [(math.log(y) - low) / (high - low) for _, y, _ in ends]
    for (x, y, name), place in zip(
        ends, spread_out(wanted, 0.98 / max(len(ends), 22)), strict=True
    ):
        joint: Any = dict(arrowstyle="-", relpos=(0, 0.5), shrinkA=1, shrinkB=3)
        joint |= dict(color=INK, lw=0.4, alpha=0.6)
        axes.annotate(name, (x, y), (1.1, place), textcoords="axes fraction", va="center",
                      fontsize=7, arrowprops=joint)  # fmt: skip


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Places from 0 to 1 near the ascending ``wanted``, ``gap`` or more apart if there is room."""
    up, down = list(wanted), list(wanted)
    last = len(up) - 1
    for i in range(1, len(up)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[last - i] = min(down[last - i], down[last - i + 1] - gap)
    # Both keep the distance, so does what lies in the middle of them.
    places = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
    for i in range(len(places)):
        places[i] = max(places[i], i * gap)
    for i in range(len(places)):
        places[last - i] = min(places[last - i], 1 - i * gap)
    return places


def _number_points(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Write 1, 2, 3 ... beside ``points``, where neither a point nor another number is."""
    pixels = axes.transData.transform(points)
    per_point = axes.figure.dpi / 72
    taken = [tuple(pixel) for pixel in pixels]
    for number, ((x, y), point) in enumerate(zip(pixels, points, strict=True), start=1):
        spots = [(x + dx * per_point, y + dy * per_point) for dx, dy in OFFSETS]
        # Beyond 14 pixels one place is as good as another: the first of them.
        room = [min(14.0, *(math.dist(spot, other) for other in taken)) for spot in spots]
        best = room.index(max(room))
        taken.append(spots[best])
        axes.annotate(str(number), point, OFFSETS[best], textcoords="offset points",
                      ha="center", va="center", fontsize=8)  # fmt: skip


def _log_ms(axes: Axes, which: str = "x") -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _show_at_least(axes: Axes, ms: Sequence[float]) -> None:
    """Widen the time axis where all times lie within a tenth of each other: they are about equal,
    and drawn from edge to edge they would look far apart."""
    if max(ms) < NARROWEST * min(ms):
        middle = math.sqrt(min(ms) * max(ms))
        axes.set_xlim(middle / NARROWEST, middle * NARROWEST)


def _svg(figure: Figure, title: str) -> str:
    target = io.StringIO()
    figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Sizes from the page; a name for a screen reader.
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    # Inline, several figures share a page: only what is referred to keeps its id.
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def standalone(svg: str) -> str:
    """``svg`` as a file: with colours of its own."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(
        r"(<svg[^>]*>)", rf"\1{OWN_COLOURS}", svg, count=1
    )

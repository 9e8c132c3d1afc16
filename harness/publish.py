"""``forge-bench publish``: everything that is generated from the recorded runs, in one go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from forge.harness import leaderboard, noise, options, page, plots, records, tables, verdict
from forge.harness.files import write_atomically
from forge.harness.leaderboard import Board
from forge.harness.options import RESULTS
from forge.harness.page import Plot
from forge.harness.profiles import Profile
from forge.harness.records import Record

PLOTS, PAGE, MARKDOWN, TABLE = "plots", "page/index.html", "LEADERBOARD.md", "leaderboard.csv"
# Folders of plots that belong to no single run.
SEQUENCE, PROFILES = "sequence", "profile"


def publish(board: Board, target: Path) -> list[Path]:
    """Write the table, plots, page and Markdown of ``board`` under ``target``.

    All texts are made before the first is written, and every file is replaced in one step. Drawings
    of runs that are no longer there are removed at the end.

    Returns:
        The files written.
    """
    figures = draw(board)
    texts = {f"{PLOTS}/{figure.name}.svg": plots.standalone(figure.svg) for figure in figures}
    texts |= {PAGE: page.render(board, figures), MARKDOWN: markdown(board, figures)}
    leaderboard.write(board, target / TABLE)
    for name, text in texts.items():
        write_atomically(target / name, text)
    for old in (target / PLOTS).glob("*/*.svg"):
        if old.relative_to(target).as_posix() not in texts:
            old.unlink()
            if not any(old.parent.iterdir()):
                old.parent.rmdir()
    return [target / name for name in (TABLE, *texts)]


def draw(board: Board) -> list[Plot]:
    """Plots of each run, in the page's order; over runs of one machine and commit; profiles."""
    rows, found = board.rows, []
    for run in page.runs_in_order(rows):
        run_id, title = run[0].run_id, page.work(run[0])
        memory_kind = next((r.memory_kind for r in run if r.memory_kind), "")
        for name, draws, what, caption in (
            ("latency-memory", plots.latency_memory, "Step time against peak memory",
             "Left and down is better. Numbers are ranks by step time." + _usual(run)),
            ("memory", plots.memory_by_part, "Peak memory by part",
             f"Of the peak ({memory_kind}): weights, optimizer states and the gradients that exist "
             "when the optimizer's step begins are counted; the rest is what remains."
             + _usual(run)),
        ):  # fmt: skip
            svg = draws(run)
            if svg:
                found.append(
                    Plot(f"{_slug(run_id)}/{name}", f"{what}: {title}", caption, svg, (run_id,))
                )
    for key, group in _comparable(rows).items():
        svg = plots.latency_sequence(group)
        if svg:
            ids = tuple(records.by_run(group))
            title = f"Step time over sequence length: {', '.join(key)}"
            caption = "Runs of one machine, one commit and one version of torch." + _usual(group)
            found.append(Plot(f"{SEQUENCE}/{_slug('_'.join(key))}", title, caption, svg, ids))
    return found + [plot for profile in board.profiles for plot in _time_by_part(profile, rows)]


def _time_by_part(profile: Profile, rows: Sequence[Record]) -> list[Plot]:
    svg = plots.time_by_part(profile)
    if not svg:
        return []

    def work(of: Profile | Record) -> tuple[Any, ...]:
        return of.model, of.batch, of.seq, of.precision, of.hardware

    ids = tuple(records.by_run(row for row in rows if work(row) == work(profile)))
    made = profile.environment
    commit = str(made.get("commit") or "unknown") + ("-dirty" if made.get("dirty") else "")
    caption = f"Commit {commit}, torch {made.get('torch')}."
    if profile.gpu_count:
        caption += f" The host launches {profile.launches:,.0f} times a step; a CUDA graph is one."
    if any(part.get("floor_ms") is not None for part in profile.parts):
        caption += (
            " The floor is the least time that the GPU can take for the part (forge-bench "
            "roofline); idle time has none. Of kernels that overlap each counts in full."
        )
    title = f"Time by part, {profile.row}: {page.work(profile)}"
    return [Plot(f"{PROFILES}/{_slug(profile.run_id)}", title, caption, svg, ids)]


def _usual(rows: Sequence[Record]) -> str:
    kernels = plots.usual_kernels(rows)
    return f" Model kernels are {kernels} where none are named." if kernels else ""


def _comparable(rows: Sequence[Record]) -> dict[tuple[str, ...], list[Record]]:
    groups: dict[tuple[str, ...], list[Record]] = {}
    for r in rows:
        made = leaderboard.measured_row(r)
        if made["commit"]:  # what is of an unknown commit compares with nothing
            key = (r.model, f"batch {r.batch}", r.precision, r.hardware, f"torch {made['torch']}")
            groups.setdefault((*key, made["commit"]), []).append(r)
    return groups


def _slug(text: str) -> str:
    """``text`` as a file name: a run's id comes from a file that anybody may have written."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "run"


def markdown(board: Board, figures: Sequence[Plot]) -> str:
    """``LEADERBOARD.md``."""
    parts = [
        "# Leaderboard",
        "Generated by `forge-bench publish` from `runs/`. Ranks hold within one run: one machine, "
        f"one software, one input. [page/index.html]({PAGE}) sorts, filters, shows every record.",
    ]
    passes = records.by_run(board.passes)
    for run in page.runs_in_order(board.rows):
        run_id = run[0].run_id
        parts.append(f"## {tables.cell(page.work(run[0]))}")
        mark = noise.drift_note(noise.drift_pct(passes[run_id]) or 0.0)
        if mark:
            parts.append(f"**Marked: {mark}.** Small differences in this run are noise.")
        parts.append(tables.markdown(board.frame, run_id))
        own = f"{_slug(run_id)}/"
        parts += [_image(figure) for figure in figures if figure.name.startswith(own)]
    for kind, title in ((SEQUENCE, "Over sequence length"), (PROFILES, "Time by part")):
        these = [figure for figure in figures if figure.name.startswith(f"{kind}/")]
        if these:
            parts += [f"## {title}", *map(_image, these)]
    if not board.rows:
        parts.append("No run is recorded.")
    parts.append(tables.published_markdown(board.frame))
    return "\n\n".join(filter(None, parts)) + "\n"


def _image(figure: Plot) -> str:
    return f"![{tables.cell(figure.title)}]({PLOTS}/{figure.name}.svg)"


def command(
    runs: Annotated[Path, typer.Option(help="folder of runs")] = RESULTS / "runs",
    target: Annotated[Path, typer.Option(help="folder that the files go to")] = RESULTS,
    published: Annotated[Path, typer.Option(help="what others published")] = RESULTS
    / "published.csv",
    include_cpu: Annotated[bool, typer.Option(help="keep rows measured on a CPU")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the files as JSON on stdout")] = False,
) -> None:
    """Write leaderboard.csv, LEADERBOARD.md, plots and page/index.html from the recorded runs.

    And fidelity.csv, where a run of `forge-bench validate` on a GPU is among them.

    \b
    Example:
      forge-bench publish --runs results/runs --target results
    """
    if not runs.is_dir():
        options.refuse(f"--runs {runs}: no such folder")
    if published != RESULTS / "published.csv" and not published.is_file():
        options.refuse(f"--published {published}: no such file")
    board = options.checked(leaderboard.read, runs, published, include_cpu)
    options.warn(board.damaged)
    with options.naming(f"--target {target}"):
        written = publish(board, target) + verdict.write_measured(runs, target)
    if as_json:
        options.show_json({"files": [str(path) for path in written], "damaged": board.damaged})
        return
    for path in written:
        typer.echo(f"wrote {path}")

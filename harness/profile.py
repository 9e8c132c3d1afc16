"""``forge-bench profile``: where the time of a method's step goes, and what there is to gain."""

from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from forge.harness import data, environment, hardware, options, profiles, roofline, timing, trace
from forge.harness.execution import EXECUTIONS, Step, build_step
from forge.harness.files import write_atomically
from forge.harness.options import RESULTS
from forge.harness.profiles import Profile
from forge.harness.rows import KERNELS, Row, cannot_run
from forge.harness.settings import new_folder
from forge.harness.shapes import shape_of
from forge.harness.trace import IDLE, PARTS, STEP, Steps
from forge.harness.workloads import MODELS, build_model
from forge.optim.footprint import FUSED, STORED
from forge.optim.spec import Hyper

TRACE_FILE, PARTS_FILE, KERNELS_FILE, TABLE_FILE = (
    "trace.json.gz",
    "parts.csv",
    "kernels.csv",
    "profile.txt",
)


def _gradients(row: Row) -> str:
    return row.spec.footprint.gradients if row.spec.footprint else STORED


def floors_ms(row: Row, config: Any, batch: int, seq: int, name: str) -> dict[str, float]:
    """The least time of each part of ``row``'s step on the GPU ``name``, as ``trace`` names parts.

    Of AdamW with the row's states (bf16 where they are something else), the update in the products
    of the weight gradients if the method fuses them. Empty for a GPU or model that is not known.
    """
    gpu = hardware.find(name)
    if gpu is None:
        return {}
    fused = _gradients(row) == FUSED
    states = row.spec.states if row.spec.states in roofline.STATES else "bf16"
    found: dict[str, float] = defaultdict(float)
    try:
        shape = shape_of(config)
    except ValueError:
        return {}
    for part in roofline.parts(shape, batch, seq, gpu, states, separate=not fused):
        found[part.group] += part.ms
    return dict(found)


def ranking(steps: Steps, wall_ms: float, floors: dict[str, float]) -> list[dict[str, Any]]:
    """Parts and idle time of a step; what could be gained most comes first.

    ``gain_pct`` is the share of the part times the share of it above its floor: by how much the
    step would shrink at the floor. Idle time and parts without a known floor have 0.

    Args:
        wall_ms: of a step without the profiler.
    """
    times = steps.parts()
    # Kernels take as long under the profiler; the host, which they may wait for, does not.
    times[IDLE] = (max(0.0, wall_ms - steps.busy_ms), 0.0)
    rows: list[dict[str, Any]] = []
    for part, (ms, pieces) in times.items():
        floor = floors.get(part)
        share, gain = (100 * above / wall_ms for above in (ms, max(0.0, ms - (floor or 0.0))))
        rows.append(
            dict(part=part, ms=ms, share_pct=share, pieces=pieces, floor_ms=floor, gain_pct=gain)
        )
    return sorted(rows, key=lambda row: -row["gain_pct"])


def record(step: Step, batches: list[dict[str, Tensor]], count: int, device: str, to: Path) -> None:
    """Run ``count`` steps under the profiler and write their Chrome trace to ``to``."""
    wait = timing.synchronizer(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        # The first step under the profiler pays for its start: it gets no span.
        step(batches[0])
        wait()
        for i in range(count):
            with torch.profiler.record_function(STEP):
                step(batches[i % len(batches)])
                wait()
    profiler.export_chrome_trace(str(to))


def _step_of(row: Row, config: Any, batches: list[Any], device: str, attention: str) -> Step:
    model = build_model(
        config,
        device=device,
        dtype=torch.bfloat16,
        attention=attention,
        kernels=row.kernels,
        seed=0,
    )
    hyper = Hyper(capturable="cuda_graph" in row.execution and row.spec.capturable)
    optimizer = row.spec.build(row.spec.resolve(), model, hyper)
    return build_step(model, optimizer, row.spec, hyper, row.execution, batches[0])


def command(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="one method, as in --optimizers")],
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODELS)} (default: 0.6b, tiny on a CPU)")
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int | None, typer.Option(min=2, help="default: 512, 128 on a CPU")] = None,
    kernels: Annotated[str | None, typer.Option(help=", ".join(KERNELS))] = None,
    execution: Annotated[str | None, typer.Option(help=f"{', '.join(EXECUTIONS)}")] = None,
    attention: Annotated[str, typer.Option(help=options.ATTENTION_HELP)] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="profiled steps")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="steps before them")] = 5,
    top: Annotated[int, typer.Option(min=1, help="kernels to show")] = 15,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if any)")] = None,
    out: Annotated[Path, typer.Option(help="where a folder is made")] = RESULTS / "runs",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout")] = False,
) -> None:
    """Profile a method's step: time by part, idle time, top kernels, gain against the floor.

    Writes profile.json, profile.txt, parts.csv, kernels.csv and a Chrome trace into a new folder.

    \b
    Example:
      forge-bench profile adamw-fused --kernels torch --execution compile+cuda_graph
    """
    where = options.device(device)
    rows = options.rows(method, where, kernels, execution, None, "METHOD")
    if len(rows) != 1:
        options.refuse(f"profile {method}: one method at a time")
    (row,) = rows
    settled = cannot_run(row, where)
    if settled:
        options.refuse(f"profile {method}: {settled[0]}: {settled[1]}")
    key, seq = options.model(model, None, where), seq or (512 if where == "cuda" else 128)
    attention = options.attention(attention, where, [row])
    batches = _batches(batch, seq, MODELS[key].vocab, where)
    config = MODELS[key].hf_config()
    if where == "cpu":
        torch.set_num_threads(1)  # on a busy machine more of them take much longer
    name = options.hardware(where)
    console = options.console(stderr=as_json)
    folder = _folder(out, row, f"{MODELS[key].name}-b{batch}-s{seq}", name)
    with options.progress(console) as progress, _removed_unless_done(folder):
        task = progress.add_task("building the model", total=warmup + 2 * steps + 1)
        with _failing_in_one_line(method):
            step = options.checked(_step_of, row, config, batches, where, attention)
            progress.update(task, description="warm-up")
            for i in range(warmup):
                timing.time_steps(step, batches, 1, where, start=i)
                progress.advance(task)
            progress.update(task, description="without the profiler")
            plain, _ = timing.time_steps(step, batches, steps, where)
            progress.update(task, advance=steps, description="under the profiler")
            record(step, batches, steps, where, folder / TRACE_FILE)
        progress.update(task, advance=steps, description="reading the trace")
        found = trace.read_steps(folder / TRACE_FILE)
        progress.advance(task)
        # On a CPU the profiler slows the work itself.
        wall_ms = statistics.median(plain) if where == "cuda" else found.wall_ms
        ranked = ranking(found, wall_ms, floors_ms(row, config, batch, seq, name))
        write(folder, ranked, found)
        kept = Profile(
            run_id=folder.name,
            row=row.id,
            method=row.spec.method,
            model=MODELS[key].name,
            batch=batch,
            seq=seq,
            precision="bf16",
            hardware=name,
            gpu_count=int(where == "cuda"),
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            steps=steps,
            wall_ms=wall_ms,
            launches=found.launches,
            parts=ranked,
            environment=environment.describe(),
        )
        profiles.save(folder, kept)
        title = f"{row.id}, {MODELS[key].name}, batch {batch}, sequence {seq}, on {name}: "
        title += f"{wall_ms:.2f} ms a step, {len(found.work) / steps:,.0f} kernels or operators, "
        title += f"{found.launches:,.0f} launches"
        if where == "cpu" and _gradients(row) != STORED:
            title += (
                "\nThe update runs inside backward; on a CPU its operators count with the others."
            )
        shown = Console(file=io.StringIO(), width=180)
        _show(shown, title, ranked, found, top)
        write_atomically(folder / TABLE_FILE, shown.file.getvalue())  # type: ignore[attr-defined]
    if as_json:
        report = dict(row=asdict(row), steps=steps, wall_ms=wall_ms, launches=found.launches)
        print(json.dumps(report | _as_json(ranked, found, top, folder), indent=1))
        return
    _show(console, title, ranked, found, top)
    console.print(f"wrote {folder}", highlight=False, soft_wrap=True)


def _batches(batch: int, seq: int, vocab: int, device: str) -> list[dict[str, Tensor]]:
    made = options.checked(data.make_batches, "stdlib", batch, seq, vocab, 0)
    ids = torch.from_numpy(made.astype(np.int64)).to(device)
    return [{"input_ids": tokens, "labels": tokens.clone()} for tokens in ids]


def _folder(out: Path, row: Row, workload: str, name: str) -> Path:
    commit, _ = environment.git_state()
    try:
        return new_folder(out, f"profile-{row.id}_{workload}", name, commit)
    except OSError as error:
        options.refuse(f"--out {out}: {error}")


@contextmanager
def _removed_unless_done(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{folder}: {error}; nothing is kept") from error
        raise


@contextmanager
def _failing_in_one_line(method: str) -> Iterator[None]:
    """Optimizers of other packages may raise anything: exit code 1, as a row that failed."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        typer.echo(f"forge-bench: profile {method}: {environment.one_line(error)}", err=True)
        raise typer.Exit(1) from error


def write(folder: Path, rows: list[dict[str, Any]], steps: Steps) -> None:
    """Write ``parts.csv`` and ``kernels.csv``: everything is of one step."""
    parts, kernels = io.StringIO(), io.StringIO()
    columns = ["part", "ms", "share_pct", "pieces", "floor_ms", "gain_pct"]
    writer = csv.DictWriter(parts, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    plain = csv.writer(kernels, lineterminator="\n")
    plain.writerow(["kernel", "part", "ms", "calls"])
    plain.writerows(steps.kernels())
    write_atomically(folder / PARTS_FILE, parts.getvalue())
    write_atomically(folder / KERNELS_FILE, kernels.getvalue())


def _as_json(rows: list[dict[str, Any]], steps: Steps, top: int, folder: Path) -> dict[str, Any]:
    kernels = [
        dict(zip(("kernel", "part", "ms", "calls"), line, strict=True))
        for line in steps.kernels()[:top]
    ]
    return dict(parts=rows, kernels=kernels, folder=str(folder))


def _show(console: Console, title: str, rows: list[dict[str, Any]], steps: Steps, top: int) -> None:
    console.print(title, highlight=False, soft_wrap=True)
    options.show_table(console, _parts_table(rows), ("pieces", "share %"))
    options.show_table(console, _kernels_table(steps, top))


def _parts_table(rows: list[dict[str, Any]]) -> Table:
    view = Table()
    view.add_column("part")
    for name in ("ms", "share %", "pieces", "floor ms", "gain %"):
        view.add_column(name, justify="right")
    for row in rows:
        floor = "" if row["floor_ms"] is None else f"{row['floor_ms']:.3f}"
        view.add_row(
            PARTS.get(row["part"], row["part"]),
            f"{row['ms']:.3f}",
            f"{row['share_pct']:.1f}",
            f"{row['pieces']:,.0f}",
            floor,
            f"{row['gain_pct']:.1f}",
        )
    return view


def _kernels_table(steps: Steps, top: int) -> Table:
    view = Table(title=f"The {top} longest", title_justify="left")
    for name in ("kernel or operator", "part"):
        view.add_column(name)
    for name in ("ms", "calls", "us a call"):
        view.add_column(name, justify="right")
    for name, part, ms, calls in steps.kernels()[:top]:
        numbers = (f"{ms:.3f}", f"{calls:,.0f}", f"{1e3 * ms / calls:.1f}")
        view.add_row(name[:100], PARTS[part], *numbers)
    return view

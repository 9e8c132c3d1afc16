"""``forge-bench run``: step time and peak memory of every method on the same work."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from forge.harness import environment, leaderboard, noise, options, records, tables
from forge.harness.execution import EXECUTIONS
from forge.harness.files import locked
from forge.harness.logs import LOG_FILE
from forge.harness.options import RESULTS
from forge.harness.rows import KERNELS, Row
from forge.harness.runner import Run
from forge.harness.settings import (
    MOST,
    MOST_PASSES,
    Settings,
    batches_of,
    load_settings,
    new_folder,
    save_settings,
)
from forge.harness.workloads import MODELS


def command(
    context: typer.Context,
    optimizers: Annotated[
        str, typer.Option(help="all, or keys or module:attribute, separated by commas")
    ] = "all",
    model: Annotated[
        str | None, typer.Option(help=f"one of {', '.join(MODELS)} (default: 0.6b, tiny on a CPU)")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="a checkpoint: folder or hub id (default: random weights)")
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int | None, typer.Option(min=2, help="default: 512, 128 on a CPU")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="timed steps (default: 200, 20 if slow, 5 on a CPU)"),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=1, help="untimed steps (default: 20, 2 on a CPU)")
    ] = None,
    states: Annotated[str | None, typer.Option(help="only methods that store states so")] = None,
    kernels: Annotated[
        str | None, typer.Option(help=f"the model's kernels: {', '.join(KERNELS)}")
    ] = None,
    attention: Annotated[str, typer.Option(help=options.ATTENTION_HELP)] = "auto",
    execution: Annotated[str | None, typer.Option(help=f"{', '.join(EXECUTIONS)}")] = None,
    data: Annotated[str, typer.Option(help="stdlib, random, or a text file or folder")] = "stdlib",
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if any)")] = None,
    out: Annotated[Path, typer.Option(help="where the run's folder is made")] = RESULTS / "runs",
    seed: Annotated[
        int, typer.Option(min=0, max=MOST, help="weights, data, order of the rows")
    ] = 0,
    repeat: Annotated[
        int, typer.Option(min=1, max=MOST_PASSES, help="interleaved passes over the rows")
    ] = 1,
    repeat_only: Annotated[
        str, typer.Option(help="keys or row ids that passes after the first measure (default: all)")
    ] = "",
    in_turns: Annotated[
        bool,
        typer.Option(
            "--in-turns",
            help="passes after the first measure their rows side by side, four steps each in turn: "
            "a host that is slow for a second is so for all",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, max=MOST, help="seconds a row may take")] = 900.0,
    resume: Annotated[
        Path | None, typer.Option(help="go on with an interrupted run (its folder)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="results as JSON on stdout")] = False,
) -> None:
    """Measure step time and peak memory of every method on the same work.

    \b
    Examples:
      forge-bench run --optimizers all
      forge-bench --optimizers adamw-fused,forge-bf16 --seq 4096 --repeat 3
      forge-bench --optimizers my_package.my_module:SPEC
      forge-bench --resume results/runs/FOLDER
    """
    console = options.console(stderr=as_json)
    if resume is not None:
        options.only_resume(context)
        folder, settings = resume, options.checked(load_settings, resume)
        settings = replace(settings, hardware=options.hardware(options.device(settings.device)))
        batches = options.checked(batches_of, settings)
    else:
        where = options.device(device)
        rows = options.rows(optimizers, where, kernels, execution, states)
        settings = options.checked(
            Settings,
            run_id="",
            model=options.model(model, weights, where),
            model_name="",
            weights=weights,
            batch=batch,
            seq=seq or (512 if where == "cuda" else 128),
            steps=steps or (None if where == "cuda" else 5),
            warmup=warmup or (20 if where == "cuda" else 2),
            attention=options.attention(attention, where, rows),
            data=data,
            device=where,
            dtype="bfloat16",
            seed=seed,
            repeat=repeat,
            repeat_only=options.keys(repeat_only),
            in_turns=in_turns,
            hardware=options.hardware(where),
            timeout_s=timeout,
            rows=[],
        )
        _check_repeats(settings, rows)
        batches = options.checked(batches_of, settings)
        folder, settings = _create(out, settings, rows)
    try:
        with locked(folder / LOG_FILE):
            found = _execute(folder, settings, batches, console)
    except BlockingIOError:
        options.refuse(f"--resume {folder}: another forge-bench is writing to this run")
    except OSError as error:
        problem = f"{folder}: {error}; what was measured is saved, go on with --resume"
        raise OSError(problem) from error
    _report(found, settings, console, as_json)


def _check_repeats(settings: Settings, rows: list[Row]) -> None:
    known = {name for row in rows for name in (row.key, row.id)}
    unknown = [name for name in settings.repeat_only if name not in known]
    if unknown:
        options.refuse(f"--repeat-only: not in this run: {', '.join(unknown)}")
    if settings.repeat_only and settings.repeat == 1:
        options.refuse("--repeat-only: says what to measure again, but --repeat is 1")
    if settings.in_turns and settings.repeat == 1:
        options.refuse("--in-turns: says how to measure again, but --repeat is 1")


def _create(out: Path, settings: Settings, rows: list[Row]) -> tuple[Path, Settings]:
    name = Path(settings.weights).name if settings.weights else MODELS[settings.model].name
    workload = f"{name}-b{settings.batch}-s{settings.seq}"
    commit, _ = environment.git_state()
    try:
        folder = new_folder(out, workload, settings.hardware, commit)
    except OSError as error:
        options.refuse(f"--out {out}: {error}")
    settings = replace(
        settings, run_id=folder.name, model_name=name, rows=[asdict(row) for row in rows]
    )
    try:
        save_settings(folder, settings)
    except OSError as error:
        folder.rmdir()
        raise OSError(f"--out {folder}: {error}") from error
    return folder, settings


def _execute(
    folder: Path, settings: Settings, batches: np.ndarray, console: Console
) -> list[records.Record]:
    progress = options.progress(console)

    def say(text: str) -> None:
        progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    job = Run(settings, folder, batches, environment.describe(), say)
    earlier, damaged = records.load(folder)
    problem = job.mismatch(earlier)
    if problem:
        options.refuse(f"--resume {folder}: rows would not compare: {problem}")
    rows = job.remaining(earlier)
    done, total = len(earlier), len(earlier) + len(rows)
    for message in damaged:
        say(message)
    commits = {str(record.environment.get("commit")) for record in earlier}
    if commits - {job.environment["commit"]}:
        say(f"earlier rows are of commit {', '.join(sorted(commits))}")
    say(f"run {folder}: {total} rows of {settings.model_name} on {settings.hardware}")
    names = [row.id for _, _, row in rows] + ["done"]
    try:
        with progress, ExitStack() as stack:
            task = progress.add_task(names[0], total=total, completed=done)
            executed = stack.enter_context(closing(job.execute(rows)))
            for record, following in zip(executed, names[1:], strict=True):
                done += 1
                say(f"[{done}/{total}] {_outcome(record)}  {record.row}  {record.notes}".rstrip())
                progress.update(task, completed=done, description=following)
    except KeyboardInterrupt:
        say(f"what was measured is saved; go on with: forge-bench --resume {folder}")
        raise
    found, _ = records.load(folder)
    drift = noise.drift_pct(found)
    if drift is not None:
        save_settings(folder, replace(settings, drift_pct=round(drift, 2)))
        if noise.drift_note(drift):
            say(f"run marked: {noise.drift_note(drift)}, of {noise.witness(found)[0].row}")
    return found


def _outcome(record: records.Record) -> str:
    ms = record.latency_ms
    return f"{record.status:>12}" if ms is None else f"{ms:9.2f} ms"


def _report(
    found: list[records.Record], settings: Settings, console: Console, as_json: bool
) -> None:
    merged = leaderboard.merge_repeats(found)
    try:
        others = leaderboard.published_rows(RESULTS / "published.csv")
    except ValueError as error:  # what was measured is shown all the same
        options.warn([str(error)])
        others = []
    setting = (settings.model_name, settings.batch, settings.seq)
    published = [row for row in others if (row["model"], row["batch"], row["seq"]) == setting]
    frame = leaderboard.table([*map(leaderboard.measured_row, merged), *published])
    if as_json:
        options.show_json(json.loads(frame.to_json(orient="records")))
        return
    title = (
        f"{settings.model_name}, batch {settings.batch}, sequence {settings.seq}, "
        f"{settings.dtype}, on {settings.hardware}"
    )
    if settings.device == "cpu":
        title += "\nA CPU run: it shows that every part works and says nothing about a GPU."
    options.show_table(console, tables.result_table(frame, title), tables.SPARE)
    for line in tables.remarks(frame):
        console.print(line, markup=False, highlight=False, soft_wrap=True)

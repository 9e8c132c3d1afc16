"""``forge-bench``: runs the benchmark, lists the methods, regenerates the leaderboard."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forge.harness import environment, leaderboard, records, tables
from forge.harness.execution import EXECUTIONS
from forge.harness.rows import KERNELS, Row, select_rows
from forge.harness.runner import (
    Run,
    Settings,
    batches_of,
    load_settings,
    new_folder,
    save_settings,
)
from forge.harness.workloads import ATTENTION, MODELS
from forge.optim.registry import REGISTRY

RESULTS = Path("results")
# Newer typer carries its own copy of click: the common base is reached through typer.
USAGE_ERROR: Any = typer.BadParameter.__base__
SUBCOMMANDS = ("run", "list", "leaderboard")

HELP = """Measure optimizers on the same training step.

`forge-bench --optimizers all` runs the benchmark; options without a command mean `run`, and
`forge-bench run --help` lists them.
"""
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=HELP)


def main() -> None:
    """Entry point. Options without a subcommand mean ``run``."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in (*SUBCOMMANDS, "--help"):
        arguments = ["run", *arguments]
    try:
        sys.exit(app(arguments, standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        typer.echo(f"forge-bench: {error.format_message()}", err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)


def _refuse(message: str) -> NoReturn:
    typer.echo(f"forge-bench: {message}", err=True)
    raise typer.Exit(2)


@app.command()
def run(
    context: typer.Context,
    optimizers: Annotated[str, typer.Option(help="all, or keys separated by commas")] = "all",
    model: Annotated[
        str | None, typer.Option(help=f"one of {', '.join(MODELS)} (default: 0.6b, tiny on a CPU)")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="a checkpoint: folder or hub id (default: random weights)")
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int | None, typer.Option(min=2, help="default: 512, 128 on a CPU")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="timed steps (default: by the speed of the row)")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=1, help="untimed steps (default: 20, 2 on a CPU)")
    ] = None,
    states: Annotated[str | None, typer.Option(help="only methods that store states so")] = None,
    kernels: Annotated[
        str | None, typer.Option(help=f"the model's kernels: {', '.join(KERNELS)}")
    ] = None,
    attention: Annotated[str, typer.Option(help="sdpa or flash")] = "sdpa",
    execution: Annotated[str | None, typer.Option(help=f"{', '.join(EXECUTIONS)}")] = None,
    data: Annotated[str, typer.Option(help="stdlib, random, or a text file or folder")] = "stdlib",
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if any)")] = None,
    out: Annotated[Path, typer.Option(help="where the run's folder is made")] = RESULTS / "runs",
    seed: Annotated[int, typer.Option(help="weights, data and order of the rows")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="interleaved passes over the rows")] = 1,
    repeat_only: Annotated[
        str, typer.Option(help="keys or row ids that passes after the first measure (default: all)")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1, help="seconds a row may take")] = 900.0,
    resume: Annotated[
        Path | None, typer.Option(help="go on with an interrupted run (its folder)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="results as JSON on stdout")] = False,
) -> None:
    """Measure step time and peak memory of every method on the same work."""
    console = _console(stderr=as_json)
    if resume is not None:
        _only_resume(context)
        folder, settings = resume, _checked(load_settings, resume)
        settings = replace(settings, hardware=_hardware(_device(settings.device)))
        batches = _checked(batches_of, settings)
    else:
        where = _device(device)
        settings = Settings(
            run_id="",
            model=_model(model, weights, where),
            model_name="",
            weights=weights,
            batch=batch,
            seq=seq or (512 if where == "cuda" else 128),
            steps=steps or (None if where == "cuda" else 5),
            warmup=warmup or (20 if where == "cuda" else 2),
            attention=_attention(attention, where),
            data=data,
            device=where,
            dtype="bfloat16",
            seed=seed,
            repeat=repeat,
            repeat_only=_keys(repeat_only),
            hardware=_hardware(where),
            timeout_s=timeout,
            rows=[],
        )
        rows = _rows(optimizers, where, kernels, execution, states, weights)
        _check_repeats(settings, rows)
        batches = _checked(batches_of, settings)
        folder, settings = _create(out, settings, rows)
    found = _execute(folder, settings, batches, console)
    _report(found, settings, console, as_json)


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # A pipe or a file has no width; 80 columns would cut the tables.
    return console if console.is_terminal else Console(stderr=stderr, width=180)


def _only_resume(context: typer.Context) -> None:
    given = [
        name
        for name in context.params
        if name not in ("resume", "as_json")
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        _refuse(f"--resume takes every setting from the run's folder; drop --{given[0]}")


def _checked(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        _refuse(str(error))


def _device(asked: str | None) -> str:
    found = bool(environment.gpus())
    if asked not in (None, "cuda", "cpu"):
        _refuse(f"--device: unknown {asked!r}; valid: cuda, cpu")
    if asked == "cuda" and not found:
        _refuse("--device cuda: no NVIDIA GPU here; use --device cpu")
    return asked or ("cuda" if found else "cpu")


def _hardware(device: str) -> str:
    if device == "cpu":
        return environment.cpu_name()
    visible = environment.gpus()
    return visible[0]["name"].removeprefix("NVIDIA ") if visible else "none"


def _model(asked: str | None, weights: str | None, device: str) -> str:
    if asked and weights:
        _refuse("--model and --weights: a checkpoint brings its own model, give one of the two")
    if weights and Path(weights).is_dir() and not (Path(weights) / "config.json").exists():
        _refuse(f"--weights {weights}: the folder holds no config.json")
    if asked and asked not in MODELS:
        _refuse(f"--model: unknown {asked!r}; valid: {', '.join(MODELS)}")
    return asked or ("qwen3-0.6b" if device == "cuda" else "qwen3-tiny")


def _attention(asked: str, device: str) -> str:
    if asked not in ATTENTION:
        _refuse(f"--attention: unknown {asked!r}; valid: {', '.join(ATTENTION)}")
    if asked == "flash" and device != "cuda":
        _refuse("--attention flash: FlashAttention needs a CUDA device; use --attention sdpa")
    if asked == "flash" and importlib.util.find_spec("flash_attn") is None:
        _refuse("--attention flash: flash-attn is not installed; use --attention sdpa")
    return asked


def _rows(
    optimizers: str,
    device: str,
    kernels: str | None,
    execution: str | None,
    states: str | None,
    weights: str | None,
) -> list[Row]:
    if kernels is not None and kernels not in KERNELS:
        _refuse(f"--kernels: unknown {kernels!r}; valid: {', '.join(KERNELS)}")
    if execution is not None and execution not in EXECUTIONS:
        _refuse(f"--execution: unknown {execution!r}; valid: {', '.join(EXECUTIONS)}")
    if device == "cpu" and kernels is not None and kernels.startswith("liger"):
        _refuse(f"--kernels {kernels}: Liger's kernels need a CUDA device; use --kernels hf")
    if device == "cpu" and execution is not None and "cuda_graph" in execution:
        _refuse(f"--execution {execution}: a CUDA graph needs a CUDA device; use eager")
    keys = _keys(optimizers)
    if not keys:
        _refuse(f"--optimizers: empty; valid: all, {', '.join(REGISTRY)}")
    return _checked(select_rows, keys, device, kernels, execution, states)


def _keys(text: str) -> list[str]:
    return [key.strip() for key in text.split(",") if key.strip()]


def _check_repeats(settings: Settings, rows: list[Row]) -> None:
    known = {name for row in rows for name in (row.key, row.id)}
    unknown = [name for name in settings.repeat_only if name not in known]
    if unknown:
        _refuse(f"--repeat-only: not in this run: {', '.join(unknown)}")
    if settings.repeat_only and settings.repeat == 1:
        _refuse("--repeat-only: says what to measure again, but --repeat is 1")


def _create(out: Path, settings: Settings, rows: list[Row]) -> tuple[Path, Settings]:
    name = Path(settings.weights).name if settings.weights else MODELS[settings.model].name
    workload = f"{name}-b{settings.batch}-s{settings.seq}"
    commit, _ = environment.git_state()
    try:
        folder = new_folder(out, workload, settings.hardware, commit)
    except OSError as error:
        _refuse(f"--out {out}: {error}")
    settings = replace(
        settings, run_id=folder.name, model_name=name, rows=[asdict(row) for row in rows]
    )
    save_settings(folder, settings)
    return folder, settings


def _execute(
    folder: Path, settings: Settings, batches: np.ndarray, console: Console
) -> list[records.Record]:
    total = len(settings.schedule())
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def say(text: str) -> None:
        progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    job = Run(settings, folder, batches, environment.describe(), say)
    earlier, damaged = records.load(folder)
    problem = job.mismatch(earlier)
    if problem:
        _refuse(f"--resume {folder}: rows would not compare: {problem}")
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
        with progress:
            task = progress.add_task(names[0], total=total, completed=done)
            for record, following in zip(job.execute(rows), names[1:], strict=True):
                done += 1
                say(f"[{done}/{total}] {_outcome(record)}  {record.row}  {record.notes}".rstrip())
                progress.update(task, completed=done, description=following)
    except KeyboardInterrupt:
        say(f"interrupted; go on with: forge-bench --resume {folder}")
        raise typer.Exit(130) from None
    return records.load(folder)[0]


def _outcome(record: records.Record) -> str:
    ms = record.latency_ms
    return f"{record.status:>12}" if ms is None else f"{ms:9.2f} ms"


def _report(
    found: list[records.Record], settings: Settings, console: Console, as_json: bool
) -> None:
    merged = leaderboard.merge_repeats(found)
    published = [
        row
        for row in leaderboard.published_rows(RESULTS / "published.csv")
        if (row["model"], row["batch"], row["seq"])
        == (settings.model_name, settings.batch, settings.seq)
    ]
    frame = leaderboard.table([*map(leaderboard.measured_row, merged), *published])
    if as_json:
        print(json.dumps(json.loads(frame.to_json(orient="records")), indent=1))
        return
    title = (
        f"{settings.model_name}, batch {settings.batch}, sequence {settings.seq}, "
        f"{settings.dtype}, on {settings.hardware}"
    )
    if settings.device == "cpu":
        title += "\nA CPU run: it shows that every part works and says nothing about a GPU."
    console.print(tables.result_table(frame, title))
    for line in tables.remarks(frame):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command("list")
def list_methods() -> None:
    """Show every method: package, licence, states, limits."""
    _console().print(tables.methods_table(list(REGISTRY.values()), environment.package_version))


@app.command("leaderboard")
def regenerate(
    runs: Annotated[Path, typer.Option(help="folder of runs")] = RESULTS / "runs",
    target: Annotated[Path, typer.Option(help="the file to write")] = RESULTS / "leaderboard.csv",
    published: Annotated[Path, typer.Option(help="what others published")] = RESULTS
    / "published.csv",
    include_cpu: Annotated[bool, typer.Option(help="keep rows measured on a CPU")] = False,
    readme: Annotated[
        Path | None, typer.Option(help="also rewrite the table between this file's markers")
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run", help="the run the README shows")] = None,
) -> None:
    """Regenerate leaderboard.csv (and the README's table) from the recorded runs."""
    if not runs.is_dir():
        _refuse(f"--runs {runs}: no such folder")
    for message in leaderboard.write(runs, published, target, include_cpu):
        typer.echo(message, err=True)
    typer.echo(f"wrote {target}")
    if readme is None:
        return
    import pandas as pd

    frame = pd.read_csv(target)
    if run_id is None:
        measured = frame[frame["source"] == "measured"]["run_id"]
        if measured.empty:
            _refuse("--readme: the leaderboard has no measured run")
        run_id = str(measured.max())
    _checked(tables.rewrite_readme, readme, _checked(tables.markdown, frame, run_id))
    typer.echo(f"wrote the table of {run_id} into {readme}")


if __name__ == "__main__":
    main()

"""``forge-bench``: its commands. ``run``, ``list`` and ``leaderboard`` are here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from forge.harness import (
    compare,
    environment,
    estimate,
    gate,
    kernel_bench,
    leaderboard,
    noise,
    ofu_sweep,
    options,
    profile,
    profiles,
    publish,
    records,
    roofline,
    tables,
    validate,
    verdict,
)
from forge.harness.execution import EXECUTIONS
from forge.harness.files import Patient, locked, write_atomically
from forge.harness.logs import LOG_FILE
from forge.harness.options import RESULTS
from forge.harness.rows import KERNELS, Row
from forge.harness.runner import (
    MOST,
    MOST_PASSES,
    Run,
    Settings,
    batches_of,
    load_settings,
    new_folder,
    save_settings,
)
from forge.harness.workloads import MODELS
from forge.optim.registry import REGISTRY, plugins

# Newer typer carries its own copy of click: the common base is reached through typer.
USAGE_ERROR: Any = typer.BadParameter.__base__

HELP = """Measure optimizers on the same training step.

Options without a command mean `run`; `forge-bench run --help` lists them.

\b
Examples:
  forge-bench --optimizers all
  forge-bench --install-completion

\b
Exit codes:
  0    done: every row ended in a status, which may be that it failed
  1    a gate failed (check), or the results could not be written
  2    bad input: one line says what to change, nothing was changed
  130  interrupted: what was measured is saved
"""
OWN_OPTIONS = ("--help", "--install-completion", "--show-completion")
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)
app.command("check")(gate.command)
app.command("compare")(compare.command)
app.command("estimate")(estimate.command)
app.command("kernels")(kernel_bench.command)
app.command("ofu-sweep")(ofu_sweep.command)
app.command("profile")(profile.command)
app.command("publish")(publish.command)
app.command("roofline")(roofline.command)
app.command("validate")(validate.command)


def main() -> None:
    """Entry point. Options without a subcommand mean ``run``."""
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(stop, signal.default_int_handler)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    before, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    with redirect_stdout(Patient(sys.stdout)), redirect_stderr(Patient(sys.stderr)):
        try:
            sys.exit(_exit_code(sys.argv[1:]))
        finally:
            sys.unraisablehook = before
            sys.stdout.flush()
            sys.stderr.flush()


def _interrupt_again(lost: Any) -> None:
    # Ctrl-C during a garbage collection is raised in the next Python code, a finalizer often, and
    # what a finalizer raises is dropped: once more, when it has ended, and this function too, on a
    # busy machine.
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        sys.__unraisablehook__(lost)


def _exit_code(arguments: list[str]) -> int:
    _complete_options_of_run()
    commands = [str(command.name) for command in app.registered_commands]
    try:
        if arguments and arguments[0] not in (*OWN_OPTIONS, *commands):
            if arguments[0] and not arguments[0].startswith("-"):
                raise USAGE_ERROR(f"unknown command {arguments[0]}; valid: {', '.join(commands)}")
            arguments = ["run", *arguments]
        _refuse_empty(arguments)
        code = app(arguments, prog_name="forge-bench", standalone_mode=False) or 0
        if code != 130:  # what newer typer makes of an interrupt
            return code
    except USAGE_ERROR as error:
        typer.echo(f"forge-bench: {error.format_message()}", err=True)
        return 2
    except OSError as error:
        typer.echo(f"forge-bench: {error}", err=True)
        return 1
    except (typer.Abort, KeyboardInterrupt):
        pass
    typer.echo("forge-bench: interrupted", err=True)
    return 130


def _complete_options_of_run() -> None:
    # To a shell that completes, options without a command are those of `run`, too.
    for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):  # of bash; of zsh and fish
        found = re.match(r"(\S+\s+)(-\S*)", os.environ.get(name, ""))
        if "_FORGE_BENCH_COMPLETE" not in os.environ or not found:
            continue
        if len(found[2]) < 4 or not any(own.startswith(found[2]) for own in OWN_OPTIONS):
            os.environ[name] = f"{found[1]}run {os.environ[name][found.end(1) :]}"
            os.environ["COMP_CWORD"] = str(int(os.environ.get("COMP_CWORD", "0")) + 1)


def _refuse_empty(arguments: list[str]) -> None:
    # It would mean the current folder, or nothing at all.
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise USAGE_ERROR(f"{argument[:-1] or before}: empty, give a value")


@app.command("run")
def run(
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


@app.command("list")
def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """Show every method: package, licence, states, limits.

    \b
    Example:
      forge-bench list --json
    """
    found, problems = plugins()
    options.warn(problems)
    specs = [*REGISTRY.values(), *found.values()]
    if as_json:
        options.show_json([tables.method(spec, environment.package_version) for spec in specs])
    else:
        view = tables.methods_table(specs, environment.package_version)
        options.show_table(options.console(), view)


@app.command("leaderboard")
def regenerate(
    runs: Annotated[Path, typer.Option(help="folder of runs")] = RESULTS / "runs",
    target: Annotated[Path, typer.Option(help="the file to write")] = RESULTS / "leaderboard.csv",
    published: Annotated[Path, typer.Option(help="what others published")] = RESULTS
    / "published.csv",
    include_cpu: Annotated[bool, typer.Option(help="keep rows measured on a CPU")] = False,
    readme: Annotated[
        Path | None, typer.Option(help="also rewrite the tables between this file's markers")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run", help="the run the README shows (default: the fullest)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the rows as JSON on stdout")] = False,
) -> None:
    """Regenerate leaderboard.csv (and the README's table) from the recorded runs.

    \b
    Example:
      forge-bench leaderboard --readme README.md
    """
    if not runs.is_dir():
        options.refuse(f"--runs {runs}: no such folder")
    if published != RESULTS / "published.csv" and not published.is_file():
        options.refuse(f"--published {published}: no such file")
    if run_id is not None and readme is None:
        options.refuse(f"--run {run_id}: chooses the README's table, give --readme too")
    board = options.checked(leaderboard.read, runs, published, include_cpu)
    options.warn(board.damaged)
    text = ""
    if readme is not None:
        if run_id is None:
            run_id = leaderboard.headline(board.rows)
        if run_id is None:
            options.refuse(
                f"--readme: no run measured on a GPU in {runs}; give --runs FOLDER, or "
                "--include-cpu for those of a CPU"
            )
        text = options.checked(tables.markdown, board.frame, run_id, brief=True)
        text = options.checked(tables.with_table, readme, text)
        found, damaged = profiles.load_all(runs)
        options.warn(damaged)
        text = tables.with_budget(text, found)
        trained = verdict.measured(runs)
        if trained:
            text = tables.with_fidelity(text, verdict.markdown(trained))
    with options.naming(f"--target {target}"):
        leaderboard.write(board, target)
    if readme is not None:
        with options.naming(f"--readme {readme}"):
            write_atomically(readme, text)
    if as_json:
        options.show_json(json.loads(board.frame.to_json(orient="records")))
        return
    typer.echo(f"wrote {target}")
    if readme is not None:
        typer.echo(f"wrote the table of {run_id} into {readme}")


if __name__ == "__main__":
    main()

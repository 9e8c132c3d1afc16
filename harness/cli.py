"""``forge-bench``: its commands. ``list`` and ``leaderboard`` are here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from forge.harness import (
    compare,
    environment,
    estimate,
    gate,
    kernel_bench,
    leaderboard,
    ofu_sweep,
    options,
    profile,
    profiles,
    publish,
    roofline,
    run,
    tables,
    validate,
    verdict,
)
from forge.harness.files import Patient, write_atomically
from forge.harness.options import RESULTS
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
app.command("run")(run.command)


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

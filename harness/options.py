"""What the commands share: values of options checked in one place, refusals, the console."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forge.harness import environment
from forge.harness.execution import EXECUTIONS
from forge.harness.rows import KERNELS, Row, select_rows
from forge.harness.tables import fitted
from forge.harness.workloads import ATTENTION, MODELS
from forge.optim.registry import REGISTRY

RESULTS = Path("results")
ATTENTION_HELP = "auto (sdpa, or what --kernels forge takes), sdpa, flash, forge"


def refuse(message: str) -> NoReturn:
    """End with ``message`` on stderr and exit code 2: bad input, nothing was changed."""
    typer.echo(f"forge-bench: {message}", err=True)
    raise typer.Exit(2)


def console(stderr: bool = False) -> Console:
    """Where tables go."""
    terminal = Console(stderr=stderr)
    # A pipe or a file has no width; 80 columns would cut the tables.
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=180)


def progress(terminal: Console) -> Progress:
    """A bar with the time that is left, on a terminal; nothing in a pipe or a file."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal,
        disable=not terminal.is_terminal,
    )


def show_table(terminal: Console, view: Table, spare: Sequence[str] = ()) -> None:
    """Print ``view`` as :func:`forge.harness.tables.fitted` makes it fit the terminal."""
    terminal.print(fitted(view, terminal.width, spare))


def show_json(value: Any) -> None:
    """Print ``value``, and nothing else, on stdout."""
    print(json.dumps(value, indent=1, allow_nan=False))


def warn(messages: Iterable[str]) -> None:
    """Damaged lines, plug-ins that do not load: said on stderr, and the work goes on."""
    for message in messages:
        typer.echo(f"forge-bench: {message}", err=True)


def checked(function: Any, *arguments: Any, **named: Any) -> Any:
    """``function(*arguments, **named)``; its ValueError is a refusal."""
    try:
        return function(*arguments, **named)
    except ValueError as error:
        refuse(str(error))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Begin the message of an OSError raised inside with ``what`` could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error}") from error


def device(asked: str | None) -> str:
    """``cuda`` or ``cpu``."""
    found = bool(environment.gpus())
    if asked not in (None, "cuda", "cpu"):
        refuse(f"--device: unknown {asked!r}; valid: cuda, cpu")
    if asked == "cuda" and not found:
        refuse("--device cuda: no NVIDIA GPU here; use --device cpu")
    return asked or ("cuda" if found else "cpu")


def hardware(where: str) -> str:
    """Name of the GPU or the processor."""
    if where == "cpu":
        return environment.cpu_name()
    visible = environment.gpus()
    return visible[0]["name"].removeprefix("NVIDIA ") if visible else "none"


def model(asked: str | None, weights: str | None, device: str) -> str:
    """Key of the model."""
    if asked and weights:
        refuse("--model and --weights: a checkpoint brings its own model, give one of the two")
    if weights and Path(weights).is_dir() and not (Path(weights) / "config.json").exists():
        refuse(f"--weights {weights}: the folder holds no config.json")
    if asked and asked not in MODELS:
        refuse(f"--model: unknown {asked!r}; valid: {', '.join(MODELS)}")
    return asked or ("qwen3-0.6b" if device == "cuda" else "qwen3-tiny")


def attention(asked: str, device: str, rows: Sequence[Row]) -> str:
    """``asked``, if all ``rows`` can have it."""
    if asked not in ATTENTION:
        refuse(f"--attention: unknown {asked!r}; valid: {', '.join(ATTENTION)}")
    if asked == "flash" and device != "cuda":
        refuse("--attention flash: FlashAttention needs a CUDA device; use --attention sdpa")
    if asked == "flash" and importlib.util.find_spec("flash_attn") is None:
        refuse("--attention flash: flash-attn is not installed; use --attention sdpa")
    if asked == "forge" and device != "cuda":
        refuse("--attention forge: its kernel needs a CUDA device; use --attention sdpa")
    others = [row.id for row in rows if row.kernels != "forge"]
    if asked == "forge" and others:
        refuse(f"--attention forge: not for {', '.join(others)}; add --kernels forge")
    return asked


def rows(
    optimizers: str,
    device: str,
    kernels: str | None,
    execution: str | None,
    states: str | None,
    named: str = "--optimizers",
) -> list[Row]:
    """The rows that the options choose; ``named`` is the one of the methods."""
    if kernels is not None and kernels not in KERNELS:
        refuse(f"--kernels: unknown {kernels!r}; valid: {', '.join(KERNELS)}")
    if execution is not None and execution not in EXECUTIONS:
        refuse(f"--execution: unknown {execution!r}; valid: {', '.join(EXECUTIONS)}")
    if device == "cpu" and kernels is not None and kernels.startswith("liger"):
        refuse(f"--kernels {kernels}: Liger's kernels need a CUDA device; use --kernels hf")
    if device == "cpu" and execution is not None and "cuda_graph" in execution:
        refuse(f"--execution {execution}: a CUDA graph needs a CUDA device; use eager")
    chosen = methods(optimizers, named)
    return checked(select_rows, chosen, device, kernels, execution, states, named)


def methods(text: str, named: str = "--optimizers") -> list[str]:
    """The methods of a comma-separated list; those of other packages can be imported then."""
    chosen = keys(text)
    if not chosen:
        refuse(f"{named}: empty; valid: all, {', '.join(REGISTRY)}")
    if "all" in chosen and len(chosen) > 1:
        refuse(f"{named}: all is every method already, give it alone")
    if any(":" in key for key in chosen):
        # A console script lacks what `python -m` has: the folder it is started in. Last, so that
        # nothing in there hides an installed package.
        sys.path.append(os.getcwd())
    return chosen


def keys(text: str) -> list[str]:
    """Items of a comma-separated list."""
    return [key.strip() for key in text.split(",") if key.strip()]


def only_resume(context: typer.Context, *others: str) -> None:
    """Refuse options beside ``--resume``, which takes every setting from the run's folder.

    ``others``: options that are no settings.
    """
    given = [
        name
        for name in context.params
        if name not in ("resume", "as_json", *others)
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        refuse(f"--resume takes every setting from the run's folder; drop --{given[0]}")

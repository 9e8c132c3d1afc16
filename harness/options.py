"""What the commands of ``forge-bench`` share: checking options, refusing them, the console."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import IO, Any, NoReturn

import typer
from rich.console import Console

from forge.harness import environment
from forge.harness.execution import EXECUTIONS
from forge.harness.rows import KERNELS, Row, select_rows
from forge.harness.workloads import ATTENTION, MODELS
from forge.optim.registry import REGISTRY

WIDTH = 180
MODEL_HELP = f"{', '.join(MODELS)}, or a Hugging Face configuration: folder or json"


def refuse(message: str) -> NoReturn:
    """End the command: ``message`` names the option and the way out."""
    typer.echo(f"forge-bench: {message}", err=True)
    raise typer.Exit(2)


def console(stderr: bool = False) -> Console:
    """Where tables go."""
    terminal = Console(stderr=stderr)
    # A pipe or a file has no width; 80 columns would cut the tables.
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=WIDTH)


def file_console(file: IO[str]) -> Console:
    """The same for a text file."""
    return Console(file=file, width=WIDTH)


def checked(function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``; a ValueError's message refuses the command."""
    try:
        return function(*arguments)
    except ValueError as error:
        refuse(str(error))


def device(asked: str | None) -> str:
    """``cuda`` or ``cpu``: as asked, or what there is."""
    found = bool(environment.gpus())
    if asked not in (None, "cuda", "cpu"):
        refuse(f"--device: unknown {asked!r}; valid: cuda, cpu")
    if asked == "cuda" and not found:
        refuse("--device cuda: no NVIDIA GPU here; use --device cpu")
    return asked or ("cuda" if found else "cpu")


def hardware(device: str) -> str:
    """Name of the GPU or processor that ``device`` is."""
    if device == "cpu":
        return environment.cpu_name()
    visible = environment.gpus()
    return visible[0]["name"].removeprefix("NVIDIA ") if visible else "none"


def model(asked: str | None, weights: str | None, device: str) -> str:
    """Key of the model, which a checkpoint replaces."""
    if asked and weights:
        refuse("--model and --weights: a checkpoint brings its own model, give one of the two")
    if weights and Path(weights).is_dir() and not (Path(weights) / "config.json").exists():
        refuse(f"--weights {weights}: the folder holds no config.json")
    if asked and asked not in MODELS:
        refuse(f"--model: unknown {asked!r}; valid: {', '.join(MODELS)}")
    return asked or ("qwen3-0.6b" if device == "cuda" else "qwen3-tiny")


def attention(asked: str, device: str) -> str:
    """The implementation asked for, if it can run."""
    if asked not in ATTENTION:
        refuse(f"--attention: unknown {asked!r}; valid: {', '.join(ATTENTION)}")
    if asked == "flash" and device != "cuda":
        refuse("--attention flash: FlashAttention needs a CUDA device; use --attention sdpa")
    if asked == "flash" and importlib.util.find_spec("flash_attn") is None:
        refuse("--attention flash: flash-attn is not installed; use --attention sdpa")
    return asked


def rows(
    optimizers: str,
    device: str,
    kernels: str | None,
    execution: str | None,
    states: str | None,
    weights: str | None,
) -> list[Row]:
    """The rows that ``--optimizers`` and its filters choose."""
    if kernels == "forge":
        refuse("--kernels forge: comes with the whole-step kernels, not in this version")
    if kernels is not None and kernels not in KERNELS:
        refuse(f"--kernels: unknown {kernels!r}; valid: {', '.join(KERNELS)}")
    if execution is not None and execution not in EXECUTIONS:
        refuse(f"--execution: unknown {execution!r}; valid: {', '.join(EXECUTIONS)}")
    if device == "cpu" and kernels is not None and kernels.startswith("liger"):
        refuse(f"--kernels {kernels}: Liger's kernels need a CUDA device; use --kernels hf")
    if device == "cpu" and execution is not None and "cuda_graph" in execution:
        refuse(f"--execution {execution}: a CUDA graph needs a CUDA device; use eager")
    chosen = keys(optimizers)
    if not chosen:
        refuse(f"--optimizers: empty; valid: all, {', '.join(REGISTRY)}")
    return checked(select_rows, chosen, device, kernels, execution, states)


def keys(text: str) -> list[str]:
    """Split at commas."""
    return [key.strip() for key in text.split(",") if key.strip()]

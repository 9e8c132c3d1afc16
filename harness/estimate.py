"""``forge-bench estimate``: predicted peak memory of every method, before running anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from forge.harness import options
from forge.harness.execution import EXECUTIONS
from forge.harness.memory import GIB
from forge.harness.memory_model import LOGIT_BYTES, estimate
from forge.harness.shapes import MODEL_HELP, Shape, load_shape
from forge.optim.registry import REGISTRY, find, plugins

HELD = ("weights", "states", "gradients", "activations", "logits", "temporaries", "workspaces")


def predictions(
    shape: Shape, batch: int, seq: int, keys: list[str], kernels: str, execution: str
) -> list[dict[str, Any]]:
    """One row a method, the smallest peak first: GiB by what holds them, and ``moment``.

    Methods without a footprint come last, with ``peak_gib`` None.
    """
    rows: list[dict[str, Any]] = []
    for key in keys:
        spec = find(key)
        row: dict[str, Any] = dict(key=key, method=spec.method, stored=spec.states, peak_gib=None)
        if spec.footprint is not None:
            found = estimate(shape, batch, seq, spec.footprint, kernels, execution)
            row["peak_gib"] = found.peak / GIB
            row |= {name: getattr(found, name) / GIB for name in HELD}
            row["moment"] = found.moment
        rows.append(row)
    return sorted(rows, key=lambda row: row["peak_gib"] or float("inf"))


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    optimizers: Annotated[str, typer.Option(help="all, or keys separated by commas")] = "all",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int, typer.Option(min=2)] = 512,
    kernels: Annotated[str, typer.Option(help=", ".join(LOGIT_BYTES))] = "liger",
    execution: Annotated[str, typer.Option(help=", ".join(EXECUTIONS))] = "eager",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout")] = False,
) -> None:
    """Predict the peak memory of every method on a Hopper GPU, in bf16; needs no GPU.

    \b
    Example:
      forge-bench estimate qwen3-8b --seq 4096 --optimizers adamw-fused,forge-bf16
    """
    if kernels not in LOGIT_BYTES:
        options.refuse(f"--kernels: unknown {kernels!r}; valid: {', '.join(LOGIT_BYTES)}")
    if execution not in EXECUTIONS:
        options.refuse(f"--execution: unknown {execution!r}; valid: {', '.join(EXECUTIONS)}")
    keys = [*REGISTRY, *plugins()[0]] if optimizers == "all" else options.methods(optimizers)
    name, shape = options.checked(load_shape, model)
    try:
        rows = predictions(shape, batch, seq, keys, kernels, execution)
    except ValueError as error:
        options.refuse(f"--optimizers: {error}")
    if as_json:
        work = dict(model=name, batch=batch, seq=seq, kernels=kernels, execution=execution)
        print(json.dumps(work | dict(shape=asdict(shape), methods=rows), indent=1))
        return
    title = f"{name}, batch {batch}, sequence {seq}, bf16, {kernels}, {execution}: predicted GiB"
    options.show_table(options.console(), _table(rows, title))


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    view = Table(title=title, title_justify="left")
    for name in ("key", "method", "stored"):
        view.add_column(name)
    for name in ("peak", *HELD):
        view.add_column(name, justify="right")
    view.add_column("peak at")
    for row in rows:
        cells = [row["key"], row["method"], row["stored"]]
        if row["peak_gib"] is None:
            view.add_row(*cells, "not known: its spec has no footprint")
            continue
        numbers = [row["peak_gib"], *(row[name] for name in HELD)]
        view.add_row(*cells, *(f"{number:.2f}" for number in numbers), row["moment"])
    return view

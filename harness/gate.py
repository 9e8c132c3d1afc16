"""``forge-bench check``: the gates alone, nothing is timed or recorded."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forge.harness import environment, options
from forge.harness.records import Record
from forge.harness.runner import Run
from forge.harness.settings import MOST, Settings, batches_of, save_settings
from forge.harness.workloads import MODELS


def command(
    methods: Annotated[str, typer.Argument(metavar="METHOD", help="as in --optimizers")],
    model: Annotated[
        str | None, typer.Option(help=f"one of {', '.join(MODELS)} (default: 0.6b, tiny on a CPU)")
    ] = None,
    kernels: Annotated[str | None, typer.Option(help="the model's kernels")] = None,
    execution: Annotated[str | None, typer.Option(help="how the step is launched")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int, typer.Option(min=2)] = 128,
    data: Annotated[str, typer.Option(help="stdlib, random, or a text file or folder")] = "stdlib",
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if any)")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="weights and data")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, max=MOST, help="seconds a gate may take")
    ] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """Does a method train as AdamW with fp32 weights and states does? Runs its gate, no timing.

    Exit code 0: every gate that can run here passed, and there was one; 1: otherwise.

    \b
    Examples:
      forge-bench check forge-bf16
      forge-bench check my_package.my_module:SPEC --device cpu
    """
    where = options.device(device)
    rows = options.rows(methods, where, kernels, execution, None, "METHOD")
    settings = options.checked(
        Settings,
        run_id="",
        model=options.model(model, None, where),
        model_name="",
        weights=None,
        batch=batch,
        seq=seq,
        steps=None,
        warmup=1,
        attention="sdpa",
        data=data,
        device=where,
        dtype="bfloat16",
        seed=seed,
        repeat=1,
        repeat_only=[],
        hardware=options.hardware(where),
        timeout_s=timeout,
        rows=[asdict(row) for row in rows],
    )
    batches = options.checked(batches_of, settings)
    console = options.console(stderr=as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    found = []
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        save_settings(Path(folder), settings)
        run = Run(settings, Path(folder), batches, environment.describe(), say, gate_only=True)
        todo = run.remaining([])
        with options.progress(console) as progress, closing(run.execute(todo)) as executed:
            task = progress.add_task("gates", total=len(todo))
            for record in executed:
                found.append(record)
                say(_line(record))
                progress.advance(task)
    if as_json:
        options.show_json([_facts(record) for record in found])
    if not _passed(found):
        raise typer.Exit(1)


def _line(record: Record) -> str:
    if record.gate != "pass":
        return f"{record.status:>11}  {record.row}  {record.notes}"
    detail = record.gate_detail
    ends = f"loss {detail['losses'][-1]:.3f}, reference {detail['reference_losses'][-1]:.3f}"
    return f"       pass  {record.row}  after {detail['steps']} steps: {ends}"


def _facts(record: Record) -> dict[str, object]:
    names = ("row", "method", "status", "gate", "notes", "loss", "gate_detail")
    return {name: getattr(record, name) for name in names}


def _passed(found: list[Record]) -> bool:
    """Nothing failed, and at least one gate ran: a method that is not installed proves nothing."""
    gates = {record.gate for record in found}
    wrong = any(record.status in ("failed", "oom") for record in found)
    return not wrong and "pass" in gates

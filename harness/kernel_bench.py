"""``forge-bench kernels``: time of single operations against their floors and their rivals.

What is measured is in ``harness/kernel_cases.py`` and ``update_cases.py``, how in
``kernel_timing.py``.
"""

from __future__ import annotations

import csv
import gc
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from forge.harness import environment, options, path_table
from forge.harness.data import MOST_TOKENS
from forge.harness.files import write_atomically
from forge.harness.kernel_cases import OPS, Case, model_cases
from forge.harness.kernel_timing import Row, measure
from forge.harness.logs import LOG_FILE
from forge.harness.options import RESULTS
from forge.harness.product_cases import PRODUCTS, product_cases
from forge.harness.settings import new_folder
from forge.harness.shapes import Shape, load_shape
from forge.harness.update_cases import OP as UPDATE
from forge.harness.update_cases import update_cases

COLUMNS = (
    "op, provider, case, tokens, dtype, ms, p20_ms, p80_ms, floor_ms, gb_per_s, tflop_per_s, "
    "max_rel_err, gate, hardware, torch, triton, date, commit"
).split(", ")
SAMPLES_FILE = "kernels.jsonl"
CPU_TOKENS = (16,)


def text_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV: numbers of five digits, empty where there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def read(path: Path) -> list[dict[str, str]]:
    """The rows of an earlier file; none if there is no file.

    Raises:
        ValueError: ``path`` is a folder, or a file with other columns.
    """
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder; give the file to write")
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or []) != COLUMNS:
            raise ValueError(f"--out {path}: not a file of `forge-bench kernels`; move it away")
        return list(reader)


def merged(earlier: Sequence[dict[str, str]], rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """``rows``, and what is left of ``earlier``.

    Rows of one operation, case, number of tokens and machine are replaced together: what stands
    side by side was measured together.
    """
    fresh = {row.group for row in rows}
    names = ("op", "case", "tokens", "hardware")
    kept = [row for row in earlier if tuple(row[name] for name in names) not in fresh]
    return [*kept, *map(asdict, rows)]


@dataclass(frozen=True)
class Plan:
    """What is to be measured: a case, a number of tokens, and who takes part."""

    case: Case
    tokens: int
    providers: tuple[str, ...]


def plan(
    cases: Sequence[Case], op: str, case: str, provider: str, tokens: Sequence[int]
) -> list[Plan]:
    """What the options choose; each a list separated by commas, empty for all.

    Raises:
        ValueError: an unknown name, or nothing is left; the message names the option.
    """
    chosen = {"--op": options.keys(op), "--case": options.keys(case)}
    chosen["--provider"] = options.keys(provider)
    valid = {"--op": [c.op for c in cases], "--case": [c.name for c in cases]}
    valid["--provider"] = [name for c in cases for name in c.providers]
    for option, names in chosen.items():
        unknown = [name for name in names if name not in valid[option]]
        if unknown:
            known = ", ".join(dict.fromkeys(valid[option]))
            raise ValueError(f"{option}: unknown {', '.join(unknown)}; valid: {known}")
    found = []
    for c in cases:
        if c.op not in (chosen["--op"] or [c.op]) or c.name not in (chosen["--case"] or [c.name]):
            continue
        taking_part = tuple(n for n in c.providers if n in (chosen["--provider"] or [n]))
        if taking_part:
            found += [Plan(c, count, taking_part) for count in tokens or c.tokens]
    if not found:
        raise ValueError("--op, --case, --provider: no case has all that they name; drop one")
    return found


def command(
    op: Annotated[
        str,
        typer.Option(
            help=f"{', '.join([UPDATE, *(known.name for known in OPS), PRODUCTS])}; separated by "
            "commas (default: all)"
        ),
    ] = "",
    case: Annotated[str, typer.Option(help="cases, likewise")] = "",
    provider: Annotated[
        str, typer.Option(help="forge, forge:PATH, torch, torch.compile, liger, scratch; likewise")
    ] = "",
    tokens: Annotated[
        str,
        typer.Option(help="likewise (default: 512, 4096, of the update also 1024; 16 on a CPU)"),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="the table to write, with a folder runs/ beside it "
            "(default: results/kernels.csv; none on a CPU)"
        ),
    ] = None,
    write_paths: Annotated[
        bool, typer.Option(help="also write what path='auto' chooses on this GPU, as measured")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if any)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the rows as JSON on stdout")] = False,
) -> None:
    """Measure each kernel beside its rivals and its floor, at the shapes of Qwen3-0.6B.

    On a CPU the references run, at the shapes of a tiny model.

    \b
    Examples:
      forge-bench kernels
      forge-bench kernels --op wgrad_update --tokens 512 --provider forge,torch
    """
    where = options.device(device)
    on_gpu = where == "cuda"
    model, shape = workload(on_gpu)
    cases = [*update_cases(model, shape, on_gpu), *model_cases(model, shape, on_gpu)]
    if on_gpu:
        cases += product_cases(model, shape)
    counts = _tokens(tokens) or ([] if on_gpu else list(CPU_TOKENS))
    if not on_gpu and PRODUCTS in options.keys(op):
        options.refuse(f"--op {PRODUCTS}: its kernels need an NVIDIA GPU; name other operations")
    plans = options.checked(plan, cases, op, case, provider, counts)
    if write_paths:
        _check_paths(plans, on_gpu)
    target = out or (RESULTS / "kernels.csv" if on_gpu else None)
    if target:
        options.checked(read, target)
    origin = _origin(where)
    folder = None
    if target:
        try:
            folder = new_folder(
                target.parent / "runs", "kernels", origin["hardware"], environment.git_state()[0]
            )
        except OSError as error:
            options.refuse(f"--out {target}: {error}")
    console = options.console(stderr=as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if folder:
            with (folder / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(text + "\n")

    rows: list[Row] = []
    with options.naming(f"--out {target}"), options.progress(console) as progress:
        say(", ".join(f"{key} {value}" for key, value in origin.items()))
        if not on_gpu:
            say("A CPU run: it shows that every part works and says nothing about a GPU.")
        task = progress.add_task("cases", total=len(plans))
        for number, item in enumerate(plans, start=1):
            say(f"[{number}/{len(plans)}] {item.case.op} {item.case.name}, {item.tokens} tokens")
            fresh = list(
                measure(item.case, item.tokens, item.providers, torch.device(where), origin)
            )
            rows += fresh
            for row in fresh:
                say(_line(row))
            if target and folder:
                with (folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
                    for row in fresh:
                        line = {**asdict(row), "environment": environment.describe()}
                        file.write(json.dumps(line) + "\n")
                # Read again: another run may have written since.
                others = options.checked(read, target)
                write_atomically(target, text_of(merged(others, rows)))
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            progress.advance(task)
    if write_paths:
        say(f"wrote {_write_paths(rows)}")
    if target:
        say(f"wrote {target} and {folder}")
    if as_json:
        options.show_json([asdict(row) for row in rows])
    else:
        where = origin["hardware"]
        console.print(_table(rows, f"Kernels at the shapes of {model} on {where}, bf16"))


def workload(on_gpu: bool) -> tuple[str, Shape]:
    """Name and shape of the model; on a CPU one layer of a tiny one."""
    if on_gpu:
        return "qwen3-0.6b", load_shape("qwen3-0.6b")[1]
    tiny = load_shape("qwen3-tiny")[1]
    return "tiny", replace(
        tiny, windows=(None,), hidden=128, heads=2, kv_heads=1, intermediate=256, vocab=1024
    )


def _origin(where: str) -> dict[str, str]:
    """What every row of this run has in common."""
    commit, dirty = environment.git_state()
    return dict(
        hardware=options.hardware(where),
        torch=environment.package_version("torch"),
        triton=environment.package_version("triton"),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=commit + ("-dirty" if dirty else ""),
    )


def _tokens(text: str) -> list[int]:
    found = options.keys(text)
    if not all(count.isdecimal() and 1 <= int(count) <= MOST_TOKENS for count in found):
        options.refuse(f"--tokens {text}: must be numbers from 1 to {MOST_TOKENS}, with commas")
    return [int(count) for count in dict.fromkeys(found)]


def _check_paths(plans: Sequence[Plan], on_gpu: bool) -> None:
    if not on_gpu:
        options.refuse("--write-paths: chooses by the time on a GPU; use --device cuda")
    if not any(path_table.decides(p.case.name) and path_table.complete(p.providers) for p in plans):
        options.refuse(
            f"--write-paths: needs {', '.join(path_table.PROVIDERS)} of the case "
            f"*{path_table.CASE}; drop --op, --case and --provider"
        )


def _write_paths(rows: Sequence[Row]) -> Path:
    deciding = [row for row in rows if path_table.decides(row.case)]
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    try:
        return path_table.write(capability, deciding)
    except ValueError as error:
        raise OSError(str(error)) from error


def _line(row: Row) -> str:
    head = f"  {row.provider:<14} {row.gate:<7}"
    if row.ms is None:
        return f"{head} {row.notes}"
    numbers = f"{row.ms:9.4f} ms ({row.p20_ms:.4f} to {row.p80_ms:.4f}), {row.gb_per_s:5.0f} GB/s"
    if row.tflop_per_s is not None:
        numbers += f", {row.tflop_per_s:.1f} TFLOP/s"
    if row.floor_ms is not None:
        numbers += f", {row.ms / row.floor_ms:.2f} x floor"
    if row.host_ms is not None:
        numbers += f", host {row.host_ms:.2f} ms"
    return f"{head} {numbers}, error {row.max_rel_err:.1e}"


def _table(rows: Sequence[Row], title: str) -> Table:
    view = Table(title=title, title_justify="left")
    left = ("op", "case", "tokens", "provider", "gate")
    for name in left:
        view.add_column(name, justify="right" if name == "tokens" else "left")
    for name in ("ms", "p20 to p80", "GB/s", "TFLOP/s", "x floor"):
        view.add_column(name, justify="right")
    for i, row in enumerate(rows):
        if i and row.group != rows[i - 1].group:
            view.add_section()
        cells = [row.op, row.case, str(row.tokens), row.provider, row.gate]
        if row.ms is not None:
            cells += [f"{row.ms:.4f}", f"{row.p20_ms:.4f} to {row.p80_ms:.4f}"]
            cells += [f"{row.gb_per_s:,.0f}"]
            cells += [f"{row.tflop_per_s:.1f}" if row.tflop_per_s is not None else ""]
            cells += [f"{row.ms / row.floor_ms:.2f}" if row.floor_ms else ""]
        view.add_row(*cells)
    return view

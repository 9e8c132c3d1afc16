"""``forge-bench kernels``: time of single operations against their floors and their rivals.

First the gate: the results of the very graph that is timed, against an fp64 truth. Then the
providers of a case take turns, each sample one replay of a CUDA graph, launched while the GPU is
busy with something else that also empties its L2.
"""

from __future__ import annotations

import csv
import gc
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from forge.harness import environment, hardware, options, path_table
from forge.harness.execution import recover
from forge.harness.files import write_atomically
from forge.harness.kernel_cases import TOLERANCE, Case, Run, Work, model_cases, relative_error
from forge.harness.options import RESULTS
from forge.harness.runner import LOG_FILE, new_folder
from forge.harness.shapes import Shape, load_shape
from forge.harness.timing import quantiles
from forge.harness.update_cases import OP as UPDATE
from forge.harness.update_cases import update_cases

COLUMNS = (
    "op, provider, case, tokens, dtype, ms, p20_ms, p80_ms, floor_ms, gb_per_s, tflop_per_s, "
    "max_rel_err, gate, hardware, torch, triton, date, commit"
).split(", ")
SAMPLES_FILE = "kernels.jsonl"
# Names of the same thing: cuBLAS into a reused scratch and the element-wise kernel is that path.
ALIASES = {"scratch": "forge:scratch"}
ROUNDS, WARM_ROUNDS = 40, 3
CPU_ROUNDS = 3
HOST_SAMPLES = 7
CPU_TOKENS = (16,)
FLUSH_BYTES = 2**30


@dataclass(frozen=True)
class Row:
    """One provider at one case and number of tokens: a line of ``kernels.jsonl``.

    Attributes:
        ms: median time of the work, and its 20th and 80th percentile; ``None``: not timed.
        floor_ms: the larger of its least bytes over the bandwidth and its operations over the
            matrix rate that the GPU is known to reach; ``None``: not known.
        gb_per_s, tflop_per_s: these bytes and operations over ``ms``.
        max_rel_err: the largest relative error among the results.
        gate: ``pass``; ``fail``, or ``skipped``: cannot be done here; ``notes`` say why.
        host_ms: median wall time of launching the work eagerly; of the update only.
    """

    op: str
    provider: str
    case: str
    tokens: int
    dtype: str
    hardware: str
    torch: str
    triton: str
    date: str
    commit: str
    gate: str
    notes: str = ""
    ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    floor_ms: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    max_rel_err: float | None = None
    host_ms: float | None = None
    samples_ms: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """What rows must share to be compared: they were measured together."""
        return (self.op, self.case, str(self.tokens), self.hardware)


@cache
def _filler() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


class Graph:
    """A run as a CUDA graph; on a CPU the run itself."""

    def __init__(self, run: Run, on_gpu: bool) -> None:
        self.run = run
        self.kept: Any = None
        self._graph: Any = None
        if not on_gpu:
            run()
            return
        stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with run.capturing():
            with torch.cuda.stream(stream):
                for _ in range(3):
                    run()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(self._graph, stream=stream):
                    self.kept = run()
            except Exception as error:
                recover(stream)
                # Ending a broken capture raises too; what broke it is that error's context.
                raise error.__context__ or error from None
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self) -> None:
        """Do the work once."""
        if self._graph is None:
            self.kept = self.run()
        else:
            self._graph.replay()

    def sample(self) -> float:
        """Milliseconds of one call of the work."""
        self.run.reset()
        if self._graph is None:
            begin = perf_counter()
            self()
            return (perf_counter() - begin) * 1e3 / self.run.calls
        first, last = self._events
        _filler().zero_()  # takes longer than the host needs to launch what follows
        first.record()
        self._graph.replay()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / self.run.calls


def check(graph: Graph, work: Work) -> tuple[list[float], list[float]]:
    """Relative error of every result, and what is allowed; the gate asks that none exceeds it."""
    graph.run.reset()
    graph()
    found = graph.run.results(graph.kept)
    errors = [relative_error(a.detach(), b) for a, b in zip(found, work.exact, strict=True)]
    return errors, [error + TOLERANCE for error in work.errors]


def interleave(
    samplers: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Samples by name: in every round one of each, in an order of its own."""
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        order = list(samplers)
        shuffle(order)
        for name in order:
            samples[name].append(samplers[name]())
    return samples


def host_ms(run: Run) -> float:
    """Median wall time of launching the work, the device idle at the start."""
    samples = []
    for _ in range(HOST_SAMPLES):
        torch.cuda.synchronize()
        begin = perf_counter()
        run()
        samples.append((perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return quantiles(samples)[1]


def measure(
    case: Case, tokens: int, providers: Sequence[str], device: torch.device, origin: dict[str, Any]
) -> Iterator[Row]:
    """The rows of ``providers``: each through its gate, then those that passed in turns.

    Args:
        origin: ``hardware``, ``torch``, ``triton``, ``date`` and ``commit`` of the rows.
    """
    on_gpu = device.type == "cuda"
    gpu = hardware.find(origin["hardware"])
    torch.manual_seed(0)
    work = case.prepare(tokens, device)
    same = dict(op=case.op, case=case.name, tokens=tokens, dtype="bf16", **origin)
    if gpu is not None:
        floors = (work.bytes / gpu.copy_tb_s / 1e9, work.flops / gpu.gemm_tflops / 1e9)
        same["floor_ms"] = max(floors)
    graphs: dict[str, Graph] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(ALIASES.get(name, name) for name in providers):
        try:
            run = work.run(name)
        except (ValueError, ImportError) as error:
            rows[name] = dict(gate="skipped", notes=_reason(error))
            continue
        try:
            graph = Graph(run, on_gpu)
            errors, allowed = check(graph, work)
        except Exception as error:  # a row that says so: a rival may raise anything
            rows[name] = dict(gate="fail", notes=_reason(error))
            continue
        # Written so that NaN fails.
        passed = all(error <= limit for error, limit in zip(errors, allowed, strict=True))
        rows[name] = dict(gate="pass" if passed else "fail", errors=errors, allowed=allowed)
        rows[name]["max_rel_err"] = max(errors, key=lambda e: float("inf") if e != e else e)
        if passed:
            graphs[name] = graph
        else:
            rows[name]["notes"] = "gate: " + ", ".join(
                f"result {i} is off by {error:.2g}, {limit:.2g} is allowed"
                for i, (error, limit) in enumerate(zip(errors, allowed, strict=True))
                if not error <= limit
            )
    samplers = {name: graph.sample for name, graph in graphs.items()}
    interleave(samplers, WARM_ROUNDS if on_gpu else 0)
    for name, samples in interleave(samplers, ROUNDS if on_gpu else CPU_ROUNDS, 1).items():
        p20, ms, p80 = quantiles(samples)
        rows[name] |= dict(samples_ms=samples, ms=ms, p20_ms=p20, p80_ms=p80)
        rows[name]["gb_per_s"] = work.bytes / ms / 1e6
        rows[name]["tflop_per_s"] = work.flops / ms / 1e9 if work.flops else None
        if on_gpu and case.op == UPDATE:
            rows[name]["host_ms"] = host_ms(graphs[name].run)
    for name in providers:
        yield Row(**same, provider=name, **rows[ALIASES.get(name, name)])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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
        ValueError: the file has other columns.
    """
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
    op: Annotated[str, typer.Option(help="operations, separated by commas (default: all)")] = "",
    case: Annotated[str, typer.Option(help="cases, likewise")] = "",
    provider: Annotated[str, typer.Option(help="providers, likewise")] = "",
    tokens: Annotated[
        str, typer.Option(help="numbers of tokens, likewise (default: 512 and more, 16 on a CPU)")
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
    counts = _tokens(tokens) or ([] if on_gpu else list(CPU_TOKENS))
    plans = options.checked(plan, cases, op, case, provider, counts)
    if write_paths:
        _check_paths(plans, on_gpu)
    target = out or (RESULTS / "kernels.csv" if on_gpu else None)
    earlier = options.checked(read, target) if target else []
    name = options.hardware(where)
    commit, dirty = environment.git_state()
    origin = dict(
        hardware=name,
        torch=environment.package_version("torch"),
        triton=environment.package_version("triton"),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=commit + ("-dirty" if dirty else ""),
    )
    folder = new_folder(target.parent / "runs", "kernels", name, commit) if target else None
    console = options.console(stderr=as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if folder:
            with (folder / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(text + "\n")

    say(json.dumps(environment.describe()))
    if not on_gpu:
        say("A CPU run: it shows that every part works and says nothing about a GPU.")
    rows: list[Row] = []
    for number, item in enumerate(plans, start=1):
        say(f"[{number}/{len(plans)}] {item.case.op} {item.case.name}, {item.tokens} tokens")
        fresh = list(measure(item.case, item.tokens, item.providers, torch.device(where), origin))
        rows += fresh
        for row in fresh:
            say(_line(row))
        if target and folder:
            with (folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
                for row in fresh:
                    line = {**asdict(row), "environment": environment.describe()}
                    file.write(json.dumps(line) + "\n")
            write_atomically(target, text_of(merged(earlier, rows)))
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    if write_paths:
        say(f"wrote {_write_paths(rows)}")
    if target:
        say(f"wrote {target} and {folder}")
    if as_json:
        options.show_json([asdict(row) for row in rows])
    else:
        console.print(_table(rows, f"Kernels at the shapes of {model} on {name}, bf16"))


def workload(on_gpu: bool) -> tuple[str, Shape]:
    """Name and shape of the model; on a CPU one layer of a tiny one."""
    if on_gpu:
        return "qwen3-0.6b", load_shape("qwen3-0.6b")[1]
    tiny = load_shape("qwen3-tiny")[1]
    return "tiny", replace(
        tiny, windows=(None,), hidden=128, heads=2, kv_heads=1, intermediate=256, vocab=1024
    )


def _tokens(text: str) -> list[int]:
    found = options.keys(text)
    if not all(count.isdecimal() and int(count) for count in found):
        options.refuse(f"--tokens {text}: must be positive numbers, separated by commas")
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

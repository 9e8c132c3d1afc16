"""Time of one case of ``forge-bench kernels``: the gate, then the providers in turns.

The gate looks at the results of the very graph that is timed. A sample is one replay of it,
launched while the GPU is busy with something else that also empties its L2.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import torch

from forge.harness import hardware
from forge.harness.execution import recover
from forge.harness.kernel_cases import TOLERANCE, Case, Run, Work, relative_error
from forge.harness.timing import quantiles
from forge.harness.update_cases import OP as UPDATE

# Names of the same thing: cuBLAS into a reused scratch and the element-wise kernel is that path.
ALIASES = {"scratch": "forge:scratch"}
ROUNDS, WARM_ROUNDS = 40, 3
CPU_ROUNDS = 3
HOST_SAMPLES = 7
# Writing so much takes an H200 1 ms: longer than the host needs to launch a graph of 2,000 kernels.
FILLER_BYTES = 2**32


@dataclass(frozen=True)
class Row:
    """One provider at one case and number of tokens: a line of ``kernels.jsonl``.

    Attributes:
        ms: median time of the work, and its 20th and 80th percentile; ``None``: not timed.
        floor_ms: the larger of its least bytes over the bandwidth and its operations over the
            matrix rate that the GPU is known to reach; ``None``: not known.
        gb_per_s, tflop_per_s: these bytes and operations over ``ms``.
        max_rel_err: the largest relative error among the results; ``None``: one is not finite.
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
    errors: list[float | None] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)

    @property
    def group(self) -> tuple[str, ...]:
        """What rows must share to be compared: they were measured together."""
        return (self.op, self.case, str(self.tokens), self.hardware)


@cache
def _filler() -> torch.Tensor:
    return torch.empty(FILLER_BYTES, dtype=torch.uint8, device="cuda")


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
        _filler().zero_()
        first.record()
        self._graph.replay()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / self.run.calls


def check(graph: Graph, work: Work, provider: str) -> tuple[list[float | None], list[float]]:
    """Relative error of every result, ``None``: not finite, and what the gate allows."""
    graph.run.reset()
    graph()
    found = graph.run.results(graph.kept)
    errors = [relative_error(a.detach(), b) for a, b in zip(found, work.exact, strict=True)]
    finite = [error if math.isfinite(error) else None for error in errors]
    return finite, [error + TOLERANCE for error in work.errors_of.get(provider, work.errors)]


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
            errors, allowed = check(graph, work, name)
        except Exception as error:  # a row that says so: a rival may raise anything
            rows[name] = dict(gate="fail", notes=_reason(error))
            continue
        wrong = [
            f"result {i} is not finite"
            if error is None
            else f"result {i} is off by {error:.2g}, {limit:.2g} is allowed"
            for i, (error, limit) in enumerate(zip(errors, allowed, strict=True))
            if error is None or error > limit
        ]
        rows[name] = dict(errors=errors, allowed=allowed)
        finite = [error for error in errors if error is not None]
        rows[name]["max_rel_err"] = max(finite) if len(finite) == len(errors) else None
        if wrong:
            rows[name] |= dict(gate="fail", notes=", ".join(wrong))
        else:
            rows[name] |= dict(gate="pass")
            graphs[name] = graph
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

"""A profiler's Chrome trace: which part of a step each piece of work belongs to, and idle time."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One of these spans a step.
STEP = "forge-bench step"
_UPDATE_SPAN = "Optimizer.step#"  # torch opens it around the step of every optimizer
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH = re.compile(r"^(cuda|cu)(Launch|Graph|Memcpy|Memset)")

IDLE = "idle"  # the time of a step in which nothing ran
PARTS = {
    "gemm": "matrix products",
    "attention": "attention",
    "norm": "norms, element-wise",
    "loss": "loss",
    "update": "update",
    "other": "other",
}
# The first pattern that is found in the name of a kernel (or of an operator, on a CPU) decides.
# What runs inside an optimizer's step is `update`, whatever its name.
_NAMES = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        # Ours, which multiply too; then the rivals'.
        (
            "update",
            r"wgrad_update|apply_rule|_(add|keep|update)_rows_kernel|_sort_ids_kernel"
            r"|_advance_kernel|multi_tensor_apply|_fused_adam",
        ),
        ("update", r"_(adam|adamw)_kernel|kOptimizer|quantize_kernel|_ecc_bits|_reconstruct_fp32"),
        ("attention", r"_attention_\w+_kernel|_sum_heads_kernel"),
        ("attention", r"sdpa|flash|fmha|scaled_dot_product"),
        ("loss", r"cross_entropy|nll_loss|log_?softmax|element_mul_kernel"),
        ("norm", r"rms_?norm|layer_?norm|rope|rotary|swiglu|geglu|silu|gelu"),
        ("gemm", r"_linear_hopper_kernel"),
        ("gemm", r"nvjet|gemm|gemv|xmma|cutlass|splitk|cublas|triton_tem|\b(add)?b?mm\b"),
        ("other", r"embedding|index|scatter|gather|sort|scan|memcpy|memset|random|distribution"),
        ("attention", r"softmax"),
        ("norm", r"elementwise|reduce_kernel|CatArray|triton_(poi|red|per)"),
        ("norm", r"aten::(mul|add|sub|div|neg|pow|r?sqrt|mean|sum|cat|sin|cos|copy|_to_copy)_?$"),
    )
)


def part_of(name: str, in_update: bool = False) -> str:
    """The part of a step that the kernel or operator ``name`` belongs to, a key of ``PARTS``."""
    if in_update:
        return "update"
    return next((part for part, pattern in _NAMES if pattern.search(name)), "other")


@dataclass(frozen=True)
class Work:
    """A kernel, or the own time of an operator on a CPU. Times in microseconds."""

    name: str
    part: str
    begin: float
    us: float


@dataclass(frozen=True)
class Steps:
    """What ran in the steps of a trace.

    Attributes:
        count: steps.
        wall_ms: of a step, under the profiler: the host is slower than without.
        busy_ms: of a step: time in which at least one piece of work ran.
        work: all pieces, in order.
        launches: calls of a step that gave the device work; 0 on a CPU.
    """

    count: int
    wall_ms: float
    busy_ms: float
    work: tuple[Work, ...]
    launches: float

    def parts(self) -> dict[str, tuple[float, float]]:
        """Milliseconds and pieces of work of a step, by part."""
        return {name: self._sum(w for w in self.work if w.part == name) for name in PARTS}

    def kernels(self) -> list[tuple[str, str, float, float]]:
        """``(name, part, ms, pieces)`` of a step, the longest first."""
        groups: dict[tuple[str, str], list[Work]] = defaultdict(list)
        for work in self.work:
            groups[work.name, work.part].append(work)
        rows = [(name, part, *self._sum(group)) for (name, part), group in groups.items()]
        return sorted(rows, key=lambda row: -row[2])

    def _sum(self, work: Iterable[Work]) -> tuple[float, float]:
        times = [w.us for w in work]
        return sum(times) / 1e3 / self.count, len(times) / self.count


def read_steps(path: Path) -> Steps:
    """The steps of a trace that ``torch.profiler`` exported.

    Raises:
        ValueError: no span called :data:`STEP`, or nothing ran in them.
    """
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    spans = _of(events, "user_annotation")
    steps = [event for event in spans if event["name"] == STEP]
    if not steps:
        raise ValueError(f"{path}: no span called {STEP!r}")
    begin, end = steps[0]["ts"], max(_end(event) for event in steps)
    updates = [event for event in spans if event["name"].startswith(_UPDATE_SPAN)]
    inside = [event for event in events if begin <= event["ts"] < end]
    device = [event for event in inside if event.get("cat") in _DEVICE]
    launches = [event for event in inside if _LAUNCH.match(event["name"])]
    if device:
        work = _device_work(device, launches, updates)
        busy_us = _covered_us(work)
    else:
        work = _cpu_work(inside, updates)
        busy_us = sum(piece.us for piece in work)
    if not work:
        raise ValueError(f"{path}: nothing ran in its steps")
    wall_us = sum(event["dur"] for event in steps)
    return Steps(
        count=len(steps),
        wall_ms=wall_us / 1e3 / len(steps),
        busy_ms=busy_us / 1e3 / len(steps),
        work=tuple(work),
        launches=len(launches) / len(steps) if device else 0.0,
    )


def _of(events: Sequence[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    found = [event for event in events if event.get("cat") == category]
    return sorted(found, key=lambda event: event["ts"])


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def _during(event: dict[str, Any], spans: Sequence[dict[str, Any]]) -> bool:
    """Whether ``event`` began, in the same thread, while one of ``spans`` was open."""
    return any(
        span["ts"] <= event["ts"] < _end(span) and span["tid"] == event["tid"] for span in spans
    )


def _device_work(
    device: list[dict[str, Any]], launches: list[dict[str, Any]], updates: list[dict[str, Any]]
) -> list[Work]:
    # A kernel belongs to the update if the call that launched it came from an optimizer's step.
    # The kernels of a replayed graph have one launch for all, so their names decide.
    updating = {event["args"]["correlation"] for event in launches if _during(event, updates)}
    return [
        Work(
            event["name"],
            part_of(event["name"], event["args"].get("correlation") in updating),
            event["ts"],
            event["dur"],
        )
        for event in sorted(device, key=lambda event: event["ts"])
    ]


def _cpu_work(events: list[dict[str, Any]], updates: list[dict[str, Any]]) -> list[Work]:
    """Operators and their own time: without that of the operators which they call."""
    own = {id(event): event["dur"] for event in events}
    callers: dict[Any, list[dict[str, Any]]] = defaultdict(list)  # the open operators of a thread
    # At equal begin the longer one is the caller.
    operators = sorted(_of(events, "cpu_op"), key=lambda event: (event["ts"], -event["dur"]))
    for event in operators:
        stack = callers[event["tid"]]
        while stack and _end(stack[-1]) <= event["ts"]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= event["dur"]
        stack.append(event)
    return [
        Work(
            event["name"],
            part_of(event["name"], _during(event, updates)),
            event["ts"],
            max(own[id(event)], 0.0),
        )
        for event in operators
    ]


def _covered_us(work: Sequence[Work]) -> float:
    """Microseconds in which something ran: work on several streams at a time counts once."""
    covered, reached = 0.0, float("-inf")
    for piece in sorted(work, key=lambda piece: piece.begin):
        end = piece.begin + piece.us
        covered += max(0.0, end - max(piece.begin, reached))
        reached = max(reached, end)
    return covered

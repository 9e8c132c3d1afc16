"""``forge-bench roofline``: the least time that each part of a step can take on a GPU.

A part takes at least its operations over the achievable matrix rate, and at least the bytes it must
move (each operand once) over the achievable bandwidth. The floor of the step is their sum: one part
after the other, every element-wise operation hidden in its neighbours, nothing lost to launches.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from forge.harness import options
from forge.harness.hardware import HARDWARE, Hardware
from forge.harness.shapes import MODEL_HELP, Gemm, Shape, load_shape

BF16 = 2
# Bytes a parameter of m and v, stored; 8-bit states' scales (0.1 byte) are left out.
STATES = {"bf16": 4, "fp32": 8, "int8": 2}


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        group: ``gemm``, ``update``, ``attention``, ``loss`` or ``norm``, as ``profile`` groups.
        fused: counted in the floor; the others can be hidden in neighbouring operations.
    """

    name: str
    group: str
    flops: float
    bytes: float
    compute_ms: float
    memory_ms: float
    fused: bool = True

    @property
    def ms(self) -> float:
        """The larger of the two."""
        return max(self.compute_ms, self.memory_ms)


def parts(
    shape: Shape, batch: int, seq: int, hardware: Hardware, states: str, separate: bool = False
) -> list[Part]:
    """Every part of a step in bf16 with AdamW states stored as ``states``.

    Args:
        separate: form the weight gradients and store them, then update in a pass of its own; else
            each product of a weight gradient applies the update, and no gradient is stored.
    """
    tokens = batch * seq

    def part(name: str, group: str, flops: float, moved: float, fused: bool = True) -> Part:
        compute, memory = flops / hardware.gemm_tflops / 1e9, moved / hardware.copy_tb_s / 1e9
        return Part(name, group, flops, moved, compute, memory, fused)

    def product(gemm: Gemm, what: str, count: int) -> Part:
        operands = tokens * (gemm.inputs + gemm.outputs)
        flops = 2.0 * count * tokens * gemm.weights
        if what != "dW + update":
            moved = BF16 * count * (operands + gemm.weights)
            return part(f"{gemm.name} {what}", "gemm", flops, moved)
        update = 2 * (BF16 + STATES[states])  # the weight and its states are read and written
        moved = count * (BF16 * operands + update * gemm.weights)
        return part(f"{gemm.name} {what}", "update", flops, moved)

    gradient = "dW" if separate else "dW + update"
    linears = [(gemm, shape.layers) for gemm in shape.gemms] + [(shape.head, 1)]
    found = [product(g, what, n) for what in ("forward", "dX", gradient) for g, n in linears]
    pairs = batch * sum(shape.pairs(seq).values())
    # Queries, keys, values and output; backward reads them and writes as many gradients. The fp32
    # log-sum of each row goes from one to the other.
    moved = BF16 * tokens * shape.layers * 2.0 * (shape.q_width + shape.kv_width)
    sums = 4 * tokens * shape.layers * shape.heads
    found += [
        part("attention forward", "attention", 4 * pairs * shape.q_width, moved + sums),
        # Scores are computed again: five products for the two of the forward.
        part("attention backward", "attention", 10 * pairs * shape.q_width, 2 * moved + sums),
    ]
    if separate:
        weights = shape.linear_weights
        pass_bytes = (BF16 + 2 * (BF16 + STATES[states])) * weights
        found.append(part("update", "update", 0, pass_bytes))
    found += [
        part("logits to their gradient", "loss", 0, 2.0 * BF16 * tokens * shape.vocab, False),
        part("norms, RoPE, activation", "norm", 0, _elementwise_bytes(shape, tokens), False),
    ]
    return found


def _elementwise_bytes(shape: Shape, tokens: int) -> float:
    # Elements a token and layer, each operation one kernel. A norm with its residual reads two
    # and writes two, also backward. Queries, keys and values go from the packed projection to
    # attention's layout, normalised and rotated; backward reads input and gradient of queries
    # and keys (rotation alone needs no input). The activation reads two and writes one; backward
    # reads three and writes two.
    rotated = shape.q_width + shape.kv_width
    element = shape.norms * 8 * shape.hidden
    element += 2 * (rotated + shape.kv_width) + (3 if shape.qk_norm else 2) * rotated
    element += 8 * shape.intermediate
    return float(BF16 * tokens * shape.layers * element)


def floor(shape: Shape, batch: int, seq: int, hardware: Hardware, states: str) -> dict[str, Any]:
    """The parts and their sums, in milliseconds.

    Returns:
        ``parts``; ``total_ms``, the floor with the update in the weight-gradient products and
        element-wise operations hidden; ``total_elementwise_ms``, with those as kernels of their
        own; ``total_separate_update_ms``, the floor with stored gradients and a separate update;
        ``tflop``, ``gb``, ``mfu_pct`` and ``tokens_per_s`` at the floor.
    """
    fused = parts(shape, batch, seq, hardware, states)
    separate = parts(shape, batch, seq, hardware, states, separate=True)
    total = sum(part.ms for part in fused if part.fused)
    flops = sum(part.flops for part in fused)
    # The recomputed scores of attention's backward are work, but not the model's.
    model = flops - 2 * batch * sum(shape.pairs(seq).values()) * shape.q_width
    return {
        "parts": [{**asdict(part), "ms": part.ms} for part in fused],
        "total_ms": total,
        "total_elementwise_ms": sum(part.ms for part in fused),
        "total_separate_update_ms": sum(part.ms for part in separate if part.fused),
        "tflop": flops / 1e12,
        "gb": sum(part.bytes for part in fused if part.fused) / 1e9,
        "mfu_pct": model / total / hardware.peak_tflops / 1e7,
        "tokens_per_s": batch * seq / total * 1e3,
    }


# What the table does without on a narrow terminal, the least important first.
SPARE = ("GFLOP", "MB", "share %", "compute ms", "memory ms")


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    batch: Annotated[int, typer.Option(min=1)] = 1,
    seq: Annotated[int, typer.Option(min=2)] = 512,
    hardware: Annotated[str, typer.Option(help=", ".join(HARDWARE))] = "h200",
    states: Annotated[str, typer.Option(help=f"AdamW's m and v: {', '.join(STATES)}")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout")] = False,
) -> None:
    """Show the least time of every part of a training step on a GPU; needs no GPU.

    \b
    Example:
      forge-bench roofline qwen3-0.6b --seq 4096 --hardware h100
    """
    if hardware not in HARDWARE:
        options.refuse(f"--hardware: unknown {hardware!r}; valid: {', '.join(HARDWARE)}")
    if states not in STATES:
        options.refuse(f"--states: unknown {states!r}; valid: {', '.join(STATES)}")
    name, shape = options.checked(load_shape, model)
    gpu = HARDWARE[hardware]
    found = floor(shape, batch, seq, gpu, states)
    if as_json:
        work = dict(model=name, batch=batch, seq=seq, states=states, hardware=asdict(gpu))
        print(json.dumps(work | found, indent=1))
        return
    title = (
        f"{name}, batch {batch}, sequence {seq}, bf16, {states} states, on {hardware}: "
        f"{gpu.gemm_tflops:.0f} TFLOP/s, {gpu.copy_tb_s:.2f} TB/s achievable"
    )
    options.show_table(options.console(), _table(found, title), SPARE)


def _table(found: dict[str, Any], title: str) -> Table:
    view = Table(title=title, title_justify="left")
    view.add_column("part")
    for name in ("GFLOP", "MB", "compute ms", "memory ms", "floor ms", "share %"):
        view.add_column(name, justify="right")
    total = found["total_ms"]
    for part in sorted(found["parts"], key=lambda part: not part["fused"]):
        numbers = [part["flops"] / 1e9, part["bytes"] / 1e6]
        cells = [f"{number:,.0f}" for number in numbers]
        cells += [f"{part[key]:.3f}" for key in ("compute_ms", "memory_ms", "ms")]
        share = f"{100 * part['ms'] / total:.1f}" if part["fused"] else "hidden"
        view.add_row(part["name"], *cells, share)
    view.add_section()
    work = (f"{found['tflop'] * 1e3:,.0f}", f"{found['gb'] * 1e3:,.0f}", "", "")
    view.add_row("floor of the step", *work, f"{total:.2f}", f"MFU {found['mfu_pct']:.0f}")
    for text, key in (
        ("with element-wise kernels of their own", "total_elementwise_ms"),
        ("with stored gradients and a separate update", "total_separate_update_ms"),
    ):
        view.add_row(text, "", "", "", "", f"{found[key]:.2f}", "")
    return view

"""Model FLOPs of a step, by the kind of layer, and their share of the hardware's peak (MFU)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from forge.harness import hardware, ofu
from forge.harness.environment import one_line
from forge.harness.shapes import Shape, shape_of


def flops_by_layer(shape: Shape, batch: int, seq: int) -> dict[str, float]:
    """Floating-point operations of forward and backward, by the kind of layer.

    Linears: 6 a weight and token, the head once. Attention: scores and mix of every query-key pair
    that the mask leaves (half of the square when causal, less with a window), 4 operations a pair
    and channel forward, 8 backward. Norms, RoPE, activations and the update are not counted.
    """
    qkv, o, gate_up, down = (gemm.weights * shape.layers for gemm in shape.gemms)
    linears = {"attention": qkv + o, "mlp": gate_up + down, "head": shape.head.weights}
    flops = {f"{name} linears": 6.0 * weights * batch * seq for name, weights in linears.items()}
    for kind, pairs in shape.pairs(seq).items():
        flops[kind] = 12.0 * batch * pairs * shape.q_width
    return flops


def model_flops(config: Any, batch: int, seq: int) -> float:
    """Sum of :func:`flops_by_layer` of a transformers configuration.

    Raises:
        ValueError: an architecture whose operations are not counted.
    """
    return sum(flops_by_layer(shape_of(config), batch, seq).values())


def mfu_pct(flops: float, latency_ms: float, name: str) -> float | None:
    """Percent of the dense bf16 peak of the GPU ``name``; ``None`` when that is not known."""
    gpu = hardware.find(name)
    if gpu is None:
        return None
    return 100 * flops / (latency_ms * 1e-3) / (gpu.peak_tflops * 1e12)


def tile_share(m: int, n: int, k: int, tile: tuple[int, int, int]) -> float:
    """Share of useful operations in a product ``[m, k] @ [k, n]`` computed in whole tiles.

    Tensor cores also work on the padding, so utilisation times this is useful work.
    """
    padded = math.prod(math.ceil(d / t) * t for d, t in zip((m, n, k), tile, strict=True))
    return m * n * k / padded


# What cuBLAS uses most on Hopper for large products; a row's real tiles are not known.
STEP_TILE = (128, 128, 64)


def step_tile_share(config: Any, batch: int, seq: int) -> float:
    """:func:`tile_share` of the linears of a step, weighted by their operations.

    Forward, input gradient and weight gradient, each in tiles of :data:`STEP_TILE`. Attention is
    left out: what its kernels pad is their own.

    Raises:
        ValueError: an architecture whose operations are not counted.
    """
    shape, tokens = shape_of(config), batch * seq
    useful = executed = 0.0
    for gemm, count in [(gemm, shape.layers) for gemm in shape.gemms] + [(shape.head, 1)]:
        out, inputs = gemm.outputs, gemm.inputs
        for m, n, k in ((tokens, out, inputs), (tokens, inputs, out), (out, inputs, tokens)):
            work = count * float(m * n * k)
            useful += work
            executed += work / tile_share(m, n, k, STEP_TILE)
    return useful / executed


def record_columns(
    config: Any,
    batch: int,
    seq: int,
    name: str,
    latency_ms: float,
    step: Callable[[], Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """The efficiency of a measured step on the GPU ``name``, as fields of a record.

    Args:
        step: runs the step on the current CUDA device, for the window in which its counters are
            read; ``None`` without such a device.

    Returns:
        The fields that are known, and why others are not.
    """
    fields: dict[str, Any] = {}
    missing, share = [], None
    try:
        fields["mfu_pct"] = mfu_pct(model_flops(config, batch, seq), latency_ms, name)
        if fields["mfu_pct"] is None and step is not None:
            missing.append(f"no MFU: the peak of {name} is not known")
        share = step_tile_share(config, batch, seq)
    except Exception as error:  # anybody's configuration, and the row is measured already
        missing.append(f"no MFU: {one_line(error)}")
    if step is None:
        return fields, missing

    def finished_step() -> None:
        step()
        torch.cuda.synchronize()

    gpu = hardware.find(name)
    top = gpu.tensor_clock_mhz if gpu else None
    try:
        seen = asdict(ofu.observe(finished_step, ofu.device_uuid(), top))
    except Exception as error:
        return fields, [*missing, f"no OFU: {one_line(error)}"]
    missing += seen.pop("missing")
    del seen["steps"]
    if seen["ofu_pct"] is not None and share is not None:
        fields["ofu_adjusted_pct"] = seen["ofu_pct"] * share
    return fields | seen, missing

"""What attention's kernels, forward and backward, share: tiles of heads and how they are found."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from forge.kernels.runtime import INTERPRETED, tl, triton

# From so many tokens to so many the kernels for Hopper run, measured (results/LOG.md): forward
# kernels/attention_hopper.py or, looked at first, attention_hopper_long.py; backward
# attention_hopper_backward.py or, looked at first and for head size 128, that of
# attention_hopper_backward_long.py. Those for long sequences are not measured yet.
HOPPER_TOKENS: dict[str, list[tuple[float, float]]] = {
    "forward": [(1, 1024)],
    "long forward": [],
    "backward": [(1, 512), (2048, math.inf)],
    "long backward": [],
}


@lru_cache
def _is_hopper(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) == (9, 0)


def runs_on_hopper(q: Tensor, direction: str) -> bool:
    """Whether the kernel for Hopper runs, for queries [B, H, T, D]."""
    return (
        q.is_cuda
        and any(least <= q.shape[2] <= most for least, most in HOPPER_TOKENS[direction])
        and q.shape[3] in ((128,) if direction == "long backward" else (64, 128))
        and q.dtype in (torch.bfloat16, torch.float16)
        and _is_hopper(q.get_device())
    )


@triton.jit
def tile_of(heads, b, h, start, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of a head, [ROWS, D]; zeros from T on. ``heads``: a descriptor of [B, heads, T, D]."""
    return heads.load([b, h, start, 0]).reshape(ROWS, D)


@triton.jit
def rows_of(x, b, h, start, T, ROWS: tl.constexpr, D: tl.constexpr):
    """The same through pointers. ``x``: address and strides by batch, head and token."""
    r = tl.arange(0, ROWS)[:, None]
    ptr = x[0] + tl.cast(b, tl.int64) * x[1] + tl.cast(h, tl.int64) * x[2]
    ptr += tl.cast(start, tl.int64) * x[3]
    return tl.load(ptr + r * x[3] + tl.arange(0, D)[None, :], r < T - start, other=0.0)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def store_rows(ptr, x, b, h, start, T, HEADS: tl.constexpr, D: tl.constexpr):
    """Write rows of a head, [ROWS, D], into memory [B, T, HEADS, D]."""
    r = tl.arange(0, x.shape[0])[:, None]
    ptr += ((tl.cast(b, tl.int64) * T + start) * HEADS + h) * D
    ptrs = ptr + r * (HEADS * D) + tl.arange(0, D)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), r < T - start)


def loadable(t: Tensor) -> Tensor:
    """``t`` [B, heads, T, D], copied if the tensor memory engine could not read it."""
    size = t.element_size()
    strides = [stride for n, stride in zip(t.shape[:3], t.stride(), strict=False) if n > 1]
    aligned = t.data_ptr() % 16 == 0 and all(s > 0 and s * size % 16 == 0 for s in strides)
    return t if aligned and t.stride(3) == 1 else t.contiguous()


def strides_of(t: Tensor) -> list[int]:
    """By batch, head and token; those of dimensions of one element, which may be any, aligned."""
    size = t.shape[3]
    return [s if n > 1 else size for n, s in zip(t.shape[:3], t.stride(), strict=False)]


def described(t: Tensor, rows: int) -> Any:
    """A descriptor of ``t`` [B, heads, T, D] for tiles of so many rows of a head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), [*strides_of(t), 1], [1, 1, rows, t.shape[3]])


def described_rows(t: Tensor, block: int) -> Any:
    """A descriptor of ``t`` [rows, pitch] for so many neighbours of a row."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, block])


def addressed(t: Tensor) -> tuple[Any, ...]:
    return (t, *strides_of(t))


def wide_block(q: Tensor) -> int:
    """Rows of an fp32 tile: it is multiplied outside the tensor cores, and lies in registers."""
    return 16 if q.shape[3] > 32 else 32


def common_options(q: Tensor, k: Tensor) -> dict[str, Any]:
    heads = q.shape[1]
    # fp32 as such, not TF32: nobody who asks for it wants it fast.
    return dict(
        H=heads, GROUP=heads // k.shape[1], D=q.shape[3], PRECISION="ieee", UPCAST=INTERPRETED
    )

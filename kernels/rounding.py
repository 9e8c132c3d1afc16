"""Rounding of fp32 results to the storage dtype.

Stochastic rounding to bf16 adds 16 random bits below the kept mantissa and truncates, so the stored
value is ``x`` on average. The bits come from an integer hash of (element index, seed): Philox costs
more than the optimizer update itself (FORGE, arXiv 2606.22932, Table 3). torch and Triton draw the
same bits, so a step is reproducible across both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.runtime import tl, triton

_MASK = 0xFFFFFFFF


def hash32_reference(x: Tensor, seed: Tensor) -> Tensor:
    """32-bit hash of ``x ^ seed`` (both int64 holding 32-bit values), as int64 in [0, 2^32)."""
    h = (x ^ seed) & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


@triton.jit
def hash32(x, seed):
    h = x.to(tl.uint32) ^ seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


def draw_reference(h: Tensor, stream: int) -> Tensor:
    """16 random bits of hash ``h`` for stored value number ``stream`` (0 the weight, then states)."""
    if stream >= 2:
        h = (h * (0x9E3779B1 + 2 * (stream - 2))) & _MASK
    return h & 0xFFFF if stream == 0 else h >> 16


@triton.jit
def draw(h, stream: tl.constexpr):
    if stream == 0:
        return h & 0xFFFF
    elif stream == 1:
        return h >> 16
    else:
        return (h * (0x9E3779B1 + 2 * (stream - 2))) >> 16


def stochastic_bf16_reference(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 ``x`` to bf16 with 16 random ``bits`` (int64, same shape); NaN stays NaN."""
    rounded = (x.view(torch.int32).to(torch.int64) + bits) >> 16
    rounded = rounded.to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isnan(x), x.to(torch.bfloat16), rounded)


@triton.jit
def stochastic_bf16(x, bits):
    rounded = (x.to(tl.uint32, bitcast=True) + bits) >> 16
    rounded = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    # A NaN of all ones would carry into the sign bit and come out as -0.
    return tl.where(x == x, rounded, x.to(tl.bfloat16))


def round_reference(x: Tensor, dtype: torch.dtype, h: Tensor | None, stream: int) -> Tensor:
    """``x`` (fp32) in ``dtype``: stochastic when ``h`` is given and ``dtype`` is bf16."""
    if h is None or dtype != torch.bfloat16:
        return x.to(dtype)
    return stochastic_bf16_reference(x, draw_reference(h, stream))


@triton.jit
def round_to(x, dtype: tl.constexpr, h, stream: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and dtype == tl.bfloat16:
        return stochastic_bf16(x, draw(h, stream))
    else:
        return x.to(dtype)

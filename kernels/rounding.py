"""Rounding of fp32 results to the storage dtype.

Stochastic rounding to bf16 adds 16 random bits below the kept mantissa and truncates, so the stored
value is ``x`` on average. The bits come from an integer hash of (element index, seed): Philox costs
more than the optimizer update itself (FORGE, arXiv 2606.22932, Table 3). torch and Triton draw the
same bits, so a step is reproducible across both.

The hash multiplies twice, each time folding the upper half of the 64-bit product onto the lower:
four instructions on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.runtime import tl, triton

_FACTORS = (0x9E3779B1, 0x85EBCA77)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> bits) & (2 ** (32 - bits) - 1)


def _int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def hash32_reference(x: Tensor, seed: Tensor) -> Tensor:
    """32-bit hash of ``x ^ seed``; int32 in and out, read as 32 unsigned bits."""
    h = x ^ seed
    for factor in _FACTORS:
        product = (h.long() & 0xFFFFFFFF) * factor  # its low 64 bits
        h = (product ^ (product >> 32)).int()
    return h


@triton.jit
def _fold(h, factor: tl.constexpr):
    product = h.to(tl.uint64) * factor
    return product.to(tl.uint32) ^ (product >> 32).to(tl.uint32)


@triton.jit
def hash32(x, seed):
    h = x.to(tl.uint32) ^ seed.to(tl.uint32)
    return _fold(_fold(h, 0x9E3779B1), 0x85EBCA77)


def random_bits_reference(x: Tensor, seed: Tensor) -> Tensor:
    """32 random bits for each element number ``x`` (int32). Two neighbours share one hash."""
    h = hash32_reference(x & ~1, seed)
    return torch.where((x & 1).bool(), h * _int32(0x9E3779B1), h)


@triton.jit
def random_bits(x, seed):
    h = hash32(x & ~1, seed)
    return tl.where((x & 1) != 0, h * 0x9E3779B1, h)


def draw_reference(h: Tensor, stream: int) -> Tensor:
    """16 random bits of hash ``h`` for stored value ``stream``: 0 the weight, 1, 2 the states."""
    if stream == 1:
        return _shift(h, 16)
    # A third value takes the middle bits: next to no correlation, and no second hash.
    return (h if stream == 0 else _shift(h, 8)) & 0xFFFF


@triton.jit
def draw(h, stream: tl.constexpr):
    if stream == 0:
        return h & 0xFFFF
    elif stream == 1:
        return h >> 16
    else:
        return (h >> 8) & 0xFFFF


def stochastic_bf16_reference(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 ``x`` to bf16 with 16 random ``bits`` (int32, same shape); NaN stays NaN."""
    rounded = ((x.view(torch.int32) + bits) >> 16).to(torch.int16).view(torch.bfloat16)
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

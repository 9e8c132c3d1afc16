"""Rounding of fp32 results to the storage dtype.

Stochastic rounding to bf16 adds 16 random bits below the kept mantissa and truncates, so the stored
value is ``x`` on average. The bits come from an integer hash of (element index, seed): Philox costs
more than the optimizer update itself (FORGE, arXiv 2606.22932, Table 3). torch and Triton draw the
same bits, so a step is reproducible across both.

All bf16 values of an element use the same bits, the upper half of its hash: each is unbiased by
itself, and errors of 2^-9 that go together do no harm. Codes of 8 bits, whose errors are forty
times as large, use a half each.

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


def half_reference(h: Tensor, j: int) -> Tensor:
    """16 of the bits ``h`` for the 8-bit code of state ``j``: the upper half, or the lower."""
    return h & 0xFFFF if j else _shift(h, 16)


@triton.jit
def half(h, j: tl.constexpr):
    if j == 0:
        return h >> 16
    else:
        return h & 0xFFFF


def stochastic_bf16_reference(x: Tensor, h: Tensor) -> Tensor:
    """Round fp32 ``x`` to bf16 by the upper half of ``h`` (int32, same shape); NaN stays NaN."""
    rounded = ((x.view(torch.int32) + _shift(h, 16)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isnan(x), x.to(torch.bfloat16), rounded)


@triton.jit
def stochastic_bf16(x, h):
    rounded = (x.to(tl.uint32, bitcast=True) + (h >> 16)) >> 16
    rounded = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    # A NaN of all ones would carry into the sign bit and come out as -0.
    return tl.where(x == x, rounded, x.to(tl.bfloat16))


def round_reference(x: Tensor, dtype: torch.dtype, h: Tensor | None) -> Tensor:
    """``x`` (fp32) in ``dtype``: stochastic when ``h`` is given and ``dtype`` is bf16."""
    if h is None or dtype != torch.bfloat16:
        return x.to(dtype)
    return stochastic_bf16_reference(x, h)


@triton.jit
def round_to(x, dtype: tl.constexpr, h, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and dtype == tl.bfloat16:
        return stochastic_bf16(x, h)
    else:
        return x.to(dtype)

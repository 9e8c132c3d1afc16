"""The Hopper kernel's inline PTX, run on the CPU, gives block_code.py's and rounding.py's bits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from forge.kernels import block_code_ptx as ptx
from forge.kernels.block_code import (
    block_exponent,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    inverse_scale,
)
from forge.kernels.rounding import half_reference, random_bits_reference, stochastic_bf16_reference

PAIRS = 4096
U32, F32, I32 = np.uint32, np.float32, np.int32


def _prmt(a, b, selector):
    """Bytes of b:a by the nibbles of ``selector``; with its upper bit, the sign alone."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for i in range(4):
        nibble = int(selector) >> 4 * i & 0xF
        byte = both >> np.uint64(8 * (nibble & 7)) & np.uint64(0xFF)
        if nibble & 8:
            byte = (byte >> np.uint64(7)) * np.uint64(0xFF)
        result |= byte << np.uint64(8 * i)
    return result.astype(U32)


def _lop3(a, b, c, table):
    result = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            terms = (x if i >> j & 1 else ~x for x, j in ((a, 2), (b, 1), (c, 0)))
            x, y, z = terms
            result |= x & y & z
    return result


def _fma(a, b, c):
    exact = a.view(F32).astype(np.float64) * b.view(F32).astype(np.float64)
    return (exact + c.view(F32).astype(np.float64)).astype(F32).view(U32)


def _bf16(x):
    """To nearest even; no NaN."""
    return (x + U32(0x7FFF) + (x >> U32(16) & U32(1))) >> U32(16)


def _abs(x):
    return np.abs(x.view(I32)).view(U32)


_OPERATIONS = {
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.f32": _fma,
    "abs.s32": _abs,
    "abs.f32": lambda a: a & U32(0x7FFFFFFF),
    "mov.b32": lambda a: a,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b.astype(np.uint64),
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "min.u32": np.minimum,
    "max.u32": np.maximum,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "setp.lt.s32": lambda a, b: a.view(I32) < b.view(I32),
    "set.num.u32.f32": lambda a, b: np.where(
        np.isnan(a.view(F32)) | np.isnan(b.view(F32)), U32(0), U32(0xFFFFFFFF)
    ),
    "cvt.rn.bf16x2.f32": lambda a, b: _bf16(a) << U32(16) | _bf16(b),
}


def run(text: str, outputs: int, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Straight-line PTX of 32-bit registers, on arrays.

    The uint32 outputs of ``text`` for inputs of four bytes an element and one shape."""
    shape = inputs[0].shape
    values = {f"${outputs + i}": x.view(U32) for i, x in enumerate(inputs)}

    def read(name: str):
        if name[0].isalpha() or name[0] == "$":
            return values[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(shape, number % 2**32, U32)

    body = re.sub(r"//.*", "", text).strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        if line.startswith(".reg"):
            continue
        guard, line = line.split(maxsplit=1) if line.startswith("@") else (None, line)
        name, rest = line.split(maxsplit=1)
        if name == "mov.b64":  # {low, high}, pair
            low, high, pair = (part.strip(" {}") for part in rest.split(","))
            values[low] = values[pair].astype(U32)
            values[high] = (values[pair] >> np.uint64(32)).astype(U32)
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        if name in ("prmt.b32", "lop3.b32"):
            *sources, table = sources
            result = _OPERATIONS[name](*map(read, sources), int(table, 0))
        else:
            with np.errstate(all="ignore"):
                result = _OPERATIONS[name](*map(read, sources))
        if guard:
            result = np.where(values[guard[1:]], result, values[target])
        values[target] = result
    return tuple(values[f"${i}"] for i in range(outputs))


def pairs(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    x = x.contiguous().numpy()
    return np.ascontiguousarray(x[..., 0::2]), np.ascontiguousarray(x[..., 1::2])


def interleave(even: np.ndarray, odd: np.ndarray, dtype: np.dtype) -> torch.Tensor:
    return torch.from_numpy(np.stack((even, odd), -1).view(dtype).reshape(*even.shape[:-1], -1))


@pytest.mark.parametrize("signed", [True, False])
def test_decode(signed):
    """Every code with every exponent that occurs, and 0, which rows outside the matrix have."""
    exponents = torch.tensor([0, *range(40, 256)], dtype=torch.int32)[:, None].expand(-1, 256)
    codes = torch.arange(signed, 256, dtype=torch.int32) - 128 * signed  # no code is -128
    codes = torch.cat((codes, codes[-1:])) if signed else codes
    codes = codes.expand(exponents.shape).contiguous()
    want = (decode_signed if signed else decode_unsigned).torch(codes, exponents)
    even, odd = pairs(codes & 0xFF)
    scale = np.ascontiguousarray(pairs(exponents << 23)[0]).view(np.float32)
    with np.errstate(all="ignore"):
        offset = scale * np.float32(-(2.0 ** (-15 if signed else -31)))
    text = ptx.DECODE_SIGNED if signed else ptx.DECODE_UNSIGNED
    shift = np.full_like(even, 2**20)
    got = interleave(*run(text, 2, even | odd << 8, scale, offset, shift), np.float32)
    both_nan = got.isnan() & want.isnan()
    assert torch.equal(got.view(torch.int32)[~both_nan], want.view(torch.int32)[~both_nan])
    assert both_nan[-1].all() and not both_nan[:-1].any()


def values(signed: bool) -> torch.Tensor:
    """Rows of a block: wide ranges, zeros, denormals, one huge value, all small, all zero."""
    x = torch.randn(PAIRS // 64, 128) * torch.exp2(torch.randint(-40, 3, (PAIRS // 64, 128)))
    x[0] = 0.0
    x[1] = torch.randn(128) * 1e-39
    x[2] *= 1e-30
    x[3, 5] = 2.0**125
    x[4, ::3] = 0.0
    x[5] *= 2.0**-90
    x[6] = torch.tensor([1.0, 1.875, 1.9375, 2.0 - 2.0**-23]).repeat(32)
    x[7] = -x[6]
    x[8, 0] = -0.0 if signed else 0.0
    return x if signed else x.abs()


@pytest.mark.parametrize("stochastic", [True, False])
def test_encode(stochastic):
    torch.manual_seed(0)
    m, v = values(True), values(False)
    numbers = (torch.arange(m.numel(), dtype=torch.int32) + 7 * 2**24).view(m.shape)
    seed = torch.tensor(-987654321, dtype=torch.int32)
    random = random_bits_reference(numbers, seed)
    inverses, want = [], []
    for j, (x, margin, encode) in enumerate(
        ((m, 0x1000FF, encode_signed), (v, 0x0FFFFF, encode_unsigned))
    ):
        largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
        inverse = inverse_scale.torch(block_exponent.torch(largest, margin)).expand(x.shape)
        bits = half_reference(random, j) if stochastic else 0x8000
        want.append(encode.torch(x, inverse, bits) & 0xFF)
        inverses.append(pairs(inverse)[0])
    (h,) = run(ptx.HASH, 1, pairs(numbers ^ seed)[0])
    assert np.array_equal(h.view(np.int32), pairs(random)[0])
    text = ptx.ENCODE_STOCHASTIC if stochastic else ptx.ENCODE_NEAREST
    inputs = (*pairs(m), *pairs(v), *inverses, h, np.full_like(h, 0x80))
    for got, codes in zip(run(text, 2, *inputs), want, strict=True):
        even, odd = pairs(codes)
        assert np.array_equal(got & 0xFFFF, (even | odd << 8).view(np.uint32))
    assert (want[1][v > 0] > 0).all() and (want[1][v == 0] == 0).all()


@pytest.mark.parametrize("stochastic", [True, False])
def test_round(stochastic):
    torch.manual_seed(0)
    w = torch.randn(2 * PAIRS)
    random = torch.randint(-(2**31), 2**31, (PAIRS,), dtype=torch.int64).int()
    bits = torch.stack((random, random * torch.tensor(0x9E3779B1 - 2**32).int()), 1).view(-1)
    want = stochastic_bf16_reference(w, bits) if stochastic else w.bfloat16()
    text = ptx.ROUND_STOCHASTIC if stochastic else ptx.ROUND_NEAREST
    (got,) = run(text, 1, *pairs(w), random.numpy())
    assert torch.equal(torch.from_numpy(got.view(np.int16)), want.view(torch.int16))
    wide = interleave(*run(ptx.WIDEN, 2, got), np.float32)
    assert torch.equal(wide, want.float())


def test_a_nan_stays_one():
    """Canonical NaN of a GPU: adding to it would carry into the sign."""
    nan = np.full(8, 0x7FFFFFFF, np.uint32)
    ones = np.full(8, 0xFFFFFFFF, np.uint32)
    (got,) = run(ptx.ROUND_STOCHASTIC, 1, nan, np.ones(8, np.float32), ones)
    assert (got & 0xFFFF == 0x7FFF).all() and (got >> 16 == 0x3F80).all()

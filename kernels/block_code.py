"""Optimizer states in 8 bits: a code for each value, a shared exponent for each block of 128.

    value = sign * (F(c) - F(0)) * 2^(e - 127)       c = |code|, e the block's exponent byte
    F(c) = (1 + (c mod 8) / 8) * 2^(c // 8 - top)    top = 15 for signed codes, 31 for unsigned

F(c) are the floats of three mantissa bits. Subtracting the smallest makes code 0 exactly zero and
the steps next to it even, as the segments of mu-law speech (ITU-T G.711) do: encoding is one
multiply-add, and an integer addition and shift of the float's bits. Neighbouring codes differ by 6
to 13 % of the value, down to 2^-11 of the block's largest value (signed) or 2^-27 (unsigned); the
smallest non-zero value is 2^-18 or 2^-34 of the block's scale.

Signed codes are int8, those of states that are never negative uint8; exponents are uint8, biased
as in fp32 (E8M0 of the OCP microscaling formats). Scales are powers of two, so that a value which
stays keeps its code when the block's largest value changes. Blocks lie along a row of memory; the
last of a row may be shorter.

Rounding is stochastic, linear between neighbours, so that a stored value is right on average and a
decay of 0.1 % a step is not lost between codes 10 % apart. An unsigned value above zero is never
rounded to zero, because it stands under a fraction. NaN, infinity and values from 2^126 on turn
their block into NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, where
from torch.nn.functional import pad

from forge.kernels.rounding import half
from forge.kernels.runtime import Dual, bits_of, float_of, tl, triton
from forge.kernels.target import BLOCK, rows_and_columns


def _block_exponent(largest, margin):
    # Above the last code a value belongs to the next exponent: it may be rounded up to it. A NaN of
    # all ones would overflow, so that is asked first.
    e = where(largest < 0x7E800000, (largest + margin) >> 23, 255)
    # Below 2^-87 fp32 has no room for the smallest codes.
    return where(e < 40, 40, e)


def _inverse_scale(exponent):
    return where(exponent < 254, float_of((254 - exponent) << 23), 0.0)


def _decode_signed(code, exponent):
    scale = float_of(exponent << 23)
    f = float_of((where(code < 0, -code, code) << 20) + 0x38000000)
    x = f * scale - 2.0**-15 * scale  # exact products; of an infinite scale, NaN
    return float_of(bits_of(x) ^ (code & -(2**31)))


def _decode_unsigned(code, exponent):
    scale = float_of(exponent << 23)
    return float_of((code << 20) + 0x30000000) * scale - 2.0**-31 * scale


def _encode_signed(x, inverse_scale, random):
    f = float_of(bits_of(x) & 0x7FFFFFFF) * inverse_scale + 2.0**-15
    # 16 random bits of the 20 that fall away, and half of the others: codes' own values stay.
    code = (bits_of(f) - 0x38000000 + (random << 4) + 8) >> 20
    sign = bits_of(x) >> 31  # 0 or -1
    return (code ^ sign) - sign


def _encode_unsigned(x, inverse_scale, random):
    f = x * inverse_scale + 2.0**-31
    code = (bits_of(f) - 0x30000000 + (random << 4) + 8) >> 20
    return where((x > 0) & (code < 1), 1, code)


# int32 in and out but for fp32 x, inverse_scale and what is decoded. `largest` are the bits of the
# block's largest magnitude, `margin` is how many floats the last code, 1.875 - F(0), is below 2.
block_exponent = Dual(_block_exponent)
inverse_scale = Dual(_inverse_scale)
decode_signed, encode_signed = Dual(_decode_signed), Dual(_encode_signed)
decode_unsigned, encode_unsigned = Dual(_decode_unsigned), Dual(_encode_unsigned)

_exponent, _inverse = block_exponent.triton, inverse_scale.triton
_to_signed, _from_signed = encode_signed.triton, decode_signed.triton
_to_unsigned, _from_unsigned = encode_unsigned.triton, decode_unsigned.triton


@triton.jit
def decode(code, scale):
    """fp32 values of ``code`` [R, 128], int8 or uint8, with exponents ``scale`` [R, 1]."""
    exponent = scale.to(tl.int32)
    if code.dtype == tl.int8:
        return _from_signed(code.to(tl.int32), exponent)
    else:
        return _from_unsigned(code.to(tl.int32), exponent)


@triton.jit
def encode(x, mask, h, j: tl.constexpr, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes and exponents of fp32 ``x`` [R, 128] where ``mask``; ``h``, ``j`` as of ``half``."""
    largest = tl.max(
        tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=1, keep_dims=True
    )
    exponent = _exponent(largest, 0x1000FF if dtype == tl.int8 else 0x0FFFFF)
    inverse = _inverse(exponent)
    random = 0x8000  # half a step: to nearest
    if STOCHASTIC:
        random = half(h, j).to(tl.int32)
    if dtype == tl.int8:
        code = _to_signed(x, inverse, random)
    else:
        code = _to_unsigned(x, inverse, random)
    return code.to(dtype), exponent.to(tl.uint8)


def scale_shape(codes: Tensor) -> tuple[int, int]:
    """Rows, and blocks in a row, of codes with this shape and memory layout."""
    rows, columns = rows_and_columns(codes)
    return rows, -(-columns // BLOCK)


def _in_rows(x: Tensor) -> Tensor:
    rows, columns = rows_and_columns(x)
    return x.as_strided((rows, columns), (columns, 1))


def decode_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of ``codes`` (int8 or uint8, dense) in their shape and memory layout.

    ``scales``: uint8 exponents of shape ``scale_shape(codes)``.
    """
    rows = _in_rows(codes)
    exponent = scales.int().repeat_interleave(BLOCK, dim=1)[:, : rows.shape[1]]
    decode = decode_signed if codes.dtype == torch.int8 else decode_unsigned
    return decode.torch(rows.int(), exponent).as_strided(codes.shape, codes.stride())


def encode_reference(x: Tensor, codes: Tensor, scales: Tensor, random: Tensor | None) -> None:
    """Write fp32 ``x`` into ``codes`` and ``scales``, in their shapes and memory layouts.

    ``random``: int32, 16 random bits for each value; None rounds to nearest.
    """
    values = _in_rows(torch.empty_like(codes, dtype=torch.float32).copy_(x))
    magnitude = bits_of(values) & 0x7FFFFFFF
    columns = values.shape[1]
    blocks = pad(magnitude, (0, -columns % BLOCK)).view(*scales.shape, BLOCK)
    margin = 0x1000FF if codes.dtype == torch.int8 else 0x0FFFFF
    exponent = block_exponent.torch(blocks.amax(dim=2), margin)
    inverse = inverse_scale.torch(exponent).repeat_interleave(BLOCK, dim=1)[:, :columns]
    bits: Tensor | int = 0x8000  # half a step
    if random is not None:
        bits = _in_rows(torch.empty_like(codes, dtype=torch.int32).copy_(random))
    encode = encode_signed if codes.dtype == torch.int8 else encode_unsigned
    # Of a NaN any eight bits: its exponent says it all.
    _in_rows(codes).copy_(encode.torch(values, inverse, bits))
    scales.copy_(exponent)

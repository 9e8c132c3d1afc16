"""Gradients of attention's queries as sums of integers, which have the same bits in any order.

    dq_i = scale * sum over j of ds_ij k_j,    ds_ij = p_ij (dout_i v_j - delta_i)

Probabilities of a query add up to 1, and out is an average of v, so of every element

    |sum| <= |dout_i| * bound,    bound = 2 * max over j |v_j| * max over j and d |k_jd|

with Euclidean norms. Parts of the sum are rounded to multiples of 1 / (fine_i * coarse), two powers
of two with |dout_i| fine_i < 1 and bound * coarse < 2^30. A factor of 2 is left to 2^31: far more
than what the rounding of p, ds and out to 8 bits, of scores in fp32 and of the parts can add. Sums
on the way may wrap around.

Precision: for random values, 128 a head, the bound is some 2^13 times a typical sum at 4096 tokens;
of 30 bits 17 are left, of which the rounding of 32 parts takes one or two. In general ds is off by
what the rounding of out does to delta, some 2^-9 |dout_i| |out_i| / sqrt(D), and that times k is
more than 2^-20 of the bound unless a query looks at values, or keys, a thousand times smaller than
the largest ones.

A query whose gradient is not finite (or 2^124 and more) gets NaN, and all queries of a head do for
a key or value that is not finite.

The sums lie as the warps of kernels/attention_hopper_backward_long.py add to them: of a head and
64 queries [halves of D, 16, 128 threads], a pair of neighbours each, as one number of 64 bits:
high * 2^32 + low, both with signs. Who adds such numbers adds both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.attention_tiles import addressed, rows_of
from forge.kernels.runtime import begin, early_launch, tl, triton

CHUNK = 32  # tokens of a program
BITS = 30
MOST = 120  # sums are multiplied by no more than 2 to this


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _norms(x):
    """Of rows; without squares that overflow or vanish."""
    most = tl.max(tl.abs(x), axis=1)
    most = tl.where(most > 0, most, 1.0)
    x /= most[:, None]
    return most * tl.sqrt(tl.sum(x * x, axis=1))


@triton.jit
def _power(bits, exponent: tl.constexpr, most: tl.constexpr):
    """The power of two, at most 2^most, that times a number of these bits is below 2^exponent."""
    e = bits >> 23
    e = tl.where(e > 250, 0x7FC00000, tl.minimum(exponent + 253 - e, most + 127) << 23)
    return e.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def _attention_prepare_kernel(
    dout,  # as rows_of takes it
    out,
    k,
    v,
    minus_ptr,  # fp32 [B * H, pitch]: minus delta; zero from T on
    fine_ptr,
    sizes_ptr,  # int32 [2, B * K, pitch / 32]: bits of the largest |k| and |v_j| of 32 tokens
    sums_ptr,  # int64 [B * H, pitch / 32, 2048]; zeroed
    T,
    pitch,
    all_kv,  # B * K
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
):
    begin(PDL)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = pitch // ROWS
    b = head // H
    h = head % H
    first = chunk * ROWS
    pairs: tl.constexpr = ROWS * D // 2
    row = head.to(tl.int64) * chunks + chunk
    zeros = tl.zeros((pairs,), tl.int64)
    tl.store(sums_ptr + row * pairs + tl.arange(0, pairs), zeros)
    dout_rows = rows_of(dout, b, h, first, T, ROWS, D).to(tl.float32)
    out_rows = rows_of(out, b, h, first, T, ROWS, D).to(tl.float32)
    at = row * ROWS + tl.arange(0, ROWS)
    tl.store(minus_ptr + at, -tl.sum(dout_rows * out_rows, axis=1))
    tl.store(fine_ptr + at, _power(_bits(_norms(dout_rows)), 0, 126))
    if h % GROUP == 0:
        kv = b * (H // GROUP) + h // GROUP
        k_rows = rows_of(k, b, h // GROUP, first, T, ROWS, D).to(tl.float32)
        v_rows = rows_of(v, b, h // GROUP, first, T, ROWS, D).to(tl.float32)
        tl.store(sizes_ptr + kv * chunks + chunk, tl.max(tl.max(_bits(k_rows), axis=1), axis=0))
        largest = tl.max(_bits(_norms(v_rows)), axis=0)
        tl.store(sizes_ptr + (all_kv + kv) * chunks + chunk, largest)


@triton.jit
def _largest(ptr, count):
    found = tl.zeros((128,), tl.int32)
    for start in range(0, count, 128):
        at = start + tl.arange(0, 128)
        found = tl.maximum(found, tl.load(ptr + at, at < count, other=0))
    return tl.max(found, axis=0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def _attention_finish_kernel(
    sums_ptr,  # int64 [B * H, pitch / 64, 2, 16, 128]
    fine_ptr,
    sizes_ptr,
    dq_ptr,  # [B, T, H, D]
    T,
    pitch,
    all_kv,
    scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    MOST: tl.constexpr,
):
    begin(PDL)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = pitch // ROWS
    b = head // H
    h = head % H
    kv = b * (H // GROUP) + h // GROUP
    bound = 2 * _largest(sizes_ptr + kv * chunks, chunks)
    bound *= _largest(sizes_ptr + (all_kv + kv) * chunks, chunks)
    coarse = _power(_bits(bound), BITS, MOST)
    r = chunk % 2 * ROWS + tl.arange(0, ROWS)[:, None]  # of 64 queries
    pair = tl.arange(0, D // 2)[None, :]
    # Of a warp 16 rows; of a thread two of them and every fourth pair of half the columns.
    at = (pair // 32 * 16 + r // 8 % 2 * 8 + pair % 32 // 4) * 128
    at += r // 16 * 32 + r % 8 * 4 + pair % 4
    both = tl.load(sums_ptr + (head.to(tl.int64) * (chunks // 2) + chunk // 2) * (ROWS * D) + at)
    low = both.to(tl.int32)
    high = ((both - low.to(tl.int64)) >> 32).to(tl.int32)
    x = tl.join(low, high).reshape(ROWS, D).to(tl.float32)
    t = chunk * ROWS + tl.arange(0, ROWS)
    times = tl.load(fine_ptr + head.to(tl.int64) * pitch + t) * coarse
    times = tl.where(times > 2.0**MOST, 2.0**MOST, times)  # NaN stays
    x = x * (1 / times)[:, None] * scale
    ptr = dq_ptr + ((b.to(tl.int64) * T + t[:, None]) * H + h) * D + tl.arange(0, D)[None, :]
    tl.store(ptr, x.to(dq_ptr.dtype.element_ty), t[:, None] < T)


def prepare(
    dout: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minus delta and fine, fp32 like ``lse`` [B * H, pitch]; sizes of keys and values; sums."""
    batch, heads, tokens, size = dout.shape
    kv_heads, (rows, pitch) = k.shape[1], lse.shape
    chunks = pitch // CHUNK
    minus, fine = torch.empty_like(lse), torch.empty_like(lse)
    sizes = lse.new_empty((2, batch * kv_heads, chunks), dtype=torch.int32)
    sums = lse.new_empty((rows, chunks // 2, 2, 16, 128), dtype=torch.int64)
    _attention_prepare_kernel[(rows, chunks)](
        *map(addressed, (dout, out, k, v)),
        minus,
        fine,
        sizes,
        sums,
        tokens,
        pitch,
        batch * kv_heads,
        H=heads,
        GROUP=heads // kv_heads,
        D=size,
        ROWS=CHUNK,
        **early_launch(dout),
    )
    return minus, fine, sizes, sums


def finish(sums: Tensor, fine: Tensor, sizes: Tensor, scale: float, dq: Tensor) -> None:
    """Write ``dq`` [B, T, H, D]."""
    batch, tokens, heads, size = dq.shape
    _attention_finish_kernel[(fine.shape[0], sizes.shape[2])](
        sums,
        fine,
        sizes,
        dq,
        tokens,
        fine.shape[1],
        sizes.shape[1],
        scale,
        H=heads,
        GROUP=batch * heads // sizes.shape[1],
        D=size,
        ROWS=CHUNK,
        BITS=BITS,
        MOST=MOST,
        **early_launch(dq),
    )

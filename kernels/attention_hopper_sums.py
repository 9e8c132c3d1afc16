"""What kernels/attention_hopper_backward_long.py does with the sums of attention_fixed_point.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from forge.kernels import attention_fixed_point

BITS = gl.constexpr(attention_fixed_point.BITS)
MOST = gl.constexpr(attention_fixed_point.MOST)


@gluon.jit
def rounded(x):
    return gl.inline_asm_elementwise(
        "cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def add_part(ptr, number, part, fineness):
    """Add a part to the sum of block ``number``.

    Two neighbours at a time, as one number of 64 bits, and threads beside each other: 256 bytes of
    a warp lie together.
    """
    x = rounded(part * gl.minimum(fineness, 2.0**MOST)[:, None])
    # [warps, rows / 8, rows, columns / 8, columns / 2, 2]: a thread has two rows, 16 columns each.
    x = x.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 1, 3, 5)).reshape([128, 16, 2])
    low, high = x.split()
    pairs = (high.to(gl.int64) << 32) + low.to(gl.int64)
    flat: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    pairs = gl.convert_layout(pairs, flat, assert_trivial=True)
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, flat))
    pair = gl.arange(0, 16, layout=gl.SliceLayout(0, flat))
    ptr += number.to(gl.int64) * (32 * 128)
    gl.atomic_add(ptr + thread[:, None] + pair[None, :] * 128, pairs, sem="relaxed")


@gluon.jit
def _largest(ptr, count):
    """The largest of so many numbers' bits, none below 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout=layout)
    found = gl.zeros((128,), dtype=gl.int32, layout=layout)
    for start in range(0, count, 128):
        found = gl.maximum(found, gl.load(ptr + start + at, mask=start + at < count, other=0))
    return gl.max(found, axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def coarse_of(sizes_ptr, kv, all_kv, chunks):
    """What a head's sums are multiplied by, as attention_fixed_point.py has it."""
    bound = 2 * _largest(sizes_ptr + kv * chunks, chunks)
    bound *= _largest(sizes_ptr + (all_kv + kv) * chunks, chunks)
    exponent = bound.to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(BITS + 253 - exponent, MOST + 127)
    return (exponent << 23).to(gl.float32, bitcast=True)

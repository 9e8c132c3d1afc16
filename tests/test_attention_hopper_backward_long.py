"""Attention's backward kernel for Hopper and long sequences, as test_attention_hopper.py has it.

The Triton kernels in front of it and behind it run in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch

from forge.kernels import attention as module
from forge.kernels import attention_backward as backward_module
from forge.kernels import attention_tiles, runtime
from forge.kernels.attention import attention_reference
from forge.kernels.attention_backward import attention_backward

from .gluon_on_cpu import OnCPU
from .test_attention import TOLERANCE, error, head_major, packed, run, sdpa
from .test_attention import check as check_attention
from .test_attention_hopper import ENDS

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
long = pytest.importorskip("forge.kernels.attention_hopper_backward_long")
fixed_point = pytest.importorskip("forge.kernels.attention_fixed_point")

interpreted = pytest.mark.skipif(
    not runtime.INTERPRETED, reason="the kernels around it need Triton's interpreter"
)
# Batch, heads of queries, of keys, tokens: one block of queries and several, an odd number of them,
# blocks cut off, groups of 1, 2 and 3, up to four turns of the ring of three.
SHAPES = [(1, 1, 1, 1), (1, 2, 1, 65), (2, 1, 1, 130), (1, 3, 1, 190), (1, 2, 1, 257)]


@pytest.fixture
def on_cpu(monkeypatch):
    def change(late, backwards=False):
        """Either warpgroup is behind the other."""
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        kernel = OnCPU(KERNEL, late, backwards=backwards, slow=1 - late)
        monkeypatch.setattr(long, "_attention_bwd_hopper_long_kernel", kernel)
        return kernel

    return change


KERNEL = long._attention_bwd_hopper_long_kernel


def forward(q, k, v, scale):
    """The exact result, rounded, and lse."""
    batch, heads, tokens, _ = q.shape
    group = heads // k.shape[1]
    s = scale * q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2)
    s.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
    out = (s.softmax(-1) @ v.double().repeat_interleave(group, 1)).to(q.dtype)
    lse = torch.full((batch * heads, -(-tokens // 64) * 64), math.inf)
    lse[:, :tokens] = (s.logsumexp(-1) * math.log2(math.e)).flatten(0, 1)
    return out, lse


def backward(dout, q, k, v, scale, parts):
    batch, heads, tokens, size = q.shape
    dq = torch.full((batch, tokens, heads, size), math.nan, dtype=q.dtype)
    kind = torch.float32 if parts else q.dtype
    dkv = torch.full((2, batch, tokens, heads if parts else k.shape[1], size), math.nan, dtype=kind)
    out, lse = forward(q, k, v, scale)
    minus, fine, sizes, sums = fixed_point.prepare(dout, out, k, v, lse)
    long.attention_backward_long(dout, q, k, v, lse, minus, fine, sizes, sums, scale, *dkv)
    fixed_point.finish(sums, fine, sizes, scale, dq)
    dk, dv = dkv.float().unflatten(3, (k.shape[1], -1)).sum(4).to(q.dtype)
    return [t.transpose(1, 2) for t in (dq, dk, dv)]


@interpreted
@ENDS
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_the_cpu(on_cpu, shape, parts, late):
    on_cpu(late)
    dtype = torch.float16 if late else torch.bfloat16
    tensors = packed(*shape, 128, dtype)
    upstream = torch.randn(*shape[:2], shape[3], 128).to(dtype)
    exact = run(lambda *t: attention_reference(*t, 0.2), [t.double() for t in tensors], upstream)
    theirs = run(lambda *t: sdpa(*t, 0.2), tensors, upstream)
    tensors = [t.detach() for t in tensors]
    found = backward(upstream, *tensors, 0.2, parts)
    for a, b, c in zip(found, theirs[1:], exact[1:], strict=True):
        assert error(a, c) <= error(b, c) + TOLERANCE[dtype]


@interpreted
def test_programs_in_any_order_give_the_same_bits(on_cpu):
    tensors = head_major(1, 1, 1, 300, 128, torch.bfloat16)
    upstream = torch.randn(tensors[0].shape).bfloat16()
    found = []
    for late, backwards in ((False, False), (True, True)):
        on_cpu(late, backwards)
        found.append(backward(upstream, *(t.detach() for t in tensors), 0.1, False))
    assert all(map(torch.equal, *found))


@interpreted
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e9], ids=str)
def test_gradients_of_any_size(on_cpu, size):
    """Squares of which vanish or overflow; and rows that differ by far."""
    on_cpu(False)
    tensors = [t.detach() for t in packed(1, 1, 1, 130, 128, torch.bfloat16)]
    rows = torch.logspace(-6, 6, 130)[:, None]
    upstream = (torch.randn(1, 1, 130, 128) * rows).bfloat16()
    plain = backward(upstream, *tensors, 0.1, False)
    found = backward((upstream * size).bfloat16(), *tensors, 0.1, False)
    for t in range(1, 130):
        assert error(found[0][:, :, t] / size, plain[0][:, :, t]) < 0.01
    assert error(found[1] / size, plain[1]) < 0.01


@interpreted
def test_the_largest_sums_there_can_be(on_cpu):
    """Half of the probability at each of two opposite values, keys alike: nearly the bound."""
    on_cpu(False)
    q = torch.zeros(1, 1, 64, 128)
    k = torch.full((1, 1, 64, 128), 2.0)
    k[:, :, 1::2] = -2.0
    v = k * 3
    dout = torch.ones(1, 1, 64, 128) * 5
    tensors = [t.bfloat16() for t in (q, k, v)]
    exact = run(
        lambda *t: attention_reference(*t, 1.0),
        [t.double().requires_grad_() for t in tensors],
        dout,
    )
    found = backward(dout.bfloat16(), *tensors, 1.0, False)
    assert exact[1].abs().max() > 0.4 * 2 * (5 * 128**0.5) * (6 * 128**0.5) * 2
    for a, b in zip(found, exact[1:], strict=True):
        assert error(a, b) < 0.01


@interpreted
def test_what_is_not_finite_stays_so(on_cpu):
    on_cpu(False)
    q, k, v = (t.detach() for t in packed(1, 2, 1, 70, 128, torch.bfloat16))
    dout = torch.randn(1, 2, 70, 128).bfloat16()
    dout[0, 1, 40, 3] = math.inf
    dq, _, _ = backward(dout, q, k, v, 0.1, False)
    wrong = dq.isnan().all(-1)
    assert wrong[0, 1, 40] and wrong.sum() == 1
    v = v.clone()
    v[0, 0, 69, 0] = math.nan
    dq, _, dv = backward(torch.randn(1, 2, 70, 128).bfloat16(), q, k, v, 0.1, False)
    assert dq.isnan().all() and dv.isfinite().all()


@interpreted
@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_attention_takes_this_kernel(on_cpu, monkeypatch, kv, whole):
    kernel = on_cpu(True)
    for file in (module, backward_module):
        monkeypatch.setattr(file, "runs_on_hopper", lambda _, way: way == "long backward")
    monkeypatch.setattr(long, "whole_groups", lambda *_: whole)
    monkeypatch.setattr(runtime, "interpret_cpu", True)
    check_attention(packed(1, 2, kv, 70, 128, torch.float16), "cpu")
    assert kernel.launched == 1
    tensors = [t.detach() for t in packed(1, 2, kv, 70, 128, torch.float16)]
    dout = torch.randn(1, 2, 70, 128).half()
    parts = attention_backward(dout, *tensors, *forward(*tensors, 0.1), 0.1, whole=False)
    assert parts[1].dtype == (torch.float32 if kv == 1 and not whole else torch.float16)


def test_whether_a_program_takes_all_heads_that_share_keys(monkeypatch):
    monkeypatch.setattr(long, "processors", lambda _: 132)

    def whole(batch, heads, kv, tokens):
        q, k = (torch.empty(batch, n, tokens, 128, device="meta") for n in (heads, kv))
        return long.whole_groups(q, k)

    # The longest program of 2048 tokens would be twice what a multiprocessor has to do.
    assert not whole(1, 16, 8, 2048) and whole(1, 16, 8, 4096) and whole(2, 16, 8, 2048)
    assert not whole(1, 32, 8, 2048) and whole(1, 32, 8, 4096)
    assert not whole(1, 32, 4, 16_384)


def test_it_is_off():
    """Until it has been measured."""
    assert attention_tiles.HOPPER_TOKENS["long backward"] == []


# -- on a GPU ---------------------------------------------------------------------------------

GPU_SHAPES = [(1, 4, 2, 1), (1, 4, 2, 129), (2, 4, 1, 700), (1, 16, 8, 1000), (1, 16, 8, 2048)]
GPU_SHAPES += [(1, 16, 8, 4096), (1, 2, 2, 4001)]


@pytest.fixture
def on_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    tokens = dict.fromkeys(attention_tiles.HOPPER_TOKENS, [])
    tokens["long backward"] = [(1, 10**9)]
    monkeypatch.setattr(attention_tiles, "HOPPER_TOKENS", tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_shapes(on_hopper, monkeypatch, shape, dtype, whole):
    monkeypatch.setattr(long, "whole_groups", lambda *_: whole)
    check_attention(packed(*shape, 128, dtype), "cuda")
    check_attention(head_major(*shape, 128, dtype), "cuda", 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16, 8, 4096), (2, 4, 1, 1000)], ids=str)
def test_two_runs_give_the_same_bits(on_hopper, shape):
    tensors = packed(*shape, 128, torch.bfloat16)
    upstream = torch.randn(tensors[0].shape)
    first, second = (run(module.attention, tensors, upstream, "cuda") for _ in range(2))
    assert all(map(torch.equal, first, second))

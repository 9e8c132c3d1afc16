"""Attention's kernels for Hopper: on the CPU as gluon_on_cpu.py runs them, and on a GPU.

Compiled, they are looked at in test_compiled_kernels.py. The criterion is that of
test_attention.py.
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

from . import gluon_on_cpu
from .gluon_on_cpu import Int, OnCPU, run_program
from .test_attention import TOLERANCE, error, head_major, packed, run, sdpa
from .test_attention import check as check_attention

pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon")
gl = gluon.language
hopper = pytest.importorskip("forge.kernels.attention_hopper")
hopper_backward = pytest.importorskip("forge.kernels.attention_hopper_backward")

# Batch, heads of queries, of keys, tokens, head size: groups of 1, 2 and 4; one block and several,
# whole ones and not; up to four turns of a warpgroup's ring of three.
SHAPES = [(1, 2, 1, 1, 64), (1, 1, 1, 63, 128), (2, 2, 2, 64, 64), (1, 4, 1, 65, 64)]
SHAPES += [(1, 2, 1, 129, 128), (2, 2, 1, 320, 64), (1, 1, 1, 511, 64)]
ENDS = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@pytest.fixture
def on_cpu(monkeypatch):
    """Both kernels, run on the CPU from copies as early or as late as may be."""

    def change(late):
        kernels = []
        for file, name in (
            (hopper, "_attention_fwd_hopper_kernel"),
            (hopper_backward, "_attention_bwd_hopper_kernel"),
        ):
            kernels.append(OnCPU(getattr(file, name), late))
            monkeypatch.setattr(file, name, kernels[-1])
        return kernels

    return change


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, math.nan, dtype=dtype)


def forward(q, k, v, scale):
    batch, heads, tokens, size = q.shape
    out = nan(batch, tokens, heads, size, dtype=q.dtype)
    lse = nan(batch * heads, -(-tokens // 64) * 64)
    hopper.attention_forward_hopper(q, k, v, scale, out, lse)
    return out.transpose(1, 2), lse


def backward(dout, q, k, v, out, lse, scale, dtype=torch.float32):
    batch, heads, tokens, size = q.shape
    delta = torch.zeros_like(lse)
    delta[:, :tokens] = (dout.float() * out.float()).sum(-1).flatten(0, 1)
    dq = nan(batch, tokens, heads, size, dtype=q.dtype)
    dk, dv = nan(2, batch, tokens, heads, size, dtype=dtype)
    hopper_backward.attention_backward_hopper(dout, q, k, v, lse, delta, scale, dq, dk, dv)
    return [t.transpose(1, 2) for t in (dq, dk, dv)]


@ENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_the_cpu(on_cpu, shape, dtype, late):
    on_cpu(late)
    batch, heads, kv, tokens, size = shape
    tensors = packed(*shape, dtype)
    upstream = torch.randn(batch, heads, tokens, size).to(dtype)
    exact = run(lambda *t: attention_reference(*t, 0.2), [t.double() for t in tensors], upstream)
    theirs = run(lambda *t: sdpa(*t, 0.2), tensors, upstream)
    out, lse = forward(*tensors, 0.2)
    assert torch.isfinite(lse[:, :tokens]).all()
    assert (lse[:, tokens:] == math.inf).all()
    dq, *parts = backward(upstream, *tensors, out, lse, 0.2)
    dk, dv = (t.unflatten(1, (kv, heads // kv)).sum(2) for t in parts)
    for a, b, c in zip((out, dq, dk, dv), theirs, exact, strict=True):
        assert error(a, c) <= error(b, c) + TOLERANCE[dtype]


def test_gradients_of_keys_in_half_precision(on_cpu):
    """Where no heads share them they are not parts."""
    on_cpu(True)
    tensors = packed(1, 2, 2, 130, 64, torch.bfloat16)
    upstream = torch.randn(1, 2, 130, 64).bfloat16()
    out, lse = forward(*tensors, 0.1)
    wide = backward(upstream, *tensors, out, lse, 0.1)
    half = backward(upstream, *tensors, out, lse, 0.1, torch.bfloat16)
    for a, b in zip(half, wide, strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16())


def test_scores_far_from_zero(on_cpu):
    """Maxima that differ by far between the warpgroups, whose sums would overflow or vanish."""
    on_cpu(False)
    for sign in (1, -1):
        q, k, v = head_major(1, 1, 1, 256, 64, torch.float16)
        q = q.abs()
        k = (k.abs() * torch.linspace(-2, 2, 256)[:, None] * sign).half()
        exact = attention_reference(q.double(), k.double(), v.double(), 1.0)
        theirs = sdpa(q, k, v, 1.0)
        out, lse = forward(q, k, v, 1.0)
        assert lse.isfinite().all()
        assert error(out, exact) <= error(theirs, exact) + TOLERANCE[torch.float16]


def test_what_nobody_may_see_is_not_seen(on_cpu):
    """NaN in later keys and values, and beyond the last token."""
    on_cpu(True)
    q, k, v = packed(1, 1, 1, 200, 64, torch.bfloat16)
    whole, _ = forward(q, k, v, 0.1)
    k, v = k.clone(), v.clone()
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.nan
    out, _ = forward(q, k, v, 0.1)
    assert torch.equal(out[:, :, :128], whole[:, :, :128])


@ENDS
@pytest.mark.parametrize("kv", [1, 2])
def test_attention_takes_these_kernels(on_cpu, monkeypatch, kv, late):
    if not runtime.INTERPRETED:
        pytest.skip("the kernels around them need Triton's interpreter")
    kernels = on_cpu(late)
    for file in (module, backward_module):
        monkeypatch.setattr(file, "runs_on_hopper", lambda _, kind: "long" not in kind)
    monkeypatch.setattr(runtime, "interpret_cpu", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_attention(packed(2, 2, kv, 130, 64, torch.float16), "cpu")
    assert [kernel.launched for kernel in kernels] == [1, 1]
    tensors = [t.detach() for t in packed(1, 2, kv, 70, 64, torch.float16)]
    out, lse = forward(*tensors, 0.1)
    dout = torch.randn(out.shape).half()
    whole = attention_backward(dout, *tensors, out, lse, 0.1)
    parts = attention_backward(dout, *tensors, out, lse, 0.1, whole=False)
    assert parts[1].dtype == (torch.float32 if kv == 1 else torch.float16)
    for a, b in zip(whole, parts, strict=True):
        summed = b.float().unflatten(1, (a.shape[1], -1)).sum(2)
        assert torch.equal(a, summed.to(a.dtype))


def test_when_they_are_taken(monkeypatch):
    class OnGPU:
        is_cuda, shape, dtype = True, (1, 2, 512, 128), torch.bfloat16

        def get_device(self):
            return 0

    def takes(capability=(9, 0), direction="forward", **changes):
        q = OnGPU()
        vars(q).update(changes)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        attention_tiles._is_hopper.cache_clear()
        found = attention_tiles.runs_on_hopper(q, direction)
        attention_tiles._is_hopper.cache_clear()
        return found

    monkeypatch.setattr(
        attention_tiles,
        "HOPPER_TOKENS",
        {"forward": [(1, 512)], "backward": [(1, 9), (20, 30)], "long backward": [(512, 600)]},
    )
    assert takes() and takes(dtype=torch.float16) and takes(shape=(1, 2, 1, 64))
    assert not takes(shape=(1, 2, 513, 128)) and not takes(shape=(1, 2, 512, 32))
    taken = [n for n in range(40) if takes(direction="backward", shape=(1, 2, n, 128))]
    assert taken == [*range(1, 10), *range(20, 31)]
    assert takes(direction="long backward")
    assert not takes(direction="long backward", shape=(1, 2, 512, 64))
    assert not takes(dtype=torch.float32) and not takes(is_cuda=False)
    assert not takes((10, 0)) and not takes((8, 0))


# -- on a GPU ---------------------------------------------------------------------------------

GPU_SHAPES = [(1, 4, 2, tokens, 128) for tokens in (1, 63, 64, 129, 512, 1000)]
GPU_SHAPES += [(1, 16, 8, 512, 128), (2, 4, 4, 449, 64), (2, 4, 1, 700, 128), (1, 8, 2, 129, 64)]
GPU_SHAPES += [(1, 16, 8, 4096, 128)]


@pytest.fixture
def on_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    tokens = dict.fromkeys(("forward", "backward"), [(1, 10**9)])
    tokens |= {"long forward": [], "long backward": []}
    monkeypatch.setattr(attention_tiles, "HOPPER_TOKENS", tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_shapes(on_hopper, shape, dtype):
    check_attention(packed(*shape, dtype), "cuda")
    check_attention(head_major(*shape, dtype), "cuda", 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16, 8, 512, 128), (2, 4, 1, 1000, 64)], ids=str)
def test_two_runs_give_the_same_bits(on_hopper, shape):
    tensors = packed(*shape, torch.bfloat16)
    upstream = torch.randn(tensors[0].shape)
    first, second = (run(module.attention, tensors, upstream, "cuda") for _ in range(2))
    assert all(map(torch.equal, first, second))


# -- the interpreter itself -------------------------------------------------------------------


@gluon.jit
def _waits(count: gl.constexpr, times: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)  # noqa: F821
    mbarrier.arrive(bar, count=1)  # noqa: F821
    for turn in range(times):
        mbarrier.wait(bar, turn & 1)  # noqa: F821


def test_an_endless_wait_is_found(monkeypatch):
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 0.05)
    run_program(_waits, (0,), (1,), False, {}, Int(1), Int(1))
    for count, times in ((2, 1), (1, 2)):
        with pytest.raises(AssertionError, match="waits for ever"):
            run_program(_waits, (0,), (1,), False, {}, Int(count), Int(times))

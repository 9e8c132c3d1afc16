"""Causal attention against fp64 truth, in the reference, Triton's interpreter and on a GPU.

Criterion, as in test_model_kernels.py: no larger an error than torch's own SDPA in the same dtype,
plus a tolerance for sums in another order.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from forge.kernels import attention as module
from forge.kernels import runtime
from forge.kernels.attention import attention, attention_reference

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 2e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16", "fp16"])
# Batch, heads of queries, of keys, tokens, head size: groups of 1, 2, 4 and 8.
SHAPES = [(1, 2, 1, 1, 16), (2, 4, 2, 33, 32), (1, 8, 1, 65, 16), (2, 2, 2, 130, 64)]
SHAPES += [(1, 4, 1, 70, 128)]


def error(found, truth):
    assert found.shape == truth.shape
    return ((found.cpu().double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def packed(batch, heads, kv, tokens, size, dtype):
    """Views of a packed projection, inside a larger buffer of NaN that nobody may read."""
    buffer = torch.full((batch, tokens + 70, (heads + 2 * kv + 1) * size), math.nan, dtype=dtype)
    qkv = buffer[:, :tokens, size:]
    qkv.normal_()
    parts = qkv.unflatten(-1, (-1, size)).split([heads, kv, kv], dim=2)
    return [t.transpose(1, 2) for t in parts]


def head_major(batch, heads, kv, tokens, size, dtype):
    return [torch.randn(batch, n, tokens, size, dtype=dtype) for n in (heads, kv, kv)]


def misaligned(batch, heads, kv, tokens, size, dtype):
    """Rows that start anywhere, and the elements of a head apart."""
    q, k, v = head_major(batch, heads, kv, tokens, size + 1, dtype)
    return [q[..., 1:], k[..., :-1], v[..., 1:].transpose(2, 3).contiguous().transpose(2, 3)]


def run(fn, tensors, upstream, device="cpu"):
    leaves = []
    for t in tensors:
        # A copy would lose the layout; the buffer around a view goes along.
        base = t.detach() if t._base is None else t._base.detach()
        moved = base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())
        leaves.append(moved.detach().requires_grad_())
    out = fn(*leaves)
    out.backward(upstream.to(device, out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def sdpa(q, k, v, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def check(tensors, device, scale=None):
    dtype = tensors[0].dtype
    wide = [t.double() for t in tensors]
    upstream = torch.randn(tensors[0].shape).to(dtype).double()
    exact = run(lambda *t: attention_reference(*t, scale), wide, upstream)
    theirs = run(lambda *t: sdpa(*t, scale), tensors, upstream)
    mine = run(lambda *t: attention(*t, scale), tensors, upstream, device)
    # Triton's interpreter truncates where the GPU rounds.
    slack = 2**-7 if runtime.interpret_cpu and dtype == torch.bfloat16 else 0.0
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), mine, theirs, exact, strict=True):
        assert a.dtype == dtype
        assert error(a, c) <= error(b, c) + TOLERANCE[dtype] + slack, name


@pytest.fixture(params=[True, False], ids=["split", "whole"])
def split(request, monkeypatch):
    """Whether a group of query heads is spread over programs in backward."""
    monkeypatch.setattr(module, "_SPLIT_TOKENS", 10**9 if request.param else 0)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_inputs(device, split, dtype, shape):
    check(packed(*shape, dtype), device)


@pytest.mark.parametrize("layout", [head_major, misaligned])
def test_other_layouts(device, layout):
    check(layout(2, 4, 2, 19, 32, torch.float32), device)
    check(layout(2, 4, 2, 19, 32, torch.bfloat16), device)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_scale(device, scale):
    check(head_major(1, 2, 1, 40, 16, torch.float32), device, scale)


def test_scores_far_from_zero(device):
    """Exponentials that would overflow without the running maximum, which grows along the row."""
    q, k, v = head_major(1, 2, 1, 100, 16, torch.float32)
    k = k * torch.linspace(1, 60, 100)[:, None]
    check([q, k, v], device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 16, 8, 512, 128), (3, 16, 4, 1000, 128), (1, 8, 8, 2049, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_of_models(split, dtype, shape):
    check(packed(*shape, dtype), "cuda")


@pytest.mark.gpu
def test_offsets_beyond_31_bits():
    size, heads, tokens = 64, 2, 80
    span = 2**31 + 1024
    buffer = torch.empty(span + tokens * heads * size, dtype=torch.bfloat16, device="cuda")
    strides = (span, size, heads * size, 1)
    far = [buffer.as_strided((2, heads, tokens, size), strides) for _ in range(3)]
    far[0].normal_()
    out = attention(*far)
    torch.testing.assert_close(out, attention(*(t.contiguous() for t in far)), rtol=0, atol=0)
    dout = torch.randn_like(out)
    grads = []
    for tensors in (far, [t.contiguous() for t in far]):
        leaves = [t.detach().requires_grad_() for t in tensors]
        attention(*leaves).backward(dout)
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_output_lies_as_the_next_projection_reads_it(device):
    q, k, v = (t.to(device) for t in packed(2, 4, 2, 7, 16, torch.float32))
    out = attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


def test_a_gradient_that_is_one_number(device):
    """``sum().backward()`` hands on a tensor of one element, expanded."""
    tensors = [t.to(device).requires_grad_() for t in head_major(1, 2, 1, 9, 16, torch.float32)]
    attention(*tensors).sum().backward()
    truth = [t.detach().clone().requires_grad_() for t in tensors]
    attention_reference(*truth).sum().backward()
    for a, b in zip(tensors, truth, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no batch", "no tokens"])
def test_nothing(device, shape):
    batch, tokens = shape
    q = torch.randn(batch, 2, tokens, 16, device=device, requires_grad=True)
    k = torch.randn(batch, 1, tokens, 16, device=device, requires_grad=True)
    attention(q, k, k).sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_two_runs_give_the_same_bits(device, split):
    tensors = packed(1, 4, 2, 100, 16, torch.bfloat16)
    upstream = torch.randn(tensors[0].shape)
    first, second = (run(attention, tensors, upstream, device) for _ in range(2))
    assert all(map(torch.equal, first, second))


def of(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: attention(of(1, 2, 4, 24), of(1, 2, 4, 24), of(1, 2, 4, 24)), "q: .*24"),
        (lambda: attention(of(2, 4, 16), of(2, 4, 16), of(2, 4, 16)), "q: "),
        (lambda: attention(of(1, 2, 4, 16), of(1, 2, 5, 16), of(1, 2, 5, 16)), "k: .* tokens"),
        (lambda: attention(of(1, 2, 4, 16), of(1, 2, 4, 16), of(1, 1, 4, 16)), "v: 1 heads"),
        (lambda: attention(of(1, 3, 4, 16), of(1, 2, 4, 16), of(1, 2, 4, 16)), "k: 2 heads"),
        (lambda: attention(of(1, 2, 4, 16), of(1, 2, 4, 16).half(), of(1, 2, 4, 16)), "k: .*16"),
        (lambda: attention(*[of(1, 2, 4, 16)] * 3, scale=0.0), "scale=0.0"),
        (lambda: attention(*[of(1, 2, 4, 16)] * 3, scale=math.nan), "scale=nan"),
    ],
)
def test_inputs_that_do_not_fit(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_fp64_is_for_the_reference(device):
    q = torch.ones(1, 2, 4, 16, dtype=torch.float64, device=device)
    if not runtime.runs_triton(q):
        assert attention(q, q, q).dtype == torch.float64
        return
    with pytest.raises(ValueError, match="q: torch.float64"):
        attention(q, q, q)

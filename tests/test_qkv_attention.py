"""Norm, rotation and attention in one function: as one behind the other, a kernel less."""

from __future__ import annotations

import pytest
import torch

import forge.kernels.qkv_attention as qkv_attention_file
from forge.kernels import attention_backward as module
from forge.kernels import runtime
from forge.kernels.attention import attention, attention_reference
from forge.kernels.qk_norm_rope import norm_rope_reference, qkv_norm_rope
from forge.kernels.qkv_attention import qkv_attention

EPS = 1e-6
# Batch, heads of queries, of keys, tokens, head size; nine heads of keys are two programs.
SHAPES = [(1, 2, 1, 1, 16), (2, 4, 2, 9, 32), (1, 4, 1, 35, 16), (1, 18, 9, 3, 16)]


@pytest.fixture(params=[True, False], ids=["split", "whole"])
def split(request, monkeypatch):
    """Whether attention leaves the gradients of keys and values in parts."""
    monkeypatch.setattr(module, "_SPLIT_TOKENS", 10**9 if request.param else 0)
    return request.param


def inputs(batch, heads, kv, tokens, size, dtype):
    qkv = torch.randn(batch, tokens, (heads + 2 * kv) * size + 8, dtype=dtype)[..., 8:]
    weights = [torch.rand(size).add(0.5).to(dtype) for _ in range(2)]
    # Both halves differ, so that mixing them up shows.
    angles = torch.rand(batch, tokens, size) * 6
    return [qkv, *weights], [angles.cos().to(dtype), angles.sin().to(dtype)]


def run(fn, leaves, tables, upstream, device="cpu", dtype=None):
    leaves = [t.detach().to(device, dtype).requires_grad_() for t in leaves]
    out = fn(*leaves, *(t.to(device, dtype) for t in tables))
    out.backward(upstream.to(device, out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def exact(heads, kv, size):
    def fn(qkv, wq, wk, cos, sin):
        q, k, v = qkv.split([heads * size, kv * size, kv * size], -1)
        q, k = norm_rope_reference(q, wq, cos, sin, EPS), norm_rope_reference(k, wk, cos, sin, EPS)
        return attention_reference(q, k, v.unflatten(-1, (-1, size)).transpose(1, 2), 0.3)

    return fn


def error(found, truth):
    assert found.shape == truth.shape
    return ((found.cpu().double() - truth).norm() / truth.norm().clamp(min=1)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_one_behind_the_other(device, split, dtype, shape):
    batch, heads, kv, tokens, size = shape
    leaves, tables = inputs(*shape, dtype)
    upstream = torch.randn(batch, heads, tokens, size).to(dtype)
    truth = run(exact(heads, kv, size), leaves, tables, upstream, dtype=torch.float64)

    def apart(*tensors):
        return attention(*qkv_norm_rope(*tensors, heads, EPS), 0.3)

    theirs = run(apart, leaves, tables, upstream, device)
    ours = run(lambda *t: qkv_attention(*t, heads, EPS, 0.3), leaves, tables, upstream, device)
    names = ("out", "dqkv", "dw_q", "dw_k")
    for name, a, b, c in zip(names, ours, theirs, truth, strict=True):
        assert a.dtype == dtype
        # A sum that is not rounded in between; the rest is the same arithmetic. Chance decides how
        # the roundings of the few numbers of a weight's gradient add up.
        slack = 1e-6 if dtype == torch.float32 else 1e-3 if name.startswith("dw") else 1e-4
        assert error(a, c) <= error(b, c) + slack, name
    assert error(ours[1], truth[1]) <= (1e-5 if dtype == torch.float32 else 2e-2)


def test_no_kernel_adds_parts(interpreter, monkeypatch):
    monkeypatch.setattr(module, "_sum_heads_kernel", None)
    leaves, tables = inputs(1, 4, 2, 9, 16, torch.float32)
    upstream = torch.randn(1, 4, 9, 16)
    run(lambda *t: qkv_attention(*t, 4), leaves, tables, upstream)
    with pytest.raises(TypeError, match="NoneType"):
        run(lambda *t: attention(*qkv_norm_rope(*t, 4)), leaves, tables, upstream)


def test_weight_gradients_can_be_collected(device):
    leaves, tables = inputs(2, 4, 2, 19, 16, torch.float32)
    upstream = torch.randn(2, 4, 19, 16)
    wanted = run(lambda *t: qkv_attention(*t, 4), leaves, tables, upstream, device)
    if not runtime.runs_triton(wanted[0]):
        return  # only kernels leave parts
    taken = []
    collect = (None, lambda parts: taken.append(parts) or True)
    found = run(lambda *t: qkv_attention(*t, 4, collect=collect), leaves, tables, upstream, device)
    assert found[3] is None and torch.equal(found[2], wanted[2])
    torch.testing.assert_close(taken[0].sum(0), wanted[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch, tokens", [(0, 4), (2, 0)])
def test_nothing(device, batch, tokens):
    leaves, tables = inputs(batch, 2, 1, tokens, 16, torch.float32)
    found = run(
        lambda *t: qkv_attention(*t, 2), leaves, tables, torch.ones(batch, 2, tokens, 16), device
    )
    assert found[1].shape == leaves[0].shape and not found[2].any()


def test_inputs_that_do_not_fit(device):
    (qkv, wq, wk), tables = inputs(1, 4, 2, 9, 16, torch.float32)
    qkv, wq, wk, *tables = (t.to(device) for t in (qkv, wq, wk, *tables))
    for call, named in (
        (lambda: qkv_attention(qkv, wq, wk, *tables, 9), "qkv: "),
        (lambda: qkv_attention(qkv, wq.half(), wk, *tables, 4), "q_weight: .*float16"),
        (lambda: qkv_attention(qkv, wq, wk, tables[0][:, 1:], tables[1], 4), "cos: "),
        (lambda: qkv_attention(qkv, wq, wk, *tables, 4, scale=-1.0), "scale=-1.0"),
        (lambda: qkv_attention(qkv, wq, wk, *tables, 5), "qkv: "),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_rotated_heads_of_many_tokens_are_made_again(device, monkeypatch):
    if not runtime.runs_triton(torch.empty(0, device=device)):
        pytest.skip("kernels only")
    batch, heads, kv, tokens, size = shape = (2, 4, 2, 9, 32)
    leaves, tables = inputs(*shape, torch.bfloat16)
    upstream = torch.randn(batch, heads, tokens, size).bfloat16()
    found, kept = [], []

    def fn(qkv, wq, wk, cos, sin):
        out = qkv_attention(qkv, wq, wk, cos, sin, heads, EPS)
        kept.append(len(out.grad_fn.saved_tensors))
        return out

    for most in (batch * tokens, batch * tokens - 1):
        monkeypatch.setattr(qkv_attention_file, "KEPT_TOKENS", most)
        found.append(run(fn, leaves, tables, upstream, device))
    assert kept[0] == kept[1] + 2
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)

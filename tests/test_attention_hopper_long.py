"""Attention's forward for Hopper and long sequences, tested as in test_attention_hopper.py."""

from __future__ import annotations

import math

import pytest
import torch

from forge.kernels import attention_tiles
from forge.kernels.attention import attention_reference

from .gluon_on_cpu import OnCPU
from .test_attention import TOLERANCE, error, head_major, packed, sdpa
from .test_attention import check as check_attention

pytest.importorskip("triton.experimental.gluon")
long = pytest.importorskip("forge.kernels.attention_hopper_long")

# Batch, heads of queries, of keys, tokens, head size; multiprocessors, for one tile a program and
# several, of which the last turn is not full.
CASES = [(1, 2, 1, 1, 64, 9), (1, 1, 1, 63, 128, 1), (2, 2, 2, 128, 64, 3), (1, 4, 1, 129, 64, 5)]
CASES += [(1, 2, 1, 400, 128, 3), (2, 2, 1, 520, 64, 4), (1, 1, 1, 511, 64, 1)]
ENDS = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@pytest.fixture
def on_cpu(monkeypatch):
    def change(late, sms):
        name = "_attention_fwd_hopper_long_kernel"
        monkeypatch.setattr(long, name, OnCPU(getattr(long, name), late))
        monkeypatch.setattr(long, "processors", lambda _: sms)

    return change


def forward(q, k, v, scale):
    batch, heads, tokens, size = q.shape
    out = torch.full((batch, tokens, heads, size), math.nan, dtype=q.dtype)
    lse = torch.full((batch * heads, -(-tokens // 64) * 64), math.nan)
    long.attention_forward_hopper_long(q, k, v, scale, out, lse)
    return out.transpose(1, 2), lse


@ENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_cpu(on_cpu, case, dtype, late):
    *shape, sms = case
    on_cpu(late, sms)
    heads, kv, tokens = shape[1:4]
    q, k, v = packed(*shape, dtype)
    exact = attention_reference(q.double(), k.double(), v.double(), 0.2)
    out, lse = forward(q, k, v, 0.2)
    assert error(out, exact) <= error(sdpa(q, k, v, 0.2), exact) + TOLERANCE[dtype]
    scores = 0.2 * q.double() @ k.double().repeat_interleave(heads // kv, 1).transpose(2, 3)
    seen = torch.ones(tokens, tokens).tril().bool()
    sums = scores.masked_fill(~seen, -math.inf).logsumexp(3) * math.log2(math.e)
    torch.testing.assert_close(lse[:, :tokens].double(), sums.flatten(0, 1), rtol=1e-3, atol=1e-2)
    assert (lse[:, tokens:] == math.inf).all()


def test_what_nobody_may_see_is_not_seen(on_cpu):
    """NaN in later keys and values, and beyond the last token."""
    on_cpu(True, 2)
    q, k, v = packed(1, 1, 1, 300, 64, torch.bfloat16)
    whole, _ = forward(q, k, v, 0.1)
    k, v = k.clone(), v.clone()
    k[:, :, 256:], v[:, :, 256:] = math.nan, math.nan
    out, _ = forward(q, k, v, 0.1)
    assert torch.equal(out[:, :, :256], whole[:, :, :256])


# -- on a GPU ---------------------------------------------------------------------------------

GPU_SHAPES = [(1, 4, 2, tokens, 128) for tokens in (1, 63, 129, 512, 1000, 2049)]
GPU_SHAPES += [(2, 4, 4, 449, 64), (2, 4, 1, 1700, 128), (1, 8, 2, 129, 64)]
GPU_SHAPES += [(1, 16, 8, 4096, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_shapes(monkeypatch, shape, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setitem(attention_tiles.HOPPER_TOKENS, "long forward", [(1, 10**9)])
    check_attention(packed(*shape, dtype), "cuda")
    check_attention(head_major(*shape, dtype), "cuda", 0.3)

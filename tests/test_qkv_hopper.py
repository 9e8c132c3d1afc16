"""The projection to q, k and v with norms and rotation in its kernel: alone, and in a layer."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import forge
from forge import ForgeAdamW
from forge.kernels import linear_auto, runtime
from forge.kernels.linear_auto import Rotation, Tile
from forge.kernels.qk_norm_rope import norm_rope_reference
from forge.kernels.qkv_attention import qkv_attention

from .gluon_on_cpu import OnCPU

D, EPS = 128, 1e-6
made: list[bool] = []


def reference(x, weight, rotation, prefetch=False):
    """qkv, and its queries and keys from what was rounded."""
    made.append(prefetch)
    qkv = x @ weight.t()
    wide = rotation.q_heads * D
    narrow = (qkv.shape[-1] - wide) // 2
    parts = qkv.split([wide, narrow, narrow], dim=-1)[:2]
    heads = [
        norm_rope_reference(part, w, rotation.cos, rotation.sin, rotation.eps)
        for part, w in zip(parts, (rotation.q_weight, rotation.k_weight), strict=True)
    ]
    return qkv, torch.cat([h.transpose(1, 2).flatten(2) for h in heads], dim=-1)


def losses():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=D,
        tie_word_embeddings=True,
    )
    model = forge.optimize(Qwen3ForCausalLM(config).train(), attention="forge")
    optimizer = ForgeAdamW(model, lr=1e-2)
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_layer_takes_what_the_product_made(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr(runtime, "interpret_cpu", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plain = losses()
    module = types.SimpleNamespace(qkv_hopper=reference)
    monkeypatch.setitem(sys.modules, "forge.kernels.qkv_hopper", module)

    def tile_for(_, weight, tiles):
        return Tile(D, 5) if weight.shape[0] == 4 * D and tiles is linear_auto.FORWARD else None

    monkeypatch.setattr(linear_auto, "tile_for", tile_for)
    made.clear()
    assert losses() == pytest.approx(plain, rel=1e-5)
    assert made == [True] * 6


def test_what_is_given_as_rotated_must_fit():
    qkv, cos = torch.randn(1, 3, 4 * D), torch.randn(1, 3, D)
    with pytest.raises(ValueError, match=r"rotated: torch.float32 \(1, 3, 128\) must be"):
        weight = torch.ones(D)
        qkv_attention(qkv, weight, weight, cos, cos, 2, rotated=qkv[..., :D])


def operands(batch, tokens, q_heads, kv_heads, columns, tables, device="cuda"):
    bf16 = dict(device=device, dtype=torch.bfloat16)
    x = torch.randn(batch, tokens, columns + 8, **bf16)[..., :columns]
    w = torch.randn((q_heads + 2 * kv_heads) * D, columns, **bf16) * columns**-0.5
    angles = torch.rand(tables, tokens, D, device=device) * 6  # both halves differ
    weights = [(0.5 + torch.rand(D, device=device)).bfloat16() for _ in range(2)]
    rotation = Rotation(*weights, angles.cos().bfloat16(), angles.sin().bfloat16(), q_heads, EPS)
    if device == "cuda":
        torch.cuda.synchronize()
    return x, w, rotation


def check(x, w, rotation, qkv, rotated):
    exact = x.double() @ w.double().t()
    assert (qkv - exact).norm() <= 2e-3 * exact.norm()
    # From what was rounded, as a kernel behind reads it.
    wide = rotation.q_heads * D
    narrow = rotated.shape[-1] - wide
    for part, weight, found in zip(
        qkv.split([wide, narrow, narrow], dim=-1),
        (rotation.q_weight, rotation.k_weight),
        rotated.split([wide, narrow], dim=-1),
        strict=False,
    ):
        want = norm_rope_reference(
            part.double(), weight.double(), rotation.cos.double(), rotation.sin.double(), EPS
        )
        error = found - want.transpose(1, 2).flatten(2)
        assert error.norm() <= 2e-3 * want.norm() and error.abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("batch", "tokens", "q_heads", "kv_heads", "columns", "tables"),
    [(1, 130, 2, 1, 64, 1), (2, 1, 2, 1, 200, 2), (3, 50, 1, 1, 520, 1)],
)
def test_on_the_cpu(batch, tokens, q_heads, kv_heads, columns, tables, late, monkeypatch):
    module = pytest.importorskip("forge.kernels.qkv_hopper")
    kernel = OnCPU(module._qkv_hopper_kernel, late)
    monkeypatch.setattr(module, "_qkv_hopper_kernel", kernel)
    monkeypatch.setattr(module, "check_operands", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    x, w, rotation = operands(batch, tokens, q_heads, kv_heads, columns, tables, "cpu")
    check(x, w, rotation, *module.qkv_hopper(x, w, rotation, prefetch=True))
    assert kernel.launched == 1


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "q_heads", "kv_heads", "columns", "tables"),
    [(1, 512, 16, 8, 1024, 1), (2, 1, 2, 1, 64, 2), (3, 127, 4, 2, 200, 1), (2, 300, 1, 1, 520, 2)],
)
def test_against_fp64(batch, tokens, q_heads, kv_heads, columns, tables, prefetch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from forge.kernels.qkv_hopper import qkv_hopper

    x, w, rotation = operands(batch, tokens, q_heads, kv_heads, columns, tables)
    check(x, w, rotation, *qkv_hopper(x, w, rotation, prefetch=prefetch))


@pytest.mark.gpu
def test_bad_inputs_are_named():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from forge.kernels.qkv_hopper import qkv_hopper

    x, w, rotation = operands(1, 4, 2, 1, 64, 1)
    for weight, changed, message in (
        (w[:-8], rotation, "128 rows for each of 2 heads"),
        (w, replace(rotation, q_heads=3), "128 rows for each of 3 heads"),
        (w, replace(rotation, cos=rotation.cos.float()), "cos: torch.float32"),
        (w.float(), rotation, "weight: is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            qkv_hopper(x, weight, changed)

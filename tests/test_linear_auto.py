"""The wiring of products by a kernel for Hopper, with torch in the kernel's place."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import forge
import small_qwen3
from forge import ForgeAdamW
from forge.kernels import linear_auto, runtime
from forge.kernels.linear_auto import Tile, linear_forward, parts_of
from forge.kernels.rms_norm import add_rms_norm
from forge.packed_linear import unpack

PARTS = 3
calls: list[tuple[Any, ...]] = []


def parted(a, w, whole):
    """Parts that are no parts of the terms: only their sum is the product."""
    noise = torch.randn(PARTS - 1, *whole.shape[-2:], generator=torch.Generator().manual_seed(3))
    return torch.cat([noise, whole - noise.sum(0, keepdim=True)])


def linear(name, a, w, parts, prefetch):
    shape = tuple(w.t().shape if name == "y" else w.shape)
    calls.append((name + " parts" * parts, shape, prefetch))
    whole = a.reshape(-1, a.shape[-1]) @ w
    return parted(a, w, whole[None]) if parts else whole.view(*a.shape[:-1], -1)


def linear_hopper(x, weight, *, parts=False, prefetch=False):
    return linear("y", x, weight.t(), parts, prefetch)


def linear_hopper_dx(dy, weight, *, parts=False, prefetch=False):
    return linear("dx", dy, weight, parts, prefetch)


@pytest.fixture
def hopper(interpreter, monkeypatch):
    """Every product by "the kernel"; all else through Triton's interpreter."""
    fake = types.SimpleNamespace(linear_hopper=linear_hopper, linear_hopper_dx=linear_hopper_dx)
    monkeypatch.setitem(sys.modules, "forge.kernels.linear_hopper", fake)
    tile = Tile(128, 6, parts=PARTS)
    split: set[tuple[str, tuple[int, ...]]] = set()

    def tile_for(a, weight, tiles):
        form = "y" if tiles is linear_auto.FORWARD else "dx"
        chosen = (form, tuple(weight.shape)) in split
        return tile if chosen else tile._replace(parts=1)

    monkeypatch.setattr(linear_auto, "tile_for", tile_for)
    calls.clear()
    return split


def make() -> Any:
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    return small_qwen3.make(**sizes)


def trained(steps: int = 2, change: Any = None) -> tuple[list[float], list[torch.Tensor]]:
    model = forge.optimize(make())
    if change is not None:
        change(model)
    optimizer = ForgeAdamW(model, lr=1e-2, weight_decay=0.1)
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


QKV, OUT, GATE_UP, DOWN = (128, 32), (32, 64), (96, 32), (32, 48)
SPLIT = {("dx", QKV), ("y", OUT), ("dx", GATE_UP), ("y", DOWN)}


@pytest.fixture(scope="module")
def plain():
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    with np.errstate(divide="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "interpret_cpu", True)
        patch.setenv("TRITON_INTERPRET", "1")
        return trained()


def compare(ours, plain):
    assert ours[0] == pytest.approx(plain[0], rel=1e-4)
    for a, b in zip(ours[1], plain[1], strict=True):
        # An update is about the learning rate; its sign hangs on gradients next to zero.
        assert ((a - b).abs() > 1e-3).float().mean() < 2e-3


def test_a_model_trains_the_same(plain, hopper):
    hopper |= SPLIT
    compare(trained(), plain)
    wanted = {("dx parts", QKV), ("dx", OUT), ("dx parts", GATE_UP), ("dx", DOWN)}
    wanted |= {("y parts", OUT), ("y parts", DOWN), ("y", QKV), ("y", GATE_UP)}
    assert {call[:2] for call in calls} == wanted
    assert all(prefetch for *_, prefetch in calls)


def test_weights_that_were_just_packed_are_not_prefetched(hopper):
    model = forge.optimize(make())
    ids = torch.zeros(1, 5, dtype=torch.int64)
    mlp = model.model.layers[0].mlp
    unpack([mlp.gate_proj, mlp.up_proj])
    for expected in ([("y", GATE_UP, False)], []):
        calls.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        assert [call for call in calls if not call[2]] == expected


def hook_on_a_norm(model):
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)


def hook_on_a_projection(model):
    model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda _module, _args, y: seen.append((y.detach().clone(), parts_of(y)))
    )


def hook_on_an_mlp(model):
    model.model.layers[1].mlp.register_full_backward_hook(
        lambda _module, grad, _: seen.append((grad[0].clone(), parts_of(grad[0])))
    )


def checkpointing(model):
    small_qwen3.recompute(model)


seen: list[tuple[torch.Tensor, Any]] = []
CHANGES = (hook_on_a_norm, hook_on_a_projection, hook_on_an_mlp, checkpointing)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_who_looks_sees_sums(plain, hopper, change):
    hopper |= SPLIT
    seen.clear()
    compare(trained(change=change), plain)
    assert all(parts is None for _, parts in seen)
    # Where nobody looks, the other layer still hands on parts.
    assert {name for name, _, _ in calls} >= {"y parts", "y"}


def test_hidden_states_and_global_hooks(plain, hopper):
    hopper |= SPLIT
    states: list[bool] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda _module, _args, y: states.append(isinstance(y, torch.Tensor) and not parts_of(y))
    )
    try:
        compare(trained(), plain)
    finally:
        handle.remove()
    assert any(states)


def test_a_sum_that_was_not_formed_must_not_be_changed(hopper):
    hopper.add(("y", (4, 8)))
    x, w = torch.randn(5, 8), torch.randn(4, 8)
    y = linear_forward(x, w, unsummed=True)
    parts = parts_of(y)
    assert parts is not None and torch.allclose(parts.sum(0), x @ w.t(), atol=1e-5)
    normed, h = add_rms_norm(y, torch.ones(5, 4), torch.ones(4))
    assert torch.allclose(h, x @ w.t() + 1, atol=1e-5)
    y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place before the norm"):
        add_rms_norm(y, torch.ones(5, 4), torch.ones(4))
    assert parts_of(linear_forward(x, w)) is None


def test_nothing_changes_without_a_hopper_gpu():
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    assert torch.equal(linear_forward(x, w, unsummed=True), nn.functional.linear(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_model_trains_the_same_on_a_gpu(monkeypatch, graph):
    """Layers of Qwen3-0.6B, eager and captured: the same losses but for roundings."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    ids = torch.randint(0, 512, (1, 512), device="cuda")
    losses = {}
    for hopper in (False, True):
        monkeypatch.setattr(linear_auto, "HOPPER", hopper)
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        )
        model = forge.optimize(Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).train())
        step = forge.TrainStep(model, ForgeAdamW(model, lr=1e-4), graph=graph)
        losses[hopper] = torch.stack([step(input_ids=ids, labels=ids).clone() for _ in range(6)])
    assert losses[True].isfinite().all() and losses[True][5] < losses[True][0] - 0.1
    assert torch.allclose(losses[True].float(), losses[False].float(), rtol=1e-2), losses

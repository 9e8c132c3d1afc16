"""The MLP's second half against plain torch; its activation is computed again in backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge import ForgeAdamW
from forge.kernels import runtime
from forge.kernels.swiglu import swiglu, swiglu_reference
from forge.swiglu_linear import swiglu_linear

K, HIDDEN, N = 24, 40, 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(K, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, N, bias=False)

    def forward(self, x):
        return swiglu_linear(self.gate_up(x), self.down)


def plain(net, x):
    return net.down(swiglu_reference(*net.gate_up(x).chunk(2, dim=-1)))


def pair(device, dtype=torch.float32):
    torch.manual_seed(3)
    ours = MLP().to(device, dtype)
    theirs = copy.deepcopy(ours)
    return ours, ForgeAdamW(ours, lr=1e-2), theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2)


@pytest.mark.parametrize("shape", [(1, K), (2, 33, K), (0, K)])
def test_trains_like_plain_layers(device, shape):
    ours, ours_opt, theirs, theirs_opt = pair(device)
    for _ in range(3):
        x = torch.randn(shape, device=device)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        found, wanted = ours(xs[0]), plain(theirs, xs[1])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for out, optimizer in ((found, ours_opt), (wanted, theirs_opt)):
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_is_not_kept_and_comes_again_bit_for_bit(device, dtype):
    ours, optimizer, _, _ = pair(device, dtype)
    if not runtime.runs_triton(ours.down.weight):
        pytest.skip("the reference keeps it")
    kept, found = [], []
    slot = next(slot for slot in optimizer._slots if slot.param is ours.down.weight)
    slot.collect = lambda act, dy: found.append(act) or False
    x = torch.randn(5, K, device=device, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = ours(x)
    assert not any(t.shape == (5, HIDDEN) for t in kept)
    with torch.no_grad():
        gate, up = ours.gate_up(x).chunk(2, dim=-1)
        act = swiglu(gate, up)
    out.sum().backward()
    assert torch.equal(found[0], act)
    assert ours.down.weight.grad is not None  # the slot did not take the factors


def test_a_kept_graph_can_be_used_again(device):
    ours, optimizer, _, _ = pair(device)
    x = torch.randn(4, K, device=device, requires_grad=True)
    out = ours(x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)
    assert all(p.grad is None for p in ours.parameters())
    optimizer.step()


@pytest.mark.parametrize("frozen", ["gate_up", "down"])
def test_frozen_parts(device, frozen):
    ours, optimizer, theirs, theirs_opt = pair(device)
    for net in (ours, theirs):
        getattr(net, frozen).requires_grad_(False)
    x = torch.randn(6, K, device=device)
    for out, opt in ((ours(x), optimizer), (plain(theirs, x), theirs_opt)):
        out.square().sum().backward()
        opt.step()
        opt.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


def test_autocast_hooks_and_adapters_take_the_plain_way(device):
    ours, optimizer, theirs, _ = pair(device)
    x = torch.randn(6, K, device=device)
    calls = []
    ours.down.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(ours(x), plain(theirs, x), rtol=1e-5, atol=1e-5)
    assert calls == [1]
    with torch.autocast(device.type, torch.bfloat16):
        out = ours(x)
        wanted = F.linear(swiglu_reference(*theirs.gate_up(x).chunk(2, dim=-1)), theirs.down.weight)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    optimizer.zero_grad()


def test_create_graph_is_refused(device):
    ours, optimizer, _, _ = pair(device)
    gate_up = torch.randn(2, 2 * HIDDEN, device=device, requires_grad=True)
    out = swiglu_linear(gate_up * 1, ours.down)
    with pytest.raises(RuntimeError, match="create_graph=True: the weight 'down.weight'"):
        torch.autograd.grad(out.sum(), gate_up, create_graph=True)
    optimizer.zero_grad()

"""Layers behind a norm do not keep its result: the norm's backward pass makes it again."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge.queue
from forge import ForgeAdamW
from forge.kernels import runtime
from forge.kernels.rms_norm import add_rms_norm, rms_norm
from forge.packed_linear import packed_linear

C, TOKENS = 40, 7


class Net(nn.Module):
    """Two norms, each read by a packed layer, as in a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.rand(C) + 0.5 for _ in range(2))
        self.first = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(C, n, bias=False) for n in (C, 24))
        self.between = lambda y: None

    def forward(self, x):
        y = rms_norm(x, self.norms[0])
        self.between(y)
        a, b = packed_linear(y, self.first).chunk(2, dim=-1)
        y, h = add_rms_norm(a * b, x, self.norms[1])
        self.between(y)
        return packed_linear(y, self.second), h


class Plain(Net):
    def forward(self, x):
        y = F.rms_norm(x, (C,), self.norms[0], 1e-6)
        a, b = (layer(y) for layer in self.first)
        h = x + a * b
        y = F.rms_norm(h, (C,), self.norms[1], 1e-6)
        return torch.cat([layer(y) for layer in self.second], dim=-1), h


@pytest.fixture
def nets(device):
    torch.manual_seed(4)
    ours = Net().to(device)
    if not runtime.runs_triton(ours.norms[0]):
        pytest.skip("the reference keeps it")
    theirs = Plain().to(device)
    theirs.load_state_dict(ours.state_dict())
    return ours, ForgeAdamW(ours, lr=1e-2), theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2)


def data(net, **options):
    return torch.randn(TOKENS, C, device=net.norms[0].device, **options)


def nodes(y):
    """Of the packed layers in the graph of ``y``."""
    found, queue = set(), [y.grad_fn]
    while queue:
        node = queue.pop()
        if "PackedLinear" in node.name():
            found.add(node)
        queue += [n for n, _ in node.next_functions if n is not None]
    return found


@pytest.mark.parametrize("queue_bytes", [0, 2**20])
def test_trains_like_plain_layers(nets, queue_bytes, monkeypatch):
    """Without a queue the update comes before the norm's backward, and fills what it needs."""
    monkeypatch.setattr(forge.queue, "QUEUE_BYTES", queue_bytes)
    ours, ours_opt, theirs, theirs_opt = nets
    for _ in range(3):
        x = data(ours)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        for net, optimizer, x in zip((ours, theirs), (ours_opt, theirs_opt), xs, strict=True):
            y, h = net(x)
            (y.square().sum() + h.sin().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-4, atol=1e-5)
    same_weights(ours, theirs)


def same_weights(ours, theirs):
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queue_bytes", [0, 2**20])
def test_two_layers_behind_one_norm(nets, queue_bytes, monkeypatch):
    monkeypatch.setattr(forge.queue, "QUEUE_BYTES", queue_bytes)
    ours, ours_opt, theirs, theirs_opt = nets
    x = data(ours)
    y = rms_norm(x, ours.norms[0])
    (packed_linear(y, ours.first).sum() + packed_linear(y, ours.second).square().sum()).backward()
    y = F.rms_norm(x, (C,), theirs.norms[0], 1e-6)
    first, second = (
        torch.cat([layer(y) for layer in layers], dim=-1)
        for layers in (theirs.first, theirs.second)
    )
    (first.sum() + second.square().sum()).backward()
    for optimizer in (ours_opt, theirs_opt):
        optimizer.step()
    same_weights(ours, theirs)


def test_a_backward_that_leaves_out_the_norms(nets):
    ours, ours_opt, theirs, theirs_opt = nets
    x = data(ours)
    for net, optimizer in ((ours, ours_opt), (theirs, theirs_opt)):
        y, _ = net(x)
        y.square().sum().backward(inputs=[layer.weight for layer in net.second])
        optimizer.step()
    same_weights(ours, theirs)


def test_a_graph_that_is_used_twice(nets):
    ours, ours_opt, theirs, theirs_opt = nets
    x = data(ours, requires_grad=True)
    for net, optimizer in ((ours, ours_opt), (theirs, theirs_opt)):
        y, h = net(x)
        loss = y.square().sum() + h.sin().sum()
        (once,) = torch.autograd.grad(loss, x, retain_graph=True)
        x.grad = None
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(x.grad, once)
    same_weights(ours, theirs)


def test_a_second_backward_through_a_freed_graph_is_refused(nets):
    ours, *_ = nets
    y, _ = ours(data(ours))
    weights = [layer.weight for layer in ours.second]
    torch.autograd.grad(y.sum(), [ours.norms[1], *weights])
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(y.sum(), weights)


def test_the_result_is_not_kept(nets):
    ours, *_ = nets
    y, _ = ours(data(ours))
    packed = nodes(y)
    assert [node.saved_tensors for node in packed] == [(), ()]  # neither of the two


@pytest.mark.parametrize("case", ["changed", "hooks", "step"])
def test_the_result_is_kept(nets, case):
    """What the norm would make is another, or the saved tensors are somebody else's to keep."""
    ours, optimizer, *_ = nets
    if case == "changed":
        ours.between = lambda y: y.mul_(2)
    if case == "step":
        optimizer.release()
        optimizer = ForgeAdamW(ours, lr=1e-2, update="step")
    x = data(ours, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        if case == "hooks"
        else contextlib.nullcontext()
    ):
        y = ours(x)[0]
    assert all(len(node.saved_tensors) == 1 for node in nodes(y))
    y.sum().backward()
    assert x.grad is not None


def test_an_input_that_was_changed_in_place_is_refused(nets):
    ours, optimizer, *_ = nets
    x = data(ours)
    y, _ = ours(x * 1)
    for node in nodes(y):
        node.again.h.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place|by an inplace operation"):
        y.sum().backward(inputs=[layer.weight for layer in ours.first])


def test_a_result_that_is_stored_holds_nothing_else(nets):
    """Python attributes of tensors are pickled with them."""
    ours, *_ = nets
    seen = []
    ours.between = lambda y: seen.append(y)
    with torch.no_grad():
        ours(data(ours))
    ours(data(ours))
    assert [bool(y.detach().__dict__) or bool(y.__dict__) for y in seen] == [False] * 2 + [True] * 2


def test_what_the_graph_holds_goes_with_the_backward_pass(nets):
    ours, optimizer, *_ = nets
    y, h = ours(data(ours))
    packed = nodes(y)
    (y.sum() + h.sum()).backward()
    assert all(node.again.h is None and node.again.empty is None for node in packed)

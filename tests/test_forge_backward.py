"""What else autograd can do with a model whose weights change in backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adamw_net import LR, assert_same, batch, pair, train
from forge import ForgeAdamW


def test_layer_in_two_reentrant_checkpoints_is_an_error_not_two_updates():
    """Reentrant checkpointing runs a backward of its own for each segment."""
    net = nn.Linear(4, 4)
    optimizer = ForgeAdamW(net, lr=LR)
    before = net.weight.detach().clone()
    h = torch.randn(2, 4, requires_grad=True)
    for _ in range(2):
        h = checkpoint(net, h, use_reentrant=True)
    with pytest.raises(RuntimeError, match="second backward before step"):
        h.sum().backward()
    optimizer.step()
    assert (net.weight - before).abs().max() < 1.1 * LR


def test_reentrant_checkpoint_follows_torch():
    ours, plain = pair("cpu")
    ours.checkpointed = plain.checkpointed = True
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(3):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 3)


def test_autograd_grad_does_not_train():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ids = batch("cpu")
    before = copy.deepcopy(ours.state_dict())
    h = torch.randn(2, 24, requires_grad=True)
    (dh,) = torch.autograd.grad(ours.block(h).sum(), h)
    (dw,) = torch.autograd.grad(ours.block(h).sum(), ours.mix.weight)
    (want,) = torch.autograd.grad(plain.block(h).sum(), plain.mix.weight)
    torch.testing.assert_close(dw, want)
    assert dh.abs().sum() > 0
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())
    # What it collected must not leak into the next real step.
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain)


def test_functional_transforms_see_a_plain_layer():
    net = nn.Linear(3, 2)
    optimizer = ForgeAdamW(net, lr=LR)
    params = dict(net.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(net, p, torch.ones(1, 3)).sum())(
        params
    )
    assert torch.equal(grads["weight"], torch.ones(2, 3))
    optimizer.step()


def test_second_backward_before_step_raises_and_changes_nothing_more():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batch("cpu")).backward()
    after_first = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match="second backward before step.*optimizer.step"):
        ours(batch("cpu")).backward()
    assert all(torch.equal(v, after_first[k]) for k, v in ours.state_dict().items())
    optimizer.step()
    optimizer.zero_grad()
    ours(batch("cpu")).backward()


def test_disjoint_graphs_in_one_step():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = ForgeAdamW(nn.ModuleList([a, b]), lr=LR)
    before = [a.weight.detach().clone(), b.weight.detach().clone()]
    a(torch.ones(1, 3)).sum().backward()
    b(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for layer, old in zip((a, b), before, strict=True):
        assert (layer.weight - old).abs().max() < 1.1 * LR
        assert not torch.equal(layer.weight, old)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph_and_stale_retained_graph_raise():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    with pytest.raises(RuntimeError, match="create_graph"):
        ours(batch("cpu")).backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    loss = ours(batch("cpu"))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward before step.*update='step'"):
        loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_hooks_on_a_weight_are_called():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    seen = []
    ours.up.weight.register_hook(lambda g: seen.append(tuple(g.shape)))
    ours.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    train(ours, optimizer, batch("cpu"))
    assert set(seen) == {(40, 24), (24, 40)}
    assert ours.up.weight in optimizer.state and ours.down.weight in optimizer.state


@pytest.mark.parametrize(
    "exchange",
    [
        lambda net: net.bfloat16().float(),
        lambda net: net.up.weight.data.set_(net.up.weight.data.clone()),
        lambda net: net.up.weight.set_(net.up.weight.detach().clone()),
    ],
    ids=["round trip", "data.set_", "set_"],
)
def test_weights_whose_autograd_node_is_exchanged_still_train(exchange):
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for _ in range(2):
        with torch.no_grad():
            exchange(ours), exchange(plain)
        for _ in range(2):
            ids = batch("cpu")
            train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("out of luck")


def test_a_failed_backward_can_be_discarded():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    before = copy.deepcopy(ours.state_dict())
    h = _Fails.apply(ours.embed(batch("cpu")))
    with pytest.raises(ValueError, match="out of luck"):
        ours.block(h).sum().backward()
    optimizer.zero_grad()
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())
    for _ in range(2):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 2)


def test_a_checkpoint_loaded_after_a_failed_backward_is_clean():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match="out of luck"):
        ours.block(_Fails.apply(ours.embed(ids))).sum().backward()
    ours.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 2)


def test_what_was_applied_cannot_be_discarded_silently():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batch("cpu")).backward()
    with pytest.raises(RuntimeError, match="zero_grad.. before step.*update='step'"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    # Nobody tells the optimizer of these.
    for discard in (ours.zero_grad, lambda: setattr(ours.norm.bias, "grad", None)):
        ours(batch("cpu")).backward()
        discard()
        with pytest.raises(RuntimeError, match="were discarded before step.*update='step'"):
            optimizer.step()
    train(ours, optimizer, batch("cpu"))


def test_operands_changed_in_place_are_noticed():
    """The weight gradient is formed a little after the layer's backward, of what that has seen."""

    class Scribbles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, victim):
            ctx.victim = victim
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            ctx.victim.zero_()
            return g, None

    layer = nn.Linear(3, 3)
    optimizer = ForgeAdamW(layer, lr=LR)
    x = torch.randn(2, 3, requires_grad=True)
    h = torch.empty(2, 3)
    entry = Scribbles.apply(x, h)  # its backward runs after the layer's, and overwrites h
    h.copy_(entry.detach())
    y = layer(h.requires_grad_()) + entry
    with pytest.raises(RuntimeError, match="'weight'.*changed in place"):
        y.sum().backward()
    del optimizer

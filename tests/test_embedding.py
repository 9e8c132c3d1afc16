"""Embeddings, tied to a head or not, against torch.optim.AdamW on a plain copy of the model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from forge import ForgeAdamW, TrainStep
from forge.deferred import AppliedGradient
from forge.embedding import ForgeEmbedding
from forge.kernels import wgrad_auto
from forge.linear import ForgeLinear

LR = 1e-2
V, C = 61, 32  # so the factors of fewer than 20 tokens are smaller than the gradient


@pytest.fixture(autouse=True)
def _slices_of_32_rows(monkeypatch):
    monkeypatch.setattr(wgrad_auto, "SCRATCH_ELEMENTS", 32 * C)


class Net(nn.Module):
    def __init__(self, tied: bool = True, bias: bool = False, **kwargs) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, C, **kwargs)
        self.mix = nn.Linear(C, C)
        self.head = nn.Linear(C, V, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + torch.tanh(self.mix(h)))

    def loss(self, ids):
        return F.cross_entropy(self(ids).flatten(0, -2), ids.flatten(), reduction="sum")


def pair(device="cpu", **kwargs):
    torch.manual_seed(1)
    ours = Net(**kwargs).to(device)
    plain = copy.deepcopy(ours)
    return (ours, ForgeAdamW(ours, lr=LR, weight_decay=0.1)), (
        plain,
        torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1),
    )


def train(model, optimizer, loss, *args):
    loss(model, *args).backward()
    if isinstance(optimizer, ForgeAdamW):
        assert all(p.grad is None or type(p.grad) is AppliedGradient for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()


def assert_same(ours, plain, steps):
    """fp32 accuracy, scaled to how far a weight moves: Adam divides small numbers by small ones."""
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() < 2e-3 * LR * steps**0.5, name


class _Allocated(TorchDispatchMode):
    """Operations that make tensors, views not counted, and how large these are."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.made.append((func.overloadpacket.__name__, out.numel()))
        return out

    def largest(self):
        return max(numel for _, numel in self.made)


def ids_of(device, count, distinct=V):
    return torch.randint(0, distinct, (count,), device=device)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_follows_torch_and_forms_no_gradient(device, tied, padding_idx):
    ours, plain = pair(device, tied=tied, padding_idx=padding_idx)
    assert type(ours[0].embed) is ForgeEmbedding and type(ours[0].head) is ForgeLinear
    batches = [ids_of(device, 16), ids_of(device, 9, 5), ids_of(device, 0), ids_of(device, 12, 4)]
    for ids in batches:
        train(*plain, Net.loss, ids)
        with _Allocated() as allocated:
            train(*ours, Net.loss, ids)
        if ids is not batches[0] and tied:  # the first makes the states
            assert 32 * C <= allocated.largest() < V * C
    assert_same(ours[0], plain[0], len(batches))


def test_a_gradient_smaller_than_its_factors_is_formed_once(device):
    """A long sequence: the head's gradient is formed, the embedding's rows are added to it."""
    ours, plain = pair(device)
    for _ in range(2):
        ids = ids_of(device, 100)
        train(*plain, Net.loss, ids)
        with _Allocated() as allocated:
            train(*ours, Net.loss, ids)
    assert [name for name, numel in allocated.made if numel == V * C].count("mm") == 1
    assert not any(name == "embedding_dense_backward" for name, _ in allocated.made)
    assert_same(ours[0], plain[0], 2)


@pytest.mark.parametrize("tokens", [6, 40])
def test_other_uses_of_the_weight(device, tokens):
    ours, plain = pair(device)
    ids, other = ids_of(device, tokens), ids_of(device, 7)
    uses = [
        lambda net: net.loss(ids) + net.loss(other),  # several forwards in one graph
        lambda net: net.loss(ids) + F.embedding(other, net.embed.weight).square().sum(),
        lambda net: net.loss(ids) + F.linear(net.mix.bias, net.head.weight).square().sum(),
        lambda net: net.embed(ids).sin().sum() + net.mix.weight.sum() + net.mix.bias.sum(),
        lambda net: net.head(net.mix(net.embed.weight[:5])).sum(),
    ]
    for use in uses:
        train(*ours, use), train(*plain, use)
    assert_same(ours[0], plain[0], len(uses))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    ours, plain = pair()
    for _ in range(3):
        ids = ids_of("cpu", 10)

        def loss(net, ids=ids):
            h = net.embed(ids)
            h = checkpoint(lambda h: h + torch.tanh(net.mix(h)), h, use_reentrant=reentrant)
            if not reentrant:
                h = h + checkpoint(net.embed, ids, use_reentrant=False)
            return F.cross_entropy(net.head(h), ids)

        train(*ours, loss), train(*plain, loss)
    assert_same(ours[0], plain[0], 3)


def test_two_runs_store_the_same_bits(device):
    results = []
    for _ in range(2):
        torch.manual_seed(2)
        net = Net(padding_idx=0).to(device, torch.bfloat16)
        optimizer = ForgeAdamW(net, lr=LR)
        for _ in range(3):
            net.loss(ids_of(device, 14, 6)).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))


def test_slices_draw_the_random_bits_of_the_whole(device, monkeypatch):
    results = []
    for elements in (32 * C, 2**24):
        monkeypatch.setattr(wgrad_auto, "SCRATCH_ELEMENTS", elements)
        torch.manual_seed(2)
        net = Net(tied=False).to(device, torch.bfloat16)
        optimizer = ForgeAdamW(net, lr=LR)
        for _ in range(3):
            with _Allocated() as allocated:
                net.embed(torch.tensor([3, 3, 17, 60], device=device)).sin().sum().backward()
                optimizer.step()
        assert (allocated.largest() < V * C) == (elements == 32 * C)
        results.append([net.embed.weight.detach(), *optimizer.state[net.embed.weight].values()])
    assert all(map(torch.equal, *results))


def test_frozen_hooked_and_left_out():
    ours, _ = pair(tied=False)
    net, optimizer = ours
    ids = ids_of("cpu", 6)
    before = net.embed.weight.detach().clone()
    net.embed.weight.requires_grad_(False)
    train(net, optimizer, Net.loss, ids)
    assert torch.equal(net.embed.weight, before) and net.embed.weight not in optimizer.state
    net.embed.weight.requires_grad_(True)
    optimizer.step()
    seen = []
    handle = net.embed.weight.register_hook(lambda grad: seen.append(grad) or grad * 0)
    net.loss(ids).backward()
    optimizer.step()
    assert [grad.shape for grad in seen] == [(V, C)]
    handle.remove()
    for kwargs in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        left = nn.Embedding(V, C, **kwargs)
        ForgeAdamW(left)
        assert type(left) is nn.Embedding


def test_settings_changed_afterwards_are_followed():
    """``scale_grad_by_freq`` switched on: the plain layer's gradient."""
    ours, plain = pair(tied=False)
    ids = torch.tensor([1, 1, 1, 2])
    for side in (ours, plain):
        side[0].embed.scale_grad_by_freq = True
        train(*side, Net.loss, ids)
    assert_same(ours[0], plain[0], 1)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_asked_for_are_formed():
    (ours, optimizer), (plain, _) = pair(padding_idx=3)
    ids = torch.tensor([1, 3, 3, 5, 1])
    grads = [torch.autograd.grad(net.loss(ids), list(net.parameters())) for net in (ours, plain)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    # Through the embedding's output, not to its weight: nothing is collected.
    h = ours.embed(ids)
    torch.autograd.grad(h.sum(), h)
    optimizer.step()
    assert not optimizer.state
    for net in (ours, plain):
        (grad,) = torch.autograd.grad(
            net.embed(ids).pow(3).sum(), net.embed.weight, create_graph=True
        )
        (twice,) = torch.autograd.grad(grad.square().sum(), net.embed.weight)
        grads.append(twice)
    torch.testing.assert_close(grads[-2], grads[-1])
    with pytest.raises(RuntimeError, match="create_graph=True"):
        ours.embed(ids).sum().backward(create_graph=True)


def test_functional_calls_and_transforms_see_a_plain_layer():
    (ours, optimizer), (plain, _) = pair()
    ids = ids_of("cpu", 6)

    def loss(params):
        return torch.func.functional_call(ours, params, (ids,)).square().sum()

    params = {n: p.detach().clone() for n, p in ours.named_parameters()}
    grads = torch.func.grad(loss)(params)
    plain(ids).square().sum().backward()
    torch.testing.assert_close(grads["embed.weight"], plain.embed.weight.grad)
    assert not optimizer.state


def test_a_failed_backward_leaves_nothing_behind():
    ours, plain = pair()
    ids = ids_of("cpu", 8)

    def fail(grad):
        raise ValueError("stop")

    h = ours[0].embed(ids)
    h.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        ours[0].head(h).sum().backward()  # the head's factors are collected by now
    for side in (ours, plain):
        train(*side, Net.loss, ids)
    assert_same(ours[0], plain[0], 1)


def test_ids_changed_in_place_are_noticed():
    ours, _ = pair(tied=False)
    ids = ids_of("cpu", 8)
    h = ours[0].embed(ids)
    h.register_hook(lambda grad: None)
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [14, 100])
def test_a_captured_step_follows_torch(device, tied, tokens):
    """On a GPU from the second call on; the table entries and the sort are replayed."""
    ours, plain = pair(device, tied=tied, padding_idx=3)
    forward = ours[0].forward
    ours[0].forward = lambda ids: F.cross_entropy(forward(ids), ids, reduction="sum")
    step = TrainStep(*ours)
    for distinct in (V, 5, V, 20):
        ids = ids_of(device, tokens, distinct)
        step(ids=ids)
        train(*plain, Net.loss, ids)
    assert_same(ours[0], plain[0], 4)


def test_release_copies_and_moves():
    ours, plain = pair()
    net, optimizer = ours
    ids = ids_of("cpu", 8)
    twin = copy.deepcopy(net)
    twin.loss(ids).backward()
    assert twin.embed.weight.grad is not None  # a plain model, like every copy
    net.double().float()  # autograd has new nodes, and memory is new
    for side in (ours, plain):
        side[0].loss(ids).backward()
        side[1].step()
        side[1].zero_grad()
        train(*side, Net.loss, ids)
    assert_same(net, plain[0], 2)
    optimizer.release()
    assert type(net.embed) is nn.Embedding and type(net.head) is nn.Linear
    net.loss(ids).backward()
    assert net.embed.weight.grad is not None


def test_autocast():
    ours, plain = pair()
    for _ in range(2):
        ids = ids_of("cpu", 8)

        def loss(net, ids=ids):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.cross_entropy(net(ids).float(), ids)

        train(*ours, loss), train(*plain, loss)
    for (name, p), q in zip(ours[0].named_parameters(), plain[0].parameters(), strict=True):
        # Where a bf16 gradient is nearly zero, Adam's step has either sign.
        assert (p - q).abs().mean() < 0.05 * LR, name

"""A tied weight updated in two parts: from the head at once, the looked-up rows at the end."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge import ForgeAdamW, TrainStep
from forge.tied import SplitUpdate

LR = 1e-2
V, C = 61, 32


class Net(nn.Module):
    def __init__(self, entries=V, columns=C, padding_idx=None) -> None:
        super().__init__()
        self.embed = nn.Embedding(entries, columns, padding_idx=padding_idx)
        self.mix = nn.Linear(columns, columns)
        self.head = nn.Linear(columns, entries, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, tokens=None):
        h = self.embed(ids)
        logits = self.head((h + torch.tanh(self.mix(h)))[:tokens])
        return F.cross_entropy(logits.float(), ids[:tokens], reduction="sum")

    loss = forward


def pair(device="cpu", **kwargs):
    torch.manual_seed(1)
    ours = Net(**kwargs).to(device)
    plain = copy.deepcopy(ours)
    return (ours, ForgeAdamW(ours, lr=LR)), (
        plain,
        torch.optim.AdamW(plain.parameters(), lr=LR),
    )


def train(model, optimizer, loss, *args):
    loss(model, *args).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(ours, plain, steps):
    """fp32 accuracy, scaled to how far a weight moves: Adam divides small numbers by small ones."""
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() < 2e-3 * LR * steps**0.5, name


def ids_of(device, count, distinct=V):
    return torch.randint(0, distinct, (count,), device=device)


def split(optimizer):
    """What a capture does, on any device."""
    (slot,) = [slot for slot in optimizer._slots if slot.shared and slot.embeds]
    slot.split = SplitUpdate(slot.name, partial(optimizer._queue.start_split, slot))
    return slot


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_follows_torch(device, padding_idx):
    ours, plain = pair(device, padding_idx=padding_idx)
    for ids in (ids_of(device, 16), ids_of(device, 9, 5), ids_of(device, V), ids_of(device, 0)):
        train(*plain, Net.loss, ids)
        slot = split(ours[1])
        train(*ours, Net.loss, ids)
        assert slot.split.apart is not None and not slot.updated
        slot.split = None
    assert_same(ours[0], plain[0], 4)


def test_more_tokens_than_entries_are_updated_at_the_end(device):
    """Apart, as many rows of the product as there are tokens would be formed once more."""
    ours, plain = pair(device)
    slot = split(ours[1])
    for count in (V + 1, 100):
        ids = ids_of(device, count)
        train(*plain, Net.loss, ids), train(*ours, Net.loss, ids)
        assert slot.split.apart is None
        slot = split(ours[1])
    assert_same(ours[0], plain[0], 2)


def test_the_logits_gradient_is_used_up_at_once():
    ours, _ = pair()
    slot, seen = split(ours[1]), []
    ours[0].mix.weight.register_hook(lambda grad: seen.append(list(slot.factors)))
    Net.loss(ours[0], ids_of("cpu", 12)).backward()
    assert slot.split.apart is not None and seen == [[]]


@pytest.mark.parametrize("tokens", [5, 16])
def test_slices_of_the_head(device, tokens):
    """From the last rows to the first, each used up at once; of fewer tokens than ids too."""
    ours, plain = pair(device)
    net, optimizer = ours
    for ids in (ids_of(device, 16), ids_of(device, 16, 5)):
        train(*plain, lambda net, ids: Net.loss(net, ids, tokens), ids)
        slot = split(optimizer)
        loss = sliced_loss(net, slot, ids, tokens, 23)
        loss.backward()
        assert slot.split.apart is not None
        optimizer.step(), optimizer.zero_grad()
        slot.split = None
    assert_same(ours[0], plain[0], 2)


def sliced_loss(net, slot, ids, tokens, size):
    h = net.embed(ids)
    hidden = (h + torch.tanh(net.mix(h)))[:tokens]
    head = Sliced.apply(hidden, net.head.weight, slot, size)
    return F.cross_entropy(head, ids[:tokens], reduction="sum")


class Sliced(torch.autograd.Function):
    """A head that hands over a slice of its factors at a time."""

    @staticmethod
    def forward(ctx, x, weight, slot, size):
        ctx.save_for_backward(x, weight)
        ctx.slot, ctx.size = slot, size
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        for end in range(V, 0, -ctx.size):
            first = max(0, end - ctx.size)
            assert ctx.slot.collect(x, dy[:, first:end], (first, end))
        return dx, None, None, None


def test_a_slice_that_is_left_out_is_noticed(monkeypatch):
    (net, optimizer), _ = pair()
    slot = split(optimizer)
    collect = slot.collect
    monkeypatch.setattr(
        slot, "collect", lambda x, dy, rows=(1, V): rows[0] == 0 or collect(x, dy, rows)
    )
    with pytest.raises(RuntimeError, match="'embed.weight' is used by more than one"):
        sliced_loss(net, slot, ids_of("cpu", 6), 6, 23).backward()


def test_an_output_that_does_not_count():
    """No rows come: what the product did stands."""
    ours, plain = pair()

    def loss(net):
        h = net.embed(torch.arange(5))
        return net.head(h.detach() + net.mix(h.detach())).square().sum()

    train(*plain, loss)
    slot = split(ours[1])
    train(*ours, loss)
    slot.split = None
    train(*ours, loss), train(*plain, loss)
    assert_same(ours[0], plain[0], 2)


def regularized(net, ids):
    return net.loss(ids) + net.embed.weight.square().sum()


def looked_up_twice(net, ids):
    return net.loss(ids) + net.embed(ids[:2]).sum()


def two_heads(net, ids):
    return net.loss(ids) + net.head(net.mix(torch.ones(3, C, device=ids.device))).sum()


def functional_head(net, ids):
    return net.loss(ids) + F.linear(net.mix.bias, net.embed.weight).square().sum()


USES = [regularized, looked_up_twice, two_heads, functional_head]


@pytest.mark.parametrize("loss", USES)
def test_other_uses_are_refused(loss):
    (net, optimizer), _ = pair()
    split(optimizer)
    with pytest.raises(RuntimeError, match=r"used by more than one head|modified by an inplace"):
        loss(net, ids_of("cpu", 6)).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [Net.loss, *USES])
def test_a_captured_step_does_without_where_it_must(loss):
    ours, plain = pair("cuda")
    bound = partial(loss, ours[0])
    started = []
    start = ours[1]._queue.start_split
    ours[1]._queue.start_split = lambda *args: started.append(start(*args)) or started[-1]

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = ours[0]

        def forward(self, ids):
            return bound(ids)

    step = TrainStep(Whole(), ours[1])
    for _ in range(4):
        ids = ids_of("cuda", 12)
        step(ids=ids)
        train(*plain, loss, ids)
    assert started or loss is not Net.loss
    assert_same(ours[0], plain[0], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_captured_parts_store_what_one_update_stores(states):
    """In bf16, with the kernel of Hopper where there is one."""
    found = []
    for parts in (True, False):
        torch.manual_seed(0)
        net = Net(3072, 256).to("cuda", torch.bfloat16)
        step = TrainStep(net, ForgeAdamW(net, lr=1e-3, states=states))
        if not parts:
            step._capture = partial(step._capture_once, tied=[])
        for i in range(4):
            ids = torch.randint(0, 3000, (256,), generator=torch.Generator().manual_seed(i))
            step(ids=ids.cuda())
        found.append([p.detach().float() for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        # Gradients are rounded in other places: one unit now and then.
        assert (a - b).abs().max() <= 2**-6 * b.abs().max() and (a != b).float().mean() < 0.2

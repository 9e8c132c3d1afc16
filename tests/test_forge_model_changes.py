"""A model that is frozen, copied, converted, moved or pruned while a ForgeAdamW holds it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from adamw_net import LR, assert_same, batch, pair, train
from forge import ForgeAdamW
from forge.linear import ForgeLinear


def test_frozen_weight_is_untouched_and_has_no_state():
    ours, _ = pair("cpu")
    ours.up.weight.requires_grad_(False)
    before = ours.up.weight.detach().clone()
    optimizer = ForgeAdamW(ours, lr=LR)
    train(ours, optimizer, batch("cpu"))
    assert torch.equal(ours.up.weight, before)
    assert ours.up.weight not in optimizer.state
    assert ours.up.bias in optimizer.state


def test_freezing_and_unfreezing_follows_torch():
    ours, plain = pair("cpu")
    for net in (ours, plain):
        net.up.weight.requires_grad_(False)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(8):
        for net in (ours, plain):
            net.up.weight.requires_grad_(step >= 2)
            net.mix.weight.requires_grad_(step != 4)
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 8)
    assert optimizer.state[ours.up.weight]["step"] == 6
    assert optimizer.state[ours.mix.weight]["step"] == 7


def test_layers_left_out_of_a_step_keep_their_own_count():
    def build():
        torch.manual_seed(3)
        return nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    ours, plain = build(), build()
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for used in ([0, 1, 2], [0], [0, 2], [1], [0, 1, 2]):
        x = torch.randn(4, 6)
        for layers, opt in ((ours, optimizer), (plain, reference)):
            h = x
            for i in used:
                h = torch.tanh(layers[i](h))
            h.square().sum().backward()
            opt.step()
            opt.zero_grad()
    assert_same(ours, plain, 5)
    assert [optimizer.state[layer.weight]["step"].item() for layer in ours] == [4, 3, 3]


def test_copies_and_evaluation_are_plain_models():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    twin = copy.deepcopy(ours)
    before = copy.deepcopy(twin.state_dict())
    twin(batch("cpu")).backward()
    assert twin.up.weight.grad is not None
    assert all(torch.equal(v, before[k]) for k, v in twin.state_dict().items())
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        ids = batch("cpu")
        assert torch.equal(loaded(ids), ours(ids))
    assert isinstance(ours.up, nn.Linear) and set(ours.state_dict()) == set(before)
    ours.eval()
    old = ours.up.weight.detach().clone()
    train(ours, optimizer, ids)  # eval() changes layers' behaviour, not whether they train
    assert not torch.equal(old, ours.up.weight)
    with pytest.raises(TypeError, match="load_state_dict"):
        copy.deepcopy(optimizer)


def test_release_and_garbage_collection_give_plain_layers_back():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    with pytest.raises(ValueError, match="'embed.weight' already belongs.*release"):
        ForgeAdamW(ours)
    optimizer.release()
    assert not any(type(m) is ForgeLinear for m in ours.modules())
    ours(batch("cpu")).backward()
    assert all(p.grad is not None for p in ours.parameters())
    ours.zero_grad()
    optimizer = ForgeAdamW(ours)
    del optimizer
    ours(batch("cpu")).backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_release_between_backward_and_step_leaves_nothing_to_the_next_optimizer():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    ours(batch("cpu")).backward()
    optimizer.release()
    assert all(p.grad is None for p in ours.parameters())
    plain.load_state_dict(ours.state_dict())
    optimizer, reference = ForgeAdamW(ours, lr=LR), torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain)


def test_a_model_converted_after_the_optimizer_was_built_still_trains():
    ours, plain = pair("cpu")
    ours.to(torch.bfloat16), plain.to(torch.bfloat16)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ours.float(), plain.float()
    for _ in range(4):
        ids = batch("cpu")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)
    assert all(p.grad is None for p in ours.parameters())
    ours.half()
    ours(batch("cpu")).backward()
    with pytest.raises(TypeError, match="is torch.float16"):
        optimizer.step()


def test_weight_laid_out_anew(device):
    ours, plain = pair(device)
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch(device)
    train(ours, optimizer, ids), train(plain, reference, ids)
    for net in (ours, plain):
        for weight in (net.embed.weight, net.up.weight):  # plain, and of a fused layer
            weight.data = weight.data.t().contiguous().t()
    for _ in range(2):
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 3)


def test_frozen_between_forward_and_backward():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    before = copy.deepcopy(ours.state_dict())
    loss = ours(batch("cpu"))
    ours.requires_grad_(False)
    loss.backward()
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items())


def test_released_duplicate_and_load_hooks():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="a parameter is in it twice"), pytest.warns(UserWarning):
        ForgeAdamW([layer.weight, layer.weight])
    optimizer = ForgeAdamW(layer)
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: called.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: called.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["pre", "post"]
    saved = optimizer.state_dict()
    optimizer.release()
    for use in (optimizer.step, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match="released"):
            use()


@pytest.mark.gpu
def test_a_model_moved_after_the_optimizer_was_built_still_trains():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    ours.to("cuda")
    saved = reference.state_dict()  # torch's own optimizer cannot follow
    reference = torch.optim.AdamW(plain.to("cuda").parameters(), lr=LR)
    reference.load_state_dict(saved)
    for _ in range(3):
        ids = batch("cuda")
        train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 4)
    assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_pruned_and_parametrized_layers(when, what):
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    changes = [
        lambda net: prune.l1_unstructured(net, what, 0.25),
        lambda net: parametrize.register_parametrization(net, what, Double()),
    ]
    for change in changes:
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(5, 7))
        nn.init.constant_(ours[0].bias, 3.0)
        plain = copy.deepcopy(ours)
        if when == "before":
            change(ours[0])
        optimizer = ForgeAdamW(ours, lr=LR)
        if when == "after":
            change(ours[0])
        change(plain[0])
        reference = torch.optim.AdamW(plain.parameters(), lr=LR)
        for _ in range(3):
            x = torch.randn(4, 5)
            for net, opt in ((ours, optimizer), (plain, reference)):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        torch.testing.assert_close(ours(x), plain(x))

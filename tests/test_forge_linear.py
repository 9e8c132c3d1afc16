"""ForgeLinear where it has to be a plain nn.Linear: compilers, transforms, copies, odd shapes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

from adamw_net import LR, assert_same
from forge import ForgeAdamW
from forge.deferred import AppliedGradient
from forge.linear import ForgeLinear


def build():
    """A net, its optimizer, the same net without one, and an input."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    plain = copy.deepcopy(net)
    return net, ForgeAdamW(net, lr=0.1), plain, torch.randn(4, 8)


def kinds(net):
    return [type(m) for m in net if isinstance(m, nn.Linear)]


@pytest.mark.parametrize(
    "capture",
    [
        lambda net, x: torch.export.export(net, (x,)).module(),
        lambda net, x: torch.export.export(net, (x,), strict=True).module(),
        lambda net, x: torch.fx.symbolic_trace(net),
        lambda net, x: torch.jit.trace(net, x),
        lambda net, x: torch.jit.script(copy.deepcopy(net)),
        lambda net, x: torch.compile(net, backend="aot_eager"),
    ],
    ids=["export", "strict export", "fx", "trace", "script a copy", "compile"],
)
@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_captured_programs_compute_what_the_layer_does(capture):
    net, optimizer, plain, x = build()
    torch.testing.assert_close(capture(net, x)(x), plain(x))
    assert kinds(net) == [ForgeLinear, ForgeLinear]


def test_a_compiled_model_trains_and_a_frozen_or_evaluated_one_is_one_graph():
    net, optimizer, plain, x = build()
    before = net[0].weight.detach().clone()
    torch.compile(net, backend="aot_eager")(x).sum().backward()
    assert not torch.equal(net[0].weight, before)
    optimizer.step()
    torch.compiler.reset()  # forget the graphs in pieces
    whole = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(x), net(x))
    with pytest.raises(Exception, match="updates weights inside backward"):
        whole(x)
    net.requires_grad_(False)
    torch.testing.assert_close(whole(x), net(x))


def test_copies_are_plain_layers_that_a_new_optimizer_can_fuse():
    net, optimizer, _, _ = build()
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    copies = [
        copy.deepcopy(net),
        torch.load(stored, weights_only=False),
        *(pickle.loads(pickle.dumps(net, protocol)) for protocol in range(6)),
    ]
    for other in copies:
        assert kinds(other) == [nn.Linear, nn.Linear]
        assert torch.equal(other[0].weight, net[0].weight)
    assert copy.copy(net[0]).weight is net[0].weight
    twin = ForgeAdamW(copies[0])
    assert kinds(copies[0]) == kinds(net) == [ForgeLinear, ForgeLinear]
    twin.release()
    assert kinds(copies[0]) == [nn.Linear, nn.Linear]


def test_an_optimizer_out_of_use_gives_layers_back_but_not_those_of_its_successor():
    net, optimizer, _, x = build()
    del optimizer
    assert kinds(net) == [nn.Linear, nn.Linear]
    first = ForgeAdamW(net)
    first.release()
    second = ForgeAdamW(net)
    del first
    assert kinds(net) == [ForgeLinear, ForgeLinear]
    net(x).sum().backward()
    assert isinstance(net[0].weight.grad, AppliedGradient)
    second.step()


def test_forward_mode_differentiation():
    net, optimizer, plain, x = build()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(m(dual)).tangent for m in (net, plain)]
    torch.testing.assert_close(*tangents)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(4, 8), (8,), (0, 8)])
def test_layers_without_elements_follow_torch(shape):
    net = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4))
    plain = copy.deepcopy(net)
    optimizer = ForgeAdamW(net, lr=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for model, opt in ((net, optimizer), (plain, reference)):
        model(torch.ones(shape)).sum().backward()
        opt.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_autocast_converts_what_torch_converts():
    net, optimizer, plain, x = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value in (x, x.half(), x.bfloat16()):
            assert net(value).dtype == plain(value).dtype == torch.bfloat16
        for value in (x.double(), x.long()):
            for model in (net, plain):
                with pytest.raises(RuntimeError, match="same dtype"):
                    model(value)


@pytest.mark.parametrize("between", ["forward and backward", "failed backward and step"])
def test_a_square_weight_whose_strides_alone_change(device, between):
    """Its address stays: only the strides tell."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)).to(device)
    plain = copy.deepcopy(net)
    optimizer = ForgeAdamW(net, lr=1e-2, eps=1e-3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        x = torch.randn(5, 24, device=device)
        for model, opt in ((net, optimizer), (plain, reference)):
            if between.startswith("failed") and model is net and step == 1:
                with pytest.raises(ZeroDivisionError):
                    h = model[0](x)
                    h.register_hook(lambda g: 1 / 0)
                    model[2](model[1](h)).sum().backward()
                model[2].weight.data = model[2].weight.data.t()
                with pytest.raises(RuntimeError, match="'2.weight' was laid out anew while"):
                    opt.step()
                opt.zero_grad()
                model[2].weight.data = model[2].weight.data.t()
            loss = model(x).square().mean()
            if between.startswith("forward") and step == 1:
                model[0].weight.data = model[0].weight.data.t()
            loss.backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 4, 5), (2, 2, 4, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_may_be_changed_in_place(bias, shape, update):
    """As by ``nn.ReLU(inplace=True)`` and ``y += residual``."""
    ours = nn.ModuleList(nn.Linear(5, 5, bias=bias) for _ in range(2))
    plain = copy.deepcopy(ours)
    x = torch.randn(shape)
    for net, optimizer in (
        (ours, ForgeAdamW(ours, lr=LR, update=update)),
        (plain, torch.optim.AdamW(plain.parameters(), lr=LR)),
    ):
        for _ in range(3):
            h = net[0](x).relu_()
            y = net[1](h)
            y += x
            y.mul_(0.5)
            y.square().sum().backward()
            optimizer.step(), optimizer.zero_grad()
    assert_same(ours, plain, 3)

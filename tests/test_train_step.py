"""TrainStep against the loop it stands for: eager on a CPU, CUDA graphs on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from forge import ForgeAdamW, ForgeSGD, TrainStep
from step_net import LR, assert_equal, batches, loop, optimizers, pair


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    return request.param


def test_trains_as_the_loop_with_a_scheduler_and_several_shapes(where):
    graphed, plain = pair(where)
    ours, theirs = optimizers(graphed, plain)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (ours, theirs)]
    step = TrainStep(graphed, ours)
    ids = [x for two in zip(batches(5, where), batches(5, where, (1, 9)), strict=True) for x in two]
    losses = []
    for x in ids:
        losses.append(step(ids=x.cpu()))
        assert losses[-1].item() == pytest.approx(loop(plain, theirs, x), abs=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    assert len({float(loss) for loss in losses}) == len(losses)  # later calls left them alone
    assert_equal(graphed, plain)
    assert all(p.grad is None for p in graphed.parameters())
    assert {float(s["step"]) for s in ours.state.values()} == {10.0}


def test_save_and_load_between_calls(where):
    graphed, plain = pair(where)
    ours, theirs = optimizers(graphed, plain)
    step = TrainStep(graphed, ours)
    for x in batches(4, where):
        step(ids=x)
        loop(plain, theirs, x)
    saved = copy.deepcopy(ours.state_dict())
    weights = copy.deepcopy(graphed.state_dict())
    for x in batches(3, where):
        step(ids=x)
    ours.load_state_dict(saved)
    graphed.load_state_dict(weights)
    for x in batches(4, where):
        step(ids=x)
        loop(plain, theirs, x)
    assert_equal(graphed, plain)


def test_settings_and_values_that_are_not_tensors(where):
    graphed, plain = pair(where)
    ours, theirs = optimizers(graphed, plain)
    step = TrainStep(graphed, ours)
    for i, x in enumerate(batches(9, where)):
        scale = (1.0, 2.0)[i % 2]
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(lr=LR / (i + 1), weight_decay=0.01 * i, eps=1e-7)
        step(ids=x, scale=scale)
        loop(plain, theirs, x, scale=scale)
    assert_equal(graphed, plain)


def test_frozen_and_unfrozen_between_calls(where):
    graphed, plain = pair(where)
    ours, theirs = optimizers(graphed, plain)
    step = TrainStep(graphed, ours)
    for i, x in enumerate(batches(9, where)):
        for net in (graphed, plain):
            net.up.weight.requires_grad_(i not in (3, 4, 5))
        step(ids=x)
        loop(plain, theirs, x)
    assert_equal(graphed, plain)


def test_ignored_labels(where):
    graphed, plain = pair(where)
    ours, theirs = optimizers(graphed, plain)
    step = TrainStep(graphed, ours)
    for i, x in enumerate(batches(5, where)):
        labels = x.clone()
        labels[:, : 1 + i] = -100
        step(ids=x, labels=labels)
        loop(plain, theirs, x, labels=labels)
    assert_equal(graphed, plain)


def test_other_rules_and_eager_steps_in_between(where):
    graphed, plain = pair(where)
    ours, theirs = (ForgeSGD(net, lr=LR, momentum=0.9) for net in (graphed, plain))
    step = TrainStep(graphed, ours)
    for i, x in enumerate(batches(8, where)):
        if i in (2, 5):
            loop(graphed, ours, x)
        else:
            step(ids=x)
        loop(plain, theirs, x)
    torch.testing.assert_close(graphed.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_arguments_are_checked():
    net, _ = pair("cpu")
    with pytest.raises(TypeError, match="AdamW: only optimizers of this package"):
        TrainStep(net, torch.optim.AdamW(net.parameters()))
    optimizer = ForgeAdamW(net)
    with pytest.raises(ValueError, match="graph=True: the model is on cpu"):
        TrainStep(net, optimizer, graph=True)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"max_graphs={count}"):
            TrainStep(net, optimizer, max_graphs=count)
    with pytest.raises(RuntimeError, match="capture.*runs eagerly"):
        TrainStep(net, optimizer).capture(ids=batches(1, "cpu")[0])
    net.extra = nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match="'extra' wants a gradient but is not in the optimizer"):
        forward = net.forward
        net.forward = lambda **kw: forward(**kw) * net.extra
        TrainStep(net, optimizer)(ids=batches(1, "cpu")[0])
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="scalar loss"):
        TrainStep(layer, ForgeAdamW(layer))(input=torch.ones(1, 2))


@pytest.mark.parametrize("update", ["backward", "step"])
def test_an_eager_step_refuses_gradients_from_outside(update):
    net = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0), nn.Linear(6, 1))
    optimizer = ForgeAdamW(net, update=update)
    step = TrainStep(net, optimizer)
    step(input=torch.ones(2, 4))
    net(torch.ones(2, 4)).backward()
    weights = [p.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match="from outside the step: call optimizer.step"):
        step(input=torch.ones(2, 4))
    assert all(map(torch.equal, weights, net.parameters()))
    optimizer.step()
    step(input=torch.ones(2, 4))


def test_a_tensor_as_learning_rate_may_be_exchanged(where):
    graphed, plain = pair(where)
    ours, theirs = optimizers(graphed, plain)
    step = TrainStep(graphed, ours)
    for i, x in enumerate(batches(6, where)):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = torch.tensor(LR / (1 + i), device=where)
        step(ids=x)
        loop(plain, theirs, x)
    assert_equal(graphed, plain)


def test_one_autocast_context_around_many_steps(where):
    """Autocast keeps casts of weights, here the tied head's, until its context ends."""
    one, many = pair(where)
    steps = [
        TrainStep(net, opt) for net, opt in zip((one, many), optimizers(one, many), strict=True)
    ]
    ids = batches(5, where)
    with torch.autocast(where, dtype=torch.bfloat16):
        for x in ids:
            steps[0](ids=x)
    for x in ids:
        with torch.autocast(where, dtype=torch.bfloat16):
            steps[1](ids=x)
    assert_equal(one, many)


@pytest.mark.gpu
def test_limits_are_errors_with_a_way_out():
    net, _ = pair("cuda")
    step = TrainStep(net, ForgeAdamW(net, lr=LR), max_graphs=1)
    step(ids=batches(1, "cuda")[0])
    with pytest.raises(RuntimeError, match="max_graphs=1"):
        step(ids=batches(1, "cuda", (3, 3))[0])
    with pytest.raises(TypeError, match="scale= is a list"):
        step(ids=batches(1, "cuda")[0], scale=[1.0])
    net.extra = nn.Parameter(torch.ones((), device="cuda"))
    with pytest.raises(RuntimeError, match="'extra' wants a gradient but is not in the optimizer"):
        forward = net.forward
        net.forward = lambda **kw: forward(**kw) * net.extra
        TrainStep(net, step.optimizer)(ids=batches(1, "cuda")[0])


@pytest.mark.gpu
def test_the_fast_paths_in_a_graph_follow_the_eager_step():
    """Shapes that the Hopper kernel takes, bf16, many launches."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512, bias=False), nn.GELU(), nn.Linear(512, 256, bias=False)]
    net = nn.Sequential(*layers, *copy.deepcopy(layers)).to("cuda", torch.bfloat16)
    other = copy.deepcopy(net)

    class Loss(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x).float().square().mean()

    ours = ForgeAdamW(net, lr=1e-3, rounding="nearest")
    theirs = ForgeAdamW(other, lr=1e-3, rounding="nearest")
    step = TrainStep(Loss(net), ours)
    eager = TrainStep(Loss(other), theirs, graph=False)
    for i in range(6):
        x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
        assert step(x=x).item() == pytest.approx(eager(x=x).item(), rel=2e-2), i
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert (p - q).abs().max() < 6e-3 and (p != q).float().mean() < 0.2

"""TrainStep against the loop it stands for: eager on a CPU, one CUDA graph on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge import ForgeAdamW, ForgeSGD, TrainStep

LR = 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None, scale=1.0):
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        labels = ids if labels is None else labels
        return scale * F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def pair(device):
    torch.manual_seed(3)
    net = Net().to(device)
    return net, copy.deepcopy(net)


def loop(net, optimizer, ids, **kwargs):
    loss = net(ids, **kwargs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def batches(count, device, shape=(2, 6)):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 31, shape, generator=generator).to(device) for _ in range(count)]


def assert_equal(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    return request.param


def optimizers(a, b, **kwargs):
    # One path for both: `auto` would take another one in a graph, of another order of sums.
    path = "auto" if next(a.parameters()).device.type == "cpu" else "tiles"
    return [ForgeAdamW(net, lr=LR, weight_decay=0.1, path=path, **kwargs) for net in (a, b)]


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
    with pytest.raises(TypeError, match="scalar loss"):
        TrainStep(nn.Linear(2, 2), optimizer)(input=torch.ones(1, 2))


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
    with pytest.raises(RuntimeError, match="'extra' got a gradient but is not in the optimizer"):
        forward = net.forward
        net.forward = lambda **kw: forward(**kw) * net.extra
        TrainStep(net, step.optimizer)(ids=batches(1, "cuda")[0])


@pytest.mark.gpu
def test_a_broken_capture_leaves_model_and_optimizer_usable():
    graphed, plain = pair("cuda")
    ours, theirs = optimizers(graphed, plain)
    forward, broken = graphed.forward, []

    def synchronizing(**inputs):
        loss = forward(**inputs)
        if broken:
            loss.item()
        return loss

    graphed.forward = synchronizing
    step = TrainStep(graphed, ours)
    ids = batches(6, "cuda")
    for i, x in enumerate(ids):
        if i == 1:
            before = copy.deepcopy(graphed.state_dict())
            broken.append(True)
            with pytest.raises(RuntimeError, match="cannot be captured.*graph=False"):
                step(ids=x)
            broken.clear()
            torch.testing.assert_close(graphed.state_dict(), before, rtol=0, atol=0)
            assert torch.rand(1, device="cuda").isfinite()
        step(ids=x)
        loop(plain, theirs, x)
    assert_equal(graphed, plain)


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
